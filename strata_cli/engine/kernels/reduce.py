"""Float32 sums, dot products and maxima in the one fixed order that every host kernel uses.

Lane ``l`` of 16 takes elements ``l, l + 16, ...`` in turn, the last partial group included; then
the lanes are folded pairwise 16 -> 8 -> 4 -> 2 -> 1 (lane ``l`` with lane ``l + half``). Written
as vectors of 16 floats, because LLVM may not reorder a strict float sum by itself. A machine with
narrower registers splits the vector and gives the same bits. Call these from compiled code.

Arrays are C-contiguous float32 of any rank; a start is an index into the flattened array. Bounds
are not checked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils as numba_cgutils
from numba.core.errors import TypingError

from strata_cli.engine.kernels.jit import intrinsic
from strata_cli.engine.kernels.lanes import Lanes, square_root

cgutils: Any = numba_cgutils  # carries no types
LANES = 16
_FLOAT = ir.FloatType()
_WIDE = ir.VectorType(_FLOAT, LANES)
_MASK = ir.VectorType(ir.IntType(1), LANES)
_I32 = ir.IntType(32)

Wide = Any  # an LLVM value: 16 floats
Step = Callable[[Any, Wide, tuple[Wide, ...]], Wide]


def _require_float_arrays(*arrays: Any) -> None:
    for array in arrays:
        if not (
            isinstance(array, types.Array) and array.dtype == types.float32 and array.layout == "C"
        ):
            raise TypingError(f"expected a C-contiguous float32 array, got {array}")


def _lane_mask(builder: Any, remainder: Any) -> Any:
    """Lanes below remainder."""
    lanes = ir.Constant(ir.VectorType(remainder.type, LANES), list(range(LANES)))
    first = builder.insert_element(
        ir.Constant(lanes.type, ir.Undefined), remainder, ir.Constant(_I32, 0)
    )
    every = ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES)
    limit = builder.shuffle_vector(first, ir.Constant(lanes.type, ir.Undefined), every)
    return builder.icmp_signed("<", lanes, limit)


def _load(builder: Any, pointer: Any, mask: Any | None) -> Wide:
    """16 floats from an address aligned for one float; lanes outside the mask are not read."""
    wide = builder.bitcast(pointer, _WIDE.as_pointer())
    if mask is None:
        return builder.load(wide, align=4)
    load = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(_WIDE, [wide.type, _I32, _MASK, _WIDE]),
        "llvm.masked.load.v16f32.p0",
    )
    return builder.call(load, [wide, ir.Constant(_I32, 4), mask, ir.Constant(_WIDE, [0.0] * LANES)])


def _accumulate(builder: Any, starts: list[Any], count: Any, initial: float, step: Step) -> Wide:
    """Run step over count elements behind the float pointers, 16 lanes side by side."""
    accumulator = cgutils.alloca_once_value(builder, ir.Constant(_WIDE, [initial] * LANES))
    builder.store(ir.Constant(_WIDE, [initial] * LANES), accumulator)
    whole = builder.and_(count, ir.Constant(count.type, -LANES))
    with cgutils.for_range_slice(
        builder, ir.Constant(count.type, 0), whole, ir.Constant(count.type, LANES), inc=True
    ) as (index, _):
        values = tuple(_load(builder, builder.gep(start, [index]), None) for start in starts)
        builder.store(step(builder, builder.load(accumulator), values), accumulator)
    remainder = builder.sub(count, whole)
    with builder.if_then(builder.icmp_signed(">", remainder, ir.Constant(count.type, 0))):
        mask = _lane_mask(builder, remainder)
        values = tuple(_load(builder, builder.gep(start, [whole]), mask) for start in starts)
        before = builder.load(accumulator)
        builder.store(builder.select(mask, step(builder, before, values), before), accumulator)
    return builder.load(accumulator)


def _fold(builder: Any, lanes: Wide, combine: Callable[[Any, Any, Any], Any]) -> Any:
    """Pairwise tree over the 16 lanes, to one float."""
    half = LANES // 2
    while half:
        undefined = ir.Constant(lanes.type, ir.Undefined)
        low, high = (
            builder.shuffle_vector(
                lanes,
                undefined,
                ir.Constant(ir.VectorType(_I32, half), list(range(first, first + half))),
            )
            for first in (0, half)
        )
        lanes = combine(builder, low, high)
        half //= 2
    return builder.extract_element(lanes, ir.Constant(_I32, 0))


def _element_pointer(context: Any, builder: Any, kind: Any, array: Any, index: Any) -> Any:
    return builder.gep(context.make_array(kind)(context, builder, array).data, [index])


def _add(builder: Any, a: Any, b: Any) -> Any:
    return builder.fadd(a, b)


def _larger(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", b, a), b, a)


def _multiply_add(builder: Any, accumulator: Wide, values: tuple[Wide, ...]) -> Wide:
    fma = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(_WIDE, [_WIDE] * 3), "llvm.fma.v16f32"
    )
    return builder.call(fma, [values[0], values[-1], accumulator])


def _over_one(x: Any, initial: float, step: Step, combine: Callable[[Any, Any, Any], Any]) -> Any:
    """Typing and code of a reduction (x, start, n) -> float32."""
    _require_float_arrays(x)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _element_pointer(context, builder, signature.args[0], args[0], args[1])
        return _fold(builder, _accumulate(builder, [pointer], args[2], initial, step), combine)

    return types.float32(x, types.intp, types.intp), generate


@intrinsic
def sum16(_typing: Any, x: Any, _start: Any, _n: Any) -> Any:
    """Sum of n elements of x from start; takes (x, start, n)."""
    return _over_one(x, 0.0, lambda b, lanes, v: b.fadd(lanes, v[0]), _add)


@intrinsic
def sum_squares16(_typing: Any, x: Any, _start: Any, _n: Any) -> Any:
    """Sum of n squares, by fused multiply-add; takes (x, start, n)."""
    return _over_one(x, 0.0, _multiply_add, _add)


@intrinsic
def max16(_typing: Any, x: Any, _start: Any, _n: Any) -> Any:
    """Largest of n elements, -inf when n is 0, NaNs passed over; takes (x, start, n)."""
    return _over_one(x, float("-inf"), lambda b, lanes, v: _larger(b, lanes, v[0]), _larger)


@intrinsic
def dot16(_typing: Any, a: Any, _ai: Any, b: Any, _bi: Any, _n: Any) -> Any:
    """Sum of a[ai + k] * b[bi + k] for k < n, by fma; takes (a, ai, b, bi, n)."""
    _require_float_arrays(a, b)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointers = [
            _element_pointer(context, builder, signature.args[0], args[0], args[1]),
            _element_pointer(context, builder, signature.args[2], args[2], args[3]),
        ]
        lanes = _accumulate(builder, pointers, args[4], 0.0, _multiply_add)
        return _fold(builder, lanes, _add)

    return types.float32(a, types.intp, b, types.intp, types.intp), generate


@intrinsic
def rms_scale(_typing: Any, x: Any, _start: Any, _n: Any, _eps: Any) -> Any:
    """1 / sqrt(mean of squares + eps), the RMS norm's factor; takes (x, start, n, eps)."""
    _require_float_arrays(x)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array, start, n, eps = args
        pointer = _element_pointer(context, builder, signature.args[0], array, start)
        lanes = _accumulate(builder, [pointer], n, 0.0, _multiply_add)
        mean = builder.fdiv(_fold(builder, lanes, _add), builder.sitofp(n, _FLOAT))
        return (1.0 / square_root(Lanes(builder, builder.fadd(mean, eps)))).value

    return types.float32(x, types.intp, types.intp, types.float32), generate
