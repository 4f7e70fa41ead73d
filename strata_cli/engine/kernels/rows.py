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


def _load(builder: Any, row: Value, index: Value, kind: Columns) -> Value:
    return builder.load(_at(builder, row, index, kind), align=4)


def _store(builder: Any, row: Value, index: Value, value: Value) -> None:
    builder.store(value, _at(builder, row, index, value.type), align=4)


def _splat(builder: Any, value: Value, kind: Columns) -> Value:
    """The same float in every column."""
    if kind is _FLOAT:
        return value
    undefined = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(undefined, value, ir.Constant(_I32, 0))
    zeros = ir.Constant(ir.VectorType(_I32, WIDTH), [0] * WIDTH)
    return builder.shuffle_vector(first, undefined, zeros)


def _fma(builder: Any, a: Value, b: Value, c: Value) -> Value:
    name = "llvm.fma.f32" if a.type is _FLOAT else f"llvm.fma.v{WIDTH}f32"
    kind = ir.FunctionType(a.type, [a.type] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [a, b, c])


def _elementwise(kinds: tuple[Any, ...], formula: Callable[..., Value]) -> tuple[Any, Any]:
    """An operation out[i] = formula(builder, out[i], ...): rows as elements, floats as they are."""

    def emit(builder: Any, operands: list[Value]) -> None:
        def columns(index: Value, kind: Columns) -> None:
            values = [
                _splat(builder, operand, kind)
                if operand.type is _FLOAT
                else _load(builder, operand, index, kind)
                for operand in operands[:-1]
            ]
            _store(builder, operands[0], index, formula(builder, *values))

        _columns(builder, operands[-1], columns)

    return _operation(kinds, emit)


@intrinsic
def scale_row(_typing: Any, out: Any, _oi: Any, x: Any, _xi: Any, scale: Any, n: Any) -> Any:
    """out = x * scale; out may be x. Takes (out, oi, x, xi, scale, n)."""
    return _elementwise((out, _oi, x, _xi, scale, n), lambda b, _, x, scale: b.fmul(x, scale))


@intrinsic
def multiply_row(_typing: Any, out: Any, _oi: Any, x: Any, _xi: Any, n: Any) -> Any:
    """out *= x; takes (out, oi, x, xi, n)."""
    return _elementwise((out, _oi, x, _xi, n), lambda b, out, x: b.fmul(out, x))


@intrinsic
def add_row(_typing: Any, out: Any, _oi: Any, x: Any, _xi: Any, n: Any) -> Any:
    """out += x; takes (out, oi, x, xi, n)."""
    return _elementwise((out, _oi, x, _xi, n), lambda b, out, x: b.fadd(out, x))


@intrinsic
def add_products(
    _typing: Any, out: Any, _oi: Any, a: Any, _ai: Any, b: Any, _bi: Any, n: Any
) -> Any:
    """out += a * b by fused multiply-add; takes (out, oi, a, ai, b, bi, n)."""
    kinds = (out, _oi, a, _ai, b, _bi, n)
    return _elementwise(kinds, lambda builder, out, a, b: _fma(builder, a, b, out))


@intrinsic
def decay_and_add(
    _typing: Any, y: Any, _yi: Any, decay: Any, factor: Any, x: Any, _xi: Any, n: Any
) -> Any:
    """y = factor * x + (decay * y), the sum fused; takes (y, yi, decay, factor, x, xi, n)."""
    kinds = (y, _yi, decay, factor, x, _xi, n)
    return _elementwise(kinds, lambda b, y, decay, factor, x: _fma(b, factor, x, b.fmul(decay, y)))


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
            total = cgutils.alloca_once(builder, kind)
            builder.store(_load(builder, out, index, kind), total)
            with _loop(builder, ir.Constant(_I64, 0), count, 1) as (k, _):
                weight = _splat(builder, builder.load(builder.gep(weights, [k])), kind)
                row = _load(builder, rows, builder.add(builder.mul(k, stride), index), kind)
                builder.store(_fma(builder, weight, row, builder.load(total)), total)
            _store(builder, out, index, builder.load(total))

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
