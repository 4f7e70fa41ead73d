"""Quantized matrix products against plain numpy, and that an output's bits are its own."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from strata_cli.engine.device import open_device
from strata_cli.engine.device.base import Tensor
from strata_cli.engine.kernels import matmul as products
from strata_cli.engine.kernels.choice import FEW_TOKENS
from strata_cli.engine.kernels.grouped_matmul import GROUPED_MATMUL, grouped_matmul
from strata_cli.engine.kernels.matmul import MATMUL, ROUND_ROWS, matmul, round_rows
from strata_cli.engine.kernels.matmul_items import ROW_TILE
from strata_cli.engine.kernels.weight import Weight, WeightLayout
from strata_cli.engine.model.quants import BLOCK, QuantType, dequantize
from strata_cli.errors import ShapeError
from tests.kernels.lab import Lab, normal
from tests.kernels.packed import packed_rows

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
FLOAT_TYPES = (QuantType.F32, QuantType.F16, QuantType.BF16)


def run_dense(
    lab: Lab, x: Floats, packed: Bytes, qtype: QuantType, is_rounded: bool = False
) -> Floats:
    """With rounded activations a GPU multiplies many rows with another function."""
    weight = Weight(lab.put(packed), qtype, len(packed), x.shape[1])
    out, activations = lab.empty((len(x), len(packed))), lab.put(x)
    matmul(lab.stream, activations, weight, out, rounded(lab, activations) if is_rounded else None)
    return lab.get(out)


def rounded(lab: Lab, x: Tensor) -> Tensor:
    halves = lab.empty(x.shape, np.float16)
    round_rows(lab.stream, x, halves)
    return halves


def run_grouped(
    lab: Lab,
    x: Floats,
    experts: Sequence[Bytes | None],
    qtype: QuantType,
    row_of: Sequence[int],
    expert_start: Sequence[int],
    offset_bytes: int = 0,
    is_rounded: bool = False,
) -> Floats:
    """Experts lie offset_bytes into blobs of their own; a missing one has no memory at all."""
    blobs, addresses = [], []
    for packed in experts:
        padded = None if packed is None else np.pad(packed.ravel(), (offset_bytes, 0))
        blobs.append(None if padded is None else lab.put(padded))
        addresses.append(0 if blobs[-1] is None else blobs[-1].address)
    rows = next(len(packed) for packed in experts if packed is not None)
    out, activations = lab.empty((len(row_of), rows)), lab.put(x)
    grouped_matmul(
        lab.stream,
        activations,
        lab.put(np.array(addresses, np.int64)),
        WeightLayout(qtype, rows, x.shape[1], offset_bytes),
        lab.put(np.array(row_of, np.int32)),
        lab.put(np.array(expert_start, np.int32)),
        out,
        rounded(lab, activations) if is_rounded else None,
    )
    return lab.get(out)


def assert_product(lab: Lab, actual: Floats, x: Floats, packed: Bytes, qtype: QuantType) -> None:
    """Within the rounding of what a device multiplies: float32, or f16 where blocks have threads.

    Relative to the sum of magnitudes, because any sum may cancel. A GPU rounds a quantized weight
    twice and an activation once, each by at most 2 ** -11, which mostly cancel; where a row is a
    single weight nothing does, but then a float weight is exact. Tensor cores cut off what a
    float32 sum cannot hold instead of rounding it: a hundred times towards zero in a sum of
    float32 products whose signs agree.
    """
    weights = dequantize(qtype, packed, x.shape[1]).astype(np.float64)
    expected = x.astype(np.float64) @ weights.T
    sizes = np.abs(x).astype(np.float64) @ np.abs(weights).T
    has_tensor_cores = lab.stream.shared_bytes > 0
    worst = 2.0**-11 if qtype is not QuantType.F32 else 6e-6
    bound = worst * 1.01 if has_tensor_cores else 2e-6
    assert (np.abs(actual - expected) <= bound * sizes + 1e-30).all()


@settings(max_examples=25)
@given(
    qtype=st.sampled_from(FLOAT_TYPES),
    tokens=st.integers(1, 20),
    rows=st.integers(1, 40),
    cols=st.integers(1, 100),
    seed=st.integers(0, 99),
)
def test_any_extents_multiply(
    lab: Lab, qtype: QuantType, tokens: int, rows: int, cols: int, seed: int
) -> None:
    x, packed = normal(seed, tokens, cols), packed_rows(qtype, rows, cols, seed)
    assert_product(lab, run_dense(lab, x, packed, qtype), x, packed, qtype)


@pytest.mark.parametrize("tokens", [1, 11])
@pytest.mark.parametrize("qtype", [QuantType.Q8_0, QuantType.Q4_0, QuantType.IQ3_S])
def test_quantized_rows_multiply(lab: Lab, qtype: QuantType, tokens: int) -> None:
    x, packed = normal(1, tokens, 512), packed_rows(qtype, 37, 512, 2)
    assert_product(lab, run_dense(lab, x, packed, qtype), x, packed, qtype)


def test_the_reference_is_the_decoded_product() -> None:
    x, packed = normal(1, 3, 64), packed_rows(QuantType.Q4_0, 5, 64, 2)
    expected = x.astype(np.float64) @ dequantize(QuantType.Q4_0, packed, 64).T
    np.testing.assert_allclose(MATMUL.reference(x, packed, QuantType.Q4_0, 5), expected, rtol=1e-5)


def test_no_token_is_no_work(lab: Lab) -> None:
    packed = packed_rows(QuantType.Q8_0, 4, 32, 0)
    assert run_dense(lab, np.empty((0, 32), np.float32), packed, QuantType.Q8_0).shape == (0, 4)


def test_a_tokens_bits_do_not_depend_on_the_batch(lab: Lab) -> None:
    x, packed = normal(3, 300, 96), packed_rows(QuantType.Q8_0, 43, 96, 4)
    whole = run_dense(lab, x, packed, QuantType.Q8_0, is_rounded=True)
    for first, last in ((0, 1), (7, 10), (100, 108), (41, 300)):
        part = run_dense(lab, x[first:last], packed, QuantType.Q8_0)
        np.testing.assert_array_equal(part, whole[first:last])


@pytest.mark.parametrize("qtype", [*FLOAT_TYPES, QuantType.Q4_0])
def test_a_columns_bits_do_not_depend_on_the_other_rows(lab: Lab, qtype: QuantType) -> None:
    x, packed = normal(3, 9, 96), packed_rows(qtype, 43, 96, 4)
    whole = run_dense(lab, x, packed, qtype)
    for first, last in ((0, 1), (3, 5), (17, 43)):
        part = run_dense(lab, x, packed[first:last], qtype)
        np.testing.assert_array_equal(part, whole[:, first:last])


def test_neighbours_that_are_not_numbers_stay_alone(lab: Lab) -> None:
    x, packed = normal(3, 9, 99), packed_rows(QuantType.F32, 9, 99, 4)
    clean = run_dense(lab, x, packed, QuantType.F32)
    x[4] = np.nan
    mixed = run_dense(lab, x, packed, QuantType.F32)
    assert np.isnan(mixed[4]).all()
    np.testing.assert_array_equal(np.delete(mixed, 4, 0), np.delete(clean, 4, 0))


@settings(max_examples=10)
@given(points=st.lists(st.floats(0, 1), max_size=4), tokens=st.sampled_from([1, 5, 300]))
def test_bits_do_not_depend_on_the_cut(host_lab: Lab, points: list[float], tokens: int) -> None:
    x, packed = normal(5, tokens, 64), packed_rows(QuantType.Q4_0, 50, 64, 6)
    whole = run_dense(host_lab, x, packed, QuantType.Q4_0)
    pieces = run_dense(host_lab.cut(points), x, packed, QuantType.Q4_0)
    np.testing.assert_array_equal(pieces, whole)


def test_an_item_writes_its_own_row_tile_only() -> None:
    x, packed = normal(5, 5, 64), packed_rows(QuantType.Q4_0, 50, 64, 6)
    out = np.full((5, 50), np.nan, np.float32)
    assert MATMUL.bind is not None
    MATMUL.host(1, 2, *MATMUL.bind(x, packed, out, QuantType.Q4_0, 5, 50, 64))
    written = np.zeros(50, bool)
    written[ROW_TILE : 2 * ROW_TILE] = True
    np.testing.assert_array_equal(~np.isnan(out), np.tile(written, (5, 1)))


def test_bits_do_not_depend_on_the_threads(host_lab: Lab) -> None:
    x, packed = normal(5, 64, 512), packed_rows(QuantType.Q4_0, 700, 512, 6)
    with open_device("host", threads=3) as device:
        shared = run_dense(Lab(device, device.stream("test")), x, packed, QuantType.Q4_0)
    np.testing.assert_array_equal(run_dense(host_lab, x, packed, QuantType.Q4_0), shared)


def test_bits_do_not_depend_on_where_bytes_lie(lab: Lab) -> None:
    x, packed = normal(7, 6, 160), packed_rows(QuantType.Q8_0, 21, 160, 8)
    usual = run_dense(lab, x, packed, QuantType.Q8_0)
    np.testing.assert_array_equal(run_dense(lab.skewed(12), x, packed, QuantType.Q8_0), usual)
    for skew in (1, 7):
        data = lab.skewed(skew).put(packed)
        out = lab.empty((6, 21))
        matmul(lab.stream, lab.put(x), Weight(data, QuantType.Q8_0, 21, 160), out)
        np.testing.assert_array_equal(lab.get(out), usual)


ROUTED = [0, 3, 3, 4, 16, 16, 40]  # experts 1 and 4 empty, one with a single pair, one with many


@pytest.mark.parametrize("qtype", [QuantType.F32, QuantType.Q4_0])
def test_grouped_products_follow_the_routing(lab: Lab, qtype: QuantType) -> None:
    x = normal(1, 13, 64)
    experts = [packed_rows(qtype, 35, 64, seed) for seed in range(6)]
    row_of = np.random.default_rng(0).integers(0, 13, 40).astype(np.int32)
    actual = run_grouped(lab, x, experts, qtype, row_of.tolist(), ROUTED, offset_bytes=20)
    for expert, (first, last) in enumerate(pairwise(ROUTED)):
        assert_product(lab, actual[first:last], x[row_of[first:last]], experts[expert], qtype)


def test_the_grouped_reference_is_a_product_per_expert() -> None:
    x, row_of = normal(1, 3, 64), np.array([2, 0, 2], np.int32)
    experts = [packed_rows(QuantType.Q4_0, 5, 64, seed) for seed in range(3)]
    actual = GROUPED_MATMUL.reference(x, experts, QuantType.Q4_0, 5, row_of, np.array([0, 2, 2, 3]))
    first = MATMUL.reference(x[row_of[:2]], experts[0], QuantType.Q4_0, 5)
    last = MATMUL.reference(x[row_of[2:]], experts[2], QuantType.Q4_0, 5)
    np.testing.assert_array_equal(actual, np.concatenate([first, last]))


def test_a_pair_has_the_bits_of_the_dense_product(lab: Lab) -> None:
    x = normal(1, 13, 96)
    experts: list[Bytes | None] = [packed_rows(QuantType.Q8_0, 35, 96, seed) for seed in range(6)]
    experts[1] = experts[4] = None  # an expert without pairs is not even in memory
    row_of = np.random.default_rng(0).integers(0, 13, 40).tolist()
    pairs = run_grouped(lab, x, experts, QuantType.Q8_0, row_of, ROUTED)
    for expert, (first, last) in enumerate(pairwise(ROUTED)):
        packed = experts[expert]
        if packed is not None:
            dense = run_dense(lab, x, packed, QuantType.Q8_0)
            np.testing.assert_array_equal(pairs[first:last], dense[row_of[first:last]])


def run_parts(
    lab: Lab,
    x: Floats,
    experts: Sequence[Bytes | None],
    qtype: QuantType,
    row_of: Sequence[int],
    starts: Sequence[int],
    parts: Sequence[range],
    is_rounded: bool = False,
) -> Floats:
    """The experts in ranges, each by a launch of its own; rows that none writes are zero."""
    data = [None if packed is None else lab.put(packed) for packed in experts]
    addresses = np.array([0 if blob is None else blob.address for blob in data], np.int64)
    rows = next(len(packed) for packed in experts if packed is not None)
    out, activations = lab.put(np.zeros((len(row_of), rows), np.float32)), lab.put(x)
    blobs, start = lab.put(addresses), lab.put(np.array(starts, np.int32))
    for part in parts:
        grouped_matmul(
            lab.stream,
            activations,
            blobs.rows(part.start, part.stop),
            WeightLayout(qtype, rows, x.shape[1], 0),
            lab.put(np.array(row_of, np.int32)),
            start.rows(part.start, part.stop + 1),
            out,
            rounded(lab, activations) if is_rounded else None,
            starts[part.stop] - starts[part.start],
        )
    return lab.get(out)


PARTS = [range(2), range(2, 3), range(3, 4), range(5, 6)]


def test_experts_in_ranges_write_their_own_pairs_alone(lab: Lab) -> None:
    x, qtype = normal(1, 13, 64), QuantType.Q4_0
    experts: list[Bytes | None] = [packed_rows(qtype, 35, 64, seed) for seed in range(6)]
    row_of = np.random.default_rng(0).integers(0, 13, ROUTED[-1]).tolist()
    whole = run_grouped(lab, x, experts, qtype, row_of, ROUTED)
    parts = run_parts(lab, x, experts, qtype, row_of, ROUTED, PARTS)
    np.testing.assert_array_equal(parts, whole)
    some = run_parts(lab, x, experts, qtype, row_of, ROUTED, [range(1, 3)])
    whole[:3], whole[4:] = 0, 0
    np.testing.assert_array_equal(some, whole)


@settings(max_examples=10)
@given(points=st.lists(st.floats(0, 1), max_size=4))
def test_grouped_bits_do_not_depend_on_the_cut(host_lab: Lab, points: list[float]) -> None:
    x = normal(1, 13, 64)
    experts = [packed_rows(QuantType.Q4_0, 70, 64, seed) for seed in range(6)]
    row_of = np.random.default_rng(0).integers(0, 13, 40).tolist()
    whole = run_grouped(host_lab, x, experts, QuantType.Q4_0, row_of, ROUTED)
    pieces = run_grouped(host_lab.cut(points), x, experts, QuantType.Q4_0, row_of, ROUTED)
    np.testing.assert_array_equal(pieces, whole)


def test_no_pair_is_no_work(lab: Lab) -> None:
    experts = [packed_rows(QuantType.Q8_0, 4, 32, 0)]
    out = run_grouped(lab, normal(0, 3, 32), experts, QuantType.Q8_0, [], [0, 0])
    assert out.shape == (0, 4)


def weight_of(lab: Lab, qtype: QuantType, rows: int, cols: int) -> Weight:
    return Weight(lab.put(packed_rows(qtype, rows, cols, 0)), qtype, rows, cols)


def test_extents_that_do_not_fit_are_named(lab: Lab) -> None:
    weight = weight_of(lab, QuantType.Q8_0, 5, 32)
    with pytest.raises(ShapeError, match=r"matmul x.*\[2, 32\].*\[2, 31\]"):
        matmul(lab.stream, lab.empty((2, 31)), weight, lab.empty((2, 5)))
    with pytest.raises(ShapeError, match=r"matmul out.*\[2, 5\].*\[2, 4\]"):
        matmul(lab.stream, lab.empty((2, 32)), weight, lab.empty((2, 4)))
    with pytest.raises(ShapeError, match=r"Q8_0 matrix of 5 x 32 .* needs 170 bytes, got 136"):
        Weight(weight.data.rows(0, 4), QuantType.Q8_0, 5, 32)


@pytest.mark.parametrize("wrong", ["x", "blobs", "row_of", "expert_start", "out"])
def test_grouped_extents_that_do_not_fit_are_named(lab: Lab, wrong: str) -> None:
    shapes: dict[str, tuple[tuple[int, ...], type]] = {
        "x": ((3, 32), np.float32),
        "blobs": ((2,), np.int64),
        "row_of": ((4,), np.int32),
        "expert_start": ((3,), np.int32),
        "out": ((4, 5), np.float32),
    }
    tensors: dict[str, Tensor] = {}
    for name, (shape, dtype) in shapes.items():
        grown = (*shape[:-1], shape[-1] + 1)
        as_wrong = lab.empty(shape, np.int16) if name == "row_of" else lab.empty(grown, dtype)
        tensors[name] = as_wrong if name == wrong else lab.empty(shape, dtype)
    layout = WeightLayout(QuantType.Q8_0, 5, 32, 0)
    x, blobs, row_of, start, out = tensors.values()
    with pytest.raises(ShapeError, match="grouped_matmul"):
        grouped_matmul(lab.stream, x, blobs, layout, row_of, start, out)


def shapes_of(qtype: QuantType) -> list[tuple[int, int]]:
    """Rows and columns that cut a type in every way: whole and partial tiles, long and short lanes,
    one slice and several."""
    block = BLOCK[qtype].weights
    cols = [block, 5 * block] if block > 32 else [block, 160, 320, 640]
    return [(1, cols[0]), (37, cols[-1]), (70, 5 * 256), (4099, 256)]


@pytest.mark.gpu
@pytest.mark.parametrize("qtype", QuantType, ids=lambda qtype: qtype.name)
def test_few_and_many_rows_give_the_same_bits(
    gpu_lab: Lab, monkeypatch: pytest.MonkeyPatch, qtype: QuantType
) -> None:
    # Where many rows have the function of few for its speed, they shall have that of many here.
    monkeypatch.setattr(products, "few_is_faster", lambda _, tokens, **_more: tokens <= FEW_TOKENS)
    products.forget_choices()
    for seed, (rows, cols) in enumerate(shapes_of(qtype)):
        x, packed = normal(seed, 131, cols), packed_rows(qtype, rows, cols, seed)
        many = run_dense(gpu_lab, x, packed, qtype, is_rounded=True)
        assert_product(gpu_lab, many, x, packed, qtype)
        np.testing.assert_array_equal(run_dense(gpu_lab, x, packed, qtype), many)
        for first, last in ((0, 1), (5, 8), (60, 131)):
            part = run_dense(gpu_lab, x[first:last], packed, qtype, is_rounded=True)
            np.testing.assert_array_equal(part, many[first:last])


CROWDED = [0, 3, 3, 4, 16, 16, 216]  # the last expert has more than one tile of tokens


@pytest.mark.gpu
@pytest.mark.parametrize("qtype", QuantType, ids=lambda qtype: qtype.name)
def test_grouped_products_have_the_bits_of_dense_ones(gpu_lab: Lab, qtype: QuantType) -> None:
    rows, cols = shapes_of(qtype)[1]
    x = normal(1, 211, cols)
    experts: list[Bytes | None] = [packed_rows(qtype, rows, cols, seed) for seed in range(6)]
    experts[1] = experts[4] = None
    row_of = np.random.default_rng(0).integers(0, 211, CROWDED[-1]).tolist()
    few = run_grouped(gpu_lab, x, experts, qtype, row_of, CROWDED, 32)
    many = run_grouped(gpu_lab, x, experts, qtype, row_of, CROWDED, 32, is_rounded=True)
    np.testing.assert_array_equal(few, many)
    for is_rounded in (False, True):
        parts = run_parts(gpu_lab, x, experts, qtype, row_of, CROWDED, PARTS, is_rounded)
        np.testing.assert_array_equal(parts, many)
    for expert, (first, last) in enumerate(pairwise(CROWDED)):
        packed = experts[expert]
        if packed is not None:
            dense = run_dense(gpu_lab, x, packed, qtype)
            np.testing.assert_array_equal(few[first:last], dense[row_of[first:last]])


@pytest.mark.gpu
@pytest.mark.parametrize("cols", [320, 321])
def test_activations_round_to_the_nearest_half(gpu_lab: Lab, cols: int) -> None:
    x = normal(1, 7, cols, scale=1e3)
    x[3, :6] = 65519.0, 1e9, -1e9, np.inf, 1e-8, 6e-6
    activations = gpu_lab.put(x)
    halves = gpu_lab.get(rounded(gpu_lab, activations))
    np.testing.assert_array_equal(halves, ROUND_ROWS.reference(x))


@pytest.mark.gpu
def test_what_is_not_a_number_stays_in_its_row(gpu_lab: Lab) -> None:
    x, packed = normal(3, 70, 320), packed_rows(QuantType.Q8_0, 40, 320, 4)
    clean = run_dense(gpu_lab, x, packed, QuantType.Q8_0, is_rounded=True)
    x[4] = np.nan
    mixed = run_dense(gpu_lab, x, packed, QuantType.Q8_0, is_rounded=True)
    assert np.isnan(mixed[4]).all()
    np.testing.assert_array_equal(np.delete(mixed, 4, 0), np.delete(clean, 4, 0))


@pytest.mark.gpu
def test_experts_may_lie_in_host_memory(gpu_lab: Lab) -> None:
    x, qtype = normal(1, 5, 320), QuantType.IQ4_NL
    packed = packed_rows(qtype, 96, 320, 2)
    pinned = gpu_lab.device.allocate_pinned(packed.nbytes)
    assert pinned.host_bytes is not None
    pinned.host_bytes[:] = packed.ravel()
    out = gpu_lab.empty((5, 96))
    grouped_matmul(
        gpu_lab.stream,
        gpu_lab.put(x),
        gpu_lab.put(np.array([pinned.address], np.int64)),
        WeightLayout(qtype, 96, 320, 0),
        gpu_lab.put(np.arange(5, dtype=np.int32)),
        gpu_lab.put(np.array([0, 5], np.int32)),
        out,
    )
    np.testing.assert_array_equal(gpu_lab.get(out), run_dense(gpu_lab, x, packed, qtype))


@pytest.mark.gpu
def test_a_recorded_product_follows_the_routing_of_each_replay(gpu_lab: Lab) -> None:
    x, qtype = normal(1, 2, 320), QuantType.Q8_0
    experts: list[Bytes | None] = [packed_rows(qtype, 40, 320, seed) for seed in range(4)]
    blobs = [gpu_lab.put(packed) for packed in experts if packed is not None]
    addresses = gpu_lab.put(np.array([blob.address for blob in blobs], np.int64))
    row_of, start = gpu_lab.empty((4,), np.int32), gpu_lab.empty((5,), np.int32)
    activations, out = gpu_lab.put(x), gpu_lab.empty((4, 40))
    layout = WeightLayout(qtype, 40, 320, 0)
    with gpu_lab.stream.capture() as graph:
        grouped_matmul(gpu_lab.stream, activations, addresses, layout, row_of, start, out)
    for rows, starts in (([0, 1, 0, 1], [0, 1, 1, 2, 4]), ([1, 0, 0, 1], [0, 0, 2, 4, 4])):
        gpu_lab.stream.copy(row_of, gpu_lab.put(np.array(rows, np.int32)))
        gpu_lab.stream.copy(start, gpu_lab.put(np.array(starts, np.int32)))
        gpu_lab.stream.replay(graph)
        expected = run_grouped(gpu_lab, x, experts, qtype, rows, starts)
        np.testing.assert_array_equal(gpu_lab.get(out), expected)
