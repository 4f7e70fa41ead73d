"""Dot products of quantized rows with one row of floats: decoded in registers, stored nowhere.

One compiled function per type, made of the type's decoder. Each output is the sum that ``simd.py``
states, bit for bit: 16 lanes of fused multiply-adds in ascending order, then the pairwise tree.
Rows that are under way together give the processor something to do while one's sums wait for each
other; what is decoded of one is at most a block ahead of its sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils as numba_cgutils

from strata_cli.engine.kernels.dequant_lanes import Block
from strata_cli.engine.kernels.jit import intrinsic
from strata_cli.engine.kernels.lanes import Lanes, fma
from strata_cli.engine.kernels.simd import LANES, fold_lanes
from strata_cli.engine.model.quants import BlockLayout

cgutils: Any = numba_cgutils  # carries no types
_FLOAT, _I8, _I32, _I64 = ir.FloatType(), ir.IntType(8), ir.IntType(32), ir.IntType(64)
_SUMS = ir.VectorType(_FLOAT, LANES)
_TOGETHER = 4  # rows
_LINE_BYTES = 64
_AHEAD_BYTES = 4096  # at least so far before they are needed, bytes are asked for

Value = Any  # an LLVM value

# (first row, bytes from one to the next, number of rows, x, blocks of a row, code book, out)
DOTS_SIGNATURE = types.void(*[types.intp] * 7)


def has_dots(layout: BlockLayout) -> bool:
    """Whether a type's blocks are whole groups of lanes, as dot_rows() needs them."""
    return layout.weights % LANES == 0


def dot_rows(decoder: Callable[[Block], None], layout: BlockLayout) -> Callable[..., Any]:
    """Intrinsic of DOTS_SIGNATURE: out[r] = sum over k of row r's weight k times x[k]."""

    def dots(
        _typing: Any,
        _row: Any,
        _stride: Any,
        _rows: Any,
        _x: Any,
        _blocks: Any,
        _table: Any,
        _out: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            features = context.codegen().magic_tuple()[2]
            emit_dots(builder, args, decoder, layout, features)
            return context.get_dummy_value()

        return DOTS_SIGNATURE, generate

    return intrinsic(dots)


def emit_dots(
    builder: Any,
    args: Sequence[Value],
    decoder: Callable[[Block], None],
    layout: BlockLayout,
    features: str,
) -> None:
    """Emit the loops of dot_rows() for a processor with these features."""
    first, stride, rows, x, blocks, table, out = args
    table = builder.inttoptr(table, _I8.as_pointer())

    def add_block(source: Value, index: Value, start: Value) -> Value:
        at = builder.add(x, _times(builder, index, 4 * layout.weights))
        sums = _Sums(builder, builder.inttoptr(at, _FLOAT.as_pointer()), start)
        decoder(_DotBlock(builder, source, sums, table, features))
        return sums.value

    emit_rows(builder, RowLoop(first, stride, rows, blocks, out), layout.nbytes, add_block)


class RowLoop(NamedTuple):
    """What emit_rows() goes through: LLVM values.

    Attributes:
        first, stride: address of the first row, and bytes from one to the next.
        rows: how many.
        blocks: of each.
        out: address of an output for each row.
        following: address of rows that are wanted next, or 0.
    """

    first: Value
    stride: Value
    rows: Value
    blocks: Value
    out: Value
    following: Value = ir.Constant(_I64, 0)


def emit_rows(
    builder: Any,
    loop: RowLoop,
    nbytes: int,
    add_block: Callable[[Value, Value, Value], Value],
    finish: Callable[[Lanes], Lanes] = lambda total: total,
) -> None:
    """Emit a loop over rows, some together, and blocks of so many bytes.

    ``add_block(source, index, sums)`` emits what a block at a pointer adds to a row's 16 sums;
    ``finish(total)``, what is done with the sum of these.
    """
    cells = cgutils.alloca_once(builder, _SUMS, size=_TOGETHER)
    together = ir.Constant(_I64, _TOGETHER)
    zero = ir.Constant(_I64, 0)
    ahead = _Ahead(builder, loop)
    with cgutils.for_range_slice(builder, zero, loop.rows, together, inc=True) as (row, _):
        left = builder.sub(loop.rows, row)
        count = builder.select(builder.icmp_signed("<", left, together), left, together)
        source = builder.add(loop.first, builder.mul(row, loop.stride))
        distance = ahead.from_row(row)
        _clear(builder, cells)
        with cgutils.for_range(builder, loop.blocks) as block:
            at = builder.add(source, _times(builder, block.index, nbytes))
            with cgutils.for_range(builder, count) as each:
                cell = builder.gep(cells, [each.index])
                own = builder.add(at, builder.mul(each.index, loop.stride))
                _prefetch(builder, builder.add(own, distance), nbytes)
                pointer = builder.inttoptr(own, _I8.as_pointer())
                builder.store(add_block(pointer, block.index, builder.load(cell)), cell)
        to = builder.add(loop.out, _times(builder, row, 4))
        to = builder.inttoptr(to, _FLOAT.as_pointer())
        with cgutils.for_range(builder, count) as each:
            lanes = builder.load(builder.gep(cells, [each.index]))
            total = Lanes(builder, fold_lanes(builder, [lanes])).lane(0)
            builder.store(finish(total).value, builder.gep(to, [each.index]))


class _Ahead:
    """How far ahead of a row the bytes are that are asked for while it is multiplied.

    They are rows behind it, or behind the last one those that are wanted next, or what is there
    anyway.
    """

    def __init__(self, builder: Any, loop: RowLoop) -> None:
        self._builder = builder
        step = _times(builder, loop.stride, _TOGETHER)
        steps = builder.sdiv(ir.Constant(_I64, _AHEAD_BYTES), step)
        self._rows = _times(builder, builder.add(steps, ir.Constant(_I64, 1)), _TOGETHER)
        self._end = loop.rows
        self._distance = builder.mul(self._rows, loop.stride)
        end = builder.add(loop.first, builder.mul(loop.rows, loop.stride))
        beyond = builder.add(self._distance, builder.sub(loop.following, end))
        none = ir.Constant(_I64, 0)
        is_known = builder.icmp_signed("!=", loop.following, none)
        self._beyond = builder.select(is_known, beyond, none)

    def from_row(self, row: Value) -> Value:
        """In bytes."""
        builder = self._builder
        is_inside = builder.icmp_signed("<", builder.add(row, self._rows), self._end)
        return builder.select(is_inside, self._distance, self._beyond)


def _times(builder: Any, index: Value, factor: int) -> Value:
    return builder.mul(index, ir.Constant(_I64, factor))


def _clear(builder: Any, cells: Value) -> None:
    zero = ir.Constant(_SUMS, [0.0] * LANES)
    for place in range(_TOGETHER):
        builder.store(zero, builder.gep(cells, [ir.Constant(_I64, place)]))


def _prefetch(builder: Any, address: Value, nbytes: int) -> None:
    """What later rows need: hardware notices rows this short too late."""
    kind = ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), _I32, _I32, _I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    for offset in range(0, nbytes, _LINE_BYTES):
        at = builder.inttoptr(builder.add(address, ir.Constant(_I64, offset)), _I8.as_pointer())
        read, near, data = (ir.Constant(_I32, value) for value in (0, 2, 1))
        builder.call(function, [at, read, near, data])


class _Sums:
    """The lanes of one output while a block is decoded; takes its weights in ascending order."""

    def __init__(self, builder: Any, x: Value, start: Value) -> None:
        self._builder = builder
        self._x = x
        self._end = 0
        self._parts: list[Value] = []
        self.value = start

    def take(self, first: int, weights: Value) -> None:
        """Weights from ``first`` of the block on."""
        assert first == self._end, "a decoder whose order is not that of the sums"
        count = weights.type.count
        self._end += count
        if count < LANES:
            self._parts.append(weights)
            if self._end % LANES == 0:
                self._add(self._end - LANES, self._joined())
            return
        for part in range(0, count, LANES):
            self._add(first + part, self._shuffle(weights, weights, range(part, part + LANES)))

    def _joined(self) -> Value:
        """Short parts, of one length, as whole lanes."""
        parts, self._parts = self._parts, []
        while len(parts) > 1:
            pairs = zip(parts[::2], parts[1::2], strict=True)
            parts = [self._shuffle(a, b, range(2 * a.type.count)) for a, b in pairs]
        return parts[0]

    def _shuffle(self, a: Value, b: Value, order: Sequence[int]) -> Value:
        mask = ir.Constant(ir.VectorType(_I32, len(order)), list(order))
        return self._builder.shuffle_vector(a, b, mask)

    def _add(self, first: int, weights: Value) -> None:
        builder = self._builder
        at = builder.gep(self._x, [ir.Constant(_I64, first)])
        x = builder.load(builder.bitcast(at, _SUMS.as_pointer()), align=4)
        self.value = fma(*(Lanes(builder, each) for each in (weights, x, self.value))).value


class _DotBlock(Block):
    """A block whose weights are multiplied instead of stored."""

    def __init__(
        self, builder: Any, source: Value, sums: _Sums, table: Value, features: str
    ) -> None:
        super().__init__(builder, source, None, table, features)
        self._sums = sums

    def store(self, first: int, values: Lanes) -> None:
        """Multiply weights from weight ``first`` on."""
        self._sums.take(first, values.value)
