"""Writes GGUF files for tests: correct ones, and, since nothing is checked here, any wrong one."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from strata_cli.engine.model.metadata import Entry, Metadata, Value, ValueType

_FORMATS = {
    ValueType.U8: "<B",
    ValueType.I8: "<b",
    ValueType.U16: "<H",
    ValueType.I16: "<h",
    ValueType.U32: "<I",
    ValueType.I32: "<i",
    ValueType.F32: "<f",
    ValueType.BOOL: "<?",
    ValueType.U64: "<Q",
    ValueType.I64: "<q",
    ValueType.F64: "<d",
}

Scalar = bool | int | float | str


@dataclass
class StoredTensor:
    """A directory line and its data; offset None means where it belongs."""

    name: str
    type_id: int
    shape: tuple[int, ...]  # numpy order
    data: bytes
    offset: int | None = None


@dataclass
class GgufBuilder:
    """A GGUF file in the making. Change any field before ``to_bytes`` to make it wrong."""

    values: dict[str, tuple[ValueType, Scalar | Sequence[Scalar]]] = field(default_factory=dict)
    tensors: list[StoredTensor] = field(default_factory=list)
    version: int = 3
    alignment: int = 32
    num_tensors: int | None = None
    num_keys: int | None = None

    def add(self, key: str, kind: ValueType, value: Scalar | Sequence[Scalar]) -> None:
        """Add or replace a key; a list or tuple becomes an array."""
        self.values[key] = (kind, value)

    def add_tensor(
        self, name: str, type_id: int, shape: tuple[int, ...], data: bytes
    ) -> StoredTensor:
        tensor = StoredTensor(name, type_id, shape, data)
        self.tensors.append(tensor)
        return tensor

    def metadata(self) -> Metadata:
        """What a reader of the file would see."""
        entries = {key: _entry(kind, value) for key, (kind, value) in self.values.items()}
        return Metadata(entries, "built in a test")

    def header(self) -> bytes:
        """Everything before the padding and the tensor data."""
        return b"".join(self.header_parts())

    def header_parts(self) -> list[bytes]:
        """The header cut where one field ends and the next begins."""
        num_tensors = len(self.tensors) if self.num_tensors is None else self.num_tensors
        num_keys = len(self.values) if self.num_keys is None else self.num_keys
        parts = [b"GGUF", struct.pack("<I", self.version)]
        parts += [struct.pack("<Q", num_tensors), struct.pack("<Q", num_keys)]
        for key, (kind, value) in self.values.items():
            parts += [*_text_parts(key), *_typed_value(kind, value)]
        offset = 0
        for tensor in self.tensors:
            at = offset if tensor.offset is None else tensor.offset
            parts += [*_text_parts(tensor.name), struct.pack("<I", len(tensor.shape))]
            parts += [struct.pack("<Q", extent) for extent in reversed(tensor.shape)]
            parts += [struct.pack("<I", tensor.type_id), struct.pack("<Q", at)]
            offset += self._padded(len(tensor.data))
        return parts

    def to_bytes(self) -> bytes:
        """The whole file."""
        header = self.header()
        parts = [header.ljust(self._padded(len(header)), b"\0")]
        parts += [
            tensor.data.ljust(self._padded(len(tensor.data)), b"\0") for tensor in self.tensors
        ]
        return b"".join(parts)

    def write(self, path: Path) -> Path:
        path.write_bytes(self.to_bytes())
        return path

    def _padded(self, nbytes: int) -> int:
        return -(-nbytes // self.alignment) * self.alignment


def _entry(kind: ValueType, value: Scalar | Sequence[Scalar]) -> Entry:
    if isinstance(value, (list, tuple)):
        items: Value = value
        return Entry(kind, len(value), lambda: items)
    assert isinstance(value, Scalar)
    scalar: Value = value
    return Entry(kind, None, lambda: scalar)


def _typed_value(kind: ValueType, value: Scalar | Sequence[Scalar]) -> list[bytes]:
    if isinstance(value, (list, tuple)):
        parts = [struct.pack("<I", number) for number in (ValueType.ARRAY, kind)]
        parts.append(struct.pack("<Q", len(value)))
        return parts + [part for item in value for part in _value_parts(kind, item)]
    assert isinstance(value, Scalar)
    return [struct.pack("<I", kind), *_value_parts(kind, value)]


def _value_parts(kind: ValueType, value: Scalar) -> list[bytes]:
    if kind is ValueType.STRING:
        return _text_parts(str(value))
    return [struct.pack(_FORMATS[kind], value)]


def _text_parts(text: str) -> list[bytes]:
    raw = text.encode()
    return [struct.pack("<Q", len(raw)), raw]
