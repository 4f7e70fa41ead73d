"""The expert cache and the store: what is resident, where, with which bytes; loans and refills."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from strata_cli.engine.device.base import Device, Stream, Tensor
from strata_cli.engine.device.host import HostDevice
from strata_cli.engine.device.transfer import download, upload
from strata_cli.engine.experts.blobs import BlobReader, arena_bytes, blob_layouts
from strata_cli.engine.experts.cache import EMPTY, NOT_RESIDENT, ExpertCache
from strata_cli.engine.experts.entries import address_row, rank_experts
from strata_cli.engine.experts.ring import Ring
from strata_cli.engine.experts.store import ExpertStore
from strata_cli.engine.experts.streaming import ChunkStream, StreamOptions
from strata_cli.engine.model.tensors import ModelFile
from strata_cli.errors import DeviceError, OutOfMemory, ShapeError, StateError
from tests.device.gates import held
from tests.experts.store_checks import Checker, open_store
from tests.experts.tiny_store import FORMS, has_expert, open_tiny

NUM_PAIRS = 24


def pinned_share(model: ModelFile, share: float) -> int:
    return int(arena_bytes(blob_layouts(model), 6) * share) + 1


@pytest.mark.parametrize("form", list(FORMS))
@pytest.mark.parametrize("share", [1.0, 0.5, 0.0])
def test_the_cache_holds_the_first_pairs_of_the_ranking(
    tmp_path: Path, device: Device, reads: Stream, form: str, share: float
) -> None:
    ranking = np.random.default_rng(5).permutation(NUM_PAIRS)
    with (
        open_tiny(tmp_path, form) as model,
        open_store(
            model, device, reads, ranking=ranking, pinned_bytes=pinned_share(model, share)
        ) as store,
    ):
        assert store.cache.pair_in.tolist() == ranking[:10].tolist()
        assert store.pinned_share == round(share * 6) / 6
        Checker(model, device, reads, store).check()


def test_without_a_ranking_every_layer_gets_its_share(
    model: ModelFile, device: Device, reads: Stream
) -> None:
    with open_store(model, device, reads, num_slots=12) as store:
        assert store.cache.is_resident.sum(axis=1).tolist() == [3, 3, 3, 3]


@pytest.mark.parametrize("num_slots", [0, 1, NUM_PAIRS, 1000])
def test_any_number_of_slots_works(
    model: ModelFile, device: Device, reads: Stream, num_slots: int
) -> None:
    with open_store(model, device, reads, num_slots=num_slots) as store:
        assert store.cache.num_slots == min(num_slots, NUM_PAIRS)
        assert store.cache.is_resident.sum() == min(num_slots, NUM_PAIRS)
        Checker(model, device, reads, store).check()


def scribble(device: Device, reads: Stream, memory: Tensor) -> None:
    reads.fill(memory, 0xA5)


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_loan_takes_the_last_slots_and_brings_them_back(
    model: ModelFile, device: Device, reads: Stream, share: float
) -> None:
    with open_store(model, device, reads, pinned_bytes=pinned_share(model, share)) as store:
        cache, checker = store.cache, Checker(model, device, reads, store)
        before, pairs = cache.slot_of.copy(), cache.pair_in.copy()
        for _ in range(2):
            with cache.lend(3 * store.slot_bytes + 1) as loan:
                assert loan.num_slots == 4
                assert loan.memory.nbytes == 4 * store.slot_bytes
                assert loan.memory.address % 256 == 0
                scribble(device, reads, loan.memory)
                expected = np.where(before >= 6, NOT_RESIDENT, before)
                assert (cache.slot_of == expected).all()
                checker.check()
            assert (cache.slot_of == before).all()
            assert (cache.pair_in == pairs).all()
            checker.check()
            loan.close()
            assert (cache.slot_of == before).all()


def test_what_was_read_before_a_loan_is_not_overwritten_by_it(
    model: ModelFile, device: Device, reads: Stream
) -> None:
    """Copies on another stream, queued inside the loan, wait for reads queued before it."""
    with open_store(model, device, reads) as store:
        last = Checker(model, device, reads, store).slots().rows(9, 10)
        copy = Tensor.over(device.allocate_pinned(store.slot_bytes), last.shape, np.uint8)
        expected = download(device, reads, last)
        with held(device, reads):
            reads.copy(copy, last)
            loan = store.cache.lend(1)
            store.copies.fill(loan.memory, 0x5A)
            time.sleep(0.02)
        reads.synchronize()
        assert (copy.numpy() == expected).all()
        loan.close()


def test_a_refill_waits_for_what_the_loan_was_used_for(
    model: ModelFile, device: Device, reads: Stream
) -> None:
    with open_store(model, device, reads) as store:
        with store.cache.lend(8 * store.slot_bytes) as loan:
            for byte in range(200):
                reads.fill(loan.memory, byte)
        Checker(model, device, reads, store).check()


def test_slots_that_must_remain_are_not_lent(
    model: ModelFile, device: Device, reads: Stream
) -> None:
    with open_store(model, device, reads) as store:
        cache = store.cache
        assert cache.lendable_bytes == 8 * store.slot_bytes
        with pytest.raises(OutOfMemory, match=r"9 of its 10 slots .*of which 2 must remain"):
            cache.lend(cache.lendable_bytes + 1)
        with cache.lend(cache.lendable_bytes) as loan:
            assert loan.num_slots == 8
            assert cache.lendable_bytes == 0
            with pytest.raises(StateError, match="already"):
                cache.lend(1)
            with pytest.raises(StateError, match="lent"):
                cache.fill(np.arange(3))
        with pytest.raises(OutOfMemory):
            cache.lend(0)


def test_a_small_cache_lends_nothing(model: ModelFile, device: Device, reads: Stream) -> None:
    with open_store(model, device, reads, least_slots=128) as store:
        assert store.cache.lendable_bytes == 0
        with pytest.raises(OutOfMemory, match="128 must remain"):
            store.cache.lend(1)


@pytest.mark.parametrize("ranking", [[0, 1, 0], [NUM_PAIRS], [-1], [[1, 2]]])
def test_a_ranking_that_is_none_is_refused(
    model: ModelFile, device: Device, reads: Stream, ranking: list[int]
) -> None:
    with pytest.raises(ShapeError, match="ranking"):
        open_store(model, device, reads, ranking=np.array(ranking))


def test_the_cache_can_be_filled_anew(model: ModelFile, device: Device, reads: Stream) -> None:
    with open_store(model, device, reads) as store:
        store.cache.fill(np.arange(20, 24))
        assert store.cache.pair_in.tolist() == [20, 21, 22, 23] + [EMPTY] * 6
        checker = Checker(model, device, reads, store)
        checker.check()
        with store.cache.lend(8 * store.slot_bytes) as loan:
            scribble(device, reads, loan.memory)
        assert store.cache.pair_in.tolist() == [20, 21, 22, 23] + [EMPTY] * 6
        checker.check()


def test_a_refill_that_fails_leaves_right_tables(
    model: ModelFile, device: Device, reads: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_moves: object) -> None:
        raise DeviceError("the copy failed")

    with open_store(model, device, reads) as store:
        cache = store.cache
        loan = cache.lend(4 * store.slot_bytes)
        scribble(device, reads, loan.memory)
        with monkeypatch.context() as patch:
            patch.setattr(cache._uploader, "upload", fail)
            with pytest.raises(DeviceError, match="failed"):
                loan.close()
        assert (cache.pair_in[6:] == EMPTY).all()
        Checker(model, device, reads, store).check()
        loan.close()


@pytest.mark.parametrize("at", ["upload", "_publish", "_fence"])
@pytest.mark.parametrize("calls", [1, 2])
def test_what_was_interrupted_can_be_filled_again(
    model: ModelFile,
    device: Device,
    reads: Stream,
    monkeypatch: pytest.MonkeyPatch,
    at: str,
    calls: int,
) -> None:
    """Where ``pair_in`` is what it was, so is everything; else a fill makes it so."""
    with open_store(model, device, reads) as store:
        cache, checker = store.cache, Checker(model, device, reads, store)
        held = cache.pair_in.copy()
        owner = cache._uploader if at == "upload" else cache
        work, left = getattr(owner, at), calls

        def interrupted(*args: Any) -> None:
            nonlocal left
            left -= 1
            if not left:
                raise KeyboardInterrupt
            work(*args)

        with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
            patch.setattr(owner, at, interrupted)
            with cache.lend(4 * store.slot_bytes) as loan:
                scribble(device, reads, loan.memory)
        if cache.loan is not None:
            cache.take_back(cache.loan)
        if (cache.pair_in != held).any():
            cache.fill(held)
        checker.check()
        assert (cache.pair_in == held).all()


@settings(max_examples=25)
@given(data=st.data())
def test_any_fills_and_loans_keep_tables_and_bytes_right(
    model: ModelFile, data: st.DataObject
) -> None:
    num_slots = data.draw(st.integers(1, 14))
    share = data.draw(st.sampled_from([1.0, 0.7, 0.2]))
    with HostDevice(1) as device:
        reads = device.stream("reads")
        options = {"num_slots": num_slots, "pinned_bytes": pinned_share(model, share)}
        with open_store(model, device, reads, least_slots=1, **options) as store:
            checker = Checker(model, device, reads, store)
            for _ in range(data.draw(st.integers(1, 4))):
                if data.draw(st.booleans()):
                    ranking = data.draw(st.permutations(range(NUM_PAIRS)))
                    store.cache.fill(np.array(ranking[: data.draw(st.integers(0, NUM_PAIRS))]))
                elif store.cache.lendable_bytes:
                    before = store.cache.slot_of.copy()
                    with store.cache.lend(data.draw(st.integers(1, store.cache.lendable_bytes))):
                        checker.check()
                    assert (store.cache.slot_of == before).all()
                checker.check()


@pytest.mark.parametrize("ring_slots", [6, 12])
@pytest.mark.parametrize("share", [1.0, 0.5, 0.0])
def test_streams_read_the_right_bytes_through_a_ring_in_a_loan(
    model: ModelFile, device: Device, reads: Stream, ring_slots: int, share: float
) -> None:
    """Two chunks in one loan, then the same residency as before, whatever is pinned."""
    options = {"num_slots": 18, "pinned_bytes": pinned_share(model, share)}
    with open_store(model, device, reads, **options) as store:
        before = store.cache.slot_of.copy()
        with store.cache.lend(ring_slots * store.slot_bytes) as loan:
            slots = loan.memory.reshape(ring_slots, store.slot_bytes)
            ring = Ring(device, slots, store.copies, reads)
            for seed in range(2):
                stream_chunk(model, device, store, ring, seed)
            ring.drain()
            ring.close()
        assert (store.cache.slot_of == before).all()
        Checker(model, device, reads, store).check()


@pytest.mark.parametrize("has_thread", [True, False])
@pytest.mark.parametrize("what", ["the file", "a thread"])
def test_a_stager_that_fails_ends_the_stream_with_its_error(
    model: ModelFile,
    device: Device,
    reads: Stream,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
    has_thread: bool,
) -> None:
    """The prompt ends with an error, the loan is refilled, and the next prompt works."""

    def fail(*_args: object) -> None:
        raise DeviceError("it failed")

    with open_store(model, device, reads, num_slots=18, pinned_bytes=0) as store:
        owner = BlobReader if what == "the file" else store._stager
        loan = store.cache.lend(12 * store.slot_bytes)
        ring = Ring(device, loan.memory.reshape(12, store.slot_bytes), store.copies, reads)
        with monkeypatch.context() as patch:
            patch.setattr(owner, "read" if what == "the file" else "_read", fail)
            with pytest.raises(DeviceError, match="it failed"):
                stream_chunk(model, device, store, ring, 0, has_thread=has_thread)
        stream_chunk(model, device, store, ring, 1, has_thread=has_thread)
        ring.drain()
        ring.close()
        loan.close()
        Checker(model, device, reads, store).check()


@pytest.mark.parametrize("has_thread", [True, False])
def test_a_stream_that_stops_while_blobs_are_staged_ends_at_once(
    model: ModelFile, device: Device, reads: Stream, has_thread: bool
) -> None:
    with open_store(model, device, reads, num_slots=18, pinned_bytes=0) as store:
        with store.cache.lend(12 * store.slot_bytes) as loan:
            ring = Ring(device, loan.memory.reshape(12, store.slot_bytes), store.copies, reads)
            for _ in range(5):
                ranking = rank_experts(store.cache.is_resident)
                options = StreamOptions(watchdog_s=10, has_thread=has_thread)
                stream = ChunkStream(ranking, ring, store.blobs, options)
                with store.staging(stream.entries), stream:
                    stream.stop()
            stream_chunk(model, device, store, ring, 0, has_thread=has_thread)
            ring.drain()
            ring.close()
        Checker(model, device, reads, store).check()


def stream_chunk(
    model: ModelFile,
    device: Device,
    store: ExpertStore,
    ring: Ring,
    seed: int,
    *,
    has_thread: bool = True,
) -> None:
    """Stream a chunk with some experts routed, and compare each when it may be read."""
    routed = np.random.default_rng(seed).random((4, 6)) < 0.6
    ranking = rank_experts(store.cache.is_resident)
    by_rank = np.take_along_axis(routed, ranking.expert_at, axis=1)
    options = StreamOptions(watchdog_s=10, has_thread=has_thread)
    stream = ChunkStream(ranking, ring, store.blobs, options)
    num_read = 0
    with store.staging(stream.entries), stream:
        for layer in range(4):
            stream.publish(layer, np.concatenate([[0], np.cumsum(by_rank[layer])]))
            for group in stream.groups(layer):
                table = addresses_of(stream, store, ring, layer)
                for rank in group:
                    if by_rank[layer, rank]:
                        expert = int(ranking.expert_at[layer, rank])
                        blob = read_at(device, store, ring.reads, layer, int(table[rank]))
                        assert has_expert(model, layer, expert, blob)
                        num_read += 1
        stream.finish()
    assert num_read == routed.sum()


def addresses_of(
    stream: ChunkStream, store: ExpertStore, ring: Ring, layer: int
) -> NDArray[np.int64]:
    ranking = rank_experts(store.cache.is_resident)
    return address_row(ranking, stream.entries, layer, store.cache.addresses[layer], ring.shape)


def read_at(
    device: Device, store: ExpertStore, reads: Stream, layer: int, address: int
) -> NDArray[np.uint8]:
    """A host copy of what kernels on a stream find at an address of the cache's memory."""
    whole: ExpertCache = store.cache
    nbytes = store.layouts[layer].nbytes
    buffer = whole._slots.buffer
    return download(
        device, reads, Tensor.over(buffer, (nbytes,), np.uint8, address - buffer.address)
    )


def test_the_table_is_written_in_the_order_of_the_reads(
    model: ModelFile, device: Device, reads: Stream
) -> None:
    """What was enqueued before a change sees the old addresses, what comes after the new ones."""
    with open_store(model, device, reads) as store:
        cache = store.cache
        old = cache.addresses.copy()
        rooms = [Tensor.over(device.allocate_pinned(old.nbytes), old.shape, np.int64) for _ in "ab"]
        upload(device, reads, rooms[0], np.zeros_like(old))
        reads.copy(rooms[0], cache.device_addresses)
        with cache.lend(1):
            reads.copy(rooms[1], cache.device_addresses)
            reads.synchronize()
            assert (rooms[0].numpy() == old).all()
            assert (rooms[1].numpy() == cache.addresses).all()
            assert (rooms[1].numpy() != old).sum() == 1


def test_closing_twice_is_safe_and_gives_everything_back(
    model: ModelFile, device: Device, reads: Stream
) -> None:
    store = open_store(model, device, reads, pinned_bytes=0)
    store.close()
    store.close()
    for tensor in (*store.blobs.layers, store.cache.device_addresses):
        with pytest.raises(DeviceError, match="closed"):
            _ = tensor.address


class Cramped(HostDevice):
    """Has no room for slots."""

    def allocate(self, nbytes: int) -> Any:
        raise OutOfMemory(f"need {nbytes} bytes")


def test_a_store_that_cannot_open_leaves_nothing_behind(
    model: ModelFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Cramped(1) as device:
        with pytest.raises(OutOfMemory):
            open_store(model, device, device.stream("reads"), pinned_bytes=0)
        for buffer in list(device._buffers):
            with pytest.raises(DeviceError, match="closed"):
                _ = buffer.address
