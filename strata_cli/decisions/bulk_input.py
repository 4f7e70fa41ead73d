"""The lines of a file of states, one JSON object each, read one at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

import orjson

from strata_cli.decisions.states import state_text
from strata_cli.errors import InputError, quoted
from strata_cli.json_objects import RepeatedKeyError, check_keys

MOST_LINE_BYTES = 16 << 20
LINE_HINT = 'each line is one object: {"state": "..."}'


class InputLine(NamedTuple):
    """One line.

    Attributes:
        number: from 1.
        offset: of its first byte in the file.
        digest: 12 hex digits that follow from its bytes.
        data: without the line end; None: it is too long to be kept.
    """

    number: int
    offset: int
    digest: str
    data: bytes | None


class Entry(NamedTuple):
    """What a line says.

    Attributes:
        state: as text.
        id: a text or a number that the answer repeats; None: there is none.
        fields: all of the line.
    """

    state: str
    id: str | int | float | None
    fields: dict[str, Any]


def read_lines(file: BinaryIO, number: int = 1, offset: int = 0) -> Iterator[InputLine]:
    """The lines of a file, numbered; the last one may lack its end. Keeps one in memory.

    Args:
        file: stands at the beginning of a line.
        number: of that line.
        offset: of its first byte.
    """
    while data := file.readline(MOST_LINE_BYTES + 1):
        nbytes = len(data)
        is_short = len(data) <= MOST_LINE_BYTES or data.endswith(b"\n")
        digest = hashlib.sha256(data.removesuffix(b"\n"))
        while not is_short and (more := file.readline(MOST_LINE_BYTES)):
            digest.update(more.removesuffix(b"\n"))
            nbytes += len(more)
            if more.endswith(b"\n"):
                break
        kept = data.removesuffix(b"\n") if is_short else None
        yield InputLine(number, offset, digest.hexdigest()[:12], kept)
        number, offset = number + 1, offset + nbytes


def count_lines(file: BinaryIO) -> int:
    """How many lines read_lines() gives; the file is at its beginning before and afterwards."""
    count, last = 0, b"\n"
    while block := file.read(1 << 20):
        count += block.count(b"\n")
        last = block[-1:]
    file.seek(0)
    return count + (last != b"\n")


def parse_line(data: bytes | None) -> Entry:
    """What a line says; keys other than state and id are the caller's own.

    Args:
        data: see InputLine.

    Raises:
        InputError: it is no object with a state, or has an id that is neither text nor number.
    """
    if data is None:
        raise InputError(
            f"the line is longer than {MOST_LINE_BYTES >> 20} MiB", hint="shorten the state"
        )
    if not data.strip():
        raise InputError("the line is empty", hint=LINE_HINT)
    try:
        fields = orjson.loads(data)
        check_keys(data)
    except RecursionError:
        raise InputError("nested too deeply", hint=LINE_HINT) from None
    except RepeatedKeyError as error:
        raise InputError(f"the key {error}", hint="name it once") from None
    except ValueError as error:
        raise InputError(f"not valid JSON: {error}", hint=LINE_HINT) from None
    if not isinstance(fields, dict):
        raise InputError("not an object", hint=LINE_HINT)
    return Entry(_state(fields.get("state")), _id(fields.get("id")), fields)


def _state(value: Any) -> str:
    """A text as it is; a list of chat turns, or any other list or object, as over HTTP."""
    if value is None:
        raise InputError("state is missing", hint=LINE_HINT)
    if not isinstance(value, str | list | dict):
        raise InputError(
            f"state is neither text nor list nor object: {quoted(str(value))}", hint=LINE_HINT
        )
    text = state_text(value)
    if not text.strip():
        raise InputError("the state is empty", hint="give some text to decide about")
    return text


def _id(value: Any) -> str | int | float | None:
    # A bool is an int to Python, and no id.
    if value is None or type(value) in (str, int, float):
        return value  # type: ignore[no-any-return] # just found to be one of these
    raise InputError(
        f"id is neither text nor number: {quoted(str(value))}", hint="quote it, or leave it out"
    )
