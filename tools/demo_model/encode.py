"""Turns examples, chats and documents into token ids with training weights."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from tools.demo_model.prompt import DECISION_SYSTEM, END_OF_TEXT, TURN_BEGIN, TURN_END, user_turn
from tools.demo_model.tasks.drawing import Example, Turn

PROMPT_WEIGHT = 0.1  # of the text loss, for words that the model will be given, not asked for
ANSWER_SPAN = f"{TURN_BEGIN}assistant\n"


@dataclass(frozen=True, slots=True)
class Answer:
    """Where an answer stands among a text's tokens.

    `at` is the answer token itself; the logits that must give it are those of the token before.
    `option_ends` are the last tokens of the options' texts, empty when the prompt lists none.
    """

    at: int
    labels: list[int]  # token ids of all labels, in the order of the options
    right: int  # index into labels
    option_ends: list[int]
    certain: bool
    kind: str


@dataclass(slots=True)
class Encoded:
    """Token ids, the loss weight of each token as a target, and the answers among them."""

    ids: list[int]
    weights: list[float]
    answers: list[Answer] = field(default_factory=list)


@dataclass(slots=True)
class Draft:
    """A text under construction; remembers the character spans that matter."""

    text: str = ""
    answer_starts: list[int] = field(default_factory=list)
    option_ends: list[list[int]] = field(default_factory=list)
    replies: list[tuple[int, int]] = field(default_factory=list)

    def say(self, role: str, content: str) -> None:
        """Append one chat turn."""
        self.text += f"{TURN_BEGIN}{role}\n"
        start = len(self.text)
        self.text += f"{content}{TURN_END}\n"
        if role == "assistant":
            self.replies.append((start, len(self.text) - 1))

    def ask(self, turn: Turn, content: str) -> None:
        """Append a question and its answer; `content` ends with the options of `turn`."""
        self.say("user", content)
        ends = []
        if turn.kind != "yes_no":
            at = self.text.rindex(turn.question().tail)
            for label, option in zip(turn.labels(), turn.options, strict=True):
                at = self.text.index(f"\n{label}. {option}\n", at) + len(label) + 3 + len(option)
                ends.append(at)
        self.option_ends.append(ends)
        self.answer_starts.append(len(self.text) + len(ANSWER_SPAN))
        self.say("assistant", turn.labels()[turn.answer])


def encode_example(tokenizer: Tokenizer, example: Example) -> Encoded:
    """Encode a decision prompt with all its turns and answers, ended by end-of-text."""
    draft = Draft()
    draft.say("system", DECISION_SYSTEM)
    for number, turn in enumerate(example.turns):
        question = turn.question()
        later = f"Question: {question.text}\n{question.tail}"
        draft.ask(turn, user_turn(example.state, question) if number == 0 else later)
    encoding = tokenizer.encode(draft.text + END_OF_TEXT, add_special_tokens=False)
    starts = [start for start, _ in encoding.offsets]
    ends = [end for _, end in encoding.offsets]
    result = Encoded(encoding.ids, [PROMPT_WEIGHT] * len(encoding.ids))
    for turn, start, option_ends in zip(
        example.turns, draft.answer_starts, draft.option_ends, strict=True
    ):
        at = bisect_left(starts, start)
        assert (starts[at], ends[at]) == (start, start + len(turn.labels()[turn.answer]))
        result.weights[at] = 0.0  # has a loss of its own
        result.answers.append(
            Answer(
                at=at,
                labels=[label_id(tokenizer, label) for label in turn.labels()],
                right=turn.answer,
                option_ends=[bisect_left(ends, end) for end in option_ends],
                certain=example.certain,
                kind=example.kind,
            )
        )
    return result


def label_id(tokenizer: Tokenizer, label: str) -> int:
    """Return the one token of a label."""
    token: int | None = tokenizer.token_to_id(label)
    assert token is not None, f"the label {label} is not one token"
    return token


def encode_chat(tokenizer: Tokenizer, turns: Sequence[tuple[str, str]]) -> Encoded:
    """Encode a conversation; what the assistant says, end of turn included, counts fully."""
    draft = Draft()
    for role, content in turns:
        draft.say(role, content)
    encoding = tokenizer.encode(draft.text + END_OF_TEXT, add_special_tokens=False)
    result = Encoded(encoding.ids, [PROMPT_WEIGHT] * len(encoding.ids))
    starts = [start for start, _ in encoding.offsets]
    for begin, end in draft.replies:
        for at in range(bisect_left(starts, begin), bisect_left(starts, end)):
            result.weights[at] = 1.0
    return result


def encode_text(tokenizer: Tokenizer, text: str) -> Encoded:
    """Encode running text, ended by end-of-text."""
    ids = tokenizer.encode(text + END_OF_TEXT, add_special_tokens=False).ids
    return Encoded(ids, [1.0] * len(ids))
