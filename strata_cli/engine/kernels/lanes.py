"""Vectors in code that is being written for LLVM: values with numpy's operators.

What an operator does is emit an instruction. So a formula over ``Lanes`` is a plain function that
reads like its numpy statement, serves scalars and vectors alike, and computes exactly what is
written: IEEE float32, every product rounded before it is added unless ``fma`` is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from llvmlite import ir
from numba.core import cgutils as numba_cgutils

cgutils: Any = numba_cgutils  # carries no types
_FLOAT = ir.FloatType()
_I32 = ir.IntType(32)

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

    def __truediv__(self, other: Operand) -> Lanes:
        return self._new(self.builder.fdiv(*self._match(other)))

    def __radd__(self, other: float) -> Lanes:
        return self.constant(other) + self

    def __rtruediv__(self, other: float) -> Lanes:
        return self.constant(other) / self

    def unsigned(self, bits: int) -> Lanes:
        """Integers widened with zeros, or cut, to so many bits."""
        kind = _with_element(self.value.type, ir.IntType(bits))
        convert = self.builder.zext if bits > _bits(self.value.type) else self.builder.trunc
        return self._new(convert(self.value, kind))

    def of_width(self, bits: int) -> Lanes:
        """The bits of an integer or of a vector of them as lanes of another width."""
        kind = self.value.type
        count = getattr(kind, "count", 1) * _bits(kind) // bits
        return self._new(self.builder.bitcast(self.value, ir.VectorType(ir.IntType(bits), count)))

    def widened(self) -> Lanes:
        """16-bit integers read as IEEE halves, as float32; where the processor does that."""
        halves = self.builder.bitcast(self.value, _with_element(self.value.type, ir.HalfType()))
        return self._new(self.builder.fpext(halves, _with_element(self.value.type, _FLOAT)))

    def floats(self) -> Lanes:
        """Signed integers as float32."""
        kind = self.value.type
        value = self.value
        if _bits(kind) < 32:
            value = self.builder.sext(value, _with_element(kind, _I32))
        return self._new(self.builder.sitofp(value, _with_element(kind, _FLOAT)))

    def integers(self) -> Lanes:
        """Whole float32 numbers as signed 32-bit integers."""
        return self._new(self.builder.fptosi(self.value, _with_element(self.value.type, _I32)))

    def as_float(self) -> Lanes:
        """A 32-bit integer's bits read as float32."""
        return self._new(self.builder.bitcast(self.value, _with_element(self.value.type, _FLOAT)))

    def as_integer(self) -> Lanes:
        """A float32's bits read as a 32-bit integer."""
        return self._new(self.builder.bitcast(self.value, _with_element(self.value.type, _I32)))

    def negated(self) -> Lanes:
        """Minus this; of a float, the sign bit turned over."""
        kind = self.value.type
        if getattr(kind, "element", kind) == _FLOAT:
            return self._new(self.builder.fneg(self.value))
        return self._new(self.builder.sub(ir.Constant(kind, None), self.value))

    def constant(self, number: float) -> Lanes:
        """The number, in this type."""
        return self._new(self._match(number)[1])

    def exceeds(self, other: Operand) -> Lanes:
        """Conditions, for pick(): float32 greater than; false for what is not a number."""
        return self._new(self.builder.fcmp_ordered(">", *self._match(other)))

    def at_least(self, least: float) -> Lanes:
        """The larger of float32 and a number; what is not a number stays."""
        bound = self.constant(least)
        return bound.exceeds(self).pick(bound, self)

    def at_most(self, most: float) -> Lanes:
        """The smaller of float32 and a number; what is not a number stays."""
        return self.exceeds(most).pick(self.constant(most), self)

    def count_bits(self) -> Lanes:
        """How many bits of a 32-bit scalar are set."""
        function = cgutils.get_or_insert_function(
            self.builder.module, ir.FunctionType(_I32, [_I32]), "llvm.ctpop.i32"
        )
        return self._new(self.builder.call(function, [self.value]))

    def bits(self, count: int) -> Lanes:
        """The lowest bits of an integer scalar as conditions, for pick(): one for each lane."""
        kind = ir.IntType(count)
        value = self.value
        if self.value.type.width > count:
            value = self.builder.trunc(value, kind)
        return self._new(self.builder.bitcast(value, ir.VectorType(ir.IntType(1), count)))

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

    def shuffled(self, other: Lanes, order: Sequence[int]) -> Lanes:
        """Lanes of this vector and, from its width on, of the other, in an order."""
        mask = ir.Constant(ir.VectorType(_I32, len(order)), list(order))
        return self._new(self.builder.shuffle_vector(self.value, other.value, mask))

    def lane(self, index: int) -> Lanes:
        """One of a vector, as a scalar."""
        return self._new(self.builder.extract_element(self.value, ir.Constant(_I32, index)))

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


def instruction(builder: Any, name: str, kind: Any, *operands: Any) -> Lanes:
    """The result of an LLVM intrinsic: of a type, made of LLVM values."""
    function_type = ir.FunctionType(kind, [operand.type for operand in operands])
    function = cgutils.get_or_insert_function(builder.module, function_type, name)
    return Lanes(builder, builder.call(function, list(operands)))


def _call(name: str, *operands: Lanes) -> Lanes:
    """An LLVM intrinsic over float32 operands of one type."""
    kind, builder = operands[0].value.type, operands[0].builder
    suffix = f"v{kind.count}f32" if isinstance(kind, ir.VectorType) else "f32"
    values = [operand.value for operand in operands]
    return instruction(builder, f"llvm.{name}.{suffix}", kind, *values)


def fma(a: Lanes, b: Operand, c: Operand) -> Lanes:
    """a * b + c in float32 with one rounding; a has the type of the result."""
    return _call("fma", a, *(Lanes(a.builder, a._match(x)[1]) for x in (b, c)))


def nearest(x: Lanes) -> Lanes:
    """The nearest whole number, the even one of two."""
    return _call("roundeven", x)


def floor(x: Lanes) -> Lanes:
    """The largest whole number that is not larger."""
    return _call("floor", x)


def square_root(x: Lanes) -> Lanes:
    """Correctly rounded."""
    return _call("sqrt", x)


def magnitude(x: Lanes) -> Lanes:
    """Without its sign."""
    return _call("fabs", x)
