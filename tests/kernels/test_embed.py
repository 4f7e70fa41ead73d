"""Token embedding against plain numpy."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from strata_cli.engine.kernels.embed import EMBED_STREAMS, embed_streams
from strata_cli.engine.kernels.weight import Weight
from strata_cli.engine.model.quants import QuantType
from strata_cli.errors import ShapeError
from tests.kernels.lab import Lab
from tests.kernels.test_matmul import packed_rows

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
