"""Requests that share the engine: each is answered as if it were alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TypeAlias, TypeVar

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from strata_cli.engine import reading
from strata_cli.engine.decode.sampling import Sampler
from strata_cli.engine.engine import Engine, EngineOptions
from strata_cli.engine.kernels.head import log_softmax_row
from strata_cli.engine.prompt_cache import CacheRules
from strata_cli.engine.reading import ReadRequest, read
from strata_cli.errors import DeviceError, OutOfMemory
from strata_cli.models import DEMO_MODEL_PATH
from strata_cli.server.constraint import MadeConstraint
from strata_cli.server.framing import encode
from strata_cli.server.protocol import (
    Done,
    Failed,
    FromWorker,
    Generate,
    Progress,
    PromptLogprobs,
    PromptRow,
    RequestEvent,
    Score,
    Scores,
    Token,
)
from strata_cli.server.scheduler import Scheduler

CHUNK = 16
OUT = ("too little", "buy more")
M = TypeVar("M", Token, Done, Failed, Progress, Scores)
OpenDesk: TypeAlias = "Callable[..., Desk]"
TEXT = tuple(int(i) for i in np.random.default_rng(8).integers(3, 8000, 400))
RULES = CacheRules(prompt_cache=4, prompt_cache_every=32, least_parked_tokens=8)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    options = EngineOptions(model=DEMO_MODEL_PATH, device="host", prefill=CHUNK, threads=2)
    with Engine.open(options) as engine:
        yield engine


@dataclass
class Desk:
    """A scheduler, and all that it has said."""

    scheduler: Scheduler
    said: list[FromWorker] = field(default_factory=list)

    def run(self, *requests: Generate | Score) -> None:
        for request in requests:
            self.scheduler.submit(request)
        while self.scheduler.is_busy:
            self.scheduler.turn()

    def turn_until(self, is_enough: Callable[[], object]) -> None:
        while not is_enough():
            self.scheduler.turn()

    def of(self, name: str, kind: type[M]) -> list[M]:
        return [m for m in self.said if isinstance(m, kind) and m.request_id == name]

    def tokens(self, name: str) -> list[int]:
        return [token.token_id for token in self.of(name, Token)]

    def done(self, name: str) -> Done:
        (done,) = self.of(name, Done)
        return done


@pytest.fixture
def open_desk(engine: Engine) -> Iterator[Callable[..., Desk]]:
    desks: list[Desk] = []

    def make(parallel: int = 1, rules: CacheRules = RULES) -> Desk:
        said: list[FromWorker] = []

        def send(message: FromWorker) -> None:
            encode(message)
            said.append(message)

        scheduler = Scheduler(engine, send, parallel=parallel, rules=rules)
        desks.append(Desk(scheduler, said))
        return desks[-1]

    yield make
    for desk in desks:
        desk.scheduler.close()


def named(name: str, request: Generate | Score) -> Generate | Score:
    return msgspec.structs.replace(request, request_id=name)


VARIED: tuple[Generate | Score, ...] = (
    Generate(prompt=TEXT[:50], max_tokens=9),
    Generate(prompt=TEXT[:50], max_tokens=1, logprobs=5, allowed_ids=(7, 900, 31), named_ids=(8,)),
    Generate(prompt=TEXT[:3], max_tokens=12, logprobs=0, sampling=Sampler(temperature=1.0, seed=4)),
    Generate(
        prompt=TEXT[40:75],
        max_tokens=7,
        ignore_eos=True,
        sampling=Sampler(temperature=0.7, top_k=40, seed=2**64 - 1, repetition_penalty=1.3),
    ),
    Generate(prompt=TEXT[:38], max_tokens=2, prompt_logprobs=3, canonical=True),
    Generate(prompt=TEXT[5:6], max_tokens=1, logprobs=256, reuse=False),
    Generate(prompt=TEXT[:20], max_tokens=0),
    Score(prefix=TEXT[:30], suffixes=(TEXT[30:50], TEXT[90:92], TEXT[1:2]), ids=((1, 2), (), (3,))),
    Score(prefix=(), suffixes=(TEXT[:4],), ids=((5,),)),
    *(
        Generate(prompt=TEXT[:66] + TEXT[at : at + 5], max_tokens=1, logprobs=2, canonical=flag)
        for at, flag in ((100, None), (103, None), (200, None), (180, False))
    ),
)


def answers(desk: Desk, name: str) -> list[object]:
    """What of a request's messages must not depend on others."""
    told: list[object] = []
    for message in desk.said:
        if not isinstance(message, RequestEvent) or message.request_id != name:
            continue
        if isinstance(message, Token):
            told.append(msgspec.structs.replace(message, request_id=""))
        elif isinstance(message, PromptLogprobs):
            told += message.rows
        elif isinstance(message, Scores):
            told.append(message.rows)
        elif isinstance(message, Done):
            told.append((message.finish_reason, message.prompt_tokens, message.generated_tokens))
    return told


@pytest.fixture(scope="module")
def alone(engine: Engine) -> list[list[object]]:
    """Each of VARIED, answered by a scheduler of its own."""
    told = []
    for request in VARIED:
        said: list[FromWorker] = []
        with Scheduler(engine, said.append, rules=CacheRules(prompt_cache=0)) as scheduler:
            desk = Desk(scheduler, said)
            desk.run(named("a", request))
            told.append(answers(desk, "a"))
    return told


@settings(max_examples=6)
@given(
    parallel=st.integers(1, 5),
    arrivals=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, len(VARIED) - 1)), min_size=4, max_size=9
    ),
)
def test_whoever_shares_the_engine_no_answer_differs(
    engine: Engine, alone: list[list[object]], parallel: int, arrivals: list[tuple[int, int]]
) -> None:
    said: list[FromWorker] = []
    with Scheduler(engine, said.append, parallel=parallel, rules=RULES) as scheduler:
        desk = Desk(scheduler, said)
        for number, (turns, index) in enumerate(arrivals):
            scheduler.submit(named(f"{number}", VARIED[index]))
            for _ in range(turns):
                scheduler.turn()
        desk.run()
        for number, (_, index) in enumerate(arrivals):
            assert answers(desk, f"{number}") == alone[index], VARIED[index]
        assert not scheduler._cancellations


def test_answers_are_those_of_a_plain_read(engine: Engine, alone: list[list[object]]) -> None:
    """Tokens and log-probabilities of the first two requests, one behind the other."""
    generate, canonical = VARIED[0], VARIED[1]
    assert isinstance(generate, Generate)
    assert isinstance(canonical, Generate)
    with engine.sequence() as sequence:
        result = read(engine, sequence, ReadRequest(ids=list(generate.prompt), max_tokens=9))
        tokens = [told.token_id for told in alone[0] if isinstance(told, Token) and not told.ends]
        assert tokens == result.generated_ids
    with engine.sequence() as sequence:
        request = ReadRequest(
            ids=list(canonical.prompt), max_tokens=1, top=5, allowed_ids=(7, 900, 31, 8)
        )
        result = read(engine, sequence, request)
    (token,) = (told for told in alone[1] if isinstance(told, Token))
    assert [tuple(entry) for entry in token.top] == [tuple(entry) for entry in result.top]
    assert [tuple(entry) for entry in token.named] == [tuple(entry) for entry in result.allowed]
    best = max(result.allowed[:3], key=lambda entry: entry.logprob)
    assert (token.token_id, token.logprob) == best


def test_prompt_logprobs_are_those_of_every_position(
    engine: Engine, alone: list[list[object]]
) -> None:
    request = VARIED[4]
    assert isinstance(request, Generate)
    with engine.sequence() as sequence:
        rows = sequence.prefill(list(request.prompt), logits="all")
    told = [row for row in alone[4] if isinstance(row, PromptRow)]
    assert [row.token_id for row in told] == list(request.prompt[1:])
    for row, logits in zip(told, rows, strict=False):
        logprobs = log_softmax_row(logits)
        assert row.logprob == float(logprobs[row.token_id])
        assert [entry.token_id for entry in row.top] == np.argsort(-logprobs)[:3].tolist()


def test_a_stop_acts_within_one_pass_and_concerns_nobody_else(open_desk: OpenDesk) -> None:
    desk = open_desk(parallel=3)
    long, other = Generate(prompt=TEXT, max_tokens=5), Generate(prompt=TEXT[:6], max_tokens=8)
    desk.scheduler.submit(named("long", long))
    desk.scheduler.submit(named("other", other))
    desk.turn_until(lambda: len(desk.of("long", Progress)) == 2)
    read_tokens = desk.of("long", Progress)[-1].read_tokens
    desk.scheduler.cancel("long")
    desk.scheduler.turn()
    done = desk.done("long")
    assert (done.finish_reason, done.read_tokens, done.generated_tokens) == (
        "cancelled",
        read_tokens,
        0,
    )
    desk.run()
    assert len(desk.tokens("other")) == 8
    desk.run(named("again", long))
    assert desk.done("again").reused_tokens > 0
    assert desk.scheduler.status().counters.requests_cancelled == 1


def test_a_stop_acts_between_two_tokens(open_desk: OpenDesk) -> None:
    desk = open_desk()
    desk.scheduler.submit(named("a", Generate(prompt=TEXT[:6], max_tokens=50, ignore_eos=True)))
    desk.turn_until(lambda: len(desk.tokens("a")) == 3)
    desk.scheduler.cancel("a")
    desk.run()
    assert desk.done("a").generated_tokens == 3


def test_a_stop_may_come_before_its_request_and_after_its_end(open_desk: OpenDesk) -> None:
    desk = open_desk()
    desk.scheduler.expect("a")
    desk.scheduler.cancel("a")
    desk.run(named("a", VARIED[0]))
    assert (desk.done("a").finish_reason, desk.tokens("a")) == ("cancelled", [])
    desk.scheduler.cancel("a")
    desk.scheduler.cancel("nobody")
    desk.run(named("b", VARIED[7]), named("c", VARIED[0]))
    assert len(desk.of("b", Scores)) == 1
    for name in ("d", "e"):
        desk.scheduler.submit(named(name, VARIED[7]))
    desk.scheduler.turn()
    desk.scheduler.cancel_all()
    desk.run()
    assert [desk.done(name).finish_reason for name in "de"] == ["cancelled"] * 2


def test_requests_beyond_the_slots_wait_in_line(open_desk: OpenDesk) -> None:
    desk = open_desk(parallel=2)
    for name in "abcde":
        desk.scheduler.submit(named(name, Generate(prompt=TEXT[:6], max_tokens=4)))
    desk.scheduler.turn()
    status = desk.scheduler.status()
    assert (status.waiting, status.reading + status.generating) == (3, 2)
    desk.run()
    ends = [message.request_id for message in desk.said if isinstance(message, Done)]
    assert sorted(ends) == list("abcde")
    assert ends[-1] == "e"


def test_answers_go_on_while_a_long_prompt_is_read(open_desk: OpenDesk) -> None:
    desk = open_desk(parallel=2)
    desk.scheduler.submit(named("chat", Generate(prompt=TEXT[:4], max_tokens=60, ignore_eos=True)))
    desk.scheduler.turn()
    desk.scheduler.submit(named("long", Generate(prompt=TEXT[::-1], max_tokens=1)))
    desk.turn_until(lambda: desk.of("long", Done) or desk.of("chat", Done))
    order = [type(m) for m in desk.said if isinstance(m, Token | Progress)]
    pairs = list(itertools.pairwise(order))
    assert (Progress, Progress) not in pairs


def test_a_short_prompt_need_not_wait_for_a_long_one(open_desk: OpenDesk) -> None:
    desk = open_desk(parallel=2)
    desk.scheduler.submit(named("long", Generate(prompt=TEXT, max_tokens=1)))
    desk.scheduler.turn()
    desk.scheduler.submit(named("short", Generate(prompt=TEXT[::-7], max_tokens=1)))
    desk.run()
    assert [m.request_id for m in desk.said if isinstance(m, Done)] == ["short", "long"]


def test_a_conversation_finds_its_slot_again(open_desk: OpenDesk) -> None:
    desk = open_desk(parallel=2)
    first = Generate(prompt=TEXT[:60], max_tokens=3, ignore_eos=True)
    desk.run(named("chat", first), named("other", Generate(prompt=TEXT[200:290], max_tokens=1)))
    answer = desk.tokens("chat")
    turn = (*first.prompt, *answer, *TEXT[100:104])
    desk.run(named("turn", Generate(prompt=turn, max_tokens=1)))
    # The last token of an answer is told, but never read.
    assert desk.done("turn").reused_tokens == len(first.prompt) + len(answer) - 1


def test_another_last_turn_is_all_that_is_read_of_a_conversation(
    open_desk: OpenDesk, engine: Engine
) -> None:
    """Also where the template wrote the last one with a thought that is gone now."""
    (mark,) = engine.tokenizer.encode("<|im_start|>", parse_special=True)
    said = tuple(token_id for token_id in TEXT if token_id != mark)[:300]
    desk = open_desk(rules=replace(RULES, prompt_cache_every=0, least_parked_tokens=299))
    for name, last in (("first", (8, 9)), ("other", (8, 10, 11)), ("again", (8, 9))):
        prompt = (*said, mark, *last)
        desk.run(named(name, Generate(prompt=prompt, max_tokens=2, ignore_eos=True)))
    assert [desk.done(name).reused_tokens for name in ("first", "other", "again")] == [0, 300, 300]
    alone = open_desk(rules=CacheRules(prompt_cache=0))
    whole = Generate(prompt=(*said, mark, 8, 10, 11), max_tokens=2, ignore_eos=True)
    alone.run(named("other", whole))
    assert alone.tokens("other") == desk.tokens("other")


@pytest.mark.parametrize(
    ("max_tokens", "least", "kept"), [(1, 299, False), (2, 301, False), (2, 300, True)]
)
def test_a_checkpoint_of_a_turn_is_for_long_conversations_that_are_answered(
    open_desk: OpenDesk, engine: Engine, max_tokens: int, least: int, kept: bool
) -> None:
    (mark,) = engine.tokenizer.encode("<|im_start|>", parse_special=True)
    said = tuple(token_id for token_id in TEXT if token_id != mark)[:300]
    desk = open_desk(rules=replace(RULES, prompt_cache_every=0, least_parked_tokens=least))
    for last in (8, 9):
        prompt = (*said, mark, last)
        desk.run(named(f"{last}", Generate(prompt=prompt, max_tokens=max_tokens)))
    assert desk.done("9").reused_tokens == (300 if kept else 0)


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (Generate(prompt=(), max_tokens=1), "no tokens"),
        (Generate(prompt=(1, 10**6), max_tokens=1), "outside the vocabulary"),
        (Generate(prompt=TEXT, max_tokens=5000), "do not fit the context"),
        (Generate(prompt=(1,), max_tokens=1, allowed_ids=(5, 8192)), "allowed token ids"),
        (Generate(prompt=(1,), max_tokens=1, named_ids=(-1,)), "named token ids"),
        (Generate(prompt=(1,), max_tokens=1, constraint="{}"), "grammar"),
        (Score(prefix=(1,), suffixes=((1,), ()), ids=((), ())), "suffix 2: "),
        (Score(prefix=(1,), suffixes=((1,),), ids=((9000,),)), "suffix 1: its token ids"),
        (Score(prefix=(1,), suffixes=((1,),), ids=()), "come with the ids of 0"),
        (Score(prefix=(-3,), suffixes=((1,),), ids=((),)), "outside the vocabulary"),
    ],
)
def test_what_cannot_be_answered_is_refused_at_once(
    open_desk: OpenDesk, request_: Generate | Score, text: str
) -> None:
    desk = open_desk()
    desk.run(named("a", request_))
    (failed,) = desk.of("a", Failed)
    assert failed.kind == "input"
    assert text in failed.message
    assert len(desk.said) == 1


def test_ends_of_an_answer(open_desk: OpenDesk, engine: Engine) -> None:
    """An end token is told, as one; stop tokens of the request count too."""
    desk, eos = open_desk(), min(engine.tokenizer.eos_ids)
    forced = Generate(prompt=TEXT[:9], max_tokens=5, allowed_ids=(eos,))
    desk.run(named("eos", forced))
    desk.run(named("ignored", msgspec.structs.replace(forced, ignore_eos=True)))
    desk.run(named("own", Generate(prompt=(9,), max_tokens=5, allowed_ids=(77,), stop_ids=(77,))))
    for name, finish, count in (("eos", "stop", 1), ("ignored", "length", 5), ("own", "stop", 1)):
        done = desk.done(name)
        assert (done.finish_reason, done.generated_tokens) == (finish, count)
        assert [token.ends for token in desk.of(name, Token)] == [finish == "stop"] * count


def test_an_answer_of_one_token_for_ever_ends_and_is_logged(
    open_desk: OpenDesk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reading, "REPEAT_LIMIT", 20)
    desk = open_desk()
    desk.run(named("a", Generate(prompt=TEXT[:9], max_tokens=400, allowed_ids=(77,))))
    assert (desk.done("a").finish_reason, desk.done("a").generated_tokens) == ("length", 20)
    (record,) = caplog.records
    assert record.message == "an answer was ended after 20 tokens: its last 20 are one and the same"


class Spelling:
    """A constraint that lets one text come, and then the end."""

    def __init__(self, ids: Sequence[int], end: int) -> None:
        self.left = [*ids, end]
        self.accepted: list[int] = []

    def mask(self) -> NDArray[np.bool_]:
        mask = np.zeros(8192, np.bool_)
        mask[[self.left[0], 4000]] = True
        return mask

    def accept(self, token_id: int) -> None:
        self.accepted.append(token_id)
        assert token_id == self.left.pop(0)


def test_a_constraint_is_asked_before_every_token(open_desk: OpenDesk) -> None:
    made: list[Spelling] = []

    def submit(request: Generate | Score, *ids: int) -> None:
        made.append(Spelling(ids, 0))
        future: MadeConstraint = Future()
        future.set_result(made[-1])
        desk.scheduler.submit(request, future)
        desk.run()

    desk = open_desk()
    allowed = (50, 60, 70, 0)
    whole = Generate(prompt=TEXT[:9], max_tokens=9, allowed_ids=allowed, constraint="50 60 70")
    submit(named("a", whole), 50, 60, 70)
    assert desk.tokens("a") == [50, 60, 70, 0]
    assert made[0].accepted == [50, 60, 70]
    assert desk.done("a").finish_reason == "stop"
    part = Generate(prompt=TEXT[:9], max_tokens=9, allowed_ids=(50,), constraint="50 60")
    submit(named("b", part), 50, 60)
    (failed,) = desk.of("b", Failed)
    assert failed.kind == "input"
    assert "none of the allowed token ids fits" in failed.message


def test_a_pass_that_fails_fails_its_requests_alone(
    open_desk: OpenDesk, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = open_desk(parallel=2)

    def fail(*_: object, **__: object) -> None:
        raise OutOfMemory(OUT[0], hint=OUT[1])

    for name in "abc":
        desk.scheduler.submit(named(name, Generate(prompt=TEXT[:20], max_tokens=2)))
    with monkeypatch.context() as patch:
        patch.setattr(engine, "read_together", fail)
        desk.scheduler.turn()
    desk.run()
    for name in "ab":
        (failed,) = desk.of(name, Failed)
        assert (failed.kind, failed.message, failed.hint) == ("out_of_memory", *OUT)
    assert len(desk.tokens("c")) == 2
    assert desk.scheduler.status().counters.requests_failed == 2


def test_a_device_that_failed_ends_the_engine(
    open_desk: OpenDesk, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = open_desk()

    def fail(*_: object, **__: object) -> None:
        raise DeviceError("cuLaunchKernel: misaligned address")

    monkeypatch.setattr(engine, "read_together", fail)
    desk.scheduler.submit(named("a", VARIED[0]))
    with pytest.raises(DeviceError):
        desk.scheduler.turn()
    assert desk.of("a", Failed)[0].kind == "device"


def test_what_was_done_is_counted(open_desk: OpenDesk) -> None:
    desk = open_desk(parallel=2)
    before = desk.scheduler.beat().progress
    desk.run(named("a", VARIED[0]), named("b", VARIED[1]), named("c", VARIED[7]))
    counters = desk.scheduler.status().counters
    dones = [desk.done(name) for name in "ab"]
    assert (counters.requests, counters.canonical_reads) == (3, 2)
    assert counters.generated_tokens == sum(done.generated_tokens for done in dones)
    assert counters.prompt_tokens == 50 + 50 + 30 + 23
    assert counters.read_tokens == sum(done.read_tokens for done in dones) + 30 + 23
    assert counters.steps > 0
    assert desk.scheduler.beat().progress - before == counters.passes
    assert desk.scheduler.status().memory_bytes > 1 << 20
    assert not desk.scheduler.is_busy


def questions(count: int, **more: object) -> list[Generate]:
    """One-token reads of prompts that begin alike, with 90 tokens, and end in five of their own."""
    return [
        msgspec.structs.replace(
            Generate(prompt=TEXT[:90] + TEXT[at : at + 5], max_tokens=1, logprobs=2), **more
        )
        for at in range(100, 100 + 7 * count, 7)
    ]


@pytest.mark.parametrize("parallel", [1, 3])
def test_what_questions_have_in_common_is_read_once(open_desk: OpenDesk, parallel: int) -> None:
    """Wherever they come in: together, or while the first one reads what they have in common."""
    desk = open_desk(parallel=parallel)
    desk.scheduler.submit(named("0", questions(9)[0]))
    desk.turn_until(lambda: desk.of("0", Progress))
    for number in range(1, 9):
        desk.scheduler.submit(named(f"{number}", questions(9)[number]))
    desk.run()
    dones = [desk.done(f"{number}") for number in range(9)]
    assert [done.read_tokens for done in dones] == [95] + [5] * 8
    assert [done.reused_tokens for done in dones] == [0] + [90] * 8
    counters = desk.scheduler.status().counters
    assert (counters.read_tokens, counters.reused_tokens) == (95 + 40, 8 * 90)
    for number, request in enumerate(questions(9)):
        other = open_desk()
        other.run(named("a", request))
        assert answers(other, "a") == answers(desk, f"{number}")


@pytest.mark.parametrize("is_answered", [True, False])
def test_chats_that_begin_alike_copy_what_one_has_read(
    open_desk: OpenDesk, is_answered: bool
) -> None:
    """From a slot whose answer goes on, or while it still reads what they have in common."""
    chats = [
        Generate(prompt=TEXT[:100] + TEXT[at : at + 20], max_tokens=6, sampling=Sampler(seed=at))
        for at in (100, 200, 300)
    ]
    desk = open_desk(parallel=3)
    desk.scheduler.submit(named("0", chats[0]))
    kind = Token if is_answered else Progress
    desk.turn_until(lambda: any(isinstance(message, kind) for message in desk.said))
    for number in (1, 2):
        desk.scheduler.submit(named(f"{number}", chats[number]))
    desk.run()
    known = 96 if is_answered else 100  # on the grid, or where they part
    assert [desk.done(f"{number}").reused_tokens for number in range(3)] == [0, known, known]
    for number, request in enumerate(chats):
        other = open_desk()
        other.run(named("a", request))
        assert answers(other, "a") == answers(desk, f"{number}")


def test_choices_of_one_prompt_read_it_once(open_desk: OpenDesk) -> None:
    desk = open_desk(parallel=4)
    choice = Generate(prompt=TEXT[:77], max_tokens=6, sampling=Sampler(temperature=1.0))
    for seed in range(4):
        sampling = Sampler(temperature=1.0, seed=seed)
        desk.scheduler.submit(named(f"{seed}", msgspec.structs.replace(choice, sampling=sampling)))
    desk.run()
    assert [desk.done(f"{seed}").read_tokens for seed in range(4)] == [77, 0, 0, 0]
    assert len({tuple(desk.tokens(f"{seed}")) for seed in range(4)}) == 4


def test_who_waits_for_a_prompt_that_is_given_up_reads_it(open_desk: OpenDesk) -> None:
    desk = open_desk(parallel=2)
    chat = Generate(prompt=TEXT[:120], max_tokens=2)
    for name in "ab":
        desk.scheduler.submit(named(name, chat))
    desk.turn_until(lambda: desk.of("a", Progress))
    assert desk.scheduler.status().waiting == 1
    desk.scheduler.cancel("a")
    desk.run()
    assert len(desk.tokens("b")) == 2


def test_of_questions_read_together_any_may_be_stopped(open_desk: OpenDesk) -> None:
    desk = open_desk()
    for number, request in enumerate(questions(4)):
        desk.scheduler.submit(named(f"{number}", request))
    desk.turn_until(lambda: desk.of("0", Progress))
    assert desk.scheduler.status().reading == 4
    desk.scheduler.cancel("0")
    desk.scheduler.cancel("2")
    desk.run()
    finishes = [desk.done(f"{number}").finish_reason for number in range(4)]
    assert finishes == ["cancelled", "length", "cancelled", "length"]
    for number, request in enumerate(questions(4)):
        desk.scheduler.submit(named(f"{number}'", request))
    desk.scheduler.turn()
    desk.scheduler.cancel_all()
    desk.run()
    assert not desk.scheduler._cancellations


def test_questions_that_fail_together_are_all_told(
    open_desk: OpenDesk, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OutOfMemory(OUT[0], hint=OUT[1])

    desk = open_desk()
    for number, request in enumerate(questions(3)):
        desk.scheduler.submit(named(f"{number}", request))
    with monkeypatch.context() as patch:
        patch.setattr(engine, "read_together", fail)
        desk.run()
    for number in range(3):
        assert len(desk.of(f"{number}", Failed)) == 1
    desk.run(named("again", questions(1)[0]))
    assert len(desk.tokens("again")) == 1


def test_ends_of_several_beginnings_are_read_in_one_pass(open_desk: OpenDesk) -> None:
    """And one that is longer than a pass, by itself."""
    desk = open_desk(parallel=3)
    requests = [
        Score(prefix=TEXT[at : at + 5], suffixes=(TEXT[:4], TEXT[4:6]), ids=((1,), (2,)))
        for at in (100, 200)
    ]
    long = Score(prefix=TEXT[:5], suffixes=(TEXT[:2], TEXT[: 2 * CHUNK + 3]), ids=((1,), (2, 3)))
    for number, request in enumerate((*requests, long)):
        desk.scheduler.submit(named(f"{number}", request))
    desk.run()
    assert desk.scheduler.status().counters.passes == 3  # beginnings, ends, the long one
    for number, request in enumerate((*requests, long)):
        other = open_desk()
        other.run(named("a", request))
        assert answers(other, "a") == answers(desk, f"{number}")


def test_what_is_canonical_shares_nothing_with_what_is_not(open_desk: OpenDesk) -> None:
    desk = open_desk()
    plain, canonical = questions(2, canonical=False), questions(2)
    for number, request in enumerate((plain[0], canonical[1], plain[1])):
        desk.scheduler.submit(named(f"{number}", request))
    desk.run()
    ends = [message.request_id for message in desk.said if isinstance(message, Done)]
    assert ends == ["0", "2", "1"]
