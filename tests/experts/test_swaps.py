"""Swaps of experts in the cache: what is resident when, with which bytes, whatever interrupts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_cli.engine.device.base import Device, Stream, Tensor
from strata_cli.engine.device.host import HostDevice
from strata_cli.engine.device.transfer import download
from strata_cli.engine.experts.adapting import Swaps
from strata_cli.engine.experts.cache import EMPTY, NOT_RESIDENT
from strata_cli.engine.experts.store import ExpertStore
from strata_cli.engine.model.tensors import ModelFile
from strata_cli.errors import DeviceError, StateError
from tests.device.gates import held
from tests.experts.store_checks import Checker, open_store
from tests.experts.tiny_store import open_tiny

NUM_PAIRS = 24


@pytest.fixture
def store(model: ModelFile, device: Device, reads: Stream) -> Iterator[ExpertStore]:
    """Pairs 0 to 9 in slots 0 to 9."""
    with open_store(model, device, reads, ranking=np.arange(NUM_PAIRS)) as store:
        yield store


def swaps_of(*swaps: tuple[int, int]) -> Swaps:
    pairs, slots = zip(*swaps, strict=True)
    return Swaps(np.array(pairs, np.int64), np.array(slots, np.int64))


def test_a_new_pair_is_resident_when_it_has_landed(
    model: ModelFile, device: Device, reads: Stream, store: ExpertStore
) -> None:
    cache, checker = store.cache, Checker(model, device, reads, store)
    with held(device, store.copies):
        cache.swap(swaps_of((20, 3), (21, 0)))
        assert cache.land() == 0
        assert cache.num_coming == 2
        assert np.flatnonzero(cache.is_coming).tolist() == [20, 21]
        assert cache.pair_in[[0, 3]].tolist() == [EMPTY, EMPTY]
        assert cache.is_resident.reshape(-1)[[0, 3, 20, 21]].tolist() == [False] * 4
        checker.check()
    assert cache.land(waits=True) == 2
    assert cache.num_coming == 0
    assert cache.pair_in.tolist() == [21, 1, 2, 20, 4, 5, 6, 7, 8, 9]
    assert (cache.pair_in == cache.held).all()
    checker.check()
    assert cache.land(waits=True) == 0


def test_what_was_read_before_a_swap_is_not_overwritten_by_it(
    model: ModelFile, device: Device, reads: Stream, store: ExpertStore
) -> None:
    slot = Checker(model, device, reads, store).slots().rows(3, 4)
    copy = Tensor.over(device.allocate_pinned(store.slot_bytes), slot.shape, np.uint8)
    expected = download(device, reads, slot)
    with held(device, reads):
        reads.copy(copy, slot)
        store.cache.swap(swaps_of((20, 3)))
        time.sleep(0.02)  # a copy that did not wait would be done
        assert store.cache.land() == 0
    reads.synchronize()
    assert (copy.numpy() == expected).all()
    assert store.cache.land(waits=True) == 1


def test_large_rounds_land_bit_by_bit(
    model: ModelFile, device: Device, reads: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strata_cli.engine.experts.cache.SWAPS_TOGETHER", 2)
    with open_store(model, device, reads, ranking=np.arange(NUM_PAIRS)) as store:
        cache = store.cache
        cache.swap(swaps_of((20, 3), (21, 0), (22, 5), (23, 6), (19, 7)))
        store.copies.synchronize()
        assert cache.num_coming == 5
        assert cache.land() == 5
        Checker(model, device, reads, store).check()


def test_a_loan_and_a_fill_wait_for_swaps(
    model: ModelFile, device: Device, reads: Stream, store: ExpertStore
) -> None:
    cache, checker = store.cache, Checker(model, device, reads, store)
    cache.swap(swaps_of((20, 9), (21, 0)))
    with cache.lend(3 * store.slot_bytes) as loan:
        assert loan.pairs.tolist() == [7, 8, 20]
        assert cache.num_coming == 0
        reads.fill(loan.memory, 0xA5)
        with pytest.raises(StateError, match="lent"):
            cache.swap(swaps_of((22, 1)))
        checker.check()
    assert cache.pair_in.tolist() == [21, 1, 2, 3, 4, 5, 6, 7, 8, 20]
    cache.swap(swaps_of((22, 1)))
    cache.fill(np.arange(5))
    assert cache.held.tolist() == [0, 1, 2, 3, 4] + [EMPTY] * 5
    assert (cache.pair_in == cache.held).all()
    checker.check()


@pytest.mark.parametrize("at", ["_publish", "_fence", "enqueue", "record"])
@pytest.mark.parametrize("calls", [1, 2])
def test_an_interrupted_swap_is_mended(
    model: ModelFile,
    device: Device,
    reads: Stream,
    store: ExpertStore,
    monkeypatch: pytest.MonkeyPatch,
    at: str,
    calls: int,
) -> None:
    cache, checker = store.cache, Checker(model, device, reads, store)
    owner = {"enqueue": cache._uploader, "record": store.copies}.get(at, cache)
    work, left = getattr(owner, at), calls

    def interrupted(*args: Any) -> None:
        nonlocal left
        left -= 1
        if not left:
            raise KeyboardInterrupt
        work(*args)

    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(owner, at, interrupted)
        cache.swap(swaps_of((20, 3), (21, 0)))
        cache.land(waits=True)
    cache.mend()
    assert not cache.is_torn
    assert cache.num_coming == 0
    assert (cache.pair_in == cache.held).all()
    assert cache.pair_in.tolist() == [21, 1, 2, 20, 4, 5, 6, 7, 8, 9]
    checker.check()


def test_a_stale_swap_cannot_come_back(
    model: ModelFile, device: Device, reads: Stream, store: ExpertStore
) -> None:
    """A slot that is swapped again, or filled, before its first swap has landed."""
    cache, checker = store.cache, Checker(model, device, reads, store)
    with held(device, store.copies):
        cache.swap(swaps_of((20, 3)))
        cache.swap(swaps_of((21, 4)))
    cache.mend()
    cache.swap(swaps_of((3, 3)))
    cache.land(waits=True)
    assert cache.pair_in.tolist() == [0, 1, 2, 3, 21, 5, 6, 7, 8, 9]
    checker.check()


def test_a_failed_copy_is_an_error_and_its_pair_stays_outside(
    model: ModelFile,
    device: Device,
    reads: Stream,
    store: ExpertStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = store.cache

    def fail(_moves: object) -> None:
        raise DeviceError("the link is gone")

    with monkeypatch.context() as patch:
        patch.setattr(cache._uploader, "enqueue", fail)
        with pytest.raises(DeviceError, match="gone"):
            cache.swap(swaps_of((20, 3)))
    assert cache.is_torn
    assert cache.slot_of.reshape(-1)[[3, 20]].tolist() == [NOT_RESIDENT] * 2
    Checker(model, device, reads, store).check()
    cache.mend()
    assert cache.pair_in[3] == 20
    Checker(model, device, reads, store).check()


@pytest.mark.parametrize("num_slots", [1, 7])
def test_a_cache_of_hardly_any_slots_swaps_too(
    model: ModelFile, device: Device, reads: Stream, num_slots: int
) -> None:
    """Seven are one above what a layer has."""
    ranking = np.arange(NUM_PAIRS)
    with open_store(model, device, reads, num_slots=num_slots, ranking=ranking) as store:
        store.cache.swap(swaps_of((23, 0)))
        store.cache.mend()
        assert store.cache.pair_in[0] == 23
        Checker(model, device, reads, store).check()


@settings(max_examples=20)
@given(data=st.data())
def test_any_swaps_fills_and_loans_keep_tables_and_bytes_right(
    model: ModelFile, data: st.DataObject
) -> None:
    with HostDevice(1) as device:
        reads = device.stream("reads")
        ranking = np.arange(NUM_PAIRS)
        with open_store(model, device, reads, least_slots=1, ranking=ranking) as store:
            cache, checker = store.cache, Checker(model, device, reads, store)
            for _ in range(data.draw(st.integers(1, 6))):
                what = data.draw(st.sampled_from(["swap", "swap", "land", "loan", "fill"]))
                if what == "swap":
                    cache.swap(_any_swaps(data, store))
                elif what == "land":
                    cache.land(waits=data.draw(st.booleans()))
                elif what == "loan":
                    with cache.lend(data.draw(st.integers(1, cache.lendable_bytes))) as loan:
                        reads.fill(loan.memory, 0xA5)
                        checker.check()
                else:
                    cache.fill(np.array(data.draw(st.permutations(range(NUM_PAIRS)))))
                checker.check()
            cache.mend()
            assert (cache.pair_in == cache.held).all()
            checker.check()


def _any_swaps(data: st.DataObject, store: ExpertStore) -> Swaps:
    cache = store.cache
    outside = np.flatnonzero(~cache.is_resident & ~cache.is_coming)
    inside = np.flatnonzero(cache.pair_in != EMPTY)
    count = data.draw(st.integers(0, min(outside.size, inside.size)))
    seed = np.random.default_rng(data.draw(st.integers(0, 99)))
    return Swaps(seed.permutation(outside)[:count], seed.permutation(inside)[:count])


def test_the_links_rate_is_known_after_a_probe(store: ExpertStore) -> None:
    uploader, known = store.cache._uploader, store.link_gbps
    uploader.link_gbps = 0.0
    uploader.probe()
    assert uploader.link_gbps > 0
    uploader.link_gbps = 1e9
    uploader.probe()
    assert uploader.link_gbps == 1e9
    assert store.link_gbps == known


def test_closing_forgets_swaps(model: ModelFile, device: Device, reads: Stream) -> None:
    store = open_store(model, device, reads, ranking=np.arange(NUM_PAIRS))
    store.cache.swap(swaps_of((20, 3)))
    store.close()
    store.close()


def test_unpinned_experts_do_not_come(tmp_path: Path, device: Device, reads: Stream) -> None:
    with (
        open_tiny(tmp_path) as model,
        open_store(model, device, reads, pinned_bytes=0) as store,
    ):
        assert not store.is_pinned.any()
