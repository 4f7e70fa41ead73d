"""Missed experts that threads of the host compute; on the host device with the same bits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from strata_cli.engine import opening
from strata_cli.engine.engine import Engine, Part, Sequence
from strata_cli.engine.experts import window_pool
from strata_cli.engine.experts.adapting import AdaptRules
from strata_cli.engine.experts.residency_counts import ResidencyCounts
from strata_cli.engine.experts.window_pool import (
    LEAST_SHARE,
    MOST_SHARE,
    USUAL_SHARE,
    WindowPool,
    balanced_share,
)
from strata_cli.engine.kernels.fixed_types import can_multiply
from strata_cli.engine.kernels.mailbox import STOP
from strata_cli.errors import DeviceError, StateError
from tests.engine.readings import bits, open_engine, text
from tests.engine.streams import NUM_EXPERTS, NUM_LAYERS, Way, failing

Floats = NDArray[np.float32]
TOP_K = 3
PROMPT = text(80)[:20]
ANSWER = [text(80)[i % 7] for i in range(12)]
ALONE = Way(cache=20, link_share=0.0)  # the threads compute every miss
RESTLESS = AdaptRules(every=1, swaps=50, decay=1.0)


@pytest.fixture(scope="module", params=["separate", "fused"])
def path(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(request.param)
    return path


def answer(sequence: Sequence, tokens: list[int] = ANSWER) -> Floats:
    return np.stack([sequence.step(token) for token in tokens])


def truth_of(path: Path, device: str) -> Floats:
    with open_engine(path, device=device) as engine, engine.sequence() as sequence:
        return np.concatenate([sequence.prefill(PROMPT)[None], answer(sequence)])


def step_interrupted_twice(engine: Engine, sequence: Sequence, where: str) -> None:
    """Ctrl-C in a method of the residency, and again in the second abandon() of the window."""
    residency = engine._residency
    with (
        failing(residency, (where,), 0, KeyboardInterrupt()),
        failing(residency, ("abandon",), 1, KeyboardInterrupt()),
        pytest.raises(KeyboardInterrupt),
    ):
        sequence.step(1)


@pytest.fixture(scope="module")
def truth(path: Path) -> Floats:
    return truth_of(path, "host")


@pytest.fixture(scope="module")
def own_truth(separate: Path) -> Floats:
    return truth_of(separate, "host")


def same(actual: Floats, expected: Floats) -> bool:
    return np.array_equal(bits(actual), bits(expected))


def counts_of(engine: Engine) -> ResidencyCounts:
    assert engine.residency_counts is not None
    return engine.residency_counts


def pool_of(engine: Engine) -> WindowPool:
    assert engine._residency is not None
    sharing = engine._residency._sharing
    assert sharing is not None
    assert sharing._pool is not None
    return sharing._pool


WAYS = {
    "all misses": ALONE,
    "half of them": Way(cache=20, link_share=0.5),
    "as suits": Way(cache=20, link_share=None),
    "no slot": Way(cache=0, link_share=0.0),
    "swaps meanwhile": Way(link_share=0.0, adapt=RESTLESS),
    "one slot above a layer's need": Way(cache=NUM_EXPERTS + 1, least=0, link_share=0.3),
    "all but one": Way(cache=NUM_EXPERTS * NUM_LAYERS - 1, least=0, link_share=0.0),
}


@pytest.mark.parametrize("way", WAYS)
def test_on_the_host_device_the_threads_compute_the_same_bits(
    path: Path, truth: Floats, way: str
) -> None:
    with WAYS[way].open(path, "host") as engine:
        for sequence_number in range(2):
            with engine.sequence() as sequence:
                assert same(sequence.prefill(PROMPT), truth[0])
                assert same(answer(sequence), truth[1:])
                # An automatic share is tried first; as it suits, steps then have none.
                assert not sequence.is_exact or (way == "as suits" and sequence_number)
        counts = counts_of(engine)
        assert counts.routed == counts.windows * NUM_LAYERS * TOP_K
        assert counts.hits + counts.pcie + counts.cpu == counts.routed
        assert counts.cpu > 0 or way == "all but one"
        assert counts.pcie == 0 or WAYS[way].link_share != 0.0
        if counts.cpu:
            assert pool_of(engine).expert_s > 0


@pytest.mark.skipif(not can_multiply(), reason="no AVX-512 VNNI")
def test_in_fixed_point_the_threads_compute_nearly_the_same(
    separate: Path, own_truth: Floats, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for a GPU, whose bits are others anyway; how many threads share rows changes none."""
    answers = []
    for threads in (1, 3):

        def inexact(*args: Any, is_exact: bool, threads: int = threads) -> WindowPool:
            assert is_exact
            device, layouts, blobs, top_k, _ = args
            return WindowPool(device, layouts, blobs, top_k, threads)

        monkeypatch.setattr(opening, "WindowPool", inexact)
        with ALONE.open(separate, "host") as engine, engine.sequence() as sequence:
            sequence.prefill(PROMPT)
            answers.append(answer(sequence))
            assert counts_of(engine).cpu > 0
    assert same(answers[0], answers[1])
    assert not same(answers[0], own_truth[1:])
    np.testing.assert_allclose(answers[0], own_truth[1:], atol=2e-4)


def test_on_a_gpu_the_threads_compute_nearly_the_same(separate: Path, device_name: str) -> None:
    """Bits are those of the host then, whose products round otherwise; a tie may fall otherwise."""
    expected = truth_of(separate, device_name)
    with ALONE.open(separate, device_name) as engine, engine.sequence() as sequence:
        sequence.prefill(PROMPT)
        differences = np.abs(answer(sequence) - expected[1:])
        assert np.median(differences) < 0.02
        assert counts_of(engine).cpu > 0


@pytest.mark.parametrize("what", ["a thread fails", "threads are not told", "an interrupt"])
def test_no_device_waits_for_a_pool_that_broke(
    separate: Path, device_name: str, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    expected = truth_of(separate, device_name)
    with ALONE.open(separate, device_name) as engine:
        with engine.sequence() as sequence, monkeypatch.context() as patch:
            sequence.prefill(PROMPT)
            sequence.step(ANSWER[0])
            error: type[BaseException] = DeviceError
            pool_of(engine).rest()  # who lingers would not come by what is patched
            if what == "a thread fails":
                patch.setattr(window_pool, "serve_windows", _fail)
            elif what == "threads are not told":
                patch.setattr(pool_of(engine), "_patience_s", 0.05)
                patch.setattr(WindowPool, "start", WindowPool.abandon)
            else:
                patch.setattr(WindowPool, "start", _interrupt)
                error = KeyboardInterrupt
            with pytest.raises(error):
                sequence.step(ANSWER[1])
        with engine.canonical(), engine.sequence() as sequence:
            assert same(sequence.prefill(PROMPT), expected[0])
            assert same(answer(sequence), expected[1:])
        before = counts_of(engine).cpu
        with engine.sequence() as sequence:
            answer(sequence)
        assert counts_of(engine).cpu > before


def _fail(*_args: object) -> bool:
    raise DeviceError("out of order")


def _interrupt(_pool: WindowPool) -> None:
    raise KeyboardInterrupt


def test_what_comes_ahead_is_not_computed_by_the_threads(separate: Path, own_truth: Floats) -> None:
    way = replace(ALONE, fetch=TOP_K, ahead=4)
    with way.open(separate, "host") as engine, engine.sequence() as sequence:
        sequence.prefill(PROMPT)
        assert same(answer(sequence), own_truth[1:])
        counts = counts_of(engine)
        assert counts.hits + counts.pcie + counts.cpu == counts.routed
        assert counts.cpu > 0
        assert counts.pcie > 0


def test_canonical_steps_have_no_share_of_the_host(separate: Path, own_truth: Floats) -> None:
    with ALONE.open(separate, "host") as engine:
        with engine.canonical(), engine.sequence() as sequence:
            sequence.prefill(PROMPT)
            assert same(answer(sequence), own_truth[1:])
            assert sequence.is_exact
        assert counts_of(engine).cpu == 0


def test_misses_of_late_rank_go_to_nobody(separate: Path) -> None:
    way = replace(ALONE, tail_skip=1)
    with way.open(separate, "host") as engine, engine.sequence() as sequence:
        without = Way(cache=20, tail_skip=1)
        with without.open(separate, "host") as other, other.sequence() as alone:
            expected = np.stack([alone.prefill(PROMPT), *answer(alone)])
        assert same(np.stack([sequence.prefill(PROMPT), *answer(sequence)]), expected)
        counts = counts_of(engine)
        assert counts.dropped > 0
        assert counts.cpu > 0
        assert counts.pcie == 0


@pytest.mark.parametrize("num", [2, 8, 9])
def test_several_sequences_step_together(separate: Path, own_truth: Floats, num: int) -> None:
    """More than eight are left to the device."""
    with ALONE.open(separate, "host") as engine:
        sequences = [engine.sequence() for _ in range(num)]
        for sequence in sequences:
            sequence.prefill(PROMPT)
        for index, token in enumerate(ANSWER[:4]):
            rows = engine.read_together([Part(each, [token]) for each in sequences])
            assert all(row is not None and same(row, own_truth[1 + index]) for row in rows)
        assert (counts_of(engine).cpu > 0) == (num <= 8)
        for sequence in sequences:
            sequence.close()


class TestFailures:
    """Whatever breaks: a clear error or the right result, and the next step works."""

    @pytest.fixture
    def engine(self, separate: Path) -> Iterator[Engine]:
        with ALONE.open(separate, "host") as engine:
            yield engine

    def expect_right(self, engine: Engine, truth: Floats) -> None:
        with engine.sequence() as sequence:
            assert same(sequence.prefill(PROMPT), truth[0])
            assert same(answer(sequence), truth[1:])

    @pytest.mark.parametrize("error", [DeviceError("out of order"), SystemExit()])
    def test_a_thread_that_fails_ends_the_step(
        self,
        engine: Engine,
        own_truth: Floats,
        monkeypatch: pytest.MonkeyPatch,
        error: BaseException,
    ) -> None:
        def fail(*_args: object) -> bool:
            raise error

        with engine.sequence() as sequence:
            sequence.prefill(PROMPT)
            pool_of(engine).rest()
            with monkeypatch.context() as patch:
                patch.setattr(window_pool, "serve_windows", fail)
                with pytest.raises(DeviceError, match="did not compute a step's experts"):
                    sequence.step(1)
            with pytest.raises(StateError, match="interrupted"):
                sequence.step(1)
        self.expect_right(engine, own_truth)

    def test_threads_that_died_are_replaced(self, engine: Engine, own_truth: Floats) -> None:
        for worker in pool_of(engine)._workers:
            thread = worker._thread
            assert thread is not None
            worker.windows.put(None)
            thread.join()
        self.expect_right(engine, own_truth)

    def test_a_window_that_a_thread_saw_for_itself_is_not_served_again(
        self, engine: Engine, own_truth: Floats
    ) -> None:
        """It may also have been told, having said that it rests just before it saw the window."""
        self.expect_right(engine, own_truth)
        for worker in pool_of(engine)._workers:
            worker.windows.put(1)
        pool_of(engine).rest()
        self.expect_right(engine, own_truth)

    def test_the_last_window_is_not_served_twice(
        self, engine: Engine, own_truth: Floats, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its counters may belong to the next one already."""
        self.expect_right(engine, own_truth)
        served: list[int] = []
        with monkeypatch.context() as patch:
            patch.setattr(window_pool, "serve_windows", lambda window, _: served.append(window))
            for worker in pool_of(engine)._workers:
                worker.windows.put(int(worker._own.back[0]))
            pool_of(engine).rest()
        assert not served

    def test_threads_that_do_not_come_end_the_step(
        self, separate: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(WindowPool.__init__, "__defaults__", (0.05,))
        with ALONE.open(separate, "host") as engine, engine.sequence() as sequence:
            sequence.prefill(PROMPT)
            with monkeypatch.context() as patch:
                patch.setattr(WindowPool, "start", lambda _pool: None)
                with pytest.raises(DeviceError, match=r"nothing came within 0\.05 s"):
                    sequence.step(1)

    @pytest.mark.parametrize("where", ["begin", "launched", "end"])
    def test_an_interrupt_at_any_part_of_a_window_is_made_up_for(
        self, engine: Engine, own_truth: Floats, where: str
    ) -> None:
        with engine.sequence() as sequence:
            sequence.prefill(PROMPT)
            answer(sequence, ANSWER[:2])
            residency = engine._residency
            interrupt = failing(residency, (where,), 0, KeyboardInterrupt())
            with interrupt, pytest.raises(KeyboardInterrupt):
                answer(sequence)
        self.expect_right(engine, own_truth)

    @pytest.mark.parametrize("where", ["open", "start", "finish", "_wait"])
    @pytest.mark.parametrize("after", [0, 2])
    def test_an_interrupt_inside_the_pool_is_made_up_for(
        self, engine: Engine, own_truth: Floats, where: str, after: int
    ) -> None:
        with engine.sequence() as sequence:
            sequence.prefill(PROMPT)
            interrupt = failing(pool_of(engine), (where,), after, KeyboardInterrupt())
            with interrupt, pytest.raises(KeyboardInterrupt):
                answer(sequence)
        self.expect_right(engine, own_truth)

    def test_a_second_interrupt_leaves_no_window_that_counts_as_read(
        self, engine: Engine, own_truth: Floats
    ) -> None:
        """The next step makes all who still wait for it give up: rows may be missing."""
        with engine.sequence() as sequence:
            sequence.prefill(PROMPT)
            step_interrupted_twice(engine, sequence, "end")
            assert sequence.position == len(PROMPT)
            with pytest.raises(StateError, match="interrupted"):
                sequence.step(1)
        self.expect_right(engine, own_truth)

    def test_nobody_waits_for_a_window_that_was_interrupted_twice(
        self, engine: Engine, own_truth: Floats
    ) -> None:
        """The threads were not told of it, and the device not that they will not come."""
        with engine.sequence() as sequence:
            sequence.prefill(PROMPT)
            step_interrupted_twice(engine, sequence, "launched")
            sequence.reset()
            assert pool_of(engine).mailbox.state.numpy()[STOP]
        self.expect_right(engine, own_truth)

    def test_an_interrupted_replay_is_made_up_for(self, engine: Engine, own_truth: Floats) -> None:
        with engine.sequence() as sequence:
            sequence.prefill(PROMPT)
            sequence.step(1)
            interrupt = failing(engine._stream, ("replay",), 0, KeyboardInterrupt())
            with interrupt, pytest.raises(KeyboardInterrupt):
                sequence.step(1)
        self.expect_right(engine, own_truth)

    def test_an_engine_closes_with_a_window_under_way(self, separate: Path) -> None:
        """The threads were never told; the device must not wait for them."""
        with ALONE.open(separate, "host") as engine:
            sequence = engine.sequence()
            sequence.prefill(PROMPT)
            sequence.step(1)
            interrupt = failing(engine._residency, ("launched",), 0, KeyboardInterrupt())
            with interrupt, pytest.raises(KeyboardInterrupt):
                sequence.step(1)
            sequence.close()


def test_where_nothing_can_be_missed_there_are_no_threads(separate: Path) -> None:
    way = replace(ALONE, cache=NUM_EXPERTS * NUM_LAYERS)
    with way.open(separate, "host") as engine, engine.sequence() as sequence:
        sequence.step(1)
        assert sequence.is_exact
        assert not pool_threads()


@pytest.mark.parametrize(
    ("expert_s", "link_gbps", "share"),
    [
        (45e-6, 10.0, 45 / (45 + 200)),
        (1.0, 10.0, MOST_SHARE),
        (1e-9, 10.0, LEAST_SHARE),
        (0.0, 10.0, USUAL_SHARE),
        (45e-6, 0.0, USUAL_SHARE),
    ],
)
def test_link_and_threads_end_together(expert_s: float, link_gbps: float, share: float) -> None:
    assert balanced_share(expert_s, 2e6, link_gbps) == pytest.approx(share)


def pool_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "strata-pool" in thread.name]


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[Any]:
    yield
    assert not pool_threads()
