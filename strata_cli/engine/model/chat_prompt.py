"""Token ids of a conversation, in which only the template can speak in control tokens.

A template's output is one text, and once rendered nobody can tell ``<|im_end|>`` written by the
template from ``<|im_end|>`` (or ``<|image_pad|>``) typed by a user. So before rendering, in every
text of the caller, each character that begins or could begin a control token is exchanged for a
*stand-in*: a private-use character that occurs nowhere else. The template's own control tokens are
then the only ones to be found; afterwards the stand-ins become the characters they stood for.

What a template does with a text (trim, split, compare its beginning) works as before, since
exchanged characters are never spaces and one stands for one. ``<think>`` and ``<tool_call>`` are
user-defined tokens, not control tokens: models write them and templates look for them in earlier
replies, so they stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from strata_cli.engine.model.chat_template import ChatTemplate, Message
from strata_cli.engine.model.tokenizer import Tokenizer
from strata_cli.errors import InputError

MAX_DEPTH = 100  # lists and objects inside each other, in messages and tool schemas
_FIRST_PRIVATE_USE, _LAST_PRIVATE_USE = 0x100000, 0x10FFFD  # plane 16


class ChatPrompt(NamedTuple):
    """A conversation ready to be read.

    Attributes:
        text: what the template made of it.
        ids: its tokens; no bos is added, since a template that wants one writes it.
    """

    text: str
    ids: list[int]


def encode_chat(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, object]] | None = None,
    continues: bool = False,
    **variables: object,
) -> ChatPrompt:
    """Render a conversation and encode it.

    Args:
        template: the model's chat template.
        tokenizer: the model's tokenizer.
        messages: the turns, oldest first; JSON values only.
        add_generation_prompt: end with the opening of the assistant's turn.
        tools: JSON schemas of the functions that may be called.
        continues: the last turn is unfinished: the prompt ends where its text does, and no turn is
            opened.
        variables: what else the template asks for, such as ``enable_thinking=False``.

    Raises:
        InputError: the template refuses these messages or fails on them, or they are no plain
            JSON values, or hold half a surrogate pair; or there is no last text to go on with.
        ModelError: the template is broken, forbidden, or ran into a limit.
    """
    texts: list[str] = [template.source]
    collect = partial(_keep, texts)
    for turn in (variables, *messages, *(tools or ())):
        _map_object(turn, collect)
    shield = Shield(tokenizer.control_texts, texts)
    turns = [_map_object(message, shield.hide) for message in messages]
    if continues:
        _mark_end(turns, shield.end_mark)
    rendered = template.render(
        turns,
        add_generation_prompt=add_generation_prompt and not continues,
        tools=None if tools is None else [_map_object(tool, shield.hide) for tool in tools],
        **_map_object(variables, shield.hide),
    )
    if continues:
        rendered = _before_mark(rendered, shield.end_mark)
    ids = tokenizer.encode(rendered, parse_special=True, add_bos=False, restore=shield.restore)
    return ChatPrompt(rendered.translate(shield.restore), ids)


class Shield:
    """Exchanges characters that begin control tokens in texts, for a template to render.

    What is rendered is encoded with parse_special and ``restore``, and without a bos.

    Attributes:
        restore: stand-in -> character, as a ``str.translate`` table.
        end_mark: a character that occurs in none of the texts and stands for none.
    """

    def __init__(self, control_texts: Collection[str], texts: Collection[str]) -> None:
        """Choose stand-ins.

        Args:
            control_texts: what no text may form.
            texts: every text of the conversation and the template; no stand-in occurs in them.
        """
        seconds: dict[str, set[str]] = {}
        for control in control_texts:
            seconds.setdefault(control[0], set()).add(control[1:2])
        unused = _unused_characters(texts)
        self.end_mark = next(unused)
        stand_ins = dict(zip(sorted(seconds), unused, strict=False))
        self.restore = {ord(stand_in): char for char, stand_in in stand_ins.items()}
        self._stand_ins = stand_ins
        # A control token cannot begin elsewhere than where its first two characters stand, or at
        # the end of a text (spaces may be trimmed off), where the next text may continue it.
        patterns = [_beginning(first, second) for first, second in sorted(seconds.items())]
        self._beginnings = re.compile("|".join(patterns) or "(?!)")

    def hide(self, text: str) -> str:
        """The text without any beginning of a control token."""
        return self._beginnings.sub(lambda match: self._stand_ins[match[0]], text)


def _mark_end(turns: Sequence[dict[str, object]], mark: str) -> None:
    """Put a mark behind the text of the last turn, where the template will carry it along."""
    last = turns[-1] if turns else {}
    content = last.get("content")
    part = content[-1] if isinstance(content, list) and content else None
    if isinstance(content, str):
        last["content"] = content + mark
    elif isinstance(part, dict) and isinstance(part.get("text"), str):
        part["text"] += mark
    else:
        raise InputError(
            "the last message has no text to go on with",
            hint="give it a text as content, or leave it out",
        )


def _before_mark(rendered: str, mark: str) -> str:
    text, found, _ = rendered.rpartition(mark)
    if not found:
        raise InputError(
            "the model's chat template leaves out the end of the last message",
            hint="end with a message of the user",
        )
    return text


def _beginning(first: str, seconds: Collection[str]) -> str:
    """Expression for a first character that one of the second ones, or the text's end, follows."""
    if "" in seconds:  # the character alone is a token
        return re.escape(first)
    followers = "|".join(re.escape(second) for second in sorted(seconds))
    return rf"{re.escape(first)}(?={followers}|\s*\Z)"


def _unused_characters(texts: Collection[str]) -> Iterator[str]:
    """Private-use characters that occur in none of the texts, from the last one down."""
    for code in range(_LAST_PRIVATE_USE, _FIRST_PRIVATE_USE - 1, -1):
        if not any(chr(code) in text for text in texts):
            yield chr(code)


def _keep(texts: list[str], text: str) -> str:
    texts.append(text)
    return text


def _map_object(value: object, change: Callable[[str], str], depth: int = 0) -> dict[str, object]:
    """A copy of an object with every text in it changed, keys included.

    Raises:
        InputError: it is no object, or holds what JSON cannot, or nests too deeply.
    """
    if not isinstance(value, Mapping):
        raise _not_json(f"found {type(value).__name__} where an object was expected")
    return {change(str(key)): _map_value(item, change, depth + 1) for key, item in value.items()}


def _map_value(value: object, change: Callable[[str], str], depth: int) -> object:
    if depth > MAX_DEPTH:
        raise _not_json(f"lists and objects are nested more than {MAX_DEPTH} deep")
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return _map_object(value, change, depth)
    if isinstance(value, (list, tuple)):
        return [_map_value(item, change, depth + 1) for item in value]
    if value is None or isinstance(value, (bool, int, float)):
        return value
    raise _not_json(f"found a value of type {type(value).__name__}")


def _not_json(problem: str) -> InputError:
    return InputError(
        f"the messages are not plain JSON values: {problem}",
        hint="use texts, numbers, booleans, lists and objects only",
    )
