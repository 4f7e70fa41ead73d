"""Sessions: whatever is reused, every prompt's numbers are those of a fresh read."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from strata_cli.engine import reading
from strata_cli.engine.conversations import ConversationCache
from strata_cli.engine.engine import Engine
from strata_cli.engine.forward.rows import RowPort
from strata_cli.engine.forward.state import SequenceState, Snapshot
from strata_cli.engine.one_thread import OneThread
from strata_cli.engine.prompt_cache import CacheRules, is_prefix
from strata_cli.engine.reading import ReadRequest
from strata_cli.engine.sequence import Part, Sequence
from strata_cli.engine.session import PromptRead, Session
from strata_cli.engine.suffixes import read_suffixes
from strata_cli.errors import InputError, StateError
from tests.engine.passes import interrupt
from tests.engine.readings import CONTEXT, TEXT, Truth, bits
from tests.engine.strategies import VOCAB

SMALL = CacheRules(prompt_cache=4, prompt_cache_every=16, prompt_cache_root=10)
PARKING = CacheRules(
    prompt_cache=6,
    prompt_cache_every=16,
    prompt_cache_root=0,
    conversation_cache_mib=64,
    least_parked_tokens=5,
)
OTHER = TEXT[::-1]


def check(session: Session, truth: Truth, ids: list[int], *, reuse: bool = True) -> int:
    """Read a prompt and compare all that follows from it; the tokens that were reused."""
    logits, reused = session.read(ids, reuse=reuse)
    assert np.array_equal(bits(logits), bits(truth(ids).logits))
    assert session.sequence.state_hash() == truth(ids).state
    return reused


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    """Beginnings of one text, some of which turn into another."""
    turn, length = draw(st.sampled_from([3, 10, 16, 33, 50])), draw(st.integers(1, 60))
    return (TEXT[:turn] + OTHER)[:length] if draw(st.booleans()) else TEXT[:length]


@settings(max_examples=6)
@given(
    rules=st.sampled_from([SMALL, PARKING, CacheRules(prompt_cache=0)]),
    calls=st.lists(
        st.tuples(prompts(), st.sampled_from(["read", "anew", "score", "go on", "begin"])),
        max_size=8,
    ),
)
def test_whatever_was_read_before_no_bit_differs(
    engine: Engine, truth: Truth, rules: CacheRules, calls: list[tuple[list[int], str]]
) -> None:
    with Session(engine, rules) as session:
        for ids, how in calls:
            if how == "score":
                suffixes = [OTHER[:3], TEXT[:1], OTHER[5:12]]
                for suffix, row in zip(
                    suffixes, session.score_suffixes(ids, suffixes), strict=True
                ):
                    assert np.array_equal(bits(row), bits(truth(ids + suffix).logits))
                continue
            if how == "begin":
                session.read_prefix(ids, keeps=False)
                continue
            reused = check(session, truth, ids, reuse=how != "anew")
            assert reused == 0 or how != "anew"
            if how == "go on":
                logits = session.sequence.step(7)
                assert np.array_equal(bits(logits), bits(truth([*ids, 7]).logits))
            assert len(session.cache.checkpoints) <= rules.prompt_cache


@pytest.mark.parametrize("rules", [SMALL, PARKING])
def test_the_order_of_prompts_changes_no_bit(
    engine: Engine, truth: Truth, rules: CacheRules
) -> None:
    three = [TEXT[:40], TEXT[:25] + OTHER[:20], OTHER[:50]]
    for order in (three, three[::-1]):
        with Session(engine, rules) as session:
            for ids in [*order, *order]:
                check(session, truth, ids)


def test_a_prompt_resumes_from_the_longest_prefix(engine: Engine, truth: Truth) -> None:
    with Session(engine, SMALL) as session:
        assert check(session, truth, TEXT[:40]) == 0
        positions = [checkpoint.position for checkpoint in session.cache.checkpoints]
        assert positions == [10, 16, 32, 40]
        assert check(session, truth, TEXT[:40]) == 40  # the end has its logits
        assert check(session, truth, TEXT[:60]) == 40
        session.sequence.step(TEXT[60])
        assert check(session, truth, TEXT[:70]) == 61  # goes on where the answer ended
        assert check(session, truth, TEXT[:40] + OTHER[:8]) == 10  # 16 and 32 made room
        assert check(session, truth, TEXT[:12] + OTHER[:8]) == 10
        assert check(session, truth, OTHER[:8]) == 0


def test_a_third_prompt_resumes_where_the_second_left_the_first(
    engine: Engine, truth: Truth
) -> None:
    rules = CacheRules(prompt_cache_every=0, prompt_cache_root=0, least_parked_tokens=20)
    with Session(engine, rules) as session:
        reused = [
            check(session, truth, TEXT[:shared] + OTHER[tail : tail + 5])
            for tail, shared in enumerate((30, 30, 30, 40, 40, 19))
        ]
        assert reused == [0, 0, 30, 30, 30, 0]  # from 30 to 40 are too few
        assert check(session, truth, TEXT[:19] + OTHER[:5]) == 0


def test_without_reuse_everything_is_read_but_kept_for_later(engine: Engine, truth: Truth) -> None:
    with Session(engine, SMALL) as session:
        for _ in range(2):
            assert check(session, truth, TEXT[:40], reuse=False) == 0
        assert check(session, truth, TEXT[:41]) == 40


def test_a_wrong_position_is_seen(
    engine: Engine, truth: Truth, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison of these tests catches a resumed read that is one token off."""
    restore = SequenceState.restore

    def off_by_one(state: SequenceState, snapshot: Snapshot) -> None:
        restore(state, snapshot)
        state.ids.pop()

    with Session(engine, SMALL) as session:
        check(session, truth, TEXT[:40])
        monkeypatch.setattr(SequenceState, "restore", off_by_one)
        logits, _ = session.read(TEXT[:35])
        assert not np.array_equal(bits(logits), bits(truth(TEXT[:35]).logits))


def test_parked_conversations_come_back(engine: Engine, truth: Truth) -> None:
    chats = [TEXT[:60], OTHER[:70], TEXT[100:150]]
    with Session(engine, PARKING) as session:
        for ids in chats:
            assert check(session, truth, ids) == 0
        assert len(session.conversations.conversations) == 2
        for ids in chats:
            assert check(session, truth, [*ids, 9]) == len(ids)
            session.sequence.step(11)
        for ids in chats:
            assert check(session, truth, [*ids, 9, 11, 12]) == len(ids) + 2
            assert check(session, truth, [*ids[:48], 4]) == 48  # its grid came back too


def test_conversations_stay_within_their_budget(
    engine: Engine, truth: Truth, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Session(engine, PARKING) as session:
        check(session, truth, TEXT[:60])
        check(session, truth, OTHER[:60])
        one = session.conversations.nbytes
        assert one > 0
        session.conversations.budget_bytes = one + 1
        check(session, truth, TEXT[100:160])
        assert [parked.rows.ids for parked in session.conversations.conversations] == [
            tuple(OTHER[:60])
        ]
        session.conversations.budget_bytes = one - 1
        check(session, truth, TEXT[30:90])  # what is too large pushes nothing out
        assert len(session.conversations.conversations) == 1
        session.conversations.budget_bytes = session.sequence.parked_bytes
        with monkeypatch.context() as patch:
            patch.setattr(Sequence, "park", None)  # nothing is copied that would not be kept
            check(session, truth, TEXT[60:120])
        assert len(session.conversations.conversations) == 1
        assert check(session, truth, TEXT[:60]) == 0


def test_few_tokens_are_not_parked(engine: Engine, truth: Truth) -> None:
    """Tails of one document are read again sooner than the document is copied."""
    with Session(engine, PARKING) as session:
        for token in range(3):
            check(session, truth, [*TEXT[:48], token, 1, 2])
        assert session.conversations.conversations == ()


def test_an_interrupted_read_leaves_what_was_whole(
    engine: Engine, truth: Truth, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Session(engine, SMALL) as session:
        check(session, truth, TEXT[:40])
        with interrupt(monkeypatch, engine, "launch", 30):
            session.read(TEXT[:60])
        assert not session.sequence.is_consistent
        assert check(session, truth, TEXT[:60]) == 40
        with interrupt(monkeypatch, engine, "launch", 30):
            session.score_suffixes(TEXT[:60], [TEXT[:3]])
        assert check(session, truth, TEXT[:61]) == 60


def test_an_interrupted_read_without_checkpoints_begins_anew(
    engine: Engine, truth: Truth, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Session(engine, CacheRules(prompt_cache=0)) as session:
        check(session, truth, TEXT[:40])
        with interrupt(monkeypatch, engine, "launch", 30):
            session.read(TEXT[:60])
        assert check(session, truth, TEXT[:60]) == 0
        assert check(session, truth, TEXT[:61]) == 60


def test_suffixes_use_up_what_was_read_behind_their_prefix(engine: Engine, truth: Truth) -> None:
    with Session(engine, SMALL) as session:
        check(session, truth, TEXT[:40])
        session.score_suffixes(TEXT[:32], [OTHER[:9]])
        assert check(session, truth, TEXT[:60]) == 32


def test_conversations_that_made_room_leave_no_checkpoints_behind(
    engine: Engine, truth: Truth
) -> None:
    with Session(engine, PARKING) as session:
        for ids in (TEXT[:40], OTHER[:40], TEXT[:41]):
            check(session, truth, ids)
            assert all(is_prefix(kept.ids, ids) for kept in session.cache.checkpoints)


def test_a_prompt_that_cannot_be_read_changes_nothing(engine: Engine, truth: Truth) -> None:
    with Session(engine, SMALL) as session:
        check(session, truth, TEXT[:40])
        for wrong in ([], [VOCAB], [1] * (CONTEXT + 1)):
            with pytest.raises(InputError):
                session.read(wrong)
        assert check(session, truth, TEXT[:41]) == 40


def test_a_prefix_is_gone_on_from_without_a_checkpoint(engine: Engine, truth: Truth) -> None:
    with Session(engine, CacheRules(prompt_cache_every=0, prompt_cache_root=0)) as session:
        session.read_prefix(TEXT[:20])
        session.read_prefix(TEXT[:40], keeps=False)
        assert [kept.position for kept in session.cache.checkpoints] == [20]
        (row,) = session.score_suffixes(TEXT[:40], [OTHER[:3]])
        assert session.read_tokens == 43
    assert np.array_equal(bits(row), bits(truth([*TEXT[:40], *OTHER[:3]]).logits))


def test_suffixes_may_follow_nothing(engine: Engine, truth: Truth) -> None:
    with Session(engine) as session:
        check(session, truth, TEXT[:20])
        rows = session.score_suffixes([], [TEXT[:5], TEXT[:1]])
        assert np.array_equal(bits(rows[0]), bits(truth(TEXT[:5]).logits))
        assert np.array_equal(bits(rows[1]), bits(truth(TEXT[:1]).logits))


def test_progress_counts_what_is_read(engine: Engine) -> None:
    calls: list[tuple[int, int]] = []
    with Session(engine, SMALL) as session:
        session.read(TEXT[:12])
        session.read(TEXT[:40], progress=lambda *call: calls.append(call))
    assert calls == [(4, 28), (20, 28), (28, 28)]


def test_a_session_answers_requests_as_a_sequence_does(engine: Engine) -> None:
    request = ReadRequest(ids=TEXT[:30], top=5, max_tokens=4, state_hash=True)
    with engine.sequence() as sequence:
        fresh = reading.read(engine, sequence, request)
    with Session(engine, SMALL) as session:
        first, second = (reading.read_in(session, request) for _ in range(2))
        every = reading.read_in(session, ReadRequest(ids=TEXT[:30], all_logits=True))
    assert (first.reused_tokens, second.reused_tokens) == (0, 30)
    for result in (first, second):
        assert result.top == fresh.top
        assert result.generated_ids == fresh.generated_ids
        assert result.state_hash == fresh.state_hash
    assert every.all_logits is not None
    assert np.array_equal(bits(every.all_logits[-1]), bits(fresh.logits))


@pytest.mark.parametrize(
    ("request_", "match"),
    [
        (ReadRequest(ids=[1], allowed_ids=(2, -1)), "token id -1 is out of range"),
        (ReadRequest(ids=[1], allowed_ids=(VOCAB,)), f"token id {VOCAB} is out of range"),
        (ReadRequest(ids=[1], top=-1), "top must not be negative, got -1"),
        (ReadRequest(ids=[1], max_tokens=-3), "max_tokens must not be negative, got -3"),
        (
            ReadRequest(ids=[1] * CONTEXT, max_tokens=2),
            f"[^,]*{CONTEXT} prompt tokens and 2 tokens .* context of {CONTEXT}",
        ),
    ],
)
def test_what_cannot_be_asked_is_refused_before_anything_is_read(
    engine: Engine, request_: ReadRequest, match: str
) -> None:
    with Session(engine, SMALL) as session, pytest.raises(InputError, match=match):
        reading.read_in(session, request_)
    with engine.sequence() as sequence:
        with pytest.raises(InputError, match=match):
            reading.read(engine, sequence, request_)
        if not request_.max_tokens:
            with pytest.raises(InputError, match=match):
                next(read_suffixes(engine, sequence, request_, [[1]]))
        assert sequence.position == 0


@pytest.mark.parametrize("canonical", [True, False])
def test_another_thread_is_refused_while_one_reads(
    engine: Engine, truth: Truth, canonical: bool
) -> None:
    request = ReadRequest(ids=TEXT[:40], top=1, deterministic=canonical)
    refused: list[StateError] = []

    def intrude() -> None:
        for use in (
            lambda: reading.read_in(session, request),
            lambda: session.read(OTHER[:9]),
            lambda: session.score_suffixes(OTHER[:9], [[1]]),
            lambda: next(read_suffixes(engine, session.sequence, request, [[1]])),
        ):
            with pytest.raises(StateError, match="another thread is using the engine") as caught:
                use()
            refused.append(caught.value)

    def progress(_done: int, _total: int) -> None:
        thread = threading.Thread(target=intrude)
        thread.start()
        thread.join()

    with Session(engine, SMALL) as session:
        result = reading.read_in(session, request, progress=progress)
        assert np.array_equal(bits(result.logits), bits(truth(TEXT[:40]).logits))
        assert refused
        later: list[PromptRead] = []
        thread = threading.Thread(target=lambda: later.append(session.read(OTHER[:9])))
        thread.start()
        thread.join()
        assert len(later) == 1


def test_what_stands_before_a_prompt_counts_in_the_message(engine: Engine) -> None:
    with engine.sequence() as sequence:
        sequence.prefill(TEXT[:9])
        with pytest.raises(InputError, match=f"9 tokens before, {CONTEXT} prompt tokens and 0"):
            reading.read(engine, sequence, ReadRequest(ids=[1] * CONTEXT))


def test_a_prompt_is_read_by_pieces_as_somebody_likes(engine: Engine, truth: Truth) -> None:
    """Two sessions in turn, in pieces of any size; each leaves the checkpoints of one read."""
    with Session(engine, SMALL) as one, Session(engine, SMALL) as two:
        prompts = [TEXT[:47], OTHER[:37]]
        readings = [
            session.begin(prompt) for session, prompt in zip((one, two), prompts, strict=True)
        ]
        while any(reading.left_tokens for reading in readings):
            for reading in readings:
                if not reading.is_over:
                    ids, wants_logits = reading.next(7)
                    row = reading.sequence.prefill(ids)
                    reading.add(row if wants_logits else None)
        for session, reading, prompt in zip((one, two), readings, prompts, strict=True):
            assert reading.logits is not None
            assert np.array_equal(bits(reading.logits), bits(truth(prompt).logits))
            assert session.known_tokens(prompt) == len(prompt)
            assert session.known_tokens([*prompt, 1]) == len(prompt)
            assert session.known_tokens([*prompt[:20], 1]) == 16
            assert session.known_tokens([1]) == 0
            assert check(session, truth, [*prompt[:20], 1]) == 16


def test_sessions_share_what_made_room(engine: Engine, truth: Truth) -> None:
    cache = ConversationCache(64 << 20)
    with (
        Session(engine, PARKING, conversations=cache) as one,
        Session(engine, PARKING, conversations=cache) as two,
    ):
        check(one, truth, TEXT[:40])
        check(one, truth, OTHER[:40])
        assert two.known_tokens(TEXT[:45]) == 40
        assert check(two, truth, TEXT[:45]) == 40


def test_a_session_adopts_what_another_knows(engine: Engine, truth: Truth) -> None:
    """While that one goes on; a checkpoint that was overwritten is not there any more."""
    with Session(engine, SMALL) as one, Session(engine, SMALL) as two:
        check(one, truth, TEXT[:40])
        one.sequence.step(TEXT[40])
        check(two, truth, OTHER[:12])
        for prompt, known in ((TEXT[:40], 40), (TEXT[:36] + OTHER[:5], 32), (OTHER[:9], 0)):
            assert one.kept_tokens(prompt) == known
            two.adopt(one, prompt)
            assert two.known_tokens(prompt) == known
            assert check(two, truth, prompt) == known
        logits = one.sequence.step(TEXT[41])
        assert np.array_equal(bits(logits), bits(truth(TEXT[:42]).logits))
        check(one, truth, TEXT[:20] + OTHER[:9])
        assert one.kept_tokens(TEXT[:40]) == 16


def test_a_state_is_copied_while_its_logits_are_computed(
    engine: Engine, truth: Truth, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And counts, though the logits never came."""
    done: list[str] = []
    snapshot = SequenceState.snapshot

    def copied(state: SequenceState, *, waits: bool = True) -> Snapshot:
        done.append("copied" if not waits else "copied and waited")
        return snapshot(state, waits=waits)

    def interrupted(_port: RowPort, _rows: int) -> None:
        done.append("logits")
        raise KeyboardInterrupt

    monkeypatch.setattr(SequenceState, "snapshot", copied)
    with Session(engine, SMALL) as session:
        session.read_prefix(TEXT[:20])
        done.clear()
        with monkeypatch.context() as patch:
            patch.setattr(RowPort, "read_marked_logits", interrupted)
            with pytest.raises(KeyboardInterrupt):
                session.read(TEXT[:30])
        assert done == ["copied", "logits"]
        assert check(session, truth, TEXT[:40]) == 30
        assert check(session, truth, TEXT[:30]) == 20
        assert session.read(TEXT[:30]).reused_tokens == 30


def test_a_shared_pass_copies_states_while_it_computes_logits(
    engine: Engine, truth: Truth, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    read_logits = RowPort.read_marked_logits

    def watched(port: RowPort, rows: int) -> NDArray[np.float32]:
        done.append("logits")
        return read_logits(port, rows)

    with Session(engine, SMALL) as one, Session(engine, SMALL) as two, engine.sequence() as other:
        first, second = one.begin(TEXT[:9]), two.begin(TEXT[:30])
        parts = [
            Part(first.sequence, first.next().ids, meanwhile=lambda: done.append("copied")),
            Part(second.sequence, second.next(5).ids, wants_logits=False),
            Part(other, TEXT[:3]),
        ]
        monkeypatch.setattr(RowPort, "read_marked_logits", watched)
        rows = engine.read_together(parts)
        assert done == ["copied", "logits"]
        assert [row is None for row in rows] == [False, True, False]
        for row, length in ((rows[0], 9), (rows[2], 3)):
            assert row is not None
            assert np.array_equal(bits(row), bits(truth(TEXT[:length]).logits))


def test_a_block_inside_another_does_not_end_it() -> None:
    """Another thread is refused until the last one is left, in whatever order they end."""
    one_thread, answers = OneThread(), list[bool]()

    def ask() -> None:
        try:
            with one_thread.using():
                answers.append(True)
        except StateError:
            answers.append(False)

    def asked() -> bool:
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        return answers[-1]

    outer, inner = ExitStack(), ExitStack()
    outer.enter_context(one_thread.using())
    inner.enter_context(one_thread.using())
    assert not asked()
    outer.close()
    assert not asked()
    inner.close()
    assert asked()
