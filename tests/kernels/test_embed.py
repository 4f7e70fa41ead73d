"""Token embedding against plain numpy."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from strata_cli.engine.kernels.embed import EMBED_STREAMS, embed_streams
from strata_cli.engine.kernels.ngram import gather_rows
from strata_cli.engine.kernels.weight import Weight
from strata_cli.engine.model.quants import BLOCK, QuantType, dequantize
from strata_cli.errors import ShapeError
from tests.kernels.lab import Lab
from tests.kernels.packed import packed_rows

VOCABULARY, WIDTH = 50, 64


def table(lab: Lab, qtype: QuantType) -> Weight:
    packed = packed_rows(qtype, VOCABULARY, WIDTH, 3)
    return Weight(lab.put(packed), qtype, VOCABULARY, WIDTH)


def embedded(
    lab: Lab, ids: NDArray[np.int32], qtype: QuantType, streams: int
) -> NDArray[np.float32]:
    x = lab.empty((len(ids), streams, WIDTH))
    embed_streams(lab.stream, lab.put(ids), table(lab, qtype), x)
    return lab.get(x)


@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize("qtype", [QuantType.F32, QuantType.BF16, QuantType.Q4_0])
def test_every_stream_gets_the_decoded_row(lab: Lab, qtype: QuantType, streams: int) -> None:
    ids = np.array([0, 49, 7, 7], np.int32)
    packed = packed_rows(qtype, VOCABULARY, WIDTH, 3)
    expected = EMBED_STREAMS.reference(ids, packed, qtype, streams, WIDTH)
    np.testing.assert_array_equal(embedded(lab, ids, qtype, streams), expected)


def test_bits_do_not_depend_on_the_cut(host_lab: Lab) -> None:
    ids = np.arange(40, dtype=np.int32)
    np.testing.assert_array_equal(
        embedded(host_lab.cut([0.1, 0.5, 0.55]), ids, QuantType.Q4_0, 2),
        embedded(host_lab, ids, QuantType.Q4_0, 2),
    )


def test_no_token_is_no_work(lab: Lab) -> None:
    assert embedded(lab, np.empty(0, np.int32), QuantType.F32, 2).shape == (0, 2, WIDTH)


def test_extents_and_types_that_do_not_fit_are_named(lab: Lab) -> None:
    weight = table(lab, QuantType.Q4_0)
    with pytest.raises(ShapeError, match="embed_streams x"):
        embed_streams(lab.stream, lab.empty((3,), np.int32), weight, lab.empty((2, 2, WIDTH)))
    with pytest.raises(ShapeError, match="embed_streams ids"):
        embed_streams(lab.stream, lab.empty((3,), np.int64), weight, lab.empty((3, 2, WIDTH)))


@pytest.mark.gpu
@pytest.mark.parametrize("qtype", QuantType, ids=lambda qtype: qtype.name)
def test_every_type_decodes_exactly(gpu_lab: Lab, qtype: QuantType) -> None:
    width = max(BLOCK[qtype].weights, 160 if BLOCK[qtype].weights <= 32 else 0)
    for columns in (width, 3 * width):
        packed = packed_rows(qtype, 9, columns, 5)
        ids, rows = np.array([8, 0, 3], np.int32), np.array([[8, 1], [0, 7]], np.int64)
        weight = Weight(gpu_lab.put(packed), qtype, 9, columns)
        x, gathered = gpu_lab.empty((3, 2, columns)), gpu_lab.empty((2, 2 * columns))
        embed_streams(gpu_lab.stream, gpu_lab.put(ids), weight, x)
        gather_rows(gpu_lab.stream, gpu_lab.put(rows), weight, gathered)
        decoded = dequantize(qtype, packed, columns)
        np.testing.assert_array_equal(gpu_lab.get(x), decoded[ids][:, None].repeat(2, 1))
        np.testing.assert_array_equal(gpu_lab.get(gathered), decoded[rows].reshape(2, -1))
