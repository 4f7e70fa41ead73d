"""Compiled block decoders for the host device: a quantized row's bytes to float32 weights.

One small function per tensor type, compiled when first asked for and cached on disk, reached by
its address so that the matrix products are compiled once for all types. Each follows gguf's own
order of float32 operations, so its values are those of ``model.quants.dequantize`` bit for bit.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import numpy as np
from numba import types
from numpy.typing import NDArray

from strata_cli.engine.kernels import dequant_blocks
from strata_cli.engine.kernels.dequant_loads import call_dequantizer, copy_floats
from strata_cli.engine.kernels.jit import c_function, inline_jit
from strata_cli.engine.model.quants import BLOCK, QuantType, grid

# (bytes of the blocks, floats out, number of blocks, code book or null)
_SIGNATURE = types.void(
    types.CPointer(types.uint8),
    types.CPointer(types.float32),
    types.intp,
    types.CPointer(types.int8),
)


class Dequantizer(NamedTuple):
    """One type's decoder as compiled callers use it.

    Attributes:
        function: address of ``void f(uint8 *blocks, float *weights, int64 count, int8 *table)``,
            or 0 when the bytes are float32 weights already.
        table: address of the type's code book, or 0; both addresses stay valid for ever.
        block_weights: weights per block.
    """

    function: int
    table: int
    block_weights: int


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
    block_weights = BLOCK[qtype].weights
    if qtype == QuantType.F32:
        return Dequantizer(0, 0, block_weights)
    compiled = c_function(_SIGNATURE, getattr(dequant_blocks, qtype.name.lower()))
    _keep_alive.append(compiled)
    return Dequantizer(compiled.address, _code_book_address(qtype), block_weights)


def _code_book_address(qtype: QuantType) -> int:
    if qtype not in dequant_blocks.CODE_BOOKS:
        return 0
    table: NDArray[np.int8] = np.ascontiguousarray(grid(qtype))
    _keep_alive.append(table)
    return int(table.ctypes.data)


@inline_jit
def copy_decoded(decoder: Dequantizer, source: int, target: int, weights: int) -> None:
    """Decode one row at address source to float32 at address target; for compiled code."""
    if decoder.function == 0:
        copy_floats(target, source, weights)
    else:
        blocks = weights // decoder.block_weights
        call_dequantizer(decoder.function, source, target, blocks, decoder.table)
