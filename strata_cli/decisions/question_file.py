"""Several questions in one file: an object of questions by id, as JSON or YAML.

A question has "question", its text, and its answers: "options" with or without "by_text": true,
"levels", "scale" with or without "bins", or "yes_no": true.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from strata_cli.decisions.questions import Question, choice, levels, scale, yes_no
from strata_cli.errors import ConfigError, InputError, quoted
from strata_cli.json_objects import distinct_keys

HINT = 'for example {"lang": {"question": "Which language?", "options": ["C", "Rust"]}}'
ANSWERS = ("options", "yes_no", "levels", "scale")
KEYS = ("question", *ANSWERS, "bins", "by_text")


def parse_questions(data: bytes, origin: str) -> list[Question]:
    """The questions of a file, in its order; YAML where the name ends in .yaml or .yml.

    Args:
        data: the file's bytes.
        origin: its name, for messages.

    Raises:
        InputError: the file is not as it should be; names the question.
        ConfigError: YAML needs a library that is not installed.
    """
    is_yaml = origin.endswith((".yaml", ".yml"))
    entries = _parse(data, origin, _load_yaml if is_yaml else _load_json)
    if not isinstance(entries, dict) or not entries:
        raise InputError(f"{origin} is not an object of questions", hint=HINT)
    return [_question(id, entry, origin) for id, entry in entries.items()]


def _question(id: Any, entry: Any, origin: str) -> Question:
    if not isinstance(id, str):
        raise InputError(f"{origin}: the id {id!r} is not a text", hint="quote it")
    where = f"{origin}, question {quoted(id)}"
    if not isinstance(entry, dict):
        raise InputError(f"{where} is not an object", hint=HINT)
    try:
        return _typed_question(id, entry)
    except InputError as error:
        raise InputError(f"{where}: {error.message}", hint=error.hint) from None


def _typed_question(id: str, entry: dict[Any, Any]) -> Question:
    given = _answers(entry)
    text = _text(entry.get("question"), "question")
    answers = entry[given]
    if given == "options":
        return choice(text, _texts(answers, "options"), id, by_text=_by_text(entry))
    if given == "levels":
        return levels(text, _texts(answers, "levels"), id)
    if given == "yes_no":
        if answers is not True:
            raise InputError("yes_no is not true", hint="give true, or other answers instead")
        return yes_no(text, id)
    low, high = _numbers(answers)
    bins = entry.get("bins", 5)
    if type(bins) is not int:
        raise InputError(f"bins is not a whole number: {quoted(str(bins))}", hint="for example 5")
    return scale(text, low, high, bins, id)


def _answers(entry: dict[Any, Any]) -> str:
    """The key that says what can be answered."""
    for key in entry:
        if key not in KEYS:
            raise InputError(f"unknown key {quoted(str(key))}", hint=f"known: {', '.join(KEYS)}")
    given = [key for key in ANSWERS if key in entry]
    if len(given) != 1:
        found = " and ".join(given) or "none"
        raise InputError(
            f"one of {', '.join(ANSWERS)} says what can be answered; found {found}", hint=HINT
        )
    for key, owner in (("bins", "scale"), ("by_text", "options")):
        if key in entry and given != [owner]:
            raise InputError(f"{key} without {owner}", hint="leave it out")
    return given[0]


def _by_text(entry: dict[Any, Any]) -> bool:
    value = entry.get("by_text", False)
    if type(value) is not bool:
        raise InputError(
            f"by_text is not true or false: {quoted(str(value))}", hint="for example true"
        )
    return value


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        kind = "missing" if value is None else f"not a text: {quoted(str(value))}"
        raise InputError(f"{name} is {kind}", hint="quote it, if it is there")
    return value


def _texts(value: Any, name: str) -> list[str]:
    if not isinstance(value, list):
        raise InputError(f"{name} is not a list of texts", hint=HINT)
    return [_text(item, f"{name}, number {number},") for number, item in enumerate(value, 1)]


def _numbers(value: Any) -> tuple[float, float]:
    # A bool is an int to Python, and no end of a scale.
    if (
        not isinstance(value, list)
        or len(value) != 2
        or not all(type(item) in (int, float) for item in value)
    ):
        raise InputError("scale is not a list of two numbers", hint="for example [0, 10]")
    try:
        return float(value[0]), float(value[1])
    except OverflowError:
        raise InputError("scale has too large a number", hint="for example [0, 10]") from None


def _parse(data: bytes, origin: str, load: Callable[[str], Any]) -> Any:
    try:
        return load(data.decode())
    except RecursionError:
        raise InputError(f"{origin} is nested too deeply", hint=HINT) from None
    except ValueError as error:
        raise InputError(f"{origin} cannot be read: {error}", hint=HINT) from None


def _load_json(text: str) -> Any:
    return json.loads(text, object_pairs_hook=distinct_keys, parse_constant=_refuse)


def _refuse(word: str) -> Any:
    raise ValueError(f"{word} is no number of JSON")


def _load_yaml(text: str) -> Any:
    try:
        import yaml
    except ImportError:
        raise ConfigError(
            "questions in YAML need the yaml extra, which is not installed",
            hint="pip install 'strata-cli[yaml]', or write them as JSON",
        ) from None

    class Loader(yaml.SafeLoader):  # type: ignore[misc] # the library is untyped
        """Plain values only; refuses keys that are there twice."""

    def construct(loader: Any, node: Any) -> dict[Any, Any]:
        keys = [loader.construct_object(key, deep=True) for key, _ in node.value]
        values = [loader.construct_object(value, deep=True) for _, value in node.value]
        if not all(isinstance(key, str | int | float | bool | None) for key in keys):
            raise ValueError("a key is a list or an object")
        return distinct_keys(zip(keys, values, strict=True))

    Loader.add_constructor("tag:yaml.org,2002:map", construct)
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
