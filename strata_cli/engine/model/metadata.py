"""The metadata of a model file: a mapping of keys to values that remembers each value's GGUF type.

Arrays are read where they are used, not when the file is opened: a vocabulary of 248,320 tokens
costs nothing until something asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeAlias

from numpy.typing import NDArray

Value: TypeAlias = bool | int | float | str | Sequence[str] | NDArray[Any]
"""A scalar, a list of strings, or a read-only numpy array of numbers or booleans."""


class ValueType(IntEnum):
    """What a value is stored as; the numbers are GGUF's."""

    U8 = 0
    I8 = 1
    U16 = 2
    I16 = 3
    U32 = 4
    I32 = 5
    F32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    U64 = 10
    I64 = 11
    F64 = 12


INTEGERS = frozenset(
    {
        ValueType.U8,
        ValueType.I8,
        ValueType.U16,
        ValueType.I16,
        ValueType.U32,
        ValueType.I32,
        ValueType.U64,
        ValueType.I64,
    }
)


@dataclass(frozen=True, slots=True)
class Entry:
    """One stored value.

    Attributes:
        type: the scalar's type, or the type of an array's items.
        num_items: items of an array; None for a scalar.
        read: gives the value, decoding it if need be; may raise ModelError for damaged text.
    """

    type: ValueType
    num_items: int | None
    read: Callable[[], Value]

    def __str__(self) -> str:
        name = self.type.name.lower()
        return name if self.num_items is None else f"{name}[{self.num_items}]"


class Metadata(Mapping[str, Value]):
    """Keys to values, as a plain mapping; ``entry`` also tells type and size without reading.

    Arrays are decoded anew at every access, so that no second copy of a vocabulary lives here.

    Attributes:
        origin: the file it came from, for messages.
    """

    __slots__ = ("_entries", "origin")

    def __init__(self, entries: Mapping[str, Entry], origin: str) -> None:
        self._entries = dict(entries)
        self.origin = origin

    def __getitem__(self, key: str) -> Value:
        return self._entries[key].read()

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries  # the inherited one would decode the value to find out

    def entry(self, key: str) -> Entry | None:
        """Type and size of a value, or None when the key is absent. Reads nothing."""
        return self._entries.get(key)
