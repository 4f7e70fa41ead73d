"""Every question that cannot be asked is refused, with what is wrong."""

from __future__ import annotations

import math

import pytest

from strata_cli.decisions.question_file import parse_questions
from strata_cli.decisions.questions import choice, levels, scale, yes_no
from strata_cli.errors import InputError

YAML = b"""
lang:
  question: Which language?
  options: [C, Rust]
spam: {question: "Spam?", yes_no: true}
"""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "0 options to choose from"),
        (["a"], "1 option to choose from"),
        ([f"o{i}" for i in range(256)], "256 options to choose from, and 255 are the most"),
        (["a", "b", "a"], "options 1 and 3 are the same: 'a'"),
        (["a", "a "], "options 1 and 2 are the same"),
        (["a", " "], "option 2 is empty"),
        (["a", "b\nC. c"], "option 2 has a line break"),
        (["a\n", "b"], "option 1 has a line break"),
        (["a", "\ud800"], "option 2 has half a surrogate pair"),
    ],
)
def test_options(options: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        choice("Which?", options)


def test_more_options_than_letters_go_by_their_text() -> None:
    assert not choice("Which?", [f"o{i}" for i in range(26)]).by_text
    assert choice("Which?", [f"o{i}" for i in range(255)]).by_text


def test_options_of_many_tokens_are_fine() -> None:
    assert (
        len(choice("Which?", [f"a long option with number {i}" for i in range(26)]).options) == 26
    )


@pytest.mark.parametrize(
    ("low", "high", "bins", "message"),
    [
        (math.nan, 1, 5, "a scale from nan to 1 is not between two finite numbers"),
        (0, math.inf, 5, "a scale from 0 to inf is not"),
        (-1.7e308, 1.7e308, 5, "is not between two finite numbers"),
        (1, 1, 5, "a scale from 1 to 1 does not go up"),
        (0, 1, 1, "1 bins to choose from"),
        (0, 1, 11, "11 bins to choose from"),
        (1_000_000, 1_000_001, 5, "5 bins from 1000000 to 1000001 cannot be told apart"),
    ],
)
def test_scales(low: float, high: float, bins: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        scale("How much?", low, high, bins)


def test_levels_and_texts() -> None:
    with pytest.raises(InputError, match="1 levels"):
        levels("How?", ["low"])
    with pytest.raises(InputError, match="levels 1 and 2 are the same"):
        levels("How?", ["low", "low"])
    with pytest.raises(InputError, match="the question is empty"):
        yes_no(" ")
    with pytest.raises(InputError, match="id is empty"):
        yes_no("Is it?", "")


def test_a_file_keeps_order_and_ids() -> None:
    entries = [
        b'"b": {"question": "B?", "options": ["x", "y"]}',
        b'"a": {"question": "A?", "yes_no": true}',
        b'"s": {"question": "S?", "scale": [0, 1.5], "bins": 3}',
        b'"l": {"question": "L?", "levels": ["n", "m"]}',
    ]
    data = b"{" + b", ".join(entries) + b"}"
    asked = parse_questions(data, "q.json")
    assert [question.id for question in asked] == ["b", "a", "s", "l"]
    assert [question.kind for question in asked] == ["choice", "noul", "score", "score"]
    assert asked[2].options == ("0 to 0.5", "0.5 to 1", "1 to 1.5")


def test_yaml_says_the_same() -> None:
    asked = parse_questions(YAML, "q.yaml")
    assert [(question.id, question.options) for question in asked] == [
        ("lang", ("C", "Rust")),
        ("spam", ("Yes", "No")),
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read"),
        (b"{}", "is not an object of questions"),
        (b"[1]", "is not an object of questions"),
        (b"\xff", "cannot be read"),
        (b"[" * 100_000, "nested too deeply|cannot be read"),
        (b'{"a": {"question": "A?", "yes_no": true}, "a": {}}', "'a' is there twice"),
        (b'{"a": 1}', "question 'a' is not an object"),
        (b'{"a": {"yes_no": true}}', "question is missing"),
        (b'{"a": {"question": "A?"}}', "found none"),
        (
            b'{"a": {"question": "A?", "yes_no": true, "options": ["a", "b"]}}',
            "found options and yes_no",
        ),
        (b'{"a": {"question": "A?", "yes_no": false}}', "yes_no is not true"),
        (
            b'{"a": {"question": "A?", "options": ["a", 1]}}',
            "options, number 2, is not a text: '1'",
        ),
        (b'{"a": {"question": "A?", "options": "ab"}}', "options is not a list of texts"),
        (b'{"a": {"question": "A?", "option": ["a", "b"]}}', "unknown key 'option'"),
        (b'{"a": {"question": "A?", "scale": [NaN, 1]}}', "NaN is no number of JSON"),
        (b'{"a": {"question": "A?", "scale": [0, 1e999]}}', "not between two finite numbers"),
        (b'{"a": {"question": "A?", "scale": [0, true]}}', "scale is not a list of two numbers"),
        (b'{"a": {"question": "A?", "scale": [0, 1], "bins": 2.5}}', "bins is not a whole number"),
        (
            b'{"a": {"question": "A?", "options": ["a", "b"], "by_text": 1}}',
            "by_text is not true or false: '1'",
        ),
        (
            b'{"a": {"question": "A?", "yes_no": true, "by_text": true}}',
            "by_text without options",
        ),
        (b'{"a": {"question": "A?", "yes_no": true, "bins": 3}}', "bins without scale"),
        (b'{"a": {"question": "A?", "options": ["a"]}}', "question 'a': 1 option to choose from"),
    ],
)
def test_a_wrong_file_is_one_error(content: bytes, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_questions(content, "q.json")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: {question: 'A?', options: [yes, no]}", "options, number 1, is not a text: 'True'"),
        (b"a: {question: 'A?', yes_no: true}\na: {}", "'a' is there twice"),
        (b"1: {question: 'A?', yes_no: true}", "the id 1 is not a text"),
        (b"a: {question: 'A?', scale: [0, .nan]}", "not between two finite numbers"),
        (b"a: [", "cannot be read"),
        (b"? [a]\n: b", "cannot be read"),
        (b"!!python/object/apply:os.getcwd []", "cannot be read"),
    ],
)
def test_wrong_yaml_is_one_error(content: bytes, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_questions(content, "q.yaml")
