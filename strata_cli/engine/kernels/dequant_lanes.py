"""Vectors inside a block decoder: LLVM values with numpy's operators.

A decoder is a plain function of a ``Block``; it runs once, when its type is compiled, and what its
operators do is emit LLVM instructions. So it reads like the numpy statement of the format, and its
arithmetic is exactly what is written: IEEE float32, every product rounded before it is added.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from llvmlite import ir
from numba.core import cgutils as numba_cgutils

cgutils: Any = numba_cgutils  # carries no types
_FLOAT = ir.FloatType()
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)

Operand: TypeAlias = "Lanes | int | float | Sequence[int]"


def _with_element(kind: Any, element: Any) -> Any:
    return ir.VectorType(element, kind.count) if isinstance(kind, ir.VectorType) else element


def _bits(kind: Any) -> int:
    width: int = getattr(kind, "element", kind).width
    return width


class Lanes:
    """One scalar or vector, of integers or of float32.

    A scalar or a Python number on either side of an operator applies to every lane. Integers wrap;
    ``>>`` shifts zeros in.
    """

    def __init__(self, builder: Any, value: Any) -> None:
        self.builder = builder
        self.value = value

    def _new(self, value: Any) -> Lanes:
        return Lanes(self.builder, value)

    def _spread(self, count: int) -> Any:
        """This scalar as a vector."""
        undefined = ir.Constant(ir.VectorType(self.value.type, count), ir.Undefined)
        first = self.builder.insert_element(undefined, self.value, ir.Constant(_I32, 0))
        zeros = ir.Constant(ir.VectorType(_I32, count), [0] * count)
        return self.builder.shuffle_vector(first, undefined, zeros)

    def _match(self, other: Operand) -> tuple[Any, Any]:
        """Both operands with the same type."""
        kind = self.value.type
        if isinstance(other, Lanes):
            left, right = self.value, other.value
            if isinstance(kind, ir.VectorType) and not isinstance(right.type, ir.VectorType):
                right = other._spread(kind.count)
            elif isinstance(right.type, ir.VectorType) and not isinstance(kind, ir.VectorType):
                left = self._spread(right.type.count)
            return left, right
        if isinstance(kind, ir.VectorType):
            values = [other] * kind.count if isinstance(other, int | float) else list(other)
            return self.value, ir.Constant(kind, values)
        return self.value, ir.Constant(kind, other)

    def __and__(self, other: Operand) -> Lanes:
        return self._new(self.builder.and_(*self._match(other)))

    def __or__(self, other: Operand) -> Lanes:
        return self._new(self.builder.or_(*self._match(other)))

    def __xor__(self, other: Operand) -> Lanes:
        return self._new(self.builder.xor(*self._match(other)))

    def __lshift__(self, other: Operand) -> Lanes:
        return self._new(self.builder.shl(*self._match(other)))

    def __rshift__(self, other: Operand) -> Lanes:
        return self._new(self.builder.lshr(*self._match(other)))

    def __add__(self, other: Operand) -> Lanes:
        left, right = self._match(other)
        is_float = getattr(left.type, "element", left.type) == _FLOAT
        return self._new((self.builder.fadd if is_float else self.builder.add)(left, right))

    def __sub__(self, other: Operand) -> Lanes:
        left, right = self._match(other)
        is_float = getattr(left.type, "element", left.type) == _FLOAT
        return self._new((self.builder.fsub if is_float else self.builder.sub)(left, right))

    def __mul__(self, other: Operand) -> Lanes:
        left, right = self._match(other)
        is_float = getattr(left.type, "element", left.type) == _FLOAT
        return self._new((self.builder.fmul if is_float else self.builder.mul)(left, right))

    def unsigned(self, bits: int) -> Lanes:
        """Integers widened with zeros, or cut, to so many bits."""
        kind = _with_element(self.value.type, ir.IntType(bits))
        convert = self.builder.zext if bits > _bits(self.value.type) else self.builder.trunc
        return self._new(convert(self.value, kind))

    def floats(self) -> Lanes:
        """Signed integers as float32."""
        kind = self.value.type
        value = self.value
        if _bits(kind) < 32:
            value = self.builder.sext(value, _with_element(kind, _I32))
        return self._new(self.builder.sitofp(value, _with_element(kind, _FLOAT)))

    def as_float(self) -> Lanes:
        """A 32-bit integer's bits read as float32."""
        return self._new(self.builder.bitcast(self.value, _FLOAT))

    def as_integer(self) -> Lanes:
        """A float32's bits read as a 32-bit integer."""
        return self._new(self.builder.bitcast(self.value, _I32))

    def negated(self) -> Lanes:
        """Minus this; of a float, the sign bit turned over."""
        kind = self.value.type
        if getattr(kind, "element", kind) == _FLOAT:
            return self._new(self.builder.fneg(self.value))
        return self._new(self.builder.sub(ir.Constant(kind, None), self.value))

    def constant(self, number: float) -> Lanes:
        """The number, in this type."""
        return self._new(self._match(number)[1])

    def equals(self, number: int) -> Lanes:
        """Conditions, for pick()."""
        return self._new(self.builder.icmp_unsigned("==", *self._match(number)))

    def pick(self, yes: Lanes, no: Lanes) -> Lanes:
        """For conditions: yes where true, no where false."""
        return self._new(self.builder.select(self.value, yes.value, no.value))

    def repeat(self, times: int) -> Lanes:
        """Each lane so many times in a row, as numpy.repeat."""
        order = [i // times for i in range(self.value.type.count * times)]
        mask = ir.Constant(ir.VectorType(_I32, len(order)), order)
        return self._new(self.builder.shuffle_vector(self.value, self.value, mask))

    def spread(self, count: int) -> Lanes:
        """A scalar in every one of count lanes."""
        return self._new(self._spread(count))

    def look_up(self, book: Sequence[int]) -> Lanes:
        """book[code] in each byte lane: 16 int8 entries, as a tree of choices on the code's bits.

        A vector unit's own table instruction would be faster, and another one on each machine.
        """
        count = self.value.type.count
        values = [self._new(ir.Constant(self.value.type, [entry] * count)) for entry in book]
        for bit in (1, 2, 4, 8):
            is_clear = (self & bit).equals(0)
            values = [
                is_clear.pick(low, high)
                for low, high in zip(values[::2], values[1::2], strict=True)
            ]
        return values[0]


class Block:
    """One quantized block being decoded; positions are bytes from its start, weights from zero."""

    def __init__(self, builder: Any, source: Any, target: Any, table: Any) -> None:
        self._builder = builder
        self._source = source
        self._target = target
        self._table = table

    def _load(self, base: Any, index: Any, kind: Any) -> Lanes:
        at = self._builder.bitcast(self._builder.gep(base, [index]), kind.as_pointer())
        return Lanes(self._builder, self._builder.load(at, align=1))

    def half(self, at: int) -> Lanes:
        """The IEEE half at a byte, as float32."""
        return self.half_from(self.integer(at, 16))

    def half_from(self, bits: Lanes) -> Lanes:
        """The float32 of an IEEE half given as a 16-bit integer.

        By integers, because LLVM calls a function that need not be there where the CPU cannot.
        """
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

    def byte(self, at: int) -> Lanes:
        """The unsigned byte at a position, as a 32-bit scalar."""
        return self.integer(at, 8).unsigned(32)

    def bytes(self, at: int, count: int) -> Lanes:
        """Consecutive bytes as 8-bit lanes."""
        return self._load(self._source, ir.Constant(_I64, at), ir.VectorType(ir.IntType(8), count))

    def entry(self, index: Lanes, width: int) -> Lanes:
        """Row ``index`` (32-bit scalar) of the type's code book: width 8-bit lanes."""
        at = self._builder.mul(self._builder.zext(index.value, _I64), ir.Constant(_I64, width))
        return self._load(self._table, at, ir.VectorType(ir.IntType(8), width))

    def store(self, first: int, values: Lanes) -> None:
        """Write float32 weights from weight ``first`` on."""
        at = self._builder.gep(self._target, [ir.Constant(_I64, first)])
        at = self._builder.bitcast(at, values.value.type.as_pointer())
        self._builder.store(values.value, at, align=4)
