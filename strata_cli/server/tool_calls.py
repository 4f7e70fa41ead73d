"""Calls of functions in the text of an answer, taken out as it comes."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from strata_cli.server.tools import CLOSE, OPEN, Tool, ToolUse, json_value

FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)</function>\s*", re.DOTALL)
PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


class ToolCall(NamedTuple):
    """A call that the model wrote: arguments are JSON text."""

    name: str
    arguments: str

    def new_id(self) -> str:
        """A name for the call that its result can refer to."""
        return f"call_{uuid.uuid4().hex[:24]}"


class CallReader:
    """Takes the calls out of an answer's text as it comes.

    What looks like a call and is none, or of no known function, stays text.

    Args:
        use: what may be called.

    Attributes:
        num_calls: so far.
    """

    def __init__(self, use: ToolUse) -> None:
        self._use = use
        self._held = ""
        self._is_behind_call = False
        self.num_calls = 0

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """Text that is no call, and the calls that are complete."""
        if not self._use.tools:
            return text, []
        self._held += text
        plain, calls = "", []
        while (start := self._held.find(OPEN)) >= 0:
            end = self._held.find(CLOSE, start)
            if end < 0:
                break
            end += len(CLOSE)
            call = self._call(self._held[start + len(OPEN) : end - len(CLOSE)])
            before, whole = self._held[:start], self._held[start:end]
            self._held = self._held[end:]
            plain += self._plain(before if call is not None else before + whole)
            self._is_behind_call |= call is not None
            if call is not None and not (self._use.is_single and self.num_calls):
                self.num_calls += 1
                calls.append(call)
        cut = start if start >= 0 else len(self._held) - self._num_suspect()
        rest, self._held = self._held[:cut], self._held[cut:]
        return plain + self._plain(rest), calls

    def finish(self) -> str:
        """What was held back and is no call after all."""
        rest, self._held = self._held, ""
        return self._plain(rest)

    def _plain(self, text: str) -> str:
        """Without the line ends between calls and behind them."""
        if self._is_behind_call:
            text = text.lstrip()
            self._is_behind_call = not text
        return text

    def _call(self, body: str) -> ToolCall | None:
        call = _part_call(body, self._use.tools) or _json_call(body)
        return call if call and call.name in {tool.name for tool in self._use.tools} else None

    def _num_suspect(self) -> int:
        """Characters at the end that a call may begin with."""
        sizes = range(min(len(OPEN) - 1, len(self._held)), 0, -1)
        return next((size for size in sizes if OPEN.startswith(self._held[-size:])), 0)


def _json_call(body: str) -> ToolCall | None:
    try:
        value = json_value(body)
    except ValueError:
        return None
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(value["name"], text)


def _part_call(body: str, tools: Sequence[Tool]) -> ToolCall | None:
    found = FUNCTION.fullmatch(body)
    if found is None:
        return None
    name = found[1].strip()
    schemas = next((tool.parameters.get("properties") for tool in tools if tool.name == name), None)
    arguments = {
        key.strip(): _value(text, (schemas or {}).get(key.strip()))
        for key, text in PARAMETER.findall(found[2])
    }
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


def _value(text: str, schema: object) -> object:
    """A parameter's text as its schema wants it: what is no string is JSON."""
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if kind == "string":
        return text
    try:
        return json_value(text)
    except ValueError:
        return text
