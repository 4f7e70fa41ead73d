"""Compiled block decoders for the host device: a quantized row's bytes to float32 weights.

One small function per tensor type, compiled when first asked for and cached on disk, reached by
its address so that the matrix products are compiled once for all types. Each follows gguf's own
order of float32 operations, so its values are those of ``model.quants.dequantize`` bit for bit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils as numba_cgutils
from numpy.typing import NDArray

from strata_cli.engine.kernels import dequant_blocks, dequant_books
from strata_cli.engine.kernels.dequant_lanes import Block
from strata_cli.engine.kernels.jit import c_function, intrinsic, named_copy
from strata_cli.engine.kernels.pointers import emit_call_decoder, emit_copy_floats
from strata_cli.engine.kernels.row_dots import DOTS_SIGNATURE, dot_rows, has_dots
from strata_cli.engine.model.quants import BLOCK, BlockLayout, QuantType, grid

cgutils: Any = numba_cgutils  # carries no types

# (blocks, weights out, number of blocks, code book), the first two and the last as addresses
_SIGNATURE = types.void(types.intp, types.intp, types.intp, types.intp)


class Dequantizer(NamedTuple):
    """One type's decoder as compiled callers use it.

    Attributes:
        function: address of ``void f(int64 blocks, int64 weights, int64 count, int64 table)``, or
            0 when the bytes are float32 weights already.
        table: address of the type's code book, or 0; both addresses stay valid for ever.
        block_weights: weights per block.
        dots: address of the type's dot products, see row_dots.py; 0 where it has none.
    """

    function: int
    table: int
    block_weights: int
    dots: int


_lock = threading.Lock()
_ready: dict[int, Dequantizer] = {}
_keep_alive: list[Any] = []


def dequantizer(qtype: int) -> Dequantizer:
    """The decoder of a type; the first call compiles it or loads it from the disk cache."""
    found = _ready.get(qtype)
    if found is not None:
        return found
    with _lock:
        if qtype not in _ready:
            _ready[qtype] = _build(QuantType(qtype))
        return _ready[qtype]


def _build(qtype: QuantType) -> Dequantizer:
    layout = BLOCK[qtype]
    if qtype == QuantType.F32:
        return Dequantizer(0, 0, layout.weights, 0)
    name = qtype.name.lower()
    decoder = getattr(dequant_books, name, None) or getattr(dequant_blocks, name)
    loop = named_copy(_loop, decoder, _emit_loop=_loop_over_blocks(decoder, layout))
    functions = [(_SIGNATURE, loop)]
    if has_dots(layout):
        dots = named_copy(_dots, decoder, "_dots", _emit_dots=dot_rows(decoder, layout))
        functions.append((DOTS_SIGNATURE, dots))
    # A thread of its own: inside the compiler Python would drop an interrupt of this one.
    with ThreadPoolExecutor(1) as compiler:
        compiled = [compiler.submit(c_function, *each).result() for each in functions]
    _keep_alive.extend(compiled)
    decode, dots_address = compiled[0].address, compiled[-1].address if has_dots(layout) else 0
    return Dequantizer(decode, _code_book_address(qtype), layout.weights, dots_address)


def _code_book_address(qtype: QuantType) -> int:
    if not qtype.name.startswith(("IQ1", "IQ2", "IQ3")):
        return 0
    table: NDArray[np.int8] = np.ascontiguousarray(grid(qtype))
    _keep_alive.append(table)
    return int(table.ctypes.data)


_emit_loop: Any = None  # what _loop calls; every copy of it has its own
_emit_dots: Any = None  # the same of _dots


def _loop(blocks: int, weights: int, count: int, table: int) -> None:
    _emit_loop(blocks, weights, count, table)


def _dots(row: int, stride: int, rows: int, x: int, blocks: int, table: int, out: int) -> None:
    _emit_dots(row, stride, rows, x, blocks, table, out)


def _loop_over_blocks(decoder: Callable[[Block], None], layout: BlockLayout) -> Callable[..., Any]:
    """Intrinsic (blocks, weights, count, table): decode count blocks."""

    def decode(_typing: Any, _blocks: Any, _weights: Any, _count: Any, _table: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            source, target, count, table = args
            i8, f32 = ir.IntType(8).as_pointer(), ir.FloatType().as_pointer()
            source, table = builder.inttoptr(source, i8), builder.inttoptr(table, i8)
            target = builder.inttoptr(target, f32)
            with cgutils.for_range(builder, count) as loop:
                from_byte = builder.mul(loop.index, ir.Constant(count.type, layout.nbytes))
                to_weight = builder.mul(loop.index, ir.Constant(count.type, layout.weights))
                block = builder.gep(source, [from_byte])
                to, features = builder.gep(target, [to_weight]), context.codegen().magic_tuple()[2]
                decoder(Block(builder, block, to, table, features))
            return context.get_dummy_value()

        return _SIGNATURE, generate

    return intrinsic(decode)


@intrinsic
def copy_decoded(_typing: Any, decoder: Any, _source: Any, _target: Any, _weights: Any) -> Any:
    """Decode one row, for compiled code.

    Takes (Dequantizer, source address, target address of the float32 weights, their number).
    """

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        fields, source, target, weights = args
        function, table, block_weights = (builder.extract_value(fields, i) for i in range(3))
        is_float = builder.icmp_signed("==", function, ir.Constant(function.type, 0))
        with builder.if_else(is_float) as (yes, no):
            with yes:
                emit_copy_floats(builder, target, source, weights)
            with no:
                blocks = builder.sdiv(weights, block_weights)
                emit_call_decoder(builder, function, source, target, blocks, table)
        return context.get_dummy_value()

    return types.void(decoder, types.intp, types.intp, types.intp), generate
