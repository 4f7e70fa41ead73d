"""Functions that an answer may call: how the model is told, and calls as it writes them.

A model whose chat template lists tools is told by that, and calls them as it was trained to: a
JSON object between <tool_call> and </tool_call>, or <function=...> with <parameter=...> parts in
there. Any other model is told in a system message and asked for the JSON form.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from strata_cli.server.failures import bad_request
from strata_cli.server.formats import check_size, json_grammar, lark_grammar, with_spaces
from strata_cli.server.schemas import Json

OPEN, CLOSE = "<tool_call>", "</tool_call>"
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
MOST_TOOLS = 128
INTRODUCTION = (
    "You may call functions. Each is described by one line of JSON:\n{}\n"
    "To call one, answer with its name and arguments as JSON and nothing else, like this:\n"
    '<tool_call>\n{{"name": "...", "arguments": {{...}}}}\n</tool_call>'
)


class Tool(NamedTuple):
    """A function.

    Attributes:
        name: of it.
        parameters: JSON schema of its arguments, an object's.
        described: as the request has it.
    """

    name: str
    parameters: Mapping[str, Any]
    described: Json


class ToolUse(NamedTuple):
    """What a request lets the answer do with tools.

    Attributes:
        tools: that may be called; none: text is all there is.
        must_call: the answer is at least one call.
        is_single: of at most one function.
    """

    tools: tuple[Tool, ...] = ()
    must_call: bool = False
    is_single: bool = False


class TemplateTools(NamedTuple):
    """How a chat template deals with tools.

    Attributes:
        lists: it tells the model of them.
        has_parts: calls are written with <function=...> and <parameter=...>.
    """

    lists: bool
    has_parts: bool

    @classmethod
    def of(cls, source: str) -> TemplateTools:
        """By the template's text."""
        return cls("tools" in source, "tools" in source and "<function=" in source)


def tool_use(
    tools: Sequence[Json] | None, choice: str | Json | None, parallel: bool | None
) -> ToolUse:
    """What a request's fields say.

    Raises:
        RequestFailed: 400, a tool is not described as one, or the choice names none of them.
    """
    known = tuple(_tool(index, item) for index, item in enumerate(tools or ()))
    names = [tool.name for tool in known]
    if len(known) > MOST_TOOLS or len(set(names)) < len(names):
        raise bad_request(f"tools must be up to {MOST_TOOLS} functions of different names", "tools")
    if choice is not None and choice not in ("none", "auto") and not known:
        raise bad_request("tool_choice needs tools", "tool_choice")
    if choice == "none" or not known:
        return ToolUse()
    if choice in (None, "auto"):
        return ToolUse(known, is_single=parallel is False)
    if choice == "required":
        return ToolUse(known, must_call=True, is_single=parallel is False)
    wanted = _chosen(choice)
    return (
        ToolUse((known[names.index(wanted)],), must_call=True, is_single=True)
        if (wanted in names)
        else _refuse_choice(wanted)
    )


def call_grammar(use: ToolUse, template: TemplateTools) -> str | None:
    """The grammar of answers that must be calls; None: they need not be.

    Raises:
        RequestFailed: 400, the schema of a tool's arguments cannot be held to.
    """
    if not use.must_call:
        return None
    check_size([tool.parameters for tool in use.tools], "tools")
    for index, tool in enumerate(use.tools):
        json_grammar(tool.parameters, f"tools[{index}].function.parameters")
    more = "" if use.is_single else f' ("\\n{OPEN}\\n" call "\\n{CLOSE}")*'
    rules = [f'start: "{OPEN}\\n" call "\\n{CLOSE}"{more}']
    rules += _part_rules(use.tools) if template.has_parts else _json_rules(use.tools)
    return lark_grammar(rules, "tools")


def told(messages: Sequence[Json], use: ToolUse, template: TemplateTools) -> list[Json]:
    """The turns as the template takes them, with the tools where it does not list them."""
    if template.lists:
        return [_with_objects(message) for message in messages]
    turns = [_as_text(message) for message in messages]
    if not use.tools:
        return turns
    lines = "\n".join(json.dumps(tool.described, ensure_ascii=False) for tool in use.tools)
    system = INTRODUCTION.format(lines)
    if turns and turns[0].get("role") == "system":
        first = {**turns[0], "content": f"{turns[0]['content']}\n\n{system}"}
        return [first, *turns[1:]]
    return [{"role": "system", "content": system}, *turns]


def _tool(index: int, item: Json) -> Tool:
    where = f"tools[{index}]"
    function = item.get("function")
    if item.get("type", "function") != "function" or not isinstance(function, Mapping):
        raise bad_request(f"{where} must have type function, and function", where)
    name, parameters = function.get("name"), function.get("parameters") or {"type": "object"}
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise bad_request(
            f"{where}.function.name must be 1 to 64 letters, digits, _, . or -",
            f"{where}.function.name",
        )
    if not isinstance(parameters, Mapping) or not _is_of_object(parameters):
        raise bad_request(
            f"{where}.function.parameters must be a JSON schema of an object",
            f"{where}.function.parameters",
        )
    described = {"type": "function", "function": dict(function)}
    return Tool(name, {"type": "object", **parameters}, described)


def _is_of_object(schema: Mapping[str, Any]) -> bool:
    properties = schema.get("properties", {})
    return schema.get("type", "object") == "object" and isinstance(properties, Mapping)


def _chosen(choice: str | Json | None) -> str:
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise bad_request(
            "tool_choice must be none, auto, required, or name a function: "
            '{"type": "function", "function": {"name": "..."}}',
            "tool_choice",
        )
    return name


def _refuse_choice(name: str) -> ToolUse:
    raise bad_request(f"tool_choice names {name!r:.80}, which is not in tools", "tool_choice")


def _json_rules(tools: Sequence[Tool]) -> Iterator[str]:
    """A schema is a document of its own, since its references (#/$defs/...) begin at its root."""
    yield "call: " + " | ".join(f"call_{index}" for index in range(len(tools)))
    for index, tool in enumerate(tools):
        head = json.dumps(f'{{"name": "{tool.name}", "arguments": ')
        yield f'call_{index}: {head} arguments_{index} "}}"'
        yield f"arguments_{index}: %json {json.dumps(with_spaces(tool.parameters))}"


def _part_rules(tools: Sequence[Tool]) -> Iterator[str]:
    yield "call: " + " | ".join(f"function_{index}" for index in range(len(tools)))
    for index, tool in enumerate(tools):
        properties = tool.parameters.get("properties") or {}
        required = set(tool.parameters.get("required") or ())
        parts = []
        for number, key in enumerate(properties):
            rule = f"part_{index}_{number}"
            parts.append(rule if key in required else f"{rule}?")
            yield f"{rule}: {json.dumps(f'<parameter={key}>' + chr(10))} value"
        head = json.dumps(f"<function={tool.name}>\n")
        yield f"function_{index}: {head} {' '.join(parts)} {json.dumps('</function>')}"
    yield 'value[suffix="\\n</parameter>\\n"]: /(?s:.*)/'


def json_value(text: str) -> Any:
    """What a text of JSON says, in values that JSON can hold.

    Raises:
        ValueError: it is none, has a number beyond all bounds, or is nested too deeply.
    """
    try:
        return msgspec.json.decode(text.encode("utf-8", "surrogatepass"))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _with_objects(message: Json) -> Json:
    """With the arguments of its calls as objects, which templates go through."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_with_object(call) for call in calls]}


def _with_object(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json_value(function["arguments"])
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _as_text(message: Json) -> Json:
    """A turn of calls or results as a plain turn."""
    if message.get("role") == "tool":
        content = f"<tool_response>\n{message['content']}\n</tool_response>"
        return {"role": "user", "content": content}
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not calls:
        return message
    texts = [str(message.get("content") or ""), *(_call_text(call) for call in calls)]
    return {"role": message["role"], "content": "\n".join(text for text in texts if text)}


def _call_text(call: Any) -> str:
    function = _with_object(call).get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise bad_request("a tool call of an earlier turn has no function", "messages")
    named = {"name": function.get("name"), "arguments": function.get("arguments")}
    return f"{OPEN}\n{json.dumps(named, ensure_ascii=False)}\n{CLOSE}"
