"""A quantized block as a decoder sees it: its bytes as ``Lanes`` in, its weights out.

A decoder is a plain function of a ``Block``; it runs once, when its type is compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from strata_cli.engine.kernels.lanes import Lanes, instruction

_I8, _I32, _I64 = (ir.IntType(bits) for bits in (8, 32, 64))
_WIDE = 16  # floats of the widest register
BOOK = 16  # entries of a code book that fits a vector


def _lanes_of(builder: Any, vector: Any, count: int) -> Any:
    """The first lanes of a vector; what it has not is undefined."""
    if vector.type.count == count:
        return vector
    undefined = ir.Constant(vector.type, ir.Undefined)
    last = vector.type.count - 1
    order = [min(lane, last) for lane in range(count)]
    return builder.shuffle_vector(vector, undefined, ir.Constant(ir.VectorType(_I32, count), order))


def look_up_floats(codes: Lanes, book: Sequence[float], scale: Lanes) -> Lanes:
    """book[code] * scale in 16 lanes, where the processor has AVX-512.

    Args:
        codes: 32-bit lanes, of which the lowest four bits count.
        book: 16 numbers.
        scale: of them, a scalar.
    """
    return pick_floats(codes, float_book(codes, book) * scale)


def float_book(like: Lanes, book: Sequence[float]) -> Lanes:
    """16 numbers as float32, in the code that another value is in."""
    kind = ir.VectorType(ir.FloatType(), _WIDE)
    return Lanes(like.builder, ir.Constant(kind, [float(entry) for entry in book]))


def pick_floats(codes: Lanes, book: Lanes) -> Lanes:
    """book[code] in 16 lanes, where the processor has AVX-512; both as of look_up_floats."""
    name = "llvm.x86.avx512.permvar.sf.512"
    return instruction(codes.builder, name, book.value.type, book.value, codes.value)


class Block:
    """One quantized block being decoded; positions are bytes from its start, weights from zero."""

    def __init__(
        self, builder: Any, source: Any, target: Any, table: Any, features: str = ""
    ) -> None:
        self._builder = builder
        self._source = source
        self._target = target
        self._table = table
        self._features = frozenset(features.split(","))

    def has(self, *features: str) -> bool:
        """Whether the processor has all of these, by LLVM's names."""
        return all(f"+{feature}" in self._features for feature in features)

    def _load(self, base: Any, index: Any, kind: Any) -> Lanes:
        at = self._builder.bitcast(self._builder.gep(base, [index]), kind.as_pointer())
        return Lanes(self._builder, self._builder.load(at, align=1))

    def half(self, at: int) -> Lanes:
        """The IEEE half at a byte, as float32."""
        return self.half_from(self.integer(at, 16))

    def half_from(self, bits: Lanes) -> Lanes:
        """The float32 of an IEEE half given as a 16-bit integer.

        By integers where the processor has no instruction: LLVM would call a function there that
        need not exist.
        """
        if self.has("f16c"):
            return bits.widened()
        wide = bits.unsigned(32)
        magnitude = (wide & 0x7FFF) << 13
        exponent = wide & 0x7C00
        normal = magnitude + (112 << 23)
        denormal = (magnitude + (113 << 23)).as_float() - 2.0**-14
        special = magnitude + (224 << 23)
        value = exponent.equals(0).pick(denormal.as_integer(), normal)
        value = exponent.equals(0x7C00).pick(special, value)
        return (value | ((wide & 0x8000) << 16)).as_float()

    def integer(self, at: int, bits: int) -> Lanes:
        """A little-endian integer at a byte."""
        return self._load(self._source, ir.Constant(_I64, at), ir.IntType(bits))

    def integers(self, at: int, count: int) -> Lanes:
        """Consecutive little-endian 32-bit integers from a byte on, as lanes."""
        return self._load(self._source, ir.Constant(_I64, at), ir.VectorType(_I32, count))

    def byte(self, at: int) -> Lanes:
        """The unsigned byte at a position, as a 32-bit scalar."""
        return self.integer(at, 8).unsigned(32)

    def bytes(self, at: int, count: int) -> Lanes:
        """Consecutive bytes as 8-bit lanes."""
        return self._load(self._source, ir.Constant(_I64, at), ir.VectorType(ir.IntType(8), count))

    def entries(self, indices: Sequence[Lanes], width: int) -> Lanes:
        """Rows of the type's code book (32-bit scalars), one after the other, as 8-bit lanes.

        Args:
            indices: of the rows.
            width: lanes of a row, 4 or 8.
        """
        builder, kind = self._builder, ir.IntType(8 * width)
        rows = ir.Constant(ir.VectorType(kind, len(indices)), ir.Undefined)
        for place, index in enumerate(indices):
            at = builder.mul(builder.zext(index.value, _I64), ir.Constant(_I64, width))
            row = self._load(self._table, at, kind).value
            rows = builder.insert_element(rows, row, ir.Constant(_I32, place))
        lanes = ir.VectorType(_I8, width * len(indices))
        return Lanes(builder, builder.bitcast(rows, lanes))

    def look_up(self, codes: Lanes, book: Sequence[int]) -> Lanes:
        """book[code] in each byte lane, at most 16: one instruction where the processor has it."""
        count = codes.value.type.count
        if not self.has("ssse3") or count > BOOK:
            return codes.look_up(book)
        builder, kind = self._builder, ir.VectorType(_I8, BOOK)
        name = "llvm.x86.ssse3.pshuf.b.128"
        wide = _lanes_of(builder, codes.value, BOOK)
        values = instruction(builder, name, kind, ir.Constant(kind, list(book)), wide)
        return Lanes(builder, _lanes_of(builder, values.value, count))

    def look_up_pairs(self, at: int, book: Sequence[int], scale: Lanes) -> tuple[Lanes, Lanes]:
        """16 bytes of two codes: book[code] * scale of all low halves, and of all high ones."""
        codes = self.bytes(at, _WIDE)
        if self.has("avx512f"):
            codes = codes.unsigned(32)
            return look_up_floats(codes, book, scale), look_up_floats(codes >> 4, book, scale)
        low, high = (self.look_up(each, book).floats() for each in (codes & 15, codes >> 4))
        return low * scale, high * scale

    def store(self, first: int, values: Lanes) -> None:
        """Write float32 weights from weight ``first`` on."""
        at = self._builder.gep(self._target, [ir.Constant(_I64, first)])
        at = self._builder.bitcast(at, values.value.type.as_pointer())
        self._builder.store(values.value, at, align=4)
