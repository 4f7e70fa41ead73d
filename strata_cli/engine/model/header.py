"""Parses the header of one GGUF file: metadata and tensor directory, nothing of the tensor data.

The ``gguf`` package's reader decodes every value when a file is opened and believes every count it
finds; a damaged or hostile file can make it allocate without bound. Here each count, length and
offset is checked against the size of the file, and against a limit far above any real model, before
it is used; arrays are only measured, and decoded when somebody asks for them.

Layout: GGUF versions 2 and 3, little-endian.
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.model.cursor import DAMAGED_HINT, U64, Cursor
from strata_cli.engine.model.directory import TensorEntry, check_num_tensors, read_directory
from strata_cli.engine.model.metadata import Entry, Metadata, ValueType
from strata_cli.errors import ModelError

MAGIC = b"GGUF"
MAX_KEYS = 65_536
MAX_KEY_BYTES = 65_535  # the format's own limit
MAX_TEXT_BYTES = 16 << 20
MAX_STRINGS = 16 << 20
MAX_STRING_ARRAY_BYTES = 512 << 20
DEFAULT_ALIGNMENT = 32

_MIN_KEY_BYTES = 8 + 1 + 4 + 1  # name length, name, type, smallest value
_DTYPES: dict[ValueType, np.dtype[Any]] = {
    ValueType.U8: np.dtype("<u1"),
    ValueType.I8: np.dtype("<i1"),
    ValueType.U16: np.dtype("<u2"),
    ValueType.I16: np.dtype("<i2"),
    ValueType.U32: np.dtype("<u4"),
    ValueType.I32: np.dtype("<i4"),
    ValueType.F32: np.dtype("<f4"),
    ValueType.BOOL: np.dtype("<u1"),
    ValueType.U64: np.dtype("<u8"),
    ValueType.I64: np.dtype("<i8"),
    ValueType.F64: np.dtype("<f8"),
}


class Header(NamedTuple):
    """Everything before the tensor data of one file."""

    metadata: Metadata
    tensors: list[TensorEntry]


def parse_header(data: mmap.mmap, origin: str) -> Header:
    """Read and check the header of a mapped file.

    Args:
        data: the whole file; lazily read arrays keep it alive.
        origin: the file's name, for messages.

    Raises:
        ModelError: not a GGUF file, a version or byte order that is not read here, a count, length,
            type or offset that cannot be right, or tensor data that reaches beyond the file.
    """
    cursor = Cursor(data, origin)
    _check_magic(cursor)
    num_tensors = cursor.u64("the number of tensors")
    num_keys = cursor.u64("the number of metadata keys")
    cursor.check_count(num_keys, MAX_KEYS, _MIN_KEY_BYTES, "metadata keys")
    check_num_tensors(cursor, num_tensors)
    entries: dict[str, Entry] = {}
    for index in range(num_keys):
        key = cursor.text(f"the name of metadata key {index}", 1, MAX_KEY_BYTES)
        if key in entries:
            raise cursor.damaged(f"metadata key {key[:80]!r} appears twice")
        entries[key] = _read_entry(cursor, key)
    metadata = Metadata(entries, origin)
    return Header(metadata, read_directory(cursor, num_tensors, _alignment(metadata)))


def _check_magic(cursor: Cursor) -> None:
    start = cursor.data[: min(cursor.size, 24)]
    if start.startswith(b"version https://git-lfs"):
        raise ModelError(
            f"{cursor.origin} is a Git LFS pointer, not the model itself",
            hint="fetch the file with: git lfs pull",
        )
    if start[:4] != MAGIC:
        raise ModelError(
            f"{cursor.origin} is not a GGUF file: it starts with {start[:4]!r}, not {MAGIC!r}",
            hint="pass a model in GGUF format (*.gguf)",
        )
    cursor.pos = len(MAGIC)
    version = cursor.u32("the format version")
    if version and version & 0xFFFF == 0:
        raise ModelError(
            f"{cursor.origin} is a big-endian GGUF file, which is not supported",
            hint="convert it to little-endian with gguf-convert-endian",
        )
    if version not in (2, 3):
        raise ModelError(
            f"{cursor.origin} has GGUF version {version}; supported are 2 and 3",
            hint="convert the model again with current tools",
        )


def _read_entry(cursor: Cursor, key: str) -> Entry:
    what = f"the value of metadata key {key[:80]!r}"
    kind = _value_type(cursor, what)
    if kind is ValueType.ARRAY:
        return _read_array(cursor, what)
    if kind is ValueType.STRING:
        text = cursor.text(what, 0, MAX_TEXT_BYTES)
        return Entry(kind, None, lambda: text)
    dtype = _DTYPES[kind]
    start = cursor.skip(dtype.itemsize, what)
    read = _booleans if kind is ValueType.BOOL else _numbers
    scalar: bool | int | float = read(cursor, start, dtype, 1, what)[0].item()
    return Entry(kind, None, lambda: scalar)


def _read_array(cursor: Cursor, what: str) -> Entry:
    kind = _value_type(cursor, what)
    count = cursor.u64(what)
    if kind is ValueType.ARRAY:
        raise cursor.damaged(f"{what} holds arrays, and nested arrays are not supported")
    if kind is ValueType.STRING:
        return _measure_strings(cursor, count, what)
    dtype = _DTYPES[kind]
    start = cursor.skip(count * dtype.itemsize, what)
    read = _booleans if kind is ValueType.BOOL else _numbers
    return Entry(kind, count, partial(read, cursor, start, dtype, count, what))


def _value_type(cursor: Cursor, what: str) -> ValueType:
    number = cursor.u32(what)
    try:
        return ValueType(number)
    except ValueError:
        raise cursor.damaged(f"{what} has the unknown type {number}") from None


def _numbers(
    cursor: Cursor, start: int, dtype: np.dtype[Any], count: int, _what: str
) -> NDArray[Any]:
    return np.frombuffer(cursor.data, dtype=dtype, count=count, offset=start)


def _booleans(
    cursor: Cursor, start: int, dtype: np.dtype[Any], count: int, what: str
) -> NDArray[np.bool_]:
    stored = _numbers(cursor, start, dtype, count, what)
    if stored.size and int(stored.max()) > 1:
        raise cursor.damaged(f"{what} holds {int(stored.max())}; a boolean is 0 or 1")
    return stored.view(np.bool_)


def _measure_strings(cursor: Cursor, count: int, what: str) -> Entry:
    cursor.check_count(count, MAX_STRINGS, U64.size, f"strings in {what}")
    data, size, first, pos = cursor.data, cursor.size, cursor.pos, cursor.pos
    length_at = U64.unpack_from
    # Not through the cursor: a vocabulary has hundreds of thousands of these.
    for _ in range(count):
        if size - pos < 8:
            raise cursor.truncated(what, pos + 8 - first, first)
        pos += 8 + int(length_at(data, pos)[0])
    cursor.skip(pos - first, what)
    if pos - first > MAX_STRING_ARRAY_BYTES:
        raise cursor.damaged(
            f"{what} takes {pos - first} bytes; at most {MAX_STRING_ARRAY_BYTES} are allowed"
        )
    return Entry(ValueType.STRING, count, partial(_strings, cursor, first, count, what))


def _strings(cursor: Cursor, pos: int, count: int, what: str) -> list[str]:
    data, length_at = cursor.data, U64.unpack_from
    texts: list[str] = []
    try:
        for _ in range(count):
            start = pos + 8
            pos = start + int(length_at(data, pos)[0])
            texts.append(data[start:pos].decode("utf-8"))
    except UnicodeDecodeError as error:
        raise cursor.damaged(f"item {len(texts)} of {what} is not valid UTF-8") from error
    return texts


def _alignment(metadata: Metadata) -> int:
    key = "general.alignment"
    entry = metadata.entry(key)
    if entry is None:
        return DEFAULT_ALIGNMENT
    value = entry.read()
    if str(entry) != "u32" or not isinstance(value, int):
        raise ModelError(f"{metadata.origin}: {key} must be u32, found {entry}", hint=DAMAGED_HINT)
    if value < 8 or value & (value - 1):
        raise ModelError(
            f"{metadata.origin}: {key} must be a power of two and at least 8, got {value}",
            hint=DAMAGED_HINT,
        )
    return value
