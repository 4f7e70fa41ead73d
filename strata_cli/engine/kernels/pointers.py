"""What compiled code does with plain addresses: take, copy and call. Nothing is checked."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils as numba_cgutils

from strata_cli.engine.kernels.jit import intrinsic

cgutils: Any = numba_cgutils  # carries no types
_I64 = ir.IntType(64)

Integer: TypeAlias = int | np.signedinteger[Any]  # one 64-bit type in compiled code


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
def copy_floats(_typing: Any, _target: Any, _source: Any, _count: Any) -> Any:
    """memcpy of count floats; takes (target address, source address, count)."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        target, source, count = args
        byte = ir.IntType(8).as_pointer()
        cgutils.raw_memcpy(
            builder, builder.inttoptr(target, byte), builder.inttoptr(source, byte), count, 4
        )
        return context.get_dummy_value()

    return types.void(*[types.intp] * 3), generate


@intrinsic
def call_decoder(
    _typing: Any, _function: Any, _blocks: Any, _weights: Any, _count: Any, _table: Any
) -> Any:
    """Call a block decoder; takes (its address, blocks, weights out, number of blocks, table)."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_I64] * 4)
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(*[types.intp] * 5), generate
