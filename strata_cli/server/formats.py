"""What an answer has to look like: from a request's fields to a grammar of llguidance's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from strata_cli.server.constraint import Rule
from strata_cli.server.failures import bad_request

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
WHITESPACE = r"[ \n\t]{0,20}"  # between JSON's parts; bounded, or a weak model never ends
MOST_PROPERTIES = 2000  # a grammar's time grows with their square: here it is two seconds
LONGEST_SCHEMA = 1 << 18


def format_grammar(response_format: Mapping[str, Any] | None) -> str | None:
    """The grammar of a response_format; None: any text.

    Raises:
        RequestFailed: 400, the format is not one, or its schema cannot be used.
    """
    kind = (response_format or {}).get("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        return json_grammar(ANY_OBJECT, "response_format")
    if kind == "json_schema":
        assert response_format is not None
        return json_grammar(_schema(response_format), "response_format.json_schema.schema")
    raise bad_request(
        f"response_format.type must be text, json_object or json_schema, not {kind!r:.50}",
        "response_format.type",
    )


def json_grammar(schema: Mapping[str, Any] | bool, where: str) -> str:
    """The grammar of JSON texts that follow a schema.

    Args:
        schema: a JSON schema.
        where: the request's field, for messages.

    Raises:
        RequestFailed: 400, the schema has something that cannot be held to.
    """
    from llguidance import LLMatcher  # only answers with a format need it

    check_size(schema, where)
    try:
        grammar = LLMatcher.grammar_from_json_schema(
            schema,  # type: ignore[arg-type]  # true and false are schemas, too
            defaults={"whitespace_pattern": WHITESPACE},
        )
    except (TypeError, ValueError) as error:
        raise bad_request(f"{where} is no JSON schema: {error}", where) from error
    return checked(grammar, where)


def check_size(schema: object, where: str) -> None:
    """Refuse what everybody would have to wait for.

    Args:
        schema: a JSON schema, or JSON with schemas in it.
        where: the request's field, for messages.

    Raises:
        RequestFailed: 400, it is too large.
    """
    properties = _num_properties(schema)
    try:
        length = len(json.dumps(schema))
    except RecursionError:
        raise bad_request(f"{where} is nested too deeply", where) from None
    if properties > MOST_PROPERTIES:
        raise bad_request(
            f"{where} has {properties} properties, and {MOST_PROPERTIES} are the most", where
        )
    if length > LONGEST_SCHEMA:
        raise bad_request(
            f"{where} has {length} characters, and {LONGEST_SCHEMA} are the most", where
        )


def with_spaces(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema for a %json of lark_grammar's, with the spaces that json_grammar allows."""
    return {**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}}


def lark_grammar(rules: Sequence[str], where: str) -> str:
    """The grammar of some lines of Lark. Raises as json_grammar does."""
    from llguidance import LLMatcher

    return checked(LLMatcher.grammar_from_lark("\n".join(rules)), where)


def checked(grammar: str, where: str) -> str:
    """The grammar itself, if answers can be held to it.

    Raises:
        RequestFailed: 400, they cannot.
    """
    from llguidance import LLMatcher

    problem = LLMatcher.validate_grammar(grammar, None)
    if problem:
        raise bad_request(f"{where} cannot be held to: {problem.splitlines()[0]:.300}", where)
    return grammar


def constraint_of(grammar: str | None, after: int | None) -> str | None:
    """What the engine is told of a grammar that holds once a token ended the thought, if any."""
    return None if grammar is None else Rule(grammar, after).text()


def _schema(response_format: Mapping[str, Any]) -> Mapping[str, Any]:
    where = "response_format.json_schema"
    described = response_format.get("json_schema")
    if not isinstance(described, Mapping):
        raise bad_request(f"{where} must be an object with name and schema", where)
    schema = described.get("schema")
    if not isinstance(schema, Mapping):
        raise bad_request(f"{where}.schema must be a JSON schema", f"{where}.schema")
    return schema


def _num_properties(schema: object) -> int:
    count, left = 0, [schema]
    while left:
        value = left.pop()
        if isinstance(value, Mapping):
            named = (value.get("properties"), value.get("required"))
            count += max(len(names) if isinstance(names, Mapping | list) else 0 for names in named)
            left.extend(value.values())
        elif isinstance(value, list):
            left.extend(value)
    return count
