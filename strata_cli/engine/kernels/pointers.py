"""What compiled code does with plain addresses: take, copy and call. Nothing is checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils as numba_cgutils

from strata_cli.engine.kernels.jit import intrinsic

cgutils: Any = numba_cgutils  # carries no types
_I64 = ir.IntType(64)


@intrinsic
def address_of(_typing: Any, array: Any) -> Any:
    """Address of an array's first element, as a signed integer.

    numba's own is unsigned, and adding a signed integer to that makes a float.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.ptrtoint(data, _I64)

    return types.intp(array), generate


@intrinsic
def allocate_bytes(_typing: Any, _nbytes: Any) -> Any:
    """Address of fresh memory; give it to free_bytes. Much less to compile than an array."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.ptrtoint(context.nrt.allocate(builder, args[0]), _I64)

    return types.intp(types.intp), generate


@intrinsic
def free_bytes(_typing: Any, _address: Any) -> Any:
    """Give memory back that allocate_bytes gave."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        context.nrt.free(builder, builder.inttoptr(args[0], ir.IntType(8).as_pointer()))
        return context.get_dummy_value()

    return types.void(types.intp), generate


def emit_copy_floats(builder: Any, target: Any, source: Any, count: Any) -> None:
    """Emit a memcpy of count floats between two addresses."""
    byte = ir.IntType(8).as_pointer()
    source, target = builder.inttoptr(source, byte), builder.inttoptr(target, byte)
    cgutils.raw_memcpy(builder, target, source, count, 4)


def emit_call_decoder(
    builder: Any, function: Any, blocks: Any, weights: Any, count: Any, table: Any
) -> None:
    """Emit a call of ``void function(int64 blocks, int64 weights, int64 count, int64 table)``."""
    _emit_call(builder, function, [blocks, weights, count, table])


def _emit_call(builder: Any, function: Any, operands: Sequence[Any]) -> None:
    kind = ir.FunctionType(ir.VoidType(), [_I64] * len(operands))
    builder.call(builder.inttoptr(function, kind.as_pointer()), operands)


def _void_call(num_arguments: int) -> tuple[Any, Any]:
    """What an intrinsic is that calls its first argument, an address, with the others."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        _emit_call(builder, args[0], args[1:])
        return context.get_dummy_value()

    return types.void(*[types.intp] * num_arguments), generate


@intrinsic
def call_digits(_typing: Any, _function: Any, _x: Any, _pieces: Any, _out: Any) -> Any:
    """Call what makes a type's digits; takes its address, and what fixed_dots.py says."""
    return _void_call(4)


@intrinsic
def call_fixed_dots(
    _typing: Any,
    _function: Any,
    _row: Any,
    _stride: Any,
    _rows: Any,
    _digits: Any,
    _pieces: Any,
    _out: Any,
    _following: Any,
) -> Any:
    """Call a type's dots in fixed point; takes their address, and what fixed_dots.py says."""
    return _void_call(8)


@intrinsic
def call_dots(
    _typing: Any,
    _function: Any,
    _row: Any,
    _stride: Any,
    _rows: Any,
    _x: Any,
    _blocks: Any,
    _table: Any,
    _out: Any,
) -> Any:
    """Call a type's dot products; takes its address, and what row_dots.py says."""
    return _void_call(8)


@intrinsic
def call_decoder(
    _typing: Any, _function: Any, _blocks: Any, _weights: Any, _count: Any, _table: Any
) -> Any:
    """Call a block decoder; takes (its address, blocks, weights out, number of blocks, table)."""
    return _void_call(5)
