"""Functions that an answer may call: fields, what the model is told, and its calls."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_cli.server.failures import RequestFailed
from strata_cli.server.tool_calls import CallReader, ToolCall
from strata_cli.server.tools import TemplateTools, ToolUse, call_grammar, told, tool_use

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
STOP = {"type": "function", "function": {"name": "stop"}}
LISTS = TemplateTools(lists=True, has_parts=False)
PARTS = TemplateTools(lists=True, has_parts=True)
PLAIN = TemplateTools(lists=False, has_parts=False)
BOTH = tool_use([WEATHER, STOP], None, None)
JSON_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
PART_CALL = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)


def read(text: str, use: ToolUse = BOTH) -> tuple[str, list[ToolCall]]:
    reader = CallReader(use)
    plain, calls = reader.push(text)
    return plain + reader.finish(), calls


@pytest.mark.parametrize(
    ("fields", "names", "must_call", "is_single"),
    [
        (([], None, None), [], False, False),
        (([WEATHER, STOP], "none", None), [], False, False),
        (([WEATHER, STOP], "auto", False), ["weather", "stop"], False, True),
        (([WEATHER, STOP], "required", None), ["weather", "stop"], True, False),
        (([WEATHER, STOP], STOP, None), ["stop"], True, True),
    ],
)
def test_fields_say_what_may_be_called(
    fields: Any, names: list[str], must_call: bool, is_single: bool
) -> None:
    use = tool_use(*fields)
    assert [tool.name for tool in use.tools] == names
    assert (use.must_call, use.is_single) == (must_call, is_single)


@pytest.mark.parametrize(
    ("tools", "choice", "message"),
    [
        ([{"type": "retrieval"}], None, r"tools\[0\] must have type function"),
        ([{"function": {"name": "a b"}}], None, "1 to 64 letters"),
        ([{"function": {"name": "f", "parameters": {"type": "array"}}}], None, "of an object"),
        ([{"function": {"name": "f", "parameters": {"properties": 5}}}], None, "of an object"),
        ([STOP, STOP], None, "different names"),
        ([], "required", "tool_choice needs tools"),
        ([STOP], WEATHER, "tool_choice names 'weather'"),
        ([STOP], {"type": "function"}, "name a function"),
        ([STOP], "sometimes", "name a function"),
    ],
)
def test_what_is_no_tool_or_choice_is_named(tools: Any, choice: Any, message: str) -> None:
    with pytest.raises(RequestFailed, match=message) as failed:
        tool_use(tools, choice, None)
    assert failed.value.failure.status == 400


def test_calls_of_both_forms_are_taken_out() -> None:
    assert read(f"Let me see.\n{JSON_CALL}") == (
        "Let me see.\n",
        [ToolCall("weather", '{"city": "Oslo"}')],
    )
    assert read(PART_CALL) == ("", [ToolCall("weather", '{"city": "Oslo", "days": 3}')])
    plain, calls = read(f"{JSON_CALL}\n{PART_CALL}\n")
    assert plain == ""
    assert [call.name for call in calls] == ["weather"] * 2


@pytest.mark.parametrize(
    "text",
    [
        "no call",
        "<tool_call>\n{broken\n</tool_call>",
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>\n{"name": "weather", "arguments"',
        "ends with <tool",
        JSON_CALL.replace('"Oslo"', "NaN"),
        JSON_CALL.replace('"Oslo"', "1e999"),
        JSON_CALL.replace("Oslo", "\\ud800"),
        JSON_CALL.replace('"Oslo"', "[" * 9000 + "]" * 9000),
    ],
)
def test_what_is_no_call_stays_text(text: str) -> None:
    assert read(text) == (text, [])


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e999", '"\\ud800"', "[" * 9000])
def test_arguments_in_parts_are_json_whatever_the_model_wrote(value: str) -> None:
    (call,) = read(PART_CALL.replace("\n3\n", f"\n{value}\n"))[1]
    assert orjson.loads(call.arguments) == {"city": "Oslo", "days": value}


def test_without_tools_nothing_is_taken_out() -> None:
    assert read(JSON_CALL, ToolUse()) == (JSON_CALL, [])


def test_an_answer_of_one_call_has_no_second() -> None:
    use = BOTH._replace(is_single=True)
    assert len(read(f"{JSON_CALL}\n{JSON_CALL}", use)[1]) == 1


@given(st.lists(st.integers(1, 30), max_size=12), st.sampled_from([JSON_CALL, PART_CALL]))
def test_how_the_text_is_cut_changes_nothing(sizes: list[int], call: str) -> None:
    text = f"First <tool> this:\n{call}\n\n{call}\n and then"
    reader, plain, at = CallReader(BOTH), "", 0
    calls: list[ToolCall] = []
    for size in [*sizes, len(text)]:
        more, found = reader.push(text[at : at + size])
        plain, calls, at = plain + more, calls + found, at + size
    assert (plain + reader.finish(), calls) == read(text)


def test_a_template_without_tools_is_told_in_a_system_turn() -> None:
    turns: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "?"},
    ]
    first, second = told(turns, BOTH, PLAIN)
    assert first["content"].startswith("Be brief.\n\n")
    assert all(json.dumps(tool) in first["content"] for tool in (WEATHER, STOP))
    assert second == turns[1]
    assert told(turns[1:], BOTH, PLAIN)[0]["role"] == "system"
    assert told(turns, ToolUse(), PLAIN) == turns
    assert told(turns, BOTH, LISTS) == turns


CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "1", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}],
}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "sunny"}


def test_earlier_calls_and_results_become_what_the_template_takes() -> None:
    call, result = told([CALLED, RESULT], ToolUse(), PLAIN)
    assert read(call["content"])[1] == [ToolCall("weather", '{"city": "Oslo"}')]
    assert result == {"role": "user", "content": "<tool_response>\nsunny\n</tool_response>"}
    call, result = told([CALLED, RESULT], BOTH, LISTS)
    assert call["tool_calls"][0]["function"]["arguments"] == {"city": "Oslo"}
    assert result == RESULT
    deep = {"function": {"name": "weather", "arguments": "[" * 9000}}
    (call,) = told([{"role": "assistant", "content": "", "tool_calls": [deep]}], BOTH, LISTS)
    assert call["tool_calls"] == [deep]


def test_templates_say_how_calls_are_written() -> None:
    assert TemplateTools.of("{{ messages }}") == PLAIN
    assert TemplateTools.of("{% if tools %}{{ tools }}{% endif %}") == LISTS
    assert TemplateTools.of("{{ tools }} <function={{ name }}>") == PARTS


def test_a_schema_that_cannot_be_held_to_is_named() -> None:
    bad = {"function": {"name": "f", "parameters": {"properties": {"a": {"type": "nope"}}}}}
    use = tool_use([STOP, bad], "required", None)
    with pytest.raises(RequestFailed, match=r"tools\[1\]\.function\.parameters cannot be held to"):
        call_grammar(use, LISTS)
    assert call_grammar(BOTH, LISTS) is None
