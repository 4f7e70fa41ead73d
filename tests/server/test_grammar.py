"""Answers held to a grammar: whatever is drawn among the allowed tokens, the text follows it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from strata_cli.engine.model.gguf import open_gguf
from strata_cli.engine.model.tokenizer import Tokenizer
from strata_cli.errors import InputError
from strata_cli.models import DEMO_MODEL_PATH
from strata_cli.server.constraint import Rule
from strata_cli.server.failures import RequestFailed
from strata_cli.server.formats import constraint_of, format_grammar, lark_grammar
from strata_cli.server.grammar import Grammars
from strata_cli.server.tool_calls import CallReader
from strata_cli.server.tools import TemplateTools, call_grammar, tool_use
from tests.server.test_tools import LISTS, PARTS, STOP, WEATHER

MOST_TOKENS = 400
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "dog"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 30},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 5}, "maxItems": 2},
    },
    "required": ["kind", "age", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    with open_gguf(DEMO_MODEL_PATH) as file:
        return Tokenizer.from_metadata(file.metadata)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer)


def drawn(grammars: Grammars, tokenizer: Tokenizer, text: str, seed: int) -> str:
    """An answer of random tokens among those that may come."""
    rng, ids = np.random.default_rng(seed), list[int]()
    constraint = grammars.make(text)
    for _ in range(MOST_TOKENS):
        mask = constraint.mask()
        if mask[sorted(tokenizer.eos_ids)].any():
            return tokenizer.decode(ids)
        token_id = int(rng.choice(np.flatnonzero(mask)))
        ids.append(token_id)
        constraint.accept(token_id)
    raise AssertionError(f"no end: {tokenizer.decode(ids)!r:.200}")


def follows(grammars: Grammars, tokenizer: Tokenizer, text: str, answer: str) -> bool:
    """Whether an answer may come, token by token, and end."""
    constraint = grammars.make(text)
    for token_id in tokenizer.encode(answer, parse_special=False):
        if not constraint.mask()[token_id]:
            return False
        constraint.accept(token_id)
    return bool(constraint.mask()[sorted(tokenizer.eos_ids)].any())


def grammar_of(response_format: Mapping[str, Any]) -> str:
    grammar = format_grammar(response_format)
    assert grammar is not None
    return Rule(grammar).text()


@pytest.mark.parametrize("seed", range(4))
def test_an_answer_follows_its_schema(grammars: Grammars, tokenizer: Tokenizer, seed: int) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA}}
    value = json.loads(drawn(grammars, tokenizer, grammar_of(wanted), seed))
    assert list(value) == ["kind", "age", "tags"]
    assert value["kind"] in ("cat", "dog")
    assert 0 <= value["age"] <= 30
    assert len(value["tags"]) <= 2
    assert all(len(tag) <= 5 for tag in value["tags"])


@pytest.mark.parametrize(
    ("answer", "is_object"),
    [('{"a": [1, {}]}', True), ("[1]", False), ("{}", True), ("{} x", False)],
)
def test_an_answer_is_an_object(
    grammars: Grammars, tokenizer: Tokenizer, answer: str, is_object: bool
) -> None:
    text = grammar_of({"type": "json_object"})
    assert follows(grammars, tokenizer, text, answer) == is_object


ONE_JSON = '<tool_call>\n{"name": "f", "arguments": {"city": "Rome"}}\n</tool_call>'
NO_CITY = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
ONE_PART = (
    "<tool_call>\n<function=f>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>"
)
STOPS = "<tool_call>\n<function=stop>\n</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("template", "answer", "may_come"),
    [
        (LISTS, ONE_JSON, True),
        (LISTS, f"{ONE_JSON}\n{ONE_JSON}", True),
        (LISTS, NO_CITY, False),
        (LISTS, "Rome", False),
        (PARTS, ONE_PART, True),
        (PARTS, STOPS, True),
        (PARTS, ONE_PART.replace("city", "town"), False),
        (PARTS, ONE_JSON, False),
    ],
)
def test_an_answer_that_must_call_does(
    grammars: Grammars, tokenizer: Tokenizer, template: TemplateTools, answer: str, may_come: bool
) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tool = {"function": {"name": "f", "parameters": {**schema, "additionalProperties": False}}}
    use = tool_use([tool, STOP], "required", None)
    text = constraint_of(call_grammar(use, template), None)
    assert text is not None
    assert follows(grammars, tokenizer, text, answer) == may_come
    if may_come:
        plain, calls = CallReader(use).push(answer)
        assert (plain, len(calls)) == ("", answer.count("</tool_call>"))


@pytest.mark.parametrize(
    ("arguments", "may_come"),
    [
        ('{"city": {"name": "Oslo"}, "more": null}', True),
        ('{"city": {"name": "Oslo"}, "more": {"city": {"name": "Rome"}, "more": null}}', True),
        ('{"city": {"name": "Oslo"}, "more":' + 20 * " " + "null}", True),
        ('{"city": {"name": "Oslo"}, "more":' + 80 * " " + "null}", False),
        ('{"city": "Oslo", "more": null}', False),
        ("7", False),
    ],
)
def test_references_in_a_tools_schema_begin_at_its_root(
    grammars: Grammars, tokenizer: Tokenizer, arguments: str, may_come: bool
) -> None:
    city = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    schema = {
        "properties": {
            "city": {"$ref": "#/$defs/City"},
            "more": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
        },
        "required": ["city", "more"],
        "additionalProperties": False,
        "$defs": {"City": city},
    }
    use = tool_use([STOP, {"function": {"name": "f", "parameters": schema}}], "required", None)
    text = constraint_of(call_grammar(use, LISTS), None)
    assert text is not None
    answer = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
    assert follows(grammars, tokenizer, text, answer) == may_come


def test_a_grammar_may_wait_for_the_end_of_a_thought(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    (end,) = tokenizer.encode("b", parse_special=False)
    text = constraint_of(lark_grammar(['start: "xyz"'], "test"), end)
    assert text is not None
    constraint = grammars.make(text)
    (other,) = tokenizer.encode("q", parse_special=False)
    for token_id in (other, end):
        mask = constraint.mask()
        assert mask[[other, end]].all()
        assert not mask[sorted(tokenizer.eos_ids)].any()
        constraint.accept(token_id)
    allowed = [tokenizer.token_bytes(int(i)) for i in np.flatnonzero(constraint.mask())]
    assert allowed
    assert all(b"xyz".startswith(token) for token in allowed)


def test_only_an_end_comes_behind_what_is_complete(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    constraint = grammars.make(Rule(lark_grammar(['start: "a"'], "test")).text())
    (token_id,) = tokenizer.encode("a", parse_special=False)
    constraint.accept(token_id)
    assert set(np.flatnonzero(constraint.mask()).tolist()) == set(tokenizer.eos_ids)


@pytest.mark.parametrize("text", ["", "{}", '{"grammar": "start: nothing"}', '{"other": 1}'])
def test_what_is_no_constraint_is_an_error(grammars: Grammars, text: str) -> None:
    with pytest.raises(InputError):
        grammars.make(text)


@pytest.mark.parametrize(
    ("response_format", "message"),
    [
        ({"type": "xml"}, "must be text, json_object or json_schema"),
        ({"type": "json_schema"}, "json_schema must be an object"),
        ({"type": "json_schema", "json_schema": {"schema": 3}}, "schema must be a JSON schema"),
        (
            {"type": "json_schema", "json_schema": {"schema": {"type": "nope"}}},
            "cannot be held to: Invalid type: nope",
        ),
    ],
)
def test_a_format_that_is_none_is_named(response_format: Any, message: str) -> None:
    with pytest.raises(RequestFailed, match=message) as failed:
        format_grammar(response_format)
    assert failed.value.failure.status == 400


def test_plain_text_needs_no_grammar() -> None:
    assert format_grammar(None) is None
    assert format_grammar({"type": "text"}) is None
    assert constraint_of(None, 3) is None
    assert call_grammar(tool_use([WEATHER], "auto", None), LISTS) is None


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"properties": {f"k{i}": {} for i in range(2001)}}, "2001 properties, and 2000 are"),
        ({"anyOf": [{"required": [f"k{i}" for i in range(2001)]}]}, "2001 properties"),
        ({"enum": ["x" * (1 << 18)]}, "characters, and 262144 are the most"),
        (nested(400), "recursion limit|nested too deeply"),
        (nested(5000), "nested too deeply"),
    ],
)
def test_schemas_that_would_hold_everybody_up_are_refused(schema: Any, message: str) -> None:
    with pytest.raises(RequestFailed, match=message) as failed:
        format_grammar({"type": "json_schema", "json_schema": {"schema": schema}})
    assert failed.value.failure.param == "response_format.json_schema.schema"
    half: Any = {"properties": {f"k{i}": {} for i in range(1001)}}
    tools = [{"function": {"name": name, "parameters": half}} for name in "ab"]
    with pytest.raises(RequestFailed, match="tools has 2002 properties"):
        call_grammar(tool_use(tools, "required", None), LISTS)
