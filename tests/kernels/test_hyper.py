"""Hyper-connection kernels against plain numpy, and that a token's bits are its own."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from strata_cli.engine.device.base import Tensor
from strata_cli.engine.kernels.combine_write import (
    can_write_few,
    combine_write_norm,
    write_norm_few,
)
from strata_cli.engine.kernels.hyper import (
    LOWRANK_SILU,
    STREAM_MIX,
    STREAM_NORM,
    STREAM_WRITE,
    STREAM_WRITE_NORM,
    lowrank_silu,
    stream_mix,
    stream_norm,
    stream_write,
    stream_write_norm,
)
from strata_cli.engine.kernels.matmul import matmul, round_rows
from strata_cli.engine.kernels.matmul_gated import matmul_normed, matmul_silu
from strata_cli.engine.kernels.moe import CombineOperands, combine
from strata_cli.engine.kernels.stream_read import (
    can_inject_beside,
    can_mix_beside,
    can_norm_beside,
    inject_parts,
    matmul_inject,
    matmul_silu_mix,
    read_few,
)
from strata_cli.engine.kernels.stream_write import (
    HeadNorm,
    StreamWrite,
    can_write_beside,
    combine_write,
    matmul_write,
)
from strata_cli.engine.kernels.weight import Weight
from strata_cli.engine.model.quants import QuantType
from strata_cli.errors import ShapeError
from tests.kernels.lab import Lab, assert_close, normal
from tests.kernels.packed import packed_rows

Floats = NDArray[np.float32]
EPS = 1e-6


def run_norm(lab: Lab, x: Floats, weight: Floats) -> Floats:
    out = lab.empty((len(x), weight.size))
    stream_norm(lab.stream, lab.put(x), lab.put(weight), EPS, out)
    return lab.get(out)


def run_silu(lab: Lab, low: Floats, num_streams: int) -> Floats:
    tensor = lab.put(low)
    lowrank_silu(lab.stream, tensor, num_streams)
    return lab.get(tensor)


def run_mix(lab: Lab, gate: Floats, normed: Floats, num_streams: int) -> Floats:
    out = lab.empty((len(gate), gate.shape[1] // num_streams))
    stream_mix(lab.stream, lab.put(gate), lab.put(normed), out)
    return lab.get(out)


def run_write(lab: Lab, x: Floats, out: Floats, inject: Floats) -> Floats:
    tensor = lab.put(x)
    stream_write(lab.stream, tensor, lab.put(out), lab.put(inject))
    return lab.get(tensor)


def run_write_norm(
    lab: Lab, x: Floats, out: Floats, inject: Floats, weight: Floats
) -> tuple[Floats, Floats]:
    tensor, normed = lab.put(x), lab.empty((len(x), weight.size))
    output, shares, norm = map(lab.put, (out, inject, weight))
    stream_write_norm(lab.stream, tensor, output, shares, norm, EPS, normed)
    return lab.get(tensor), lab.get(normed)


SHAPES = {
    "num_tokens": st.integers(1, 7),
    "num_streams": st.integers(2, 5),
    "size": st.integers(1, 70),
    "seed": st.integers(0, 999),
}


@given(**SHAPES)
@settings(max_examples=25)
def test_every_kernel_agrees_with_numpy_at_odd_sizes(
    lab: Lab, num_tokens: int, num_streams: int, size: int, seed: int
) -> None:
    x = normal(seed, num_tokens, num_streams, size, scale=3.0)
    weight = normal(seed + 1, num_streams * size)
    gate = normal(seed + 2, num_tokens, num_streams * size, scale=4.0)
    normed = normal(seed + 3, num_tokens, num_streams * size)
    out, inject = normal(seed + 4, num_tokens, size), normal(seed + 5, num_tokens, num_streams)
    assert_close(run_norm(lab, x, weight), STREAM_NORM.reference(x, weight, EPS))
    assert_close(run_silu(lab, gate, num_streams), LOWRANK_SILU.reference(gate, num_streams))
    assert_close(
        run_mix(lab, gate, normed, num_streams), STREAM_MIX.reference(gate, normed, num_streams)
    )
    written = run_write(lab, x, out, inject)
    assert_close(written, STREAM_WRITE.reference(x, out, inject))
    both = run_write_norm(lab, x, out, inject, weight)
    reference = STREAM_WRITE_NORM.reference(x, out, inject, weight, EPS)
    for actual, expected in zip(both, reference, strict=True):
        assert_close(actual, expected)
    np.testing.assert_array_equal(both[0], written)
    np.testing.assert_array_equal(both[1], run_norm(lab, written, weight))


@given(**SHAPES, points=st.lists(st.floats(0, 1), max_size=4))
@settings(max_examples=25)
def test_bits_do_not_depend_on_cuts_neighbours_or_alignment(
    host_lab: Lab, num_tokens: int, num_streams: int, size: int, seed: int, points: list[float]
) -> None:
    x = normal(seed, num_tokens, num_streams, size)
    weight = normal(seed + 1, num_streams * size)
    gate, normed = (normal(seed + i, num_tokens, num_streams * size) for i in (2, 3))
    out, inject = normal(seed + 4, num_tokens, size), normal(seed + 5, num_tokens, num_streams)

    def everything(lab: Lab, rows: slice) -> list[Floats]:
        return [
            run_norm(lab, x[rows], weight),
            run_silu(lab, gate[rows], num_streams),
            run_mix(lab, gate[rows], normed[rows], num_streams),
            run_write(lab, x[rows], out[rows], inject[rows]),
            run_write_norm(lab, x[rows], out[rows], inject[rows], weight)[1],
        ]

    whole = everything(host_lab, slice(None))
    for lab in (host_lab.cut(points), host_lab.skewed(4), host_lab.skewed(12)):
        for same, expected in zip(everything(lab, slice(None)), whole, strict=True):
            np.testing.assert_array_equal(same, expected)
    last = slice(num_tokens - 1, None)
    for alone, expected in zip(everything(host_lab, last), whole, strict=True):
        np.testing.assert_array_equal(alone, expected[last])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("num_tokens", "num_streams", "size"), [(1, 4, 2560), (37, 4, 2560), (5, 3, 17), (2, 2, 1)]
)
def test_a_gpu_agrees_with_the_host_and_with_itself(
    host_lab: Lab, gpu_lab: Lab, num_tokens: int, num_streams: int, size: int
) -> None:
    x = normal(1, num_tokens, num_streams, size, scale=3.0)
    weight = normal(2, num_streams * size)
    gate, normed = (normal(i, num_tokens, num_streams * size, scale=9.0) for i in (3, 4))
    out, inject = normal(5, num_tokens, size), normal(6, num_tokens, num_streams, scale=9.0)

    def everything(lab: Lab, part: slice) -> list[Floats]:
        return [
            run_norm(lab, x[part], weight),
            run_silu(lab, gate[part], num_streams),
            run_mix(lab, gate[part], normed[part], num_streams),
            run_write(lab, x[part], out[part], inject[part]),
            *run_write_norm(lab, x[part], out[part], inject[part], weight),
        ]

    gpu, last = everything(gpu_lab, slice(None)), slice(num_tokens - 1, None)
    for actual, expected in zip(gpu, everything(host_lab, slice(None)), strict=True):
        assert_close(actual, expected)
    for alone, expected in zip(everything(gpu_lab, last), gpu, strict=True):
        np.testing.assert_array_equal(alone, expected[last])


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2560, 37])
def test_a_gpu_also_writes_what_products_read(gpu_lab: Lab, size: int) -> None:
    lab, x, weight = gpu_lab, normal(1, 9, 4, size), normal(2, 4 * size, scale=1e5)
    gate, out, inject = normal(3, 9, 4 * size), normal(4, 9, size), normal(5, 9, 4)

    def rounded(values: Tensor) -> NDArray[np.float16]:
        halves = lab.empty(values.shape, np.float16)
        round_rows(lab.stream, values, halves)
        return lab.get(halves)

    normed, mixed = lab.empty((9, 4 * size)), lab.empty((9, size))
    wide, narrow = lab.empty(normed.shape, np.float16), lab.empty(mixed.shape, np.float16)
    streams, norm = lab.put(x), lab.put(weight)
    stream_norm(lab.stream, streams, norm, EPS, normed, wide)
    np.testing.assert_array_equal(lab.get(wide), rounded(normed))
    stream_mix(lab.stream, lab.put(gate), normed, mixed, narrow)
    np.testing.assert_array_equal(lab.get(narrow), rounded(mixed))
    output, shares = lab.put(out), lab.put(inject)
    stream_write_norm(lab.stream, streams, output, shares, norm, EPS, normed, wide)
    np.testing.assert_array_equal(lab.get(wide), rounded(normed))


def test_a_stream_of_zeros_stays_zero(lab: Lab) -> None:
    x = np.zeros((2, 3, 17), np.float32)
    x[1, 2] = 1.0
    normed = run_norm(lab, x, np.ones(51, np.float32))
    assert not normed[0].any()
    assert not normed[1, :34].any()
    assert_close(normed[1, 34:], np.ones(17, np.float32))


def test_large_launches_are_shared_by_threads_with_the_same_result(lab: Lab) -> None:
    x, weight = normal(1, 300, 4, 256), normal(2, 1024)
    gate = normal(3, 300, 1024)
    normed = run_norm(lab, x, weight)
    np.testing.assert_array_equal(normed[250:251], run_norm(lab, x[250:251], weight))
    assert_close(normed, STREAM_NORM.reference(x, weight, EPS))
    assert_close(run_mix(lab, gate, normed, 4), STREAM_MIX.reference(gate, normed, 4))


def test_wrong_shapes_are_refused_by_name(lab: Lab) -> None:
    x, flat = lab.empty((2, 3, 8)), lab.empty((2, 24))
    with pytest.raises(ShapeError, match=r"weight: expected float32 \[24\], got float32 \[23\]"):
        stream_norm(lab.stream, x, lab.empty((23,)), EPS, flat)
    with pytest.raises(ShapeError, match="low: expected 2 extents"):
        lowrank_silu(lab.stream, x, 3)
    with pytest.raises(ShapeError, match="stream_mix"):
        stream_mix(lab.stream, flat, flat, lab.empty((2, 7)))
    with pytest.raises(ShapeError, match="inject: expected float32"):
        stream_write(lab.stream, x, lab.empty((2, 8)), lab.empty((2, 3), np.int32))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("qtype", "rank", "num_tokens", "num_streams", "size"),
    [
        (QuantType.Q8_0, 320, 1, 4, 2560),
        (QuantType.Q8_0, 32, 1, 4, 256),
        (QuantType.Q8_0, 32, 9, 4, 320),
        (QuantType.Q6_K, 20, 3, 2, 128),
        (QuantType.BF16, 8, 32, 4, 33),
        (QuantType.F32, 8, 1, 4, 256),
    ],
)
def test_an_inject_beside_a_product_has_the_bits_of_one(
    gpu_lab: Lab, qtype: QuantType, rank: int, num_tokens: int, num_streams: int, size: int
) -> None:
    stream, width = gpu_lab.stream, num_streams * size
    packed = gpu_lab.put(packed_rows(QuantType.F32, num_streams, width, 1))
    weight = Weight(packed, QuantType.F32, num_streams, width)
    down = Weight(gpu_lab.put(packed_rows(qtype, rank, width, 2)), qtype, rank, width)
    normed = gpu_lab.put(normal(3, num_tokens, width))
    assert can_inject_beside(stream, normed, weight)
    parts = gpu_lab.empty((inject_parts(width), num_tokens, num_streams))
    low, alone = (gpu_lab.empty((num_tokens, rank)) for _ in range(2))
    matmul_inject(stream, normed, down, low, weight, parts)
    matmul(stream, normed, down, alone)
    np.testing.assert_array_equal(gpu_lab.get(low), gpu_lab.get(alone))
    whole = gpu_lab.empty((num_tokens, num_streams))
    matmul(stream, normed, weight, whole)
    x, out = normal(4, num_tokens, num_streams, size), gpu_lab.put(normal(5, num_tokens, size))
    norm, written = gpu_lab.put(normal(6, width)), []
    for inject in (parts, whole):
        once, twice, after = gpu_lab.put(x), gpu_lab.put(x), gpu_lab.empty((num_tokens, width))
        stream_write(stream, once, out, inject)
        stream_write_norm(stream, twice, out, inject, norm, EPS, after)
        written.append([gpu_lab.get(each) for each in (once, twice, after)])
    for own, expected in zip(*written, strict=True):
        np.testing.assert_array_equal(own, expected)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("qtype", "rank", "num_tokens", "num_streams", "size"),
    [
        (QuantType.Q8_0, 320, 1, 4, 2560),
        (QuantType.Q8_0, 320, 9, 4, 320),
        (QuantType.Q8_0, 96, 3, 2, 104),
        (QuantType.Q6_K, 512, 2, 8, 64),
        (QuantType.BF16, 64, 8, 4, 36),
        (QuantType.F32, 64, 1, 4, 256),
        (QuantType.IQ3_XXS, 2560, 32, 4, 32),
    ],
)
def test_a_mix_of_gates_as_they_are_made_has_the_bits_of_the_launches(
    gpu_lab: Lab, qtype: QuantType, rank: int, num_tokens: int, num_streams: int, size: int
) -> None:
    stream, width = gpu_lab.stream, num_streams * size
    up = Weight(gpu_lab.put(packed_rows(qtype, width, rank, 1)), qtype, width, rank)
    low, normed = (gpu_lab.put(normal(s, num_tokens, n)) for s, n in ((2, rank), (3, width)))
    gate, mixed, alone = (gpu_lab.empty((num_tokens, n)) for n in (width, size, size))
    assert can_mix_beside(stream, low, num_streams, up)
    matmul_silu_mix(stream, low, num_streams, up, normed, mixed)
    matmul_silu(stream, low, num_streams, up, gate)
    stream_mix(stream, gate, normed, alone)
    np.testing.assert_array_equal(gpu_lab.get(mixed), gpu_lab.get(alone))


@pytest.mark.gpu
def test_columns_that_tiles_would_cut_are_mixed_by_themselves(gpu_lab: Lab) -> None:
    up = Weight(gpu_lab.put(packed_rows(QuantType.Q8_0, 132, 32, 1)), QuantType.Q8_0, 132, 32)
    assert not can_mix_beside(gpu_lab.stream, gpu_lab.empty((1, 32)), 4, up)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("qtype", "rank", "num_streams", "size", "has_inject"),
    [
        (QuantType.Q8_0, 320, 4, 2560, True),
        (QuantType.Q8_0, 320, 4, 2560, False),
        (QuantType.Q6_K, 256, 2, 256, True),
        (QuantType.Q8_0, 32, 4, 256, True),
        (QuantType.BF16, 320, 2, 3072, True),
        (QuantType.F32, 8, 6, 96, True),
    ],
)
def test_a_read_that_norms_the_streams_has_the_bits_of_the_launches(
    gpu_lab: Lab, qtype: QuantType, rank: int, num_streams: int, size: int, has_inject: bool
) -> None:
    lab, width = gpu_lab, num_streams * size
    down = Weight(lab.put(packed_rows(qtype, rank, width, 1)), qtype, rank, width)
    packed = lab.put(packed_rows(QuantType.F32, num_streams, width, 2))
    inject = Weight(packed, QuantType.F32, num_streams, width) if has_inject else None
    x, norm = lab.put(normal(3, 1, num_streams, size)), lab.put(normal(4, width))
    shape = (inject_parts(width), 1, num_streams)
    (normed, low, parts), alone = (
        [lab.empty(each) for each in ((1, width), (1, rank), shape)] for _ in range(2)
    )
    assert can_norm_beside(lab.stream, x, norm, down)
    read_few(lab.stream, x, norm, EPS, normed, down, low, inject, parts if has_inject else None)
    stream_norm(lab.stream, x, norm, EPS, alone[0])
    if inject is None:
        matmul(lab.stream, alone[0], down, alone[1])
    else:
        matmul_inject(lab.stream, alone[0], down, alone[1], inject, alone[2])
        np.testing.assert_array_equal(lab.get(parts), lab.get(alone[2]))
    np.testing.assert_array_equal(lab.get(normed), lab.get(alone[0]))
    np.testing.assert_array_equal(lab.get(low), lab.get(alone[1]))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("qtype", "cols", "dim", "num_streams", "size", "parts"),
    [
        (QuantType.Q8_0, 6144, 128, 4, 2560, 40),
        (QuantType.Q5_K, 512, 0, 4, 2560, 40),
        (QuantType.Q6_K, 256, 32, 2, 36, 0),
        (QuantType.F32, 96, 0, 3, 20, 7),
    ],
)
def test_a_product_that_is_written_to_the_streams_has_the_bits_of_the_launches(
    gpu_lab: Lab, qtype: QuantType, cols: int, dim: int, num_streams: int, size: int, parts: int
) -> None:
    lab = gpu_lab
    weight = Weight(lab.put(packed_rows(qtype, size, cols, 1)), qtype, size, cols)
    own, z = lab.put(normal(2, 1, cols)), lab.put(normal(3, 1, cols))
    inject = lab.put(normal(5, *((parts,) if parts else ()), 1, num_streams))
    x, expected = (lab.put(normal(6, 1, num_streams, size)) for _ in range(2))
    out, write = lab.empty((1, size)), StreamWrite(x, inject)
    assert can_write_beside(lab.stream, write)
    if dim:
        heads = HeadNorm(z, lab.put(normal(4, dim)), EPS)
        matmul_write(lab.stream, own, weight, write, heads)
        matmul_normed(lab.stream, own, *heads, weight, out)
    else:
        matmul_write(lab.stream, own, weight, write)
        matmul(lab.stream, own, weight, out)
    stream_write(lab.stream, expected, out, inject)
    np.testing.assert_array_equal(lab.get(x), lab.get(expected))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("top_k", "num_streams", "size", "parts"), [(10, 4, 2560, 40), (3, 2, 36, 0), (11, 8, 260, 24)]
)
def test_a_sum_of_experts_that_is_written_has_the_bits_of_the_launches(
    gpu_lab: Lab, top_k: int, num_streams: int, size: int, parts: int
) -> None:
    lab = gpu_lab
    order = np.random.default_rng(0).permutation(top_k).astype(np.int32)
    operands = CombineOperands(
        lab.put(normal(1, top_k, size)),
        lab.put(order.reshape(1, top_k)),
        lab.put(normal(2, 1, top_k)),
        lab.put(normal(3, 1, size)),
        lab.put(normal(4, 1, 1)),
    )
    inject = lab.put(normal(5, *((parts,) if parts else ()), 1, num_streams))
    x, expected = (lab.put(normal(6, 1, num_streams, size)) for _ in range(2))
    out, write = lab.empty((1, size)), StreamWrite(x, inject)
    assert can_write_beside(lab.stream, write)
    combine_write(lab.stream, operands, write)
    combine(lab.stream, *operands, out)
    stream_write(lab.stream, expected, out, inject)
    np.testing.assert_array_equal(lab.get(x), lab.get(expected))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("num_tokens", "num_streams", "size", "parts"),
    [(1, 4, 2560, 40), (3, 2, 64, 0), (32, 4, 100, 7), (2, 2, 3072, 40), (70, 4, 2560, 40)],
)
def test_writes_of_few_tokens_have_the_bits_of_those_of_many(
    gpu_lab: Lab, num_tokens: int, num_streams: int, size: int, parts: int
) -> None:
    lab, top_k, width = gpu_lab, 5, num_streams * size
    order = np.random.default_rng(0).permutation(num_tokens * top_k).astype(np.int32)
    operands = CombineOperands(
        lab.put(normal(1, num_tokens * top_k, size)),
        lab.put(order.reshape(num_tokens, top_k)),
        lab.put(normal(2, num_tokens, top_k)),
        lab.put(normal(3, num_tokens, size)),
        lab.put(normal(4, num_tokens, 1)),
    )
    shape = (num_tokens, num_streams)
    inject, norm = (
        lab.put(normal(5, *((parts,) if parts else ()), *shape)),
        lab.put(normal(6, width)),
    )
    streams = normal(7, *shape, size)
    x, alone, expected = (lab.put(streams) for _ in range(3))
    normed, own, after = (lab.empty((num_tokens, width)) for _ in range(3))
    assert can_write_few(lab.stream, x, inject, norm)
    combine_write_norm(lab.stream, operands, x, inject, norm, EPS, normed)
    out = lab.empty((num_tokens, size))
    combine(lab.stream, *operands, out)
    write_norm_few(lab.stream, alone, out, inject, norm, EPS, own)
    stream_write_norm(lab.stream, expected, out, inject, norm, EPS, after)
    again, rest, halves, wanted = (
        *(lab.put(streams) for _ in range(2)),
        *(lab.empty((num_tokens, width), np.float16) for _ in range(2)),
    )
    round_rows(lab.stream, after, wanted)
    for written, normalised in ((x, normed), (alone, own)):
        np.testing.assert_array_equal(lab.get(written), lab.get(expected))
        np.testing.assert_array_equal(lab.get(normalised), lab.get(after))
    combine_write_norm(lab.stream, operands, again, inject, norm, EPS, normed, halves)
    np.testing.assert_array_equal(lab.get(halves), lab.get(wanted))
    write_norm_few(lab.stream, rest, out, inject, norm, EPS, own, halves)
    np.testing.assert_array_equal(lab.get(halves), lab.get(wanted))
    for written, normalised in ((again, normed), (rest, own)):
        np.testing.assert_array_equal(lab.get(written), lab.get(expected))
        np.testing.assert_array_equal(lab.get(normalised), lab.get(after))
