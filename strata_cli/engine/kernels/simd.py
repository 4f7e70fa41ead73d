"""The dot products that every host matrix product is made of, written as LLVM vector code.

A tile multiplies a few weight rows with a few activation rows. Each output has 16 lanes: lane
``l`` adds ``w[k] * x[k]`` for ``k = l, l + 16, ...`` by fused multiply-add, the last partial group
filled up with zeros; then lanes fold pairwise 16 -> 8 -> 4 -> 2 -> 1 (``l`` with ``l + half``). How
many outputs share a tile, and how many lanes a register holds, changes speed and never a bit.

Compiled code hands over plain addresses (intp); nothing here checks bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils as numba_cgutils

from strata_cli.engine.kernels.jit import intrinsic

cgutils: Any = numba_cgutils  # carries no types
LANES = 16
_FLOAT = ir.FloatType()
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)

Value = Any  # an LLVM value


class Registers(NamedTuple):
    """What one pass over K keeps in registers: lanes of each accumulator, and activation rows."""

    lanes: int
    tokens: int


def choose_registers(cpu_features: str) -> Registers:
    """Widest pass whose accumulators, with 4 weight rows, fit the CPU's vector registers.

    Source: measured; 32 registers of 16 floats hold 4 x 4 outputs at once, 16 registers of 8
    floats hold half the lanes of 4 x 2 outputs.
    """
    if "+avx512f" in cpu_features:
        return Registers(lanes=16, tokens=4)
    if "+avx2" in cpu_features:
        return Registers(lanes=8, tokens=2)
    return Registers(lanes=4, tokens=2)


def _vector(lanes: int) -> Any:
    return ir.VectorType(_FLOAT, lanes)


def _shuffle(builder: Any, a: Value, b: Value, lanes: Sequence[int]) -> Value:
    """Lanes of a (0 <= lane < width) and b (from width on), in the order given."""
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_I32, len(lanes)), list(lanes)))


def _row_pointers(builder: Any, base: Value, stride_bytes: Value, rows: int) -> list[Value]:
    pointers = []
    for row in range(rows):
        address = builder.add(base, builder.mul(stride_bytes, ir.Constant(_I64, row)))
        pointers.append(builder.inttoptr(address, _FLOAT.as_pointer()))
    return pointers


def _gathered_pointers(
    builder: Any, base: Value, stride_bytes: Value, row_of: Value, count: int
) -> list[Value]:
    table = builder.inttoptr(row_of, _I32.as_pointer())
    pointers = []
    for i in range(count):
        row = builder.sext(builder.load(builder.gep(table, [ir.Constant(_I64, i)])), _I64)
        address = builder.add(base, builder.mul(row, stride_bytes))
        pointers.append(builder.inttoptr(address, _FLOAT.as_pointer()))
    return pointers


def _load(builder: Any, pointer: Value, index: Value, lanes: int, mask: Value | None) -> Value:
    """Floats index .. index + lanes, from any address; lanes outside the mask read as zero."""
    kind = _vector(lanes)
    at = builder.bitcast(builder.gep(pointer, [index]), kind.as_pointer())
    if mask is None:
        return builder.load(at, align=1)
    function = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(kind, [at.type, _I32, mask.type, kind]),
        f"llvm.masked.load.v{lanes}f32.p0",
    )
    zeros = ir.Constant(kind, [0.0] * lanes)
    return builder.call(function, [at, ir.Constant(_I32, 1), mask, zeros])


def _fma(builder: Any, a: Value, b: Value, c: Value) -> Value:
    kind = a.type
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(kind, [kind] * 3), f"llvm.fma.v{kind.count}f32"
    )
    return builder.call(function, [a, b, c])


def _lane_mask(builder: Any, first_lane: int, lanes: int, remainder: Value) -> Value:
    """Lanes first_lane .. first_lane + lanes that lie below remainder."""
    kind = ir.VectorType(_I64, lanes)
    undefined = ir.Constant(kind, ir.Undefined)
    single = builder.insert_element(undefined, remainder, ir.Constant(_I32, 0))
    limit = _shuffle(builder, single, undefined, [0] * lanes)
    ids = ir.Constant(kind, list(range(first_lane, first_lane + lanes)))
    return builder.icmp_signed("<", ids, limit)


def _accumulate(
    builder: Any, w: list[Value], x: list[Value], k: Value, first_lane: int, lanes: int
) -> list[Value]:
    """One pass over K: some lanes of every output, activation rows outermost."""
    zero = ir.Constant(_vector(lanes), [0.0] * lanes)
    sums = [cgutils.alloca_once(builder, zero.type) for _ in range(len(w) * len(x))]
    for cell in sums:
        builder.store(zero, cell)

    def step(index: Value, mask: Value | None) -> None:
        at = builder.add(index, ir.Constant(_I64, first_lane))
        weights = [_load(builder, row, at, lanes, mask) for row in w]
        for token, row in enumerate(x):
            value = _load(builder, row, at, lanes, mask)
            for cell, weight in zip(sums[token * len(w) :], weights, strict=False):
                builder.store(_fma(builder, weight, value, builder.load(cell)), cell)

    whole = builder.and_(k, ir.Constant(_I64, -LANES))
    with cgutils.for_range_slice(
        builder, ir.Constant(_I64, 0), whole, ir.Constant(_I64, LANES), inc=True
    ) as (index, _):
        step(index, None)
    remainder = builder.sub(k, whole)
    with builder.if_then(builder.icmp_signed("!=", remainder, ir.Constant(_I64, 0)), likely=False):
        step(whole, _lane_mask(builder, first_lane, lanes, remainder))
    return [builder.load(cell) for cell in sums]


def _join(builder: Any, parts: list[Value]) -> Value:
    """Concatenate vectors (a power of two of them) to one of 16 lanes."""
    while len(parts) > 1:
        width = parts[0].type.count
        parts = [
            _shuffle(builder, a, b, range(2 * width))
            for a, b in zip(parts[::2], parts[1::2], strict=True)
        ]
    return parts[0]


def fold_lanes(builder: Any, sums: list[Value]) -> Value:
    """Sum the 16 lanes of each output; result lane i is output i.

    Two outputs share each addition: at distance ``half``, lanes with that bit clear keep the first
    one's sums and lanes with it set the second one's, so 16 outputs cost 15 additions.
    """
    values = [(value, [output] * LANES) for output, value in enumerate(sums)]
    half = LANES // 2
    while half:
        firsts, seconds = (values, values) if len(values) == 1 else (values[::2], values[1::2])
        values = []
        for (a, owner_a), (b, owner_b) in zip(firsts, seconds, strict=True):
            source = [LANES if lane & half else 0 for lane in range(LANES)]
            near = _shuffle(builder, a, b, [lane + source[lane] for lane in range(LANES)])
            far = _shuffle(builder, a, b, [(lane ^ half) + source[lane] for lane in range(LANES)])
            owners = [owner_b[i] if i & half else owner_a[i] for i in range(LANES)]
            values.append((builder.fadd(near, far), owners))
        half //= 2
    value, owners = values[0]
    return _shuffle(builder, value, value, [owners.index(i) for i in range(len(sums))])


def _store_rows(builder: Any, packed: Value, out: Value, stride_bytes: Value, width: int) -> None:
    """Write packed results, width consecutive floats per activation row."""
    kind = _vector(width)
    tokens = packed.type.count // width
    for token, row in enumerate(_row_pointers(builder, out, stride_bytes, tokens)):
        part = _shuffle(builder, packed, packed, range(token * width, (token + 1) * width))
        builder.store(part, builder.bitcast(row, kind.as_pointer()), align=1)


def _tile(module: Any, rows: int, tokens: int, cut: Registers) -> Any:
    """The function of a tile, in a module that may have it already.

    It takes (w, w_stride, x, x_stride, row_of, k, out, out_stride): addresses of the first weight
    row, of activation row 0, of the names of its activation rows and of its first output; strides
    in bytes. Inlined into the loops around it, it would take three times as long to compile and
    run no faster.
    """
    name = f"tile_{rows}x{tokens}_{cut.lanes}x{cut.tokens}"
    if name in module.globals:
        return module.globals[name]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [_I64] * 8), name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    builder = ir.IRBuilder(function.append_basic_block())
    _emit_tile(builder, function.args, rows, tokens, cut)
    builder.ret_void()
    return function


def _emit_tile(builder: Any, args: Sequence[Value], rows: int, tokens: int, cut: Registers) -> None:
    w, w_stride, x, x_stride, row_of, k, out, out_stride = args
    w_rows = _row_pointers(builder, w, w_stride, rows)
    x_rows = _gathered_pointers(builder, x, x_stride, row_of, tokens)
    sums: list[Value] = []
    for first in range(0, tokens, cut.tokens):
        some = x_rows[first : first + cut.tokens]
        passes = [
            _accumulate(builder, w_rows, some, k, lane, cut.lanes)
            for lane in range(0, LANES, cut.lanes)
        ]
        sums += [_join(builder, list(parts)) for parts in zip(*passes, strict=True)]
    _store_rows(builder, fold_lanes(builder, sums), out, out_stride, rows)


def _emit_product(builder: Any, args: Sequence[Value], cut: Registers) -> None:
    """Cover count x rows outputs: tiles of four by four, then what is left at the edges."""
    w, w_stride, rows, x, k, row_of, count, out, pitch = args
    zero, four = ir.Constant(_I64, 0), ir.Constant(_I64, 4)  # four is also the bytes of a float
    x_stride = builder.mul(k, four)
    even_rows = builder.and_(rows, ir.Constant(_I64, -4))
    even_count = builder.and_(count, ir.Constant(_I64, -4))
    for tile_rows, tile_tokens, row_range, token_range in (
        (4, 4, (zero, even_rows), (zero, even_count)),
        (4, 1, (zero, even_rows), (even_count, count)),
        (1, 1, (even_rows, rows), (zero, count)),
    ):
        tile = _tile(builder.module, tile_rows, tile_tokens, cut)
        with (
            _steps(builder, *token_range, tile_tokens) as p,
            _steps(builder, *row_range, tile_rows) as r,
        ):
            from_row = builder.add(w, builder.mul(r, w_stride))
            names = builder.add(row_of, builder.mul(p, four))
            to = builder.add(builder.add(out, builder.mul(p, pitch)), builder.mul(r, four))
            builder.call(tile, [from_row, w_stride, x, x_stride, names, k, to, pitch])


@contextmanager
def _steps(builder: Any, start: Value, stop: Value, step: int) -> Iterator[Value]:
    with cgutils.for_range_slice(builder, start, stop, ir.Constant(_I64, step), inc=True) as loop:
        yield loop[0]


def make_multiply_rows(registers: Registers | None = None) -> Callable[..., None]:
    """Build the product of float32 weight rows with chosen activation rows, for compiled code.

    Args:
        registers: how to cut the work; default: what suits the CPU compiled for.

    Returns:
        ``multiply_rows(w, w_stride, rows, x, k, row_of, count, out, pitch)`` writes
        ``out[p, r] = sum over k of w[r, k] * x[row_of[p], k]`` for p < count, r < rows. w, x
        (rows of k floats), row_of (int32) and out are addresses; w_stride and pitch are the bytes
        from one row of w, or of out, to the next.
    """

    def multiply(
        _typing: Any,
        _w: Any,
        _w_stride: Any,
        _rows: Any,
        _x: Any,
        _k: Any,
        _row_of: Any,
        _count: Any,
        _out: Any,
        _pitch: Any,
    ) -> tuple[Any, Any]:
        def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            cut = registers or choose_registers(context.codegen().magic_tuple()[2])
            _emit_product(builder, args, cut)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 9), generate

    return intrinsic(multiply)


multiply_rows = make_multiply_rows()
