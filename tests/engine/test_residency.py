"""Experts that change places between steps: no bit changes, and everything is counted."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strata_cli.engine import engine as engine_module
from strata_cli.engine.decode import residency as residency_module
from strata_cli.engine.decode.residency import Residency
from strata_cli.engine.device.transfer import download
from strata_cli.engine.engine import Engine, EngineOptions, Part, Sequence
from strata_cli.engine.experts.adapting import AdaptRules
from strata_cli.engine.experts.profile import even_profile, load_profile
from strata_cli.engine.experts.residency_counts import ResidencyCounts
from strata_cli.engine.experts.resident import ExpertMatrices
from strata_cli.engine.forward import fetching
from strata_cli.engine.forward.fetching import Fetcher
from strata_cli.engine.kernels.fetch import MOST_AHEAD
from strata_cli.engine.learning import ProfileLearner
from strata_cli.engine.model.tensors import load_model_file
from strata_cli.engine.prefill import sharing, streamer
from strata_cli.engine.trace import Event, Trace
from strata_cli.errors import DeviceError
from tests.device.gates import held
from tests.device.interrupting import interrupted_at
from tests.engine.readings import bits, open_engine, text
from tests.engine.streams import (
    NUM_EXPERTS,
    NUM_LAYERS,
    Way,
    failing,
    store_of,
    streamer_of,
    write_streamed_model,
)

BLOCKS = {contextlib.__file__} | {
    str(module.__file__)
    for module in (engine_module, residency_module, fetching, sharing, streamer)
}
TOP_K = 3
RESTLESS = AdaptRules(every=1, swaps=50, decay=1.0)
ANSWER = [text(80)[i % 7] for i in range(24)]  # a few tokens, over and over
PROMPT = text(80)[:30]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_streamed_model(tmp_path_factory.mktemp("residency") / "m.gguf", fused=False)


def answer(sequence: Sequence, tokens: list[int] = ANSWER) -> np.ndarray[Any, Any]:
    return np.stack([sequence.step(token) for token in tokens])


@pytest.fixture(scope="module")
def truth(path: Path, device_name: str) -> np.ndarray[Any, Any]:
    """By an engine with all experts in place: the prompt's logits, then those of the answer."""
    with open_engine(path, device=device_name) as engine, engine.sequence() as sequence:
        assert engine.residency_counts is None
        return np.concatenate([sequence.prefill(PROMPT)[None], answer(sequence)])


def same(actual: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> bool:
    return np.array_equal(bits(actual), bits(expected))


def residency_of(engine: Engine) -> Residency:
    assert engine._residency is not None
    return engine._residency


def counts_of(engine: Engine) -> ResidencyCounts:
    return residency_of(engine).counts


WAYS = {
    "half pinned": Way(cache=20, pinned=NUM_EXPERTS // 2, adapt=RESTLESS),
    "as by default": Way(adapt=AdaptRules()),
    "every step": Way(adapt=RESTLESS),
    "one swap": Way(adapt=replace(RESTLESS, swaps=1)),
    "one slot above a layer's need": Way(cache=NUM_EXPERTS + 1, least=0, adapt=RESTLESS),
    "one slot": Way(cache=1, adapt=RESTLESS),
    "no slot": Way(cache=0, adapt=RESTLESS),
    "fetched": Way(fetch=TOP_K, adapt=RESTLESS),
    "fetched, but for one": Way(cache=0, fetch=TOP_K - 1),
    "read over the link": Way(fetch=0, adapt=RESTLESS),
    "all but one": Way(cache=NUM_EXPERTS * NUM_LAYERS - 1, least=0, adapt=RESTLESS),
    "all": Way(cache=NUM_EXPERTS * NUM_LAYERS, adapt=RESTLESS),
}


@pytest.mark.parametrize("ahead", [0, MOST_AHEAD])
def test_products_read_what_was_fetched(
    path: Path, device_name: str, monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    """What spoils slots behind a fetch spoils the step: its own, or those of what came ahead."""
    way = Way(cache=0, fetch=TOP_K, ahead=ahead)
    with way.open(path, device_name) as engine, engine.sequence() as sequence:
        fetcher = engine._forward.fetcher
        assert fetcher is not None
        fetch, foresight, stream = Fetcher.fetch, fetcher._foresight, engine._stream
        assert (foresight is not None) == bool(ahead)

        def spoiling(self: Fetcher, layer: int, *args: Any) -> ExpertMatrices:
            matrices = fetch(self, layer, *args)
            stream.fill(fetcher._slots if foresight is None else foresight.ahead(layer).slots, 0)
            return matrices

        monkeypatch.setattr(Fetcher, "fetch", spoiling)
        spoilt = sequence.step(ANSWER[0])
        monkeypatch.undo()
    with way.open(path, device_name) as engine, engine.sequence() as sequence:
        assert not same(spoilt, sequence.step(ANSWER[0]))


def test_a_step_learns_what_was_foreseen_wrongly(path: Path, device_name: str) -> None:
    way = Way(cache=0, fetch=TOP_K, ahead=4)
    with way.open(path, device_name) as engine, engine.sequence() as sequence:
        fetcher = engine._forward.fetcher
        assert fetcher is not None
        foresight = fetcher._foresight
        assert foresight is not None
        off = []
        for token in ANSWER[:1] * 6:
            sequence.step(token)
            parts = foresight.errors, foresight._foreseen, foresight._logits
            errors, foreseen, logits = (download(engine._device, engine._stream, x) for x in parts)
            off.append(float(np.abs(logits[1:, 0] - foreseen[1:, 0] - errors[1:]).mean()))
        assert off[-1] < off[0] / 2
        assert not errors[0].any()  # nobody foresees the first layer
        with engine.canonical():
            answer(sequence)
        assert same(download(engine._device, engine._stream, foresight.errors), errors)


def test_sequences_that_step_together_may_look_ahead(path: Path, device_name: str) -> None:
    def steps(way: Way) -> list[np.ndarray[Any, Any]]:
        rows: list[np.ndarray[Any, Any]] = []
        opened = way.open(path, device_name)
        with opened as engine, engine.sequence() as one, engine.sequence() as other:
            one.prefill(PROMPT)
            other.prefill(PROMPT[:9])
            for token in ANSWER[:6]:
                both = engine.read_together([Part(one, [token]), Part(other, [token])])
                rows += [row.copy() for row in both if row is not None]
                rows.append(one.step(token))
        return rows

    plain, ahead = steps(Way(cache=0, fetch=12)), steps(Way(cache=0, fetch=12, ahead=8))
    assert len(plain) == 18
    assert all(same(a, b) for a, b in zip(plain, ahead, strict=True))


def test_a_step_reads_what_it_misses_from_slots(path: Path, device_name: str) -> None:
    way = Way(cache=0, fetch=TOP_K, ahead=0)
    with way.open(path, device_name) as engine, engine.sequence() as sequence:
        sequence.step(ANSWER[0])
        fetcher = engine._forward.fetcher
        assert fetcher is not None
        staged = download(engine._device, engine._stream, fetcher._staged)[0]
        memory = download(engine._device, engine._stream, fetcher._slots).reshape(-1)
        at = staged - fetcher._slots.address
        (fetched,) = np.nonzero((at >= 0) & (at < memory.size))
        assert fetched.size == TOP_K
        for expert in fetched:
            blob = store_of(engine).blobs.layers[-1].numpy()[expert]
            assert (memory[at[expert] : at[expert] + blob.size] == blob).all()


@pytest.mark.parametrize("way", WAYS)
def test_no_bit_depends_on_swaps(
    path: Path, device_name: str, truth: np.ndarray[Any, Any], way: str
) -> None:
    with WAYS[way].open(path, device_name) as engine:
        for _ in range(2):
            with engine.sequence() as sequence:
                rows = np.concatenate([sequence.prefill(PROMPT)[None], answer(sequence)])
            assert same(rows, truth)
        counts, cache = counts_of(engine), store_of(engine).cache
        cache.mend()
        assert (cache.pair_in == cache.held).all()
        assert len(set(cache.held.tolist())) == cache.num_slots
        assert counts.windows == 2 * len(ANSWER)
        assert counts.routed == counts.windows * NUM_LAYERS * TOP_K
        assert counts.hits + counts.pcie == counts.routed
        assert counts.cpu == counts.dropped == 0
        has_outside = 0 < cache.num_slots < NUM_EXPERTS * NUM_LAYERS
        if way != "one slot":  # whose layer may have no better expert
            assert (counts.swaps > 0) == has_outside


def test_a_skewed_conversation_finds_more_and_more_in_the_cache(
    path: Path, device_name: str
) -> None:
    way = Way(adapt=AdaptRules(every=2, swaps=50))
    with way.open(path, device_name) as engine, engine.sequence() as sequence:
        answer(sequence)
        first = counts_of(engine)
        answer(sequence)
        second = counts_of(engine) - first
        assert first.hit_rate < second.hit_rate
        assert second.hit_rate + second.pcie_share == pytest.approx(1)


def test_the_device_and_the_host_agree_on_hits(path: Path, device_name: str) -> None:
    with Way().open(path, device_name) as engine, engine.sequence() as sequence:
        sequence.step(ANSWER[0])
        ids = residency_of(engine)._on_host(1).numpy()
        resident = store_of(engine).cache.is_resident
        layers = np.arange(NUM_LAYERS)[:, None]
        assert ids.shape == (NUM_LAYERS, 1, TOP_K)
        assert counts_of(engine).hits == resident[layers, ids[:, 0]].sum()


def test_a_swap_under_way_is_seen_by_no_window(
    path: Path, device_name: str, truth: np.ndarray[Any, Any]
) -> None:
    """The copy stream stands still: windows go on, and what was evicted is read in place."""
    with Way(adapt=RESTLESS).open(path, device_name) as engine, engine.sequence() as sequence:
        sequence.prefill(PROMPT)
        streamer_of(engine).settle()
        cache, store = store_of(engine).cache, store_of(engine)
        with held(engine._device, store.copies):
            rows = answer(sequence, ANSWER[:8])
            assert cache.num_coming > 0
            assert not (cache.is_coming & cache.is_resident).any()
        assert same(rows, truth[1:9])
        assert same(answer(sequence, ANSWER[8:]), truth[9:])


class TestTailSkip:
    """Misses of late rank that steps leave out."""

    @pytest.mark.parametrize("tail_skip", [1, 2])
    def test_misses_of_late_rank_are_left_out(
        self, path: Path, device_name: str, truth: np.ndarray[Any, Any], tail_skip: int
    ) -> None:
        with Way(cache=20, tail_skip=tail_skip).open(path, device_name) as engine:
            with engine.sequence() as sequence:
                prompt, rows = sequence.prefill(PROMPT), answer(sequence)
                assert same(prompt, truth[0])
                assert not sequence.is_exact
            counts = counts_of(engine)
            assert same(rows, truth[1:]) == (counts.dropped == 0)
            most = counts.windows * NUM_LAYERS * (TOP_K - tail_skip)
            assert counts.dropped <= most
            assert counts.dropped > 0 or tail_skip > 1
            assert counts.hits + counts.pcie + counts.dropped == counts.routed

    def test_what_is_left_out_depends_on_the_cache_alone(
        self, path: Path, device_name: str
    ) -> None:
        rows = []
        for _ in range(2):
            way = Way(cache=20, tail_skip=1)
            with way.open(path, device_name) as engine, engine.sequence() as sequence:
                sequence.prefill(PROMPT)
                rows.append(answer(sequence))
        assert same(rows[0], rows[1])

    def test_canonical_reads_leave_out_nothing(
        self, path: Path, device_name: str, truth: np.ndarray[Any, Any]
    ) -> None:
        with Way(tail_skip=1, adapt=RESTLESS).open(path, device_name) as engine:
            for _ in range(2):
                with engine.sequence() as sequence:
                    sequence.prefill(PROMPT)
                    answer(sequence)
                dropped = counts_of(engine).dropped
                with engine.canonical(), engine.sequence() as sequence:
                    assert same(sequence.prefill(PROMPT), truth[0])
                    assert same(answer(sequence), truth[1:])
                    assert sequence.is_exact
                assert counts_of(engine).dropped == dropped > 0

    @pytest.mark.parametrize(
        "way",
        [Way(cache=NUM_EXPERTS * NUM_LAYERS, tail_skip=1), Way(cache=0, tail_skip=TOP_K)],
        ids=["all are hits", "no rank is late"],
    )
    def test_where_nothing_can_be_left_out_steps_are_exact(
        self, path: Path, device_name: str, truth: np.ndarray[Any, Any], way: Way
    ) -> None:
        with way.open(path, device_name) as engine, engine.sequence() as sequence:
            sequence.prefill(PROMPT)
            assert same(answer(sequence), truth[1:])
            assert sequence.is_exact

    def test_a_window_of_several_leaves_out_what_all_of_them_rank_late(
        self, path: Path, device_name: str
    ) -> None:
        """Twice the same token: both rows drop the same, as the one alone does."""
        with Way(cache=20, tail_skip=1).open(path, device_name) as engine:
            with engine.sequence() as one, engine.sequence() as other:
                for sequence in (one, other):
                    sequence.prefill(PROMPT)
                rows = engine.read_together([Part(one, [5]), Part(other, [5])])
                assert rows[0] is not None
                assert rows[1] is not None
                assert same(rows[0], rows[1])
            with engine.sequence() as alone:
                alone.prefill(PROMPT)
                assert same(alone.step(5), rows[0])


def test_canonical_reads_leave_what_adapts_as_it_was(path: Path, device_name: str) -> None:
    def adapted(engine: Engine) -> list[Any]:
        residency, cache = residency_of(engine), store_of(engine).cache
        cache.mend()
        state = [residency._use.tolist(), residency._windows, residency._is_due]
        return [*state, cache.pair_in.tolist(), cache.slot_of.tolist()]

    with Way(adapt=RESTLESS).open(path, device_name) as engine, engine.sequence() as sequence:
        sequence.prefill(PROMPT)
        answer(sequence, ANSWER[:6])
        before = adapted(engine)
        with engine.canonical(), engine.sequence() as other:
            assert not store_of(engine).cache.num_coming
            other.prefill(text(90))
            answer(other, ANSWER[::-1])
            with engine.canonical():
                answer(other, ANSWER)
            answer(other, ANSWER)
        streamer_of(engine).settle()
        assert adapted(engine) == before
        answer(sequence, ANSWER[6:])
        assert adapted(engine) != before


@pytest.mark.parametrize("ends_by", ["itself", "an interrupt"])
def test_interrupts_around_canonical_reads_leave_nothing_paused(path: Path, ends_by: str) -> None:
    """Wherever one comes; also a second one on the way out of the block."""

    def block(engine: Engine) -> None:
        with engine.canonical():
            if ends_by == "an interrupt":
                raise InterruptedError

    with Way(adapt=RESTLESS, fetch=4, ahead=2, cpu=0.5).open(path, "host") as engine:
        share = streamer_of(engine)._share
        assert share is not None
        for place in itertools.count():
            is_interrupted = False
            try:
                with suppress(InterruptedError), interrupted_at(place, BLOCKS):
                    block(engine)
            except KeyboardInterrupt:
                is_interrupted = True
            # The exception is gone, and with it what it kept of the blocks.
            assert not engine.is_canonical
            assert (residency_of(engine)._pauses, share._pauses) == (0, 0)
            if not is_interrupted:
                break
        assert place > 20


@pytest.mark.parametrize("where", ["begin", "launched", "end"])
@pytest.mark.parametrize("after", [0, 3])
def test_an_interrupt_at_any_part_of_a_window_is_made_up_for(
    path: Path, device_name: str, truth: np.ndarray[Any, Any], where: str, after: int
) -> None:
    with Way(adapt=RESTLESS).open(path, device_name) as engine:
        with engine.sequence() as sequence:
            sequence.prefill(PROMPT)
            interrupt = failing(residency_of(engine), (where,), after, KeyboardInterrupt())
            with interrupt, pytest.raises(KeyboardInterrupt):
                answer(sequence)
        with engine.sequence() as sequence:
            assert same(sequence.prefill(PROMPT), truth[0])
            assert same(answer(sequence), truth[1:])


@pytest.mark.parametrize("where", ["_publish", "_fence", "_leave", "_moves"])
@pytest.mark.parametrize("after", [0, 1, 2, 5])
def test_an_interrupt_inside_a_swap_is_made_up_for(
    path: Path, device_name: str, truth: np.ndarray[Any, Any], where: str, after: int
) -> None:
    with Way(adapt=RESTLESS).open(path, device_name) as engine:
        cache = store_of(engine).cache
        with engine.sequence() as sequence:
            sequence.prefill(PROMPT)
            streamer_of(engine).settle()
            interrupt = failing(cache, (where,), after, KeyboardInterrupt())
            with interrupt, pytest.raises(KeyboardInterrupt):
                answer(sequence)
        with engine.sequence() as sequence:
            assert same(sequence.prefill(PROMPT), truth[0])
            assert same(answer(sequence), truth[1:])
        cache.mend()
        assert (cache.pair_in == cache.held).all()


def test_a_failing_copy_is_one_error_and_the_next_step_is_right(
    path: Path, device_name: str, truth: np.ndarray[Any, Any]
) -> None:
    with Way(adapt=RESTLESS).open(path, device_name) as engine:
        copies = store_of(engine).copies
        with engine.sequence() as sequence:
            sequence.prefill(PROMPT)
            streamer_of(engine).settle()
            broken = failing(copies, ("copy_many",), 0, DeviceError("the link is gone"))
            with broken, pytest.raises(DeviceError, match="the link is gone"):
                answer(sequence)
        with engine.sequence() as sequence:
            assert same(sequence.prefill(PROMPT), truth[0])
            assert same(answer(sequence), truth[1:])


def test_a_trace_tells_of_windows_and_swaps(path: Path, device_name: str) -> None:
    events: list[Event] = []
    way = Way(adapt=RESTLESS)
    with way.open(path, device_name, Trace(events.append)) as engine:
        with engine.sequence() as sequence:
            answer(sequence)
        counts = counts_of(engine)

    def total(ev: str, name: str) -> int:
        return sum(int(event[name]) for event in events if event["ev"] == ev)

    assert total("window.experts", "hits") == counts.hits
    assert total("window.experts", "pcie") == counts.pcie
    assert total("cache.swap", "swaps") == counts.swaps
    assert 0 < total("cache.land", "landed") <= counts.swaps


class TestLearning:
    """The profile that a run saves."""

    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        return tmp_path / "learned.npz"

    def options(self, path: Path, file: Path, **more: Any) -> EngineOptions:
        return EngineOptions(
            model=path, device="host", threads=2, profile_save=file, prefill=128, **more
        )

    def test_it_counts_prompts_and_steps(self, path: Path, file: Path) -> None:
        with Engine.open(self.options(path, file, expert_cache=30)) as engine:
            with engine.sequence() as sequence:
                sequence.prefill(text(228))
                answer(sequence)
            assert not file.exists()
            with engine.canonical(), engine.sequence() as sequence:
                sequence.prefill(text(228))
                answer(sequence)
        assert self.use(path, file).sum() == NUM_LAYERS * TOP_K * (228 + len(ANSWER))

    def test_it_counts_passes_that_sequences_share(self, path: Path, file: Path) -> None:
        opened = Engine.open(self.options(path, file, expert_cache=30))
        with opened as engine, engine.sequence() as one, engine.sequence() as other:
            engine.read_together([Part(one, text(60)), Part(other, text(50))])
        assert self.use(path, file).sum() == NUM_LAYERS * TOP_K * 110

    def test_it_counts_steps_of_experts_that_stay_in_the_file(self, path: Path, file: Path) -> None:
        options = self.options(path, file, expert_cache=30, pinned_bytes=0)
        with Engine.open(options) as engine, engine.sequence() as sequence:
            answer(sequence)
        assert self.use(path, file).sum() == NUM_LAYERS * TOP_K * len(ANSWER)

    def test_it_goes_on_from_what_was_known(self, path: Path, file: Path) -> None:
        for _ in range(2):
            known = file if file.exists() else None
            options = self.options(path, file, expert_cache=30, expert_profile=known)
            with Engine.open(options) as engine, engine.sequence() as sequence:
                answer(sequence)
        assert self.use(path, file).sum() == 2 * NUM_LAYERS * TOP_K * len(ANSWER)

    def test_it_learns_where_all_experts_are_in_place_too(self, path: Path, file: Path) -> None:
        with Engine.open(self.options(path, file)) as engine, engine.sequence() as sequence:
            answer(sequence)
            counts = engine.residency_counts
            assert counts is not None
            assert counts.hit_rate == 1
        assert self.use(path, file).sum() == NUM_LAYERS * TOP_K * len(ANSWER)

    def test_it_is_saved_at_an_interval(self, path: Path, file: Path) -> None:
        options = self.options(path, file, profile_save_every_s=1e-6)
        with Engine.open(options) as engine, engine.sequence() as sequence:
            answer(sequence)
            for thread in threading.enumerate():
                if thread.name == "strata-profile":
                    thread.join()
            assert file.exists()
        assert self.use(path, file).sum() == NUM_LAYERS * TOP_K * len(ANSWER)

    def test_a_file_that_cannot_be_written_is_a_warning(
        self, path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        file = tmp_path / "nowhere" / "learned.npz"
        with Engine.open(self.options(path, file)) as engine, engine.sequence() as sequence:
            answer(sequence)
        assert "cannot be written" in caplog.text

    def test_what_an_interval_could_not_save_is_saved_at_the_end(
        self, path: Path, tmp_path: Path
    ) -> None:
        """Although nothing new came since."""
        file = tmp_path / "later" / "learned.npz"
        with load_model_file(path) as model:
            learner = ProfileLearner(file, even_profile(model), every_s=1e-6)
        learner.add_pairs(np.array([3, 5]))
        assert learner._saving is not None
        learner._saving.join()
        file.parent.mkdir()
        learner.close()
        assert np.flatnonzero(self.use(path, file)).tolist() == [3, 5]

    def test_what_no_thread_could_save_is_saved_at_the_end(
        self,
        path: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """The step that it was to be saved behind goes on."""

        def refuse(_thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        file = tmp_path / "learned.npz"
        with load_model_file(path) as model:
            learner = ProfileLearner(file, even_profile(model), every_s=1e-6)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            learner.add_pairs(np.array([3, 5]))
        assert "no thread can be started" in caplog.text
        learner.close()
        assert np.flatnonzero(self.use(path, file)).tolist() == [3, 5]

    def use(self, path: Path, file: Path) -> np.ndarray[Any, Any]:
        with load_model_file(path) as model:
            return load_profile(file, model).use


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    yield
    assert not [t for t in threading.enumerate() if t.name == "strata-profile"]
