"""Typed, range-checked reading of metadata keys, with errors that name key, value and range."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from strata_cli.engine.model.metadata import Entry, Metadata, ValueType
from strata_cli.errors import ModelError

MAX_I32 = 2**31 - 1
SMALL_INTEGERS = (ValueType.U32, ValueType.I32)


class Keys:
    """The metadata keys under one prefix. Every error names file, key, value and what was expected.

    Attributes:
        metadata: where the keys are read from.
        prefix: put before every key, for example ``qwen4exp.``.
    """

    __slots__ = ("metadata", "prefix")

    def __init__(self, metadata: Metadata, prefix: str) -> None:
        self.metadata = metadata
        self.prefix = prefix

    def error(self, detail: str, hint: str = "") -> ModelError:
        """A ModelError that names the file; the caller raises it."""
        return ModelError(
            f"{self.metadata.origin}: {detail}",
            hint=hint or "convert the model again, or use another conversion of it",
        )

    def has(self, key: str) -> bool:
        """Whether the key is there at all."""
        return self.prefix + key in self.metadata

    def is_array(self, key: str) -> bool:
        """Whether the key is there and holds an array."""
        entry = self.metadata.entry(self.prefix + key)
        return entry is not None and entry.num_items is not None

    def u32(self, key: str, low: int = 1, high: int = MAX_I32, default: int | None = None) -> int:
        """A u32 within low..high; the default, when there is one, if the key is absent."""
        if default is not None and not self.has(key):
            return default
        return self.check_range(key, self._scalar(key, (ValueType.U32,)), low, high)

    def u32_or_i32(self, key: str, low: int, high: int) -> int:
        """An integer within low..high, stored as u32 or i32."""
        return self.check_range(key, self._scalar(key, SMALL_INTEGERS), low, high)

    def f32(self, key: str) -> float:
        """A finite f32 above 0."""
        value = self._read(key, None, (ValueType.F32,))
        if not isinstance(value, float) or not math.isfinite(value) or value <= 0:
            raise self.error(f"{self.prefix}{key} is {value}; expected a number above 0")
        return value

    def integers(
        self, key: str, length: int, types: tuple[ValueType, ...] = SMALL_INTEGERS
    ) -> tuple[int, ...]:
        """An array of exactly ``length`` integers of one of the given types."""
        value = self._read(key, length, types)
        return tuple(int(item) for item in np.asarray(value).tolist())

    def booleans(self, key: str, length: int) -> tuple[bool, ...]:
        """An array of exactly ``length`` booleans."""
        value = self._read(key, length, (ValueType.BOOL,))
        return tuple(bool(item) for item in np.asarray(value).tolist())

    def num_strings(self, key: str) -> int:
        """The length of an array of strings, without reading it."""
        entry = self._entry(key)
        if entry.type is not ValueType.STRING or entry.num_items is None:
            raise self.error(f"{self.prefix}{key} must be an array of strings, found {entry}")
        return entry.num_items

    def text(self, key: str) -> str:
        """A string."""
        return str(self._read(key, None, (ValueType.STRING,)))

    def check_range(self, key: str, value: int, low: int, high: int) -> int:
        """Value, if it lies within low..high."""
        if not low <= value <= high:
            raise self.error(f"{self.prefix}{key} is {value}; expected {low} to {high}")
        return value

    def _scalar(self, key: str, types: tuple[ValueType, ...]) -> int:
        value = self._read(key, None, types)
        assert isinstance(value, int)
        return value

    def _entry(self, key: str) -> Entry:
        entry = self.metadata.entry(self.prefix + key)
        if entry is None:
            raise self.error(f"metadata key {self.prefix}{key} is missing")
        return entry

    def _read(self, key: str, length: int | None, types: tuple[ValueType, ...]) -> object:
        entry = self._entry(key)
        if entry.type not in types or (entry.num_items is None) != (length is None):
            raise self.error(
                f"{self.prefix}{key} has the type {entry}, expected {_expected(types, length)}"
            )
        # Checked before reading: an array in a hostile file may be as large as the file.
        if entry.num_items != length:
            raise self.error(f"{self.prefix}{key} has {entry.num_items} items, expected {length}")
        return entry.read()


def _expected(types: Sequence[ValueType], length: int | None) -> str:
    return " or ".join(str(Entry(kind, length, lambda: 0)) for kind in types)
