"""Canonical reads: their bits depend on their tokens alone, whatever plain reads do meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from strata_cli.engine import reading
from strata_cli.engine.device.base import Stream, Tensor
from strata_cli.engine.engine import Engine, Sequence
from strata_cli.engine.forward.state import SequenceState
from strata_cli.engine.kernels import moe
from strata_cli.engine.prompt_cache import CacheRules
from strata_cli.engine.reading import ReadRequest, is_canonical
from strata_cli.engine.session import Session
from strata_cli.engine.suffixes import read_suffixes
from tests.engine.readings import TEXT, Reading, Truth, bits
from tests.engine.streams import TURNS, Way, store_of, streamer_of

RULES = CacheRules(
    prompt_cache=4,
    prompt_cache_every=16,
    prompt_cache_root=10,
    conversation_cache_mib=64,
    least_parked_tokens=5,
)
OTHER = TEXT[::-1]


@pytest.mark.parametrize(
    ("deterministic", "max_tokens", "wants_logprobs", "expected"),
    [
        (None, 0, True, True),
        (None, 1, True, True),
        (None, 2, True, False),
        (None, 1, False, False),
        (True, 40, False, True),
        (False, 0, True, False),
    ],
)
def test_one_token_s_logprobs_are_canonical_unless_told_otherwise(
    deterministic: bool | None, max_tokens: int, wants_logprobs: bool, expected: bool
) -> None:
    assert is_canonical(deterministic, max_tokens, wants_logprobs) is expected


def test_a_block_is_canonical_to_its_end(engine: Engine) -> None:
    seen = [engine.is_canonical]
    with engine.canonical(), pytest.raises(KeyboardInterrupt), engine.canonical():
        raise KeyboardInterrupt
    with engine.canonical():
        with engine.canonical():
            pass
        seen.append(engine.is_canonical)
    assert [*seen, engine.is_canonical] == [False, True, False]


def test_a_block_that_ends_late_ends_no_other(engine: Engine) -> None:
    """Its end was interrupted twice, and left to the garbage collector."""
    late: Any = engine.canonical()
    late.__enter__()
    with engine.canonical():
        late.gen.close()
        assert engine.is_canonical
    assert not engine.is_canonical


@pytest.fixture
def deviating(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Plain passes leave out every token's last expert, as a tier that saves work does."""
    combine = moe.combine

    def skipping(
        stream: Stream, expert_out: Tensor, pair_of: Tensor, weights: Tensor, *rest: Tensor
    ) -> None:
        is_step = stream._recording is not None  # type: ignore[attr-defined]  # the host's

        def skip() -> None:
            if not (engine.is_canonical if is_step else is_canonical):
                memory = weights.buffer.memory()  # type: ignore[attr-defined]  # the host's
                every = memory[weights.offset_bytes :][: weights.nbytes].view(np.float32)
                every.reshape(weights.shape)[:, -1] = 0

        is_canonical = engine.is_canonical
        stream.call(skip)
        combine(stream, expert_out, pair_of, weights, *rest)

    if engine.device_name != "host":
        pytest.skip("weights are changed in place")
    monkeypatch.setattr(moe, "combine", skipping)
    monkeypatch.setattr(Engine, "_deviates", property(lambda _engine: True))
    return engine


class Exact:
    """What canonical reads must give."""

    def __init__(self, engine: Engine, truth: Truth) -> None:
        self._engine, self._truth = engine, truth

    def __call__(self, ids: list[int]) -> Reading:
        with self._engine.canonical():
            return self._truth(ids)

    def check(self, ids: list[int], logits: NDArray[np.float32]) -> None:
        assert np.array_equal(bits(logits), bits(self(ids).logits))


@pytest.fixture
def exact(engine: Engine, truth: Truth) -> Exact:
    return Exact(engine, truth)


def exactness(sequence: Sequence) -> tuple[bool, int]:
    return sequence.is_exact, sequence.exact_rows


def ask(session: Session, ids: list[int], *, canonical: bool, answer: int = 0) -> int:
    """Read a prompt and perhaps generate; how many tokens were reused."""
    request = ReadRequest(ids=ids, top=1, max_tokens=answer, deterministic=canonical)
    return reading.read_in(session, request).reused_tokens


def test_plain_reads_differ_where_the_engine_deviates(deviating: Engine, exact: Exact) -> None:
    """Or the tests below would show nothing."""
    with deviating.sequence() as sequence:
        logits = sequence.prefill(TEXT[:30])
        assert exactness(sequence) == (False, 0)
        assert not np.array_equal(logits, exact(TEXT[:30]).logits)
        sequence.reset()
        assert exactness(sequence) == (True, 0)
        with deviating.canonical():
            sequence.prefill(TEXT[:30])
        stepped = sequence.step(TEXT[30])
        assert exactness(sequence) == (False, 30)
        assert not np.array_equal(stepped, exact(TEXT[:31]).logits)


def test_canonical_reads_resume_from_exact_states_alone(deviating: Engine, exact: Exact) -> None:
    with Session(deviating, RULES) as session:

        def read(ids: list[int]) -> int:
            with deviating.canonical():
                logits, reused = session.read(ids)
            exact.check(ids, logits)
            assert session.sequence.is_exact
            return reused

        assert ask(session, TEXT[:40], canonical=False) == 0
        assert read(TEXT[:40]) == 0
        assert read(TEXT[:40]) == 40
        assert ask(session, TEXT[:50], canonical=False, answer=6) == 40
        assert read(TEXT[:50]) == 40
        answered = list(session.sequence.ids)
        assert ask(session, TEXT[:50], canonical=False, answer=6) == 50
        answered = list(session.sequence.ids)
        assert len(answered) > 50
        assert read([*answered, 3]) == 50
        assert ask(session, [*answered, 3], canonical=False) == len(answered) + 1


def test_parked_conversations_know_what_of_them_is_exact(deviating: Engine, exact: Exact) -> None:
    with Session(deviating, RULES) as session:
        ask(session, TEXT[:40], canonical=True)
        ask(session, TEXT[:60], canonical=False)
        ask(session, OTHER[:60], canonical=False)
        with deviating.canonical():
            logits, reused = session.read(TEXT[:60])
            exact.check(TEXT[:60], logits)
            assert reused == 40
            logits, reused = session.read(OTHER[:60])
            exact.check(OTHER[:60], logits)
            assert reused == 0


def test_rows_that_a_plain_read_wrote_again_are_not_exact(deviating: Engine, exact: Exact) -> None:
    with deviating.sequence() as sequence:
        with deviating.canonical():
            sequence.prefill(TEXT[:20])
            early = sequence.snapshot()
            sequence.prefill(TEXT[20:40])
            late = sequence.snapshot()
        sequence.restore(early)
        sequence.restore(late)
        assert exactness(sequence) == (True, 40)
        sequence.restore(early)
        sequence.prefill(TEXT[20:40])
        sequence.restore(late)  # the same tokens, but other keys
        assert exactness(sequence) == (False, 20)
        sequence.restore(early)
        assert exactness(sequence) == (True, 20)
        with deviating.canonical():
            exact.check(TEXT[:40], sequence.prefill(TEXT[20:40]))


@pytest.mark.parametrize("is_parked", [False, True])
def test_checkpoints_over_rows_that_were_written_again_are_not_exact(
    deviating: Engine, exact: Exact, is_parked: bool
) -> None:
    with Session(deviating, RULES) as session:
        ask(session, TEXT[:40], canonical=True)
        plain = ReadRequest(ids=TEXT[:40], top=1, deterministic=False, reuse=False)
        reading.read_in(session, plain)
        if is_parked:
            ask(session, OTHER[:60], canonical=False)
        assert ask(session, TEXT[:34], canonical=False) == 32
        assert exactness(session.sequence) == (False, 0)
        with deviating.canonical():
            logits, reused = session.read(TEXT[:35])
        exact.check(TEXT[:35], logits)
        assert reused == 0


def test_suffixes_are_canonical_one_by_one(deviating: Engine, exact: Exact) -> None:
    suffixes = [OTHER[:3], TEXT[:7], OTHER[5:12]]
    for deterministic in (None, False):
        request = ReadRequest(ids=TEXT[:30], top=2, deterministic=deterministic)
        with deviating.sequence() as sequence:
            for own, result in read_suffixes(deviating, sequence, request, suffixes):
                assert not deviating.is_canonical
                is_same = np.array_equal(bits(result.logits), bits(exact(own.ids).logits))
                assert is_same is own.is_canonical


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    turn, length = draw(st.sampled_from([10, 16, 33])), draw(st.integers(1, 50))
    return (TEXT[:turn] + OTHER)[:length] if draw(st.booleans()) else TEXT[:length]


CALLS = st.lists(
    st.tuples(
        prompts(),
        st.sampled_from(["canonical", "plain", "plain anew", "plain and on", "canonical and on"]),
    ),
    max_size=9,
)


def play(session: Session, exact: Exact, calls: list[tuple[list[int], str]]) -> None:
    for ids, how in calls:
        request = ReadRequest(
            ids=ids,
            max_tokens=4 if how.endswith("on") else 0,
            deterministic=how.startswith("canonical"),
            reuse=how != "plain anew",
        )
        result = reading.read_in(session, request)
        sequence = session.sequence
        if request.is_canonical:
            exact.check(ids, result.logits)
            assert sequence.is_exact
        if sequence.is_exact:
            assert sequence.state_hash() == exact(list(sequence.ids)).state


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(calls=CALLS)
def test_no_plain_read_changes_a_canonical_one(
    deviating: Engine, exact: Exact, calls: list[tuple[list[int], str]]
) -> None:
    with Session(deviating, RULES) as session:
        play(session, exact, calls)


def test_a_forgotten_mark_is_seen(
    deviating: Engine, exact: Exact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparisons of these tests catch a canonical read that goes on from a plain one."""
    end_pass = SequenceState.end_pass

    def forgetful(state: SequenceState, ids: list[int], *, is_exact: bool) -> None:
        end_pass(state, ids)

    monkeypatch.setattr(SequenceState, "end_pass", forgetful)
    with Session(deviating, RULES) as session, pytest.raises(AssertionError):
        play(session, exact, [(TEXT[:40], "plain"), (TEXT[:41], "canonical")])


def test_sessions_may_be_canonical_throughout(deviating: Engine, exact: Exact) -> None:
    with Session(deviating, canonical=True) as session:
        exact.check(TEXT[:30], session.read(TEXT[:30]).logits)
        (row,) = session.score_suffixes(TEXT[:20], [OTHER[:4]])
        exact.check(TEXT[:20] + OTHER[:4], row)
        assert session.read(TEXT[:33]).reused_tokens == 20


@pytest.fixture(scope="module")
def streamed(separate: Path, device_name: str) -> Iterator[Engine]:
    with Way(is_likely=True).open(separate, device_name) as engine:
        yield engine


def test_checkpoints_of_streamed_prompts_cost_no_pass(streamed: Engine) -> None:
    rules = CacheRules(prompt_cache_every=100, prompt_cache_root=10)
    with Session(streamed, rules) as session:
        session.read(TURNS[0])
        kept = [checkpoint.position for checkpoint in session.cache.checkpoints]
        assert kept == [64, 128, len(TURNS[0])]
        assert len(streamer_of(streamed).counts) == 2  # passes behind the last of them
        assert session.read(TURNS[0][:70] + TURNS[1]).reused_tokens == 64


def test_what_adapts_is_as_if_the_read_had_not_been(streamed: Engine) -> None:
    history = streamer_of(streamed)._history
    with streamed.sequence() as sequence:
        sequence.prefill(TURNS[0])
        sequence.step(5)
        held = store_of(streamed).cache.pair_in.copy()
        order, depth = history.order(), vars(history.depth).copy()
        with streamed.canonical():
            sequence.reset()
            sequence.prefill(TURNS[1])
            assert (history.order() != order).any()
            sequence.step(5)
            history.depth.polled(0, was_full=True)
            assert vars(history.depth) != depth
        assert (history.order() == order).all()
        assert vars(history.depth) == depth
        assert (store_of(streamed).cache.pair_in == held).all()
