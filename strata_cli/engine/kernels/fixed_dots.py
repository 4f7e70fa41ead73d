"""Dot products of quantized rows with a row in fixed point: for a processor that counts in bytes.

A weight is a small integer times a scale that it shares with its neighbours. So most of a dot
product can be a sum of integers: AVX-512 VNNI adds 64 products of bytes at a time, where float32
takes 16, after a conversion and a product of each weight alone. The row of floats becomes integers
of 24 bits first, in units of its largest magnitude, and each of these three signed bytes:

    x[k] = unit * (d0[k] + 256 * d1[k] + 65536 * d2[k])

What the weights of 32 or so make with each byte is summed exactly; only scales are floats. That is
as exact as a sum of float32 products, whose order it has not: bits are not those of ``simd.py``.

Weights are signed, and the instruction wants one of its operands unsigned: decoders add a bias, and
sums start with what that will make too much.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils as numba_cgutils

from strata_cli.engine.kernels.dequant_lanes import Block
from strata_cli.engine.kernels.jit import intrinsic
from strata_cli.engine.kernels.lanes import Lanes, fma, instruction, nearest
from strata_cli.engine.kernels.row_dots import RowLoop, emit_rows

cgutils: Any = numba_cgutils  # carries no types
_FLOAT, _I8, _I32, _I64 = ir.FloatType(), *(ir.IntType(bits) for bits in (8, 32, 64))
_LANES, _BYTES = 16, 64  # of a register
_INTEGERS, _FLOATS = ir.VectorType(_I32, _LANES), ir.VectorType(_FLOAT, _LANES)
_REGISTER = ir.VectorType(_I8, _BYTES)
UNIT_BYTES = 64  # in front of a row's digits, which begin at a multiple of that
_DIGITS = 3
_TOP = 127 * 65536  # what the largest magnitude becomes
_MIDDLE = 0x808080  # 128 in each digit: added, all are unsigned

Value = Any  # an LLVM value

# (x, pieces of a row, digits out)
DIGITS_SIGNATURE = types.void(*[types.intp] * 3)
# (first row, bytes from one to the next, number of rows, digits, pieces of a row, out, where rows
# are that are wanted next, or 0)
FIXED_SIGNATURE = types.void(*[types.intp] * 7)


class Group(NamedTuple):
    """Weights that are summed lane by lane, before a lane's scale is applied.

    Attributes:
        planes: weights with the bias, unsigned, in the bytes of a register each.
        scale: of each lane, that is of its four bytes in all planes, float32 [16].
    """

    planes: Sequence[Lanes]
    scale: Lanes


class Piece(NamedTuple):
    """The unit in which a type's rows are multiplied: some blocks.

    Attributes:
        weights: of a piece.
        nbytes: of a piece.
        bias: added to each weight.
        orders: of each group and plane, which weight of the piece is in which byte.
        decode: gives the groups.
    """

    weights: int
    nbytes: int
    bias: int
    orders: Sequence[Sequence[Sequence[int]]]
    decode: Callable[[Block], Sequence[Group]]

    @property
    def digits_nbytes(self) -> int:
        """Of a piece's part of x: of each group, digits by plane, and what sums start with."""
        return sum(_DIGITS * _BYTES * (len(planes) + 1) for planes in self.orders)


def make_digits(piece: Piece) -> Callable[..., Any]:
    """Intrinsic of DIGITS_SIGNATURE: a row of floats as the type's fixed_dots() takes it."""

    def digits(_typing: Any, _x: Any, _pieces: Any, _out: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            _emit_digits(builder, args, piece)
            return context.get_dummy_value()

        return DIGITS_SIGNATURE, generate

    return intrinsic(digits)


def fixed_dots(piece: Piece) -> Callable[..., Any]:
    """Intrinsic of FIXED_SIGNATURE: out[r] = sum over k of row r's weight k times x[k]."""

    def dots(
        _typing: Any,
        _row: Any,
        _stride: Any,
        _rows: Any,
        _digits: Any,
        _pieces: Any,
        _out: Any,
        _following: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            features = context.codegen().magic_tuple()[2]
            _emit_dots(builder, args, piece, features)
            return context.get_dummy_value()

        return FIXED_SIGNATURE, generate

    return intrinsic(dots)


def _emit_digits(builder: Any, args: Sequence[Value], piece: Piece) -> None:
    x, pieces, out = args
    count = builder.mul(pieces, ir.Constant(_I64, piece.weights))
    largest = _largest_magnitude(builder, x, count)
    top = ir.Constant(_FLOAT, float(_TOP))
    is_zero = builder.fcmp_ordered("==", largest, ir.Constant(_FLOAT, 0.0))
    factor = builder.select(is_zero, ir.Constant(_FLOAT, 0.0), builder.fdiv(top, largest))
    unit = builder.fdiv(largest, top)
    builder.store(unit, builder.inttoptr(out, _FLOAT.as_pointer()), align=4)
    first = builder.add(out, ir.Constant(_I64, UNIT_BYTES))
    with cgutils.for_range(builder, pieces) as loop:
        start = builder.mul(loop.index, ir.Constant(_I64, piece.weights))
        natural = _digits_of(builder, x, start, piece.weights, Lanes(builder, factor))
        to = builder.mul(loop.index, ir.Constant(_I64, piece.digits_nbytes))
        _store_planes(builder, natural, builder.add(first, to), piece)


def _largest_magnitude(builder: Any, x: Value, count: Value) -> Value:
    """By the bits of magnitudes, of which those of what is no number are the largest."""
    cell = cgutils.alloca_once(builder, _INTEGERS)
    builder.store(ir.Constant(_INTEGERS, [0] * _LANES), cell)
    step = ir.Constant(_I64, _LANES)
    with cgutils.for_range_slice(builder, ir.Constant(_I64, 0), count, step, inc=True) as loop:
        bits = _floats_at(builder, x, loop[0]).as_integer() & 0x7FFFFFFF
        found = builder.load(cell)
        is_larger = builder.icmp_unsigned(">", bits.value, found)
        builder.store(builder.select(is_larger, bits.value, found), cell)
    largest = Lanes(builder, builder.load(cell))
    half = _LANES // 2
    while half:
        other = largest.shuffled(largest, [lane ^ half for lane in range(_LANES)])
        is_larger = builder.icmp_unsigned(">", other.value, largest.value)
        largest = Lanes(builder, builder.select(is_larger, other.value, largest.value))
        half //= 2
    return largest.lane(0).as_float().value


def _floats_at(builder: Any, x: Value, index: Value) -> Lanes:
    at = builder.add(x, builder.mul(index, ir.Constant(_I64, 4)))
    return Lanes(builder, builder.load(builder.inttoptr(at, _FLOATS.as_pointer()), align=4))


def _digits_of(
    builder: Any, x: Value, start: Value, count: int, factor: Lanes
) -> list[list[Lanes]]:
    """Each digit of some floats from one on, in order, in registers of bytes."""
    whole = []
    for first in range(0, count, _LANES):
        floats = _floats_at(builder, x, builder.add(start, ir.Constant(_I64, first)))
        whole.append((nearest(floats * factor).integers() + _MIDDLE) ^ _MIDDLE)
    return [
        [_joined([(each >> (8 * digit)).unsigned(8) for each in whole[at : at + 4]])
         for at in range(0, len(whole), 4)]
        for digit in range(_DIGITS)
    ]  # fmt: skip


def _joined(parts: list[Lanes]) -> Lanes:
    """Four vectors as one."""
    halves = [a.shuffled(b, range(2 * _LANES)) for a, b in (parts[:2], parts[2:])]
    return halves[0].shuffled(halves[1], range(_BYTES))


def _store_planes(builder: Any, digits: list[list[Lanes]], to: Value, piece: Piece) -> None:
    """A piece's digits in the order of its planes, and what sums start with."""
    bias = ir.Constant(_REGISTER, [piece.bias] * _BYTES)
    at = 0
    for orders in piece.orders:
        starts = []
        for registers in digits:
            too_much: Value = ir.Constant(_INTEGERS, [0] * _LANES)
            for order in orders:
                plane = _in_order(registers, order).value
                _store_at(builder, to, at, plane)
                too_much = _add_products(builder, too_much, bias, plane)
                at += _BYTES
            starts.append(Lanes(builder, too_much).negated().value)
        for start in starts:
            _store_at(builder, to, at, start)
            at += _BYTES


def _in_order(registers: Sequence[Lanes], order: Sequence[int]) -> Lanes:
    """Bytes of one, two or four registers: pairs of these first, then of what came of them."""
    sources, where = list(registers), [divmod(place, _BYTES) for place in order]
    while len(sources) > 1:
        sources = [
            sources[first].shuffled(
                sources[first + 1],
                [
                    (register - first) * _BYTES + byte if first <= register <= first + 1 else lane
                    for lane, (register, byte) in enumerate(where)
                ],
            )
            for first in range(0, len(sources), 2)
        ]
        where = [(register // 2, lane) for lane, (register, _) in enumerate(where)]
    return sources[0].shuffled(sources[0], [byte for _, byte in where])


def _store_at(builder: Any, to: Value, offset: int, value: Value) -> None:
    at = builder.add(to, ir.Constant(_I64, offset))
    builder.store(value, builder.inttoptr(at, value.type.as_pointer()), align=_BYTES)


def _add_products(builder: Any, sums: Value, unsigned: Value, signed: Value) -> Value:
    """sums plus, in each lane, the products of its four unsigned and signed bytes."""
    operands = [builder.bitcast(each, _INTEGERS) for each in (unsigned, signed)]
    name = "llvm.x86.avx512.vpdpbusd.512"
    return instruction(builder, name, _INTEGERS, sums, *operands).value


def _emit_dots(builder: Any, args: Sequence[Value], piece: Piece, features: str) -> None:
    first, stride, rows, digits, pieces, out, following = args
    unit = Lanes(builder, builder.load(builder.inttoptr(digits, _FLOAT.as_pointer())))
    planes = builder.add(digits, ir.Constant(_I64, UNIT_BYTES))

    def add_piece(source: Value, index: Value, start: Value) -> Value:
        at = builder.add(planes, builder.mul(index, ir.Constant(_I64, piece.digits_nbytes)))
        sums, offset = Lanes(builder, start), 0
        for group in piece.decode(Block(builder, source, None, None, features)):
            sums = fma(_dots_of(builder, group, at, offset), group.scale, sums)
            offset += _DIGITS * _BYTES * (len(group.planes) + 1)
        return sums.value

    loop = RowLoop(first, stride, rows, pieces, out, following)
    emit_rows(builder, loop, piece.nbytes, add_piece, lambda total: total * unit)


def _dots_of(builder: Any, group: Group, digits: Value, offset: int) -> Lanes:
    """What a group makes of its part of x, in units of x and of its scale, float32 [16]."""
    count = len(group.planes)
    sums = []
    for digit in range(_DIGITS):
        start = offset + _BYTES * (_DIGITS * count + digit)
        value = _load_at(builder, digits, start, _INTEGERS)
        for index, plane in enumerate(group.planes):
            x = _load_at(builder, digits, offset + _BYTES * (digit * count + index), _REGISTER)
            value = _add_products(builder, value, plane.value, x)
        sums.append(Lanes(builder, value))
    low = (sums[1] << 8) + sums[0]  # of at most 16 products: below 2 ** 27
    return fma(sums[2].floats(), 65536.0, low.floats())


def _load_at(builder: Any, base: Value, offset: int, kind: Any) -> Value:
    at = builder.add(base, ir.Constant(_I64, offset))
    return builder.load(builder.inttoptr(at, kind.as_pointer()), align=_BYTES)
