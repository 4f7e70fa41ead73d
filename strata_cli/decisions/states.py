"""States, and other texts of a request, that come as JSON: each value has one text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


def state_text(value: str | Mapping[str, Any] | Sequence[Any]) -> str:
    """A state as the model reads it.

    A text is itself, a list of chat turns one line each ("role: content"), and any other value JSON
    indented by two spaces, its keys in the order given. As AnyJev does, except that contents that
    are no text are JSON too.
    """
    if isinstance(value, str):
        return value
    turns: Sequence[Any] = value if isinstance(value, Sequence) else ()
    if turns and all(map(_is_turn, turns)):
        return "\n".join(f"{turn['role']}: {turn['content']}" for turn in turns)
    return json.dumps(value, indent=2, ensure_ascii=False)


def line_text(value: str | Mapping[str, Any] | Sequence[Any]) -> str:
    """A description on one line: runs of white space are one space, other values compact JSON."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return " ".join(text.split())


def shown_names(names: Sequence[str]) -> list[str]:
    """Names of options, each on one line, told apart as the names are.

    A name that is empty, or looks like another on one line, is written as a JSON string.
    """
    lines = [line_text(name) for name in names]
    unclear = {line for line in lines if not line or lines.count(line) > 1}
    return [
        json.dumps(name, ensure_ascii=True) if line in unclear else line
        for name, line in zip(names, lines, strict=True)
    ]


def _is_turn(value: object) -> bool:
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("role"), str)
        and isinstance(value.get("content"), str)
    )
