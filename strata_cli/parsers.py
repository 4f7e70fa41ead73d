"""How settings are written: one small parser per form, each of which can say what it expects.

Numbers are plain ASCII decimals. Python's int() and float() also take "1_0", " 1", "+1" and the
digits of other scripts, which are typing errors more often than wishes.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Generic, TypeVar, cast

T = TypeVar("T")
W = TypeVar("W")

LARGEST_COUNT = 2**31 - 1  # positions and token ids are int32
LARGEST_BYTES = 1 << 50
LONGEST_TEXT, LONGEST_SECRET = 255, 1024

_WHOLE = re.compile(r"[0-9]{1,20}")
_DECIMAL = re.compile(r"([0-9]{1,40}(\.[0-9]{0,40})?|\.[0-9]{1,40})([eE][-+]?[0-9]{1,3})?")


class UnusableError(ValueError):
    """A text of the right form that cannot be used here.

    Attributes:
        problem: what is wrong with it; stands where "must be ..." would.
        hint: what to try.
    """

    def __init__(self, problem: str, hint: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.hint = hint


@dataclass(frozen=True, slots=True)
class Parser(Generic[T]):
    """One form of value. Calling it turns text into a value, or raises ValueError.

    Attributes:
        expected: the accepted values in words; completes "must be ...".
        metavar: stands for the value in help.
        convert: text to value, range unchecked; raises ValueError when the text is no such value.
        accepts: whether a value is in range.
        show: the text that converts back to the value.
        is_switch: true for on-off settings, which become a --name/--no-name flag.
        is_secret: no message and no log shows a value.
    """

    expected: str
    metavar: str
    convert: Callable[[str], T]
    accepts: Callable[[T], bool]
    show: Callable[[T], str] = str
    is_switch: bool = False
    is_secret: bool = False

    def __call__(self, text: str) -> T:
        """The value that the text stands for; ValueError when it is not of this form."""
        value = self.convert(text)
        if not self.accepts(value):
            raise ValueError(f"not {self.expected}")
        return value


def or_word(word: str, meaning: W, parse: Parser[T]) -> Parser[T | W]:
    """The parser's values, and one word that stands for a value of its own.

    The word is the only spelling of that value: "0" is no other way to write "auto".
    """

    def accepts(value: T | W) -> bool:
        return value == meaning or parse.accepts(cast(T, value))

    def show(value: T | W) -> str:
        return word if value == meaning else parse.show(cast(T, value))

    return Parser(
        expected=f"{word} or {parse.expected}",
        metavar=f"{word}|{parse.metavar}",
        convert=lambda text: meaning if text == word else parse(text),
        accepts=accepts,
        show=show,
        is_switch=parse.is_switch,
        is_secret=parse.is_secret,
    )


def whole_number(minimum: int, maximum: int = LARGEST_COUNT) -> Parser[int]:
    """A whole number in a closed range of numbers that are not negative."""
    return Parser(
        expected=f"a whole number {_range(minimum, maximum)}",
        metavar="N",
        convert=to_int,
        accepts=lambda value: minimum <= value <= maximum,
    )


def to_int(text: str) -> int:
    """The number that ASCII digits alone stand for.

    Raises:
        ValueError: the text is anything else, or has more digits than any setting takes.
    """
    if _WHOLE.fullmatch(text) is None:
        raise ValueError("not a whole number")
    return int(text)


def number(minimum: float, maximum: float | None = None) -> Parser[float]:
    """A finite number in a closed range of numbers that are not negative."""
    limit = math.inf if maximum is None else maximum
    return Parser(
        expected=f"a number {_range(minimum, maximum)}",
        metavar="X",
        convert=_to_float,
        accepts=lambda value: math.isfinite(value) and minimum <= value <= limit,
        show=lambda value: f"{value:g}",
    )


def _to_float(text: str) -> float:
    if _DECIMAL.fullmatch(text) is None:
        raise ValueError("not a decimal number")
    return float(text)


def byte_size(minimum: int) -> Parser[int]:
    """A number of bytes, as it is or with a unit: 800MiB, 12GiB, 24GB."""
    return Parser(
        expected=(
            f"a size such as 800MiB, 12GiB or 24GB, "
            f"from {show_bytes(minimum)} to {show_bytes(LARGEST_BYTES)}"
        ),
        metavar="SIZE",
        convert=_to_bytes,
        accepts=lambda value: minimum <= value <= LARGEST_BYTES,
        show=show_bytes,
    )


def choice(*words: str) -> Parser[str]:
    """One of a few words."""
    return Parser(
        expected=f"one of {', '.join(words)}",
        metavar="|".join(words),
        convert=str,
        accepts=lambda value: value in words,
    )


def _range(minimum: float, maximum: float | None) -> str:
    return f"from {minimum}" if maximum is None else f"from {minimum} to {maximum}"


_UNITS = {
    "PiB": 1 << 50, "TiB": 1 << 40, "GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10,
    "TB": 10**12, "GB": 10**9, "MB": 10**6, "KB": 10**3, "B": 1,
}  # fmt: skip


def show_bytes(nbytes: int) -> str:
    """A size in the largest binary unit that says it exactly."""
    for unit, factor in _UNITS.items():
        if unit.endswith("iB") and nbytes and nbytes % factor == 0:
            return f"{nbytes // factor}{unit}"
    return f"{nbytes}B"


def _to_bytes(text: str) -> int:
    match = re.fullmatch(r"([0-9]{1,20}(?:\.[0-9]{1,20})?) ?([A-Za-z]*)", text)
    if match is None:
        raise ValueError("not a number of bytes")
    units = {unit.lower(): factor for unit, factor in _UNITS.items()} | {"": 1}
    factor = units.get(match[2].lower())
    if factor is None:
        raise ValueError("no unit of bytes")
    return int(Fraction(match[1]) * factor)


def _to_bool(text: str) -> bool:
    words = {"0": False, "false": False, "1": True, "true": True}
    if text.lower() not in words:
        raise ValueError("neither 0 nor 1")
    return words[text.lower()]


def _to_path(text: str) -> Path:
    if not text:
        raise ValueError("an empty path")
    if "\0" in text:
        raise UnusableError("has a NUL character, which no path can have", "check the path")
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise UnusableError(
            "starts with ~, but that user has no home folder here",
            "write the whole path, or ./~ for a file whose name begins with ~",
        ) from None


def _to_new_path(text: str) -> str:
    """Unlike a Path, keeps the slash at the end that makes it a folder."""
    _to_path(text)
    return os.path.expanduser(text)


def _to_trace_target(text: str) -> str:
    """Nothing for nowhere, "1" for stderr; a file of that name is given with its folder."""
    if text in ("0", "1"):
        return text.strip("0")
    path = str(_to_path(text))
    return f"./{path}" if path in ("0", "1") else path


def _to_text(text: str) -> str:
    if not text.isprintable() or not 0 < len(text.strip()) <= LONGEST_TEXT:
        raise ValueError("empty, too long or not printable")
    return text.strip()


def _to_secret(text: str) -> str:
    if not (text.isascii() and text.isprintable()) or " " in text:
        raise ValueError("not what a header can carry")
    if not 0 < len(text) <= LONGEST_SECRET:
        raise ValueError("empty or too long")
    return text


def _to_names(text: str) -> tuple[str, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isprintable() and " " not in part for part in parts):
        raise ValueError("a name with a space")
    if not all(0 < len(part) <= LONGEST_TEXT for part in parts):
        raise ValueError("an empty name, or one that is too long")
    return tuple(parts)


boolean: Parser[bool] = Parser(
    expected="0, 1, false or true",
    metavar="0|1",
    convert=_to_bool,
    accepts=lambda _value: True,
    show=lambda value: str(int(value)),
    is_switch=True,
)

file_path: Parser[Path] = Parser(
    expected="the path of a file", metavar="PATH", convert=_to_path, accepts=lambda _value: True
)

new_file_path: Parser[str] = Parser(
    expected="the path of a file",
    metavar="PATH",
    convert=_to_new_path,
    accepts=lambda _value: True,
)

text: Parser[str] = Parser(
    expected=f"printable text of at most {LONGEST_TEXT} characters",
    metavar="TEXT",
    convert=_to_text,
    accepts=lambda _value: True,
)

secret: Parser[str] = Parser(
    expected=f"up to {LONGEST_SECRET} ASCII letters, digits and signs without a space",
    metavar="TEXT",
    convert=_to_secret,
    accepts=lambda _value: True,
    is_secret=True,
)

names: Parser[tuple[str, ...]] = Parser(
    expected=f"names of at most {LONGEST_TEXT} characters with commas between",
    metavar="NAMES",
    convert=_to_names,
    accepts=lambda _value: True,
    show=",".join,
)

trace_target: Parser[str] = Parser(
    expected="0, 1 (stderr) or the path of a file",
    metavar="0|1|PATH",
    convert=_to_trace_target,
    accepts=lambda _value: True,
    show=lambda value: value or "0",
)

device_name: Parser[str] = Parser(
    expected="auto, host or cuda:N",
    metavar="auto|host|cuda:N",
    convert=str,
    accepts=lambda value: re.fullmatch(r"auto|host|cuda:[0-9]{1,4}", value) is not None,
)

auto_or_count = or_word("auto", 0, whole_number(1))
auto_or_threads = or_word("auto", 0, whole_number(1, 1024))
auto_or_bytes = or_word("auto", 0, byte_size(1 << 20))
auto_or_boolean = or_word("auto", None, boolean)
embedded_or_path = or_word("embedded", None, file_path)
none_or_path = or_word("none", None, file_path)
none_or_secret = or_word("none", None, secret)
none_or_names = or_word("none", (), names)
auto_or_path = or_word("auto", None, file_path)
auto_or_slots = or_word("auto", None, whole_number(0))
auto_or_few_slots = or_word("auto", None, whole_number(0, 16))
auto_or_ring = or_word("auto", 0, whole_number(1, 512))
auto_or_share = or_word("auto", None, number(0, 1))
auto_or_gib = or_word("auto", None, number(0, LARGEST_BYTES >> 30))
auto_or_depth = or_word("auto", 0, whole_number(1, 256))
