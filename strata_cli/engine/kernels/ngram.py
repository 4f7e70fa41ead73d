"""The hashed n-gram embedding: table rows of each token, their gate, and the dilated convolution.

Source: qwen4exp PLE. T tokens, S streams, D hidden size, H hash heads (the same number for each
n = 2 .. max_n, bigrams first), W table width. A vector over all streams is stream-major.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.device.base import Kernel, Launch, Stream, Tensor
from strata_cli.engine.kernels.conv import ROWS_AT_ONCE, channel_taps, convolve_silu
from strata_cli.engine.kernels.dequant import Dequantizer, copy_decoded, dequantizer
from strata_cli.engine.kernels.embed import ROWS_PER_BLOCK, row_kernel, table_alignment
from strata_cli.engine.kernels.jit import nogil_jit
from strata_cli.engine.kernels.math32 import sigmoid32
from strata_cli.engine.kernels.products import WARP
from strata_cli.engine.kernels.reduce import dot16, rms_scale
from strata_cli.engine.kernels.rows import (
    add_row,
    compile_small,
    copy_rows,
    multiply_row,
    scale_row,
)
from strata_cli.engine.kernels.shapes import blocks, expect, expect_rank, grain
from strata_cli.engine.kernels.weight import Weight
from strata_cli.engine.model.quants import QuantType, dequantize, row_bytes

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Bytes = NDArray[np.uint8]
F32 = np.float32
U64 = np.uint64
SOURCE = "ngram.cu"
THREADS = 256  # per block on a GPU
RUN_TOKENS = 32  # that a GPU's block of the convolution treats
_ROOT_OF_AT_LEAST = F32(1e-6)


def ngram_rows(
    stream: Stream,
    ids: Tensor,
    history: Tensor,
    multipliers: Tensor,
    offsets: Tensor,
    sizes: Tensor,
    eos_token_id: int,
    rows_out: Tensor,
) -> None:
    """Hash each token's n-grams to table rows, for one sequence's next T tokens.

    A predecessor that is eos, or lies before one that is, counts as eos. For each n the products
    id * multiplier of the n latest ids are xored, all in unsigned 64-bit arithmetic; a head's row
    is that value modulo its size, plus its offset.

    Args:
        stream: enqueues here.
        ids: int32 [T].
        history: the ids before, most recent last, int32 [max_n - 1], eos where there is none;
            moves along.
        multipliers: int64 [max_n], read as unsigned.
        offsets: int64 [H].
        sizes: int64 [H], positive.
        eos_token_id: the id that cuts n-grams.
        rows_out: int64 [T, H], overwritten.

    Raises:
        ShapeError: an argument has another shape or type, or max_n - 1 does not divide H.
    """
    expect_rank("ngram_rows ids", ids, 1)
    expect_rank("ngram_rows history", history, 1)
    look_back = history.size
    num_heads = offsets.size // look_back * look_back
    expect("ngram_rows ids", ids, ids.shape, np.int32)
    expect("ngram_rows history", history, (look_back,), np.int32)
    expect("ngram_rows multipliers", multipliers, (look_back + 1,), np.int64)
    expect("ngram_rows offsets", offsets, (num_heads,), np.int64)
    expect("ngram_rows sizes", sizes, (num_heads,), np.int64)
    expect("ngram_rows rows_out", rows_out, (ids.size, num_heads), np.int64)
    launch = Launch(
        items=1,
        grid=(blocks(ids.size, THREADS), 1, 1),
        block=(THREADS, 1, 1),
        extents=(ids.size, look_back, num_heads),
        early=True,
    )
    stream.launch(
        NGRAM_ROWS,
        launch,
        ids,
        history,
        multipliers,
        offsets,
        sizes,
        eos_token_id,
        rows_out,
    )


def gather_rows(stream: Stream, rows: Tensor, table: Weight, out: Tensor) -> None:
    """Decode the table's rows of each token side by side. Reads no other row.

    Args:
        stream: enqueues here.
        rows: int64 [T, H], each 0 <= row < table.rows (not checked here).
        table: rows of W quantized weights.
        out: float32 [T, H * W], overwritten.

    Raises:
        ShapeError: an argument has another shape or type.
    """
    expect_rank("gather_rows rows", rows, 2)
    expect("gather_rows rows", rows, rows.shape, np.int64)
    expect("gather_rows out", out, (rows.shape[0], rows.shape[1] * table.cols))
    launch = Launch(
        items=rows.size,
        grain=grain(4 * table.cols),
        grid=(max(1, blocks(rows.size, ROWS_PER_BLOCK)), 1, 1),
        block=(WARP * ROWS_PER_BLOCK, 1, 1),
        extents=(rows.size, table.cols),
    )
    kernel = row_kernel(GATHER_ROWS, table.qtype, table_alignment(table))
    out = out.reshape(rows.size, table.cols)
    stream.launch(kernel, launch, rows, table.data, out, int(table.qtype))


def ngram_gate(
    stream: Stream,
    key: Tensor,
    value: Tensor,
    x: Tensor,
    w_key: Tensor,
    w_query: Tensor,
    eps: float,
    gated: Tensor,
) -> None:
    """Gate the n-gram value of each stream: sigmoid(signed square root of key . query) * value.

    Key and query (the residual stream) are RMS-normalised per stream; their product is divided by
    sqrt(D); the root is of at least 1e-6.

    Args:
        stream: enqueues here.
        key: float32 [T, S * D].
        value: float32 [T, D].
        x: residual streams, float32 [T, S, D].
        w_key: float32 [S * D].
        w_query: float32 [S * D].
        eps: added to the mean square.
        gated: float32 [T, S * D], overwritten.

    Raises:
        ShapeError: an argument has another shape or type.
    """
    expect_rank("ngram_gate x", x, 3)
    num_tokens, num_streams, size = x.shape
    expect("ngram_gate x", x, x.shape)
    expect("ngram_gate key", key, (num_tokens, num_streams * size))
    expect("ngram_gate value", value, (num_tokens, size))
    expect("ngram_gate w_key", w_key, (num_streams * size,))
    expect("ngram_gate w_query", w_query, (num_streams * size,))
    expect("ngram_gate gated", gated, (num_tokens, num_streams * size))
    launch = Launch(
        items=num_tokens * num_streams,
        grain=grain(2 * size),
        grid=(num_tokens * num_streams, 1, 1),
        block=(THREADS, 1, 1),
        extents=(num_streams, size),
        early=True,
    )
    stream.launch(NGRAM_GATE, launch, key, value, x, w_key, w_query, eps, gated.reshape(*x.shape))


def ngram_conv(
    stream: Stream,
    gated: Tensor,
    w_conv: Tensor,
    history: Tensor,
    weight: Tensor,
    dilation: int,
    eps: float,
    x: Tensor,
) -> None:
    """Add the gated values and their convolution to the streams of one sequence's next T tokens.

    x += gated + silu(conv(rms(gated) * w_conv)), the norm per stream, taps dilation tokens apart.

    Args:
        stream: enqueues here.
        gated: float32 [T, S * D].
        w_conv: norm weight, float32 [S * D].
        history: the normalised rows before, float32 [(K - 1) * dilation, S * D], zeros at a
            sequence's start; moves along.
        weight: taps, oldest first, float32 [S * D, K].
        dilation: tokens from one tap to the next, at least 1.
        eps: added to the mean square.
        x: residual streams, float32 [T, S, D], in place.

    Raises:
        ShapeError: an argument has another shape or type.
    """
    expect_rank("ngram_conv x", x, 3)
    expect_rank("ngram_conv weight", weight, 2)
    num_tokens, num_streams, size = x.shape
    channels, num_taps = num_streams * size, weight.shape[1]
    expect("ngram_conv x", x, x.shape)
    expect("ngram_conv gated", gated, (num_tokens, channels))
    expect("ngram_conv w_conv", w_conv, (channels,))
    expect("ngram_conv weight", weight, (channels, num_taps))
    expect("ngram_conv history", history, ((num_taps - 1) * dilation, channels))
    past = (num_taps - 1) * dilation
    run = max(RUN_TOKENS, past)
    # A block norms whole rows: many blocks for each run only where they would be too few.
    columns = THREADS if num_tokens <= 4 * run else size
    launch = Launch(
        items=num_streams,
        grain=grain(8 * num_tokens * size),
        grid=(num_streams, blocks(num_tokens, run), blocks(size, columns)),
        block=(THREADS, 1, 1),
        shared_bytes=4 * (run + past),
        extents=(num_tokens, num_streams, size, num_taps, run, columns),
        early=True,
    )
    stream.launch(NGRAM_CONV, launch, gated, w_conv, history, weight, dilation, eps, x)


@nogil_jit
def _ngram_rows(
    begin: int,
    end: int,
    ids: Ints,
    history: Ints,
    multipliers: Longs,
    offsets: Longs,
    sizes: Longs,
    eos: int,
    rows_out: Longs,
) -> None:
    """One item: the whole segment, because the history moves with it."""
    num_tokens, look_back = ids.size, history.size
    per_n = offsets.size // look_back
    compile_small()
    for token in range(num_tokens if begin < end else 0):
        mixed = U64(ids[token]) * U64(multipliers[0])
        is_cut = False
        for distance in range(1, look_back + 1):
            at = token - distance
            predecessor = ids[at] if at >= 0 else history[look_back + at]
            is_cut = is_cut or predecessor == eos
            mixed ^= U64(eos if is_cut else predecessor) * U64(multipliers[distance])
            for head in range((distance - 1) * per_n, distance * per_n):
                rows_out[token, head] = np.int64(mixed % U64(sizes[head])) + offsets[head]
    for i in range(look_back if begin < end else 0):
        at = num_tokens - look_back + i
        history[i] = ids[at] if at >= 0 else history[num_tokens + i]


@nogil_jit
def _gather_items(
    begin: int,
    end: int,
    rows: Longs,
    table: int,
    row_nbytes: int,
    decoder: Dequantizer,
    out: int,
    width: int,
) -> None:
    num_heads = rows.shape[1]
    for item in range(begin, end):
        source = table + rows[item // num_heads, item % num_heads] * row_nbytes
        copy_decoded(decoder, source, out + item * width * 4, width)


def _gather_rows(begin: int, end: int, rows: Longs, table: Bytes, out: Floats, qtype: int) -> None:
    """Items: (token, head)."""
    width = out.shape[1]
    row_nbytes = row_bytes(QuantType(qtype), width)
    source, target = table.ctypes.data, out.ctypes.data
    _gather_items(begin, end, rows, source, row_nbytes, dequantizer(qtype), target, width)


@nogil_jit
def _ngram_gate(
    begin: int,
    end: int,
    key: Floats,
    value: Floats,
    x: Floats,
    w_key: Floats,
    w_query: Floats,
    eps: float,
    gated: Floats,
) -> None:
    """Items: (token, stream)."""
    num_streams, size = x.shape[1], x.shape[2]
    keys, queries = np.empty(size, F32), np.empty(size, F32)
    compile_small()
    for item in range(begin, end):
        at, column = item * size, item % num_streams * size
        scale_row(keys, 0, key, at, rms_scale(key, at, size, eps), size)
        multiply_row(keys, 0, w_key, column, size)
        scale_row(queries, 0, x, at, rms_scale(x, at, size, eps), size)
        multiply_row(queries, 0, w_query, column, size)
        product = dot16(keys, 0, queries, 0, size) / np.sqrt(F32(size))
        magnitude = abs(product)
        root = np.sqrt(magnitude if magnitude > _ROOT_OF_AT_LEAST else _ROOT_OF_AT_LEAST)
        weight = sigmoid32(np.sign(product) * root)
        scale_row(gated, at, value, item // num_streams * size, weight, size)


@nogil_jit
def _ngram_conv(
    begin: int,
    end: int,
    gated: Floats,
    w_conv: Floats,
    history: Floats,
    weight: Floats,
    dilation: int,
    eps: float,
    x: Floats,
) -> None:
    """Items: streams. The history holds normalised rows, whose norm runs over a whole stream."""
    num_tokens, num_streams, size = x.shape
    past, channels = history.shape[0], num_streams * size
    most = num_tokens if num_tokens < ROWS_AT_ONCE else ROWS_AT_ONCE
    window, result = np.empty((past + most) * size, F32), np.empty(most * size, F32)
    compile_small()
    for column in range(begin * size, end * size, size):
        taps = channel_taps(weight, column, size)
        copy_rows(window, 0, size, history, column, channels, past, size)
        for first in range(0, num_tokens, ROWS_AT_ONCE):
            rows = most if first + most <= num_tokens else num_tokens - first
            for row in range(rows):
                at = (first + row) * channels + column
                scale = rms_scale(gated, at, size, eps)
                scale_row(window, (past + row) * size, gated, at, scale, size)
                multiply_row(window, (past + row) * size, w_conv, column, size)
            convolve_silu(window, rows, size, taps, dilation, result)
            for row in range(rows):
                at = (first + row) * channels + column
                add_row(result, row * size, gated, at, size)
                add_row(x, at, result, row * size, size)
            copy_rows(window, 0, size, window, rows * size, size, past, size)
        copy_rows(history, column, channels, window, 0, size, past, size)


def ngram_rows_reference(
    ids: Ints, history: Ints, multipliers: Longs, offsets: Longs, sizes: Longs, eos: int
) -> tuple[Longs, Ints]:
    """ngram_rows in plain Python integers: (rows [T, H], the new history)."""
    known = [int(i) for i in (*history, *ids)]
    look_back = len(history)
    per_n = len(offsets) // look_back
    rows = np.empty((len(ids), len(offsets)), np.int64)
    for token in range(len(ids)):
        context = known[token : token + look_back + 1][::-1]
        cut = context.index(eos, 1) if eos in context[1:] else len(context)
        context[cut:] = [eos] * (len(context) - cut)
        for head in range(len(offsets)):
            mixed = 0
            for distance in range(head // per_n + 2):
                mixed ^= context[distance] * (int(multipliers[distance]) % 2**64) % 2**64
            rows[token, head] = mixed % int(sizes[head]) + int(offsets[head])
    return rows, np.array(known[len(ids) :], np.int32)


def gather_rows_reference(rows: Longs, table: Bytes, qtype: QuantType, width: int) -> Floats:
    """gather_rows in plain numpy: [T, H * W]."""
    packed = table.reshape(-1, row_bytes(qtype, width))[rows.reshape(-1)]
    return dequantize(qtype, packed, width).reshape(len(rows), -1)


def ngram_gate_reference(
    key: Floats, value: Floats, x: Floats, w_key: Floats, w_query: Floats, eps: float
) -> Floats:
    """ngram_gate in plain numpy: [T, S * D]."""
    num_tokens, size = len(x), x.shape[2]
    keys = _rms(key.reshape(x.shape), w_key, eps)
    product = np.sum(keys * _rms(x, w_query, eps), axis=-1) / np.sqrt(size)
    root = np.sign(product) * np.sqrt(np.maximum(np.abs(product), 1e-6))
    weight: Doubles = 1.0 / (1.0 + np.exp(-root))
    return (weight[..., None] * value[:, None]).reshape(num_tokens, -1).astype(np.float32)


def ngram_conv_reference(
    gated: Floats,
    w_conv: Floats,
    history: Floats,
    weight: Floats,
    dilation: int,
    eps: float,
    x: Floats,
) -> tuple[Floats, Floats]:
    """ngram_conv in plain numpy: (the new x, the new history)."""
    num_tokens, num_taps = len(x), weight.shape[1]
    normed = _rms(gated.reshape(x.shape), w_conv, eps).reshape(gated.shape)
    rows = np.concatenate([history, normed])
    total = sum(
        rows[j * dilation : j * dilation + num_tokens] * weight[:, j] for j in range(num_taps)
    )
    new = x + (gated + total / (1.0 + np.exp(-total))).reshape(x.shape)
    return new.astype(np.float32), rows[len(rows) - len(history) :].astype(np.float32)


def _rms(x: Floats, weight: Floats, eps: float) -> Doubles:
    wide = x.astype(np.float64)
    normed: Doubles = wide / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + eps)
    scaled: Doubles = normed * weight.reshape(x.shape[1:])
    return scaled


NGRAM_ROWS = Kernel("ngram_rows", _ngram_rows, ngram_rows_reference, SOURCE)
GATHER_ROWS = Kernel("gather_rows", _gather_rows, gather_rows_reference)
NGRAM_GATE = Kernel("ngram_gate", _ngram_gate, ngram_gate_reference, SOURCE)
NGRAM_CONV = Kernel("ngram_conv", _ngram_conv, ngram_conv_reference, SOURCE)
