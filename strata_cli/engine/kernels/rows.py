"""Rows of floats multiplied, added and moved, as vector code that compiles fast and stays exact.

Each operation treats the columns of a row separately, so 32 columns side by side, or one alone,
give the same bits; a machine with narrower registers splits the vector. They are written for LLVM
directly: left to itself it takes longer to compile such a loop, and numba's signed indices and
possibly overlapping arrays often keep it scalar.

Arrays are C-contiguous float32 of any rank, each followed by the flat index where its row starts.
Bounds are not checked; rows must not overlap unless stated. Call from compiled code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils as numba_cgutils
from numba.core.errors import TypingError

from strata_cli.engine.kernels.jit import intrinsic
from strata_cli.engine.kernels.lanes import Lanes, fma
from strata_cli.engine.kernels.math32 import exp, sigmoid, silu

cgutils: Any = numba_cgutils  # carries no types
WIDTH = 32
_FLOAT = ir.FloatType()
_VECTOR = ir.VectorType(_FLOAT, WIDTH)
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)

Value = Any  # an LLVM value
Columns = Any  # an LLVM type: 32 columns or one
Emit = Callable[[Any, list[Value]], None]


def _operation(kinds: tuple[Any, ...], emit: Emit) -> tuple[Any, Any]:
    """Typing and code of an operation whose arrays are each followed by a start index.

    emit gets the builder and the arguments, each array and its start joined to one pointer.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Value:
        operands: list[Value] = []
        arrays = [isinstance(kind, types.Array) for kind in signature.args]
        for index, kind in enumerate(signature.args):
            if arrays[index]:
                data = context.make_array(kind)(context, builder, args[index]).data
                operands.append(builder.gep(data, [args[index + 1]]))
            elif index == 0 or not arrays[index - 1]:
                operands.append(args[index])
        emit(builder, operands)
        return context.get_dummy_value()

    return types.void(*[_argument(kind) for kind in kinds]), generate


def _argument(kind: Any) -> Any:
    if isinstance(kind, types.Array):
        if kind.dtype != types.float32 or kind.layout != "C":
            raise TypingError(f"expected a C-contiguous float32 array, got {kind}")
        return kind
    return types.float32 if isinstance(kind, types.Float) else types.intp


def _loop(builder: Any, start: Value, stop: Value, step: int) -> Any:
    """A counting loop as a context manager; gives the index."""
    return cgutils.for_range_slice(builder, start, stop, ir.Constant(_I64, step), inc=True)


def _columns(builder: Any, n: Value, emit: Callable[[Value, Columns], None]) -> None:
    """Run emit over n columns: 32 at a time, then one at a time."""
    whole = builder.and_(n, ir.Constant(_I64, -WIDTH))
    with _loop(builder, ir.Constant(_I64, 0), whole, WIDTH) as (index, _):
        emit(index, _VECTOR)
    with _loop(builder, whole, n, 1) as (index, _):
        emit(index, _FLOAT)


def _at(builder: Any, row: Value, index: Value, kind: Columns) -> Value:
    return builder.bitcast(builder.gep(row, [index]), kind.as_pointer())


def _load(builder: Any, row: Value, index: Value, kind: Columns) -> Lanes:
    return Lanes(builder, builder.load(_at(builder, row, index, kind), align=4))


def _store(builder: Any, row: Value, index: Value, lanes: Lanes) -> None:
    builder.store(lanes.value, _at(builder, row, index, lanes.value.type), align=4)


def _splat(builder: Any, value: Value, kind: Columns) -> Lanes:
    """The same float in every column."""
    single = Lanes(builder, value)
    return single if kind is _FLOAT else single.spread(WIDTH)


def _elementwise(kinds: tuple[Any, ...], formula: Callable[..., Lanes]) -> tuple[Any, Any]:
    """An operation out[i] = formula(out[i], ...): rows as elements, floats as they are."""

    def emit(builder: Any, operands: list[Value]) -> None:
        out, *others, n = operands

        def columns(index: Value, kind: Columns) -> None:
            values = [_load(builder, out, index, kind)]
            values += [
                _splat(builder, operand, kind)
                if operand.type is _FLOAT
                else _load(builder, operand, index, kind)
                for operand in others
            ]
            _store(builder, out, index, formula(*values))

        _columns(builder, n, columns)

    return _operation(kinds, emit)


@intrinsic
def scale_row(_typing: Any, out: Any, _oi: Any, x: Any, _xi: Any, scale: Any, n: Any) -> Any:
    """out = x * scale; out may be x. Takes (out, oi, x, xi, scale, n)."""
    return _elementwise((out, _oi, x, _xi, scale, n), lambda _, x, scale: x * scale)


@intrinsic
def divide_row(_typing: Any, out: Any, _oi: Any, divisor: Any, n: Any) -> Any:
    """out /= divisor; takes (out, oi, divisor, n)."""
    return _elementwise((out, _oi, divisor, n), lambda out, divisor: out / divisor)


@intrinsic
def multiply_row(_typing: Any, out: Any, _oi: Any, x: Any, _xi: Any, n: Any) -> Any:
    """out *= x; takes (out, oi, x, xi, n)."""
    return _elementwise((out, _oi, x, _xi, n), lambda out, x: out * x)


@intrinsic
def add_row(_typing: Any, out: Any, _oi: Any, x: Any, _xi: Any, n: Any) -> Any:
    """out += x; takes (out, oi, x, xi, n)."""
    return _elementwise((out, _oi, x, _xi, n), lambda out, x: out + x)


@intrinsic
def add_products(
    _typing: Any, out: Any, _oi: Any, a: Any, _ai: Any, b: Any, _bi: Any, n: Any
) -> Any:
    """out += a * b by fused multiply-add; takes (out, oi, a, ai, b, bi, n)."""
    return _elementwise((out, _oi, a, _ai, b, _bi, n), lambda out, a, b: fma(a, b, out))


@intrinsic
def add_scaled_row(_typing: Any, out: Any, _oi: Any, factor: Any, x: Any, _xi: Any, n: Any) -> Any:
    """out += factor * x by fused multiply-add; takes (out, oi, factor, x, xi, n)."""
    kinds = (out, _oi, factor, x, _xi, n)
    return _elementwise(kinds, lambda out, factor, x: fma(factor, x, out))


@intrinsic
def add_gated_row(
    _typing: Any, out: Any, _oi: Any, gate: Any, _gi: Any, x: Any, _xi: Any, n: Any
) -> Any:
    """out += sigmoid(gate) * x, the sum fused; takes (out, oi, gate, gi, x, xi, n)."""
    kinds = (out, _oi, gate, _gi, x, _xi, n)
    return _elementwise(kinds, lambda out, gate, x: fma(sigmoid(gate), x, out))


@intrinsic
def sigmoid_row(_typing: Any, out: Any, _oi: Any, x: Any, _xi: Any, n: Any) -> Any:
    """out = sigmoid(x); out may be x. Takes (out, oi, x, xi, n)."""
    return _elementwise((out, _oi, x, _xi, n), lambda _, x: sigmoid(x))


@intrinsic
def silu_row(_typing: Any, out: Any, _oi: Any, n: Any) -> Any:
    """out = silu(out); takes (out, oi, n)."""
    return _elementwise((out, _oi, n), silu)


@intrinsic
def swiglu_row(
    _typing: Any, out: Any, _oi: Any, gate: Any, _gi: Any, up: Any, _ui: Any, n: Any
) -> Any:
    """out = silu(gate) * up; out may be either. Takes (out, oi, gate, gi, up, ui, n)."""
    return _elementwise((out, _oi, gate, _gi, up, _ui, n), lambda _, gate, up: silu(gate) * up)


@intrinsic
def exp_row(_typing: Any, out: Any, _oi: Any, x: Any, _xi: Any, shift: Any, n: Any) -> Any:
    """out = e ** (x - shift); out may be x. Takes (out, oi, x, xi, shift, n)."""
    return _elementwise((out, _oi, x, _xi, shift, n), lambda _, x, shift: exp(x - shift))


@intrinsic
def subtract_twice(
    _typing: Any, out: Any, _oi: Any, x: Any, _xi: Any, first: Any, second: Any, n: Any
) -> Any:
    """out = (x - first) - second; out may be x. Takes (out, oi, x, xi, first, second, n)."""
    kinds = (out, _oi, x, _xi, first, second, n)
    return _elementwise(kinds, lambda _, x, first, second: (x - first) - second)


@intrinsic
def decay_and_add(
    _typing: Any, y: Any, _yi: Any, decay: Any, factor: Any, x: Any, _xi: Any, n: Any
) -> Any:
    """y = factor * x + (decay * y), the sum fused; takes (y, yi, decay, factor, x, xi, n)."""
    kinds = (y, _yi, decay, factor, x, _xi, n)
    return _elementwise(kinds, lambda y, decay, factor, x: fma(factor, x, decay * y))


@intrinsic
def add_weighted_rows(
    _typing: Any,
    out: Any,
    _oi: Any,
    weights: Any,
    _wi: Any,
    rows: Any,
    _ri: Any,
    stride: Any,
    count: Any,
    n: Any,
) -> Any:
    """out += sum over k < count of weights[k] * row k, k ascending, by fused multiply-add.

    Takes (out, oi, weights, wi, rows, ri, stride, count, n); stride floats from row to row.
    """

    def emit(builder: Any, operands: list[Value]) -> None:
        out, weights, rows, stride, count, n = operands

        def columns(index: Value, kind: Columns) -> None:
            cell = cgutils.alloca_once(builder, kind)
            builder.store(_load(builder, out, index, kind).value, cell)
            with _loop(builder, ir.Constant(_I64, 0), count, 1) as (k, _):
                weight = _splat(builder, builder.load(builder.gep(weights, [k])), kind)
                row = _load(builder, rows, builder.add(builder.mul(k, stride), index), kind)
                total = Lanes(builder, builder.load(cell))
                builder.store(fma(weight, row, total).value, cell)
            _store(builder, out, index, Lanes(builder, builder.load(cell)))

        _columns(builder, n, columns)

    return _operation((out, _oi, weights, _wi, rows, _ri, stride, count, n), emit)


@intrinsic
def copy_rows(
    _typing: Any,
    out: Any,
    _oi: Any,
    out_stride: Any,
    x: Any,
    _xi: Any,
    x_stride: Any,
    count: Any,
    n: Any,
) -> Any:
    """Copy count rows of n floats, first row first; a row may overlap its copy.

    Takes (out, oi, out_stride, x, xi, x_stride, count, n); strides in floats.
    """

    def emit(builder: Any, operands: list[Value]) -> None:
        out, out_stride, x, x_stride, count, n = operands
        with _loop(builder, ir.Constant(_I64, 0), count, 1) as (row, _):
            target = builder.gep(out, [builder.mul(row, out_stride)])
            source = builder.gep(x, [builder.mul(row, x_stride)])
            cgutils.raw_memmove(builder, target, source, n, 4)

    return _operation((out, _oi, out_stride, x, _xi, x_stride, count, n), emit)


@intrinsic
def clear_row(_typing: Any, out: Any, _oi: Any, n: Any) -> Any:
    """Set n elements to zero; takes (out, oi, n)."""

    def emit(builder: Any, operands: list[Value]) -> None:
        out, n = operands
        nbytes = builder.mul(n, ir.Constant(_I64, 4))
        cgutils.memset(builder, out, nbytes, 0)

    return _operation((out, _oi, n), emit)


@intrinsic
def compile_small(_typing: Any) -> Any:
    """Compile the function that calls this for small code: no loop is copied to handle every case.

    That halves compile time, and costs nothing where the work is done by the operations above and
    by loops over one array.
    """

    def generate(context: Any, builder: Any, _signature: Any, _args: Any) -> Value:
        builder.function.attributes.add("optsize")
        return context.get_dummy_value()

    return types.void(), generate
