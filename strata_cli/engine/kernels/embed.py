"""Token embedding: one decoded table row per token, the same in every residual stream."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.device.base import Kernel, Launch, Stream, Tensor
from strata_cli.engine.kernels.dequant import Dequantizer, copy_decoded, dequantizer
from strata_cli.engine.kernels.jit import nogil_jit
from strata_cli.engine.kernels.pointers import address_of
from strata_cli.engine.kernels.products import WARP, alignment, defines_of
from strata_cli.engine.kernels.shapes import blocks, expect, expect_rank, grain
from strata_cli.engine.kernels.weight import Weight
from strata_cli.engine.model.quants import QuantType, dequantize, row_bytes

ROWS_PER_BLOCK = 4  # table rows that a block of embed.cu decodes, one per warp


@nogil_jit
def _embed_items(
    begin: int,
    end: int,
    ids: NDArray[np.int32],
    table: int,
    nbytes: int,
    decoder: Dequantizer,
    x: NDArray[np.float32],
) -> None:
    streams, width = x.shape[1], x.shape[2]
    for t in range(begin, end):
        row = table + np.int64(ids[t]) * nbytes
        for s in range(streams):
            copy_decoded(decoder, row, address_of(x) + (t * streams + s) * width * 4, width)


def _embed_streams(
    begin: int,
    end: int,
    ids: NDArray[np.int32],
    table: NDArray[np.uint8],
    x: NDArray[np.float32],
    qtype: int,
) -> None:
    nbytes = row_bytes(QuantType(qtype), x.shape[2])
    _embed_items(begin, end, ids, table.ctypes.data, nbytes, dequantizer(qtype), x)


def _embed_reference(
    ids: NDArray[np.int32], table: NDArray[np.uint8], qtype: QuantType, streams: int, width: int
) -> NDArray[np.float32]:
    """The rows of the ids, decoded and repeated: [T, S, D]."""
    packed = table.reshape(-1, row_bytes(qtype, width))[ids]
    return np.repeat(dequantize(qtype, packed, width)[:, None, :], streams, axis=1)


EMBED_STREAMS = Kernel("embed_streams", _embed_streams, _embed_reference)


@lru_cache(maxsize=256)
def row_kernel(kernel: Kernel, qtype: QuantType, align: int) -> Kernel:
    """The kernel of embed.cu that a kernel is for one type, rows at multiples of align bytes."""
    function = f"{kernel.name}<{qtype.name}, {align}>"
    defines = defines_of(qtype)
    return replace(kernel, name=function, source="embed.cu", function=function, defines=defines)


def table_alignment(table: Weight) -> int:
    """The largest power of two up to 16 that divides the address of every row of a table."""
    return alignment(row_bytes(table.qtype, table.cols), table.data.address)


def embed_streams(stream: Stream, ids: Tensor, table: Weight, x: Tensor) -> None:
    """Enqueue x[t, s] = decoded table row ids[t], for every stream s.

    Args:
        stream: where it runs.
        ids: token ids, int32 [T], each 0 <= id < V (not checked here).
        table: V rows of D quantized weights.
        x: residual streams, float32 [T, S, D], overwritten.

    Raises:
        ShapeError: extents or types do not fit.
    """
    expect_rank("embed_streams x", x, 3)
    tokens, streams = ids.shape[0], x.shape[1]
    expect("embed_streams ids", ids, (tokens,), np.int32)
    expect("embed_streams x", x, (tokens, streams, table.cols))
    if tokens == 0:
        return
    launch = Launch(
        items=tokens,
        grain=grain(streams * table.cols),
        grid=(blocks(tokens, ROWS_PER_BLOCK), 1, 1),
        block=(WARP * ROWS_PER_BLOCK, 1, 1),
        extents=(tokens, streams, table.cols),
    )
    kernel = row_kernel(EMBED_STREAMS, table.qtype, table_alignment(table))
    stream.launch(kernel, launch, ids, table.data, x, int(table.qtype))
