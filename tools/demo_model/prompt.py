"""The chat template of the demo model and the wording of its decision prompts.

Training, export and evaluation all take the wording from here, so they cannot drift apart.
"""

from collections.abc import Sequence
from dataclasses import dataclass

END_OF_TEXT = "<|endoftext|>"
TURN_BEGIN = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_BEGIN, TURN_END)  # their ids are 0, 1, 2

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.content is string %}{{- message.content }}"
    "{%- else %}{%- for part in message.content %}{{- part.text }}{%- endfor %}{%- endif %}"
    "{{- '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

DECISION_SYSTEM = (
    "You are a decision function. You will be given a state and one question. Reply with the "
    "answer label only: no words, no punctuation, no explanation."
)
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True, slots=True)
class Question:
    """One question about a state: its wording and how the answer is to be written."""

    text: str
    tail: str  # everything after the question line: options and the answering instruction


def choice(text: str, options: Sequence[str]) -> Question:
    """Ask for one of up to 26 options by letter."""
    lines = "\n".join(f"{LETTERS[i]}. {option}" for i, option in enumerate(options))
    return Question(text, f"Options:\n{lines}\nAnswer with the letter only.")


def yes_no(text: str, *, yes_first: bool = True) -> Question:
    """Ask for Yes or No, naming either first."""
    return Question(text, "Answer Yes or No." if yes_first else "Answer No or Yes.")


def score(text: str, levels: Sequence[str]) -> Question:
    """Ask for the number of one of the ordered levels."""
    lines = "\n".join(f"{i}. {level}" for i, level in enumerate(levels, start=1))
    head = "Pick the level that applies (the levels are ordered):"
    return Question(text, f"{head}\n{lines}\nAnswer with the number only.")


def user_turn(state: str, question: Question) -> str:
    """Word a decision as the user's message."""
    return f"State:\n{state}\n\nQuestion: {question.text}\n{question.tail}"


def render(turns: Sequence[tuple[str, str]], *, answer_next: bool = True) -> str:
    """Render (role, content) turns exactly as CHAT_TEMPLATE does."""
    text = "".join(f"{TURN_BEGIN}{role}\n{content}{TURN_END}\n" for role, content in turns)
    return text + (f"{TURN_BEGIN}assistant\n" if answer_next else "")


def decision_prompt(state: str, question: Question) -> str:
    """Render a whole decision prompt, ready for its answer token."""
    return render([("system", DECISION_SYSTEM), ("user", user_turn(state, question))])
