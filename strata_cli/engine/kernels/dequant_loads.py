"""Loads of little-endian values at any byte of a block, for compiled code.

Each takes ``(pointer to uint8, byte index)``; nothing is checked, no alignment is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils as numba_cgutils

from strata_cli.engine.kernels.jit import intrinsic

cgutils: Any = numba_cgutils  # carries no types
_FLOAT = ir.FloatType()
_SIGNATURE_ARGS = (types.CPointer(types.uint8), types.intp)


def _load(builder: Any, args: Any, kind: Any) -> Any:
    source, index = args
    at = builder.bitcast(builder.gep(source, [index]), kind.as_pointer())
    return builder.load(at, align=1)


def _integer_at(kind: Any, bits: int) -> Callable[[Any, int], Any]:
    def load(_typing: Any, _source: Any, _index: Any) -> tuple[Any, Any]:
        def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            return _load(builder, args, ir.IntType(bits))

        return kind(*_SIGNATURE_ARGS), generate

    return intrinsic(load)


i8_at = _integer_at(types.int8, 8)
u16_at = _integer_at(types.uint16, 16)
u32_at = _integer_at(types.uint32, 32)


@intrinsic
def half_at(_typing: Any, _source: Any, _index: Any) -> Any:
    """The IEEE half at a byte index, widened to float32."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.fpext(_load(builder, args, ir.HalfType()), _FLOAT)

    return types.float32(*_SIGNATURE_ARGS), generate


@intrinsic
def bfloat_at(_typing: Any, _source: Any, _index: Any) -> Any:
    """The bfloat16 at a byte index, widened to float32."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        bits = builder.zext(_load(builder, args, ir.IntType(16)), ir.IntType(32))
        return builder.bitcast(builder.shl(bits, ir.Constant(bits.type, 16)), _FLOAT)

    return types.float32(*_SIGNATURE_ARGS), generate


@intrinsic
def call_dequantizer(
    _typing: Any, _function: Any, _source: Any, _target: Any, _count: Any, _table: Any
) -> Any:
    """Call a compiled decoder; takes (its address, blocks, floats, number of blocks, table)."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        function, source, target, count, table = args
        byte = ir.IntType(8).as_pointer()
        floats = _FLOAT.as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte, floats, count.type, byte])
        builder.call(
            builder.inttoptr(function, kind.as_pointer()),
            [
                builder.inttoptr(source, byte),
                builder.inttoptr(target, floats),
                count,
                builder.inttoptr(table, byte),
            ],
        )
        return context.get_dummy_value()

    return types.void(*[types.intp] * 5), generate


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
def address_of(_typing: Any, array: Any) -> Any:
    """Address of an array's first element, as a signed integer (numba's own is unsigned, and a
    signed and an unsigned integer make a float)."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.ptrtoint(data, ir.IntType(64))

    return types.intp(array), generate
