"""The 65 reads whose numbers must never move, what goes on between them, and ways to ask for them.

15 reads report named tokens, 15 the 20 likeliest, 35 one question each about one of seven states,
its options in five rotations. Every third prompt and state is as long as a document. Logits are
compared as bits, whatever is reported of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine import reading
from strata_cli.engine.decode.sampling import Sampler
from strata_cli.engine.engine import Engine, Part
from strata_cli.engine.reading import ReadRequest, next_token_logprobs
from strata_cli.engine.session import Session
from tools.synth.prompts import zipf_prompt

Logits: TypeAlias = NDArray[np.float32]

TOP = 20
NUM_NAMED_IDS = 4
KINDS = ("named", "top", "rotation")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is read. The defaults are the protocol; smaller ones make a quick test.

    Attributes:
        named, top, states, rotations: reads of each kind; the last two are multiplied.
        short, long: tokens of a prompt: the least and the most of a short one.
        options: tokens of one option of a rotation.
        plain: tokens of the plain reads between two runs.
        chats, chat, answer: chats between two runs, tokens of their prompts and their answers.
        turns, turn: of a growing conversation, and tokens that each brings.
    """

    named: int = 15
    top: int = 15
    states: int = 7
    rotations: int = 5
    short: tuple[int, int] = (73, 101)
    long: int = 1032
    options: int = 6
    plain: tuple[int, ...] = (3051, 1032)
    chats: int = 4
    chat: int = 60
    answer: int = 48
    turns: int = 29
    turn: int = 40

    @property
    def context_tokens(self) -> int:
        """That the longest prompt and its answer take."""
        grown = self.turns * (self.turn + self.answer)
        return max(*self.plain, grown, self.long + self.short[1]) + self.answer


SPEC_SIZES = Sizes()
SMALL_SIZES = Sizes(
    short=(9, 14),
    long=56,
    options=2,
    plain=(110, 56),
    chat=12,
    answer=5,
    turns=7,
    turn=6,
)


@dataclass(frozen=True)
class Asked:
    """One of the reads.

    Attributes:
        kind: see KINDS.
        ids: the prompt.
        prefix: how many of its first tokens others of its kind begin with.
        top, named: what is reported.
    """

    kind: str
    ids: list[int]
    prefix: int = 0
    top: int = 0
    named: tuple[int, ...] = ()

    def request(self, *, reuse: bool = True, deterministic: bool | None = None) -> ReadRequest:
        return ReadRequest(
            ids=self.ids,
            top=self.top,
            allowed_ids=self.named,
            max_tokens=1,
            deterministic=deterministic,
            reuse=reuse,
        )


def asked_of(vocab_size: int, sizes: Sizes = SPEC_SIZES) -> list[Asked]:
    """The reads, for a model with so many tokens; the same ones every time."""
    rng = np.random.default_rng(65)

    def prompt(index: int, seed: int) -> list[int]:
        length = sizes.long if index % 3 == 2 else int(rng.integers(*sizes.short, endpoint=True))
        return zipf_prompt(vocab_size, length, seed)

    named = [
        Asked("named", prompt(i, 100 + i), named=_ids(vocab_size, NUM_NAMED_IDS, 100 + i))
        for i in range(sizes.named)
    ]
    top = [Asked("top", prompt(i, 200 + i), top=TOP) for i in range(sizes.top)]
    rotations = [
        Asked("rotation", ids, len(prompt_ids), named=_ids(vocab_size, sizes.rotations, 300 + s))
        for s, prompt_ids in enumerate(prompt(s, 300 + s) for s in range(sizes.states))
        for ids in _rotations(vocab_size, prompt_ids, sizes, 300 + s)
    ]
    return [*named, *top, *rotations]


def _rotations(vocab_size: int, state: list[int], sizes: Sizes, seed: int) -> Iterator[list[int]]:
    count = sizes.rotations
    options = [zipf_prompt(vocab_size, sizes.options, seed * 10 + i) for i in range(count)]
    for first in range(count):
        turned = [options[(first + i) % count] for i in range(count)]
        yield [*state, *(token for option in turned for token in option)]


def _ids(vocab_size: int, count: int, seed: int) -> tuple[int, ...]:
    rng = np.random.default_rng(seed)
    return tuple(rng.choice(vocab_size, count, replace=False).tolist())


class Answers(NamedTuple):
    """Logits [V] of every read, in the protocol's order, and tokens that were not read again."""

    logits: list[Logits]
    reused_tokens: int = 0


@dataclass(frozen=True)
class Protocol:
    """An engine's reads, one session that they and all else go through, and how they are read.

    Attributes:
        session: of the engine.
        asked: what is read.
        sizes: what else is.
        deterministic: of the reads; None: as the rule says, which makes them canonical.
    """

    session: Session
    asked: list[Asked]
    sizes: Sizes = SPEC_SIZES
    deterministic: bool | None = None

    @property
    def engine(self) -> Engine:
        return self.session.engine

    @property
    def vocab_size(self) -> int:
        return self.engine.spec.vocab_size

    def read(self, asked: Asked, *, reuse: bool = True) -> tuple[Logits, int]:
        """One read, as a client would ask for it; what is reported follows from the logits."""
        request = asked.request(reuse=reuse, deterministic=self.deterministic)
        result = reading.read_in(self.session, request)
        expected = next_token_logprobs(result.logits, asked.top, asked.named)
        assert (result.top, result.allowed) == expected
        return result.logits, result.reused_tokens

    def plain(self, ids: list[int], max_tokens: int = 0, seed: int = 0) -> list[int]:
        """A read that is not canonical; what it generated."""
        sampler = Sampler(temperature=0.8, seed=seed)
        request = ReadRequest(
            ids=ids, top=1, max_tokens=max_tokens, sampler=sampler, deterministic=False
        )
        return reading.read_in(self.session, request).generated_ids

    def churn(self, seed: int) -> None:
        """Plain reads and chats: other experts come into the cache, and other prompts."""
        sizes = self.sizes
        for length in sizes.plain:
            self.plain(zipf_prompt(self.vocab_size, length, 1000 + seed))
        for chat in range(sizes.chats):
            ids = zipf_prompt(self.vocab_size, sizes.chat, 2000 + 10 * seed + chat)
            self.plain(ids, sizes.answer, seed=chat)


Manner: TypeAlias = Callable[[Protocol], Answers]


def in_order(protocol: Protocol) -> Answers:
    """Named, top, rotations."""
    return _one_by_one(protocol, protocol.asked)


def backwards(protocol: Protocol) -> Answers:
    """Rotations, top, named, each kind in its own order."""
    return _one_by_one(protocol, sorted(protocol.asked, key=lambda a: -KINDS.index(a.kind)))


def without_reuse(protocol: Protocol) -> Answers:
    """Each prompt read anew."""
    return _one_by_one(protocol, protocol.asked, reuse=False)


def in_batches(protocol: Protocol) -> Answers:
    """Many reads in one pass: rotations of a state behind it, the other prompts behind nothing."""
    groups: dict[tuple[int, ...], list[Asked]] = {}
    for asked in protocol.asked:
        groups.setdefault(tuple(asked.ids[: asked.prefix]), []).append(asked)
    found: dict[int, Logits] = {}
    before = protocol.session.read_tokens
    for prefix, members in groups.items():
        suffixes = [asked.ids[asked.prefix :] for asked in members]
        with members[0].request(deterministic=protocol.deterministic).manner(protocol.engine):
            rows = protocol.session.score_suffixes(list(prefix), suffixes)
        found.update((id(asked), row) for asked, row in zip(members, rows, strict=True))
    total = sum(len(asked.ids) for asked in protocol.asked)
    reused = total - (protocol.session.read_tokens - before)
    return Answers([found[id(asked)] for asked in protocol.asked], reused)


def last_token_stepped(protocol: Protocol) -> Answers:
    """The last token of each prompt goes through the decode path."""
    logits = []
    with protocol.engine.sequence() as sequence:
        for asked in protocol.asked:
            sequence.reset()
            with asked.request(deterministic=protocol.deterministic).manner(protocol.engine):
                sequence.prefill(asked.ids[:-1], logits="none")
                logits.append(sequence.step(asked.ids[-1]))
    return Answers(logits)


def side_by_side(protocol: Protocol) -> Answers:
    """Each beside a chat that is not canonical: prompts together, then steps together.

    A pass with a canonical row is canonical as a whole.
    """
    engine = protocol.engine
    logits: list[Logits] = []
    piece = max(engine.chunk_tokens // 2, 1)
    with engine.sequence() as sequence, engine.sequence() as chat:
        for asked in protocol.asked:
            sequence.reset()
            chat.reset()
            other = zipf_prompt(protocol.vocab_size, len(asked.ids), 4000 + len(logits))
            row: Logits | None = None
            with asked.request(deterministic=protocol.deterministic).manner(engine):
                for start in range(0, len(asked.ids) - 1, piece):
                    stop = min(start + piece, len(asked.ids) - 1)
                    parts = [Part(sequence, asked.ids[start:stop]), Part(chat, other[start:stop])]
                    engine.read_together(parts)
                parts = [Part(chat, other[-1:]), Part(sequence, asked.ids[-1:])]
                _, row = engine.read_together(parts)
            assert row is not None
            logits.append(row)
    return Answers(logits)


def between_turns(protocol: Protocol, *, reuse: bool = True) -> Answers:
    """Beside a conversation that grows, turn by turn, through the same session."""
    sizes, asked = protocol.sizes, protocol.asked
    talk: list[int] = []
    found: list[Logits] = []
    reused = 0
    for index, part in enumerate(_parts(asked, sizes.turns)):
        talk += zipf_prompt(protocol.vocab_size, sizes.turn, 3000 + index)
        talk += protocol.plain(talk, sizes.answer, seed=index)
        for one in part:
            logits, tokens = protocol.read(one, reuse=reuse)
            found.append(logits)
            reused += tokens
    return Answers(found, reused)


MANNERS: dict[str, Manner] = {
    "ABC": in_order,
    "CBA": backwards,
    "no reuse": without_reuse,
    "in batches": in_batches,
    "last token stepped": last_token_stepped,
    "beside chats": side_by_side,
    "29 turns between": between_turns,
    "29 turns without reuse": partial(between_turns, reuse=False),
}


def _one_by_one(protocol: Protocol, order: Iterable[Asked], *, reuse: bool = True) -> Answers:
    found = {id(asked): protocol.read(asked, reuse=reuse) for asked in order}
    answers = [found[id(asked)] for asked in protocol.asked]
    return Answers([logits for logits, _ in answers], sum(tokens for _, tokens in answers))


def _parts(asked: list[Asked], count: int) -> Iterator[Sequence[Asked]]:
    for index in range(count):
        yield asked[len(asked) * index // count : len(asked) * (index + 1) // count]


@dataclass(frozen=True)
class Difference:
    """How many reads of a run are not those of the first one, bit by bit.

    Attributes:
        run: what differed in how it was read.
        reads: of each run.
        differing: of them.
        kinds: of those, by kind.
        largest: difference of a logit.
        reused_tokens: that were not read again.
    """

    run: str
    reads: int
    differing: int
    kinds: dict[str, int] = field(default_factory=dict)
    largest: float = 0.0
    reused_tokens: int = 0

    def line(self) -> str:
        verdict = f"{self.reads - self.differing} of {self.reads} equal"
        if self.differing:
            kinds = ", ".join(f"{count} {kind}" for kind, count in self.kinds.items())
            verdict += f", {self.differing} differ ({kinds}), by up to {self.largest:.2g}"
        return f"{self.run:<44} {verdict:<20} reused {self.reused_tokens}"


def compare(run: str, asked: list[Asked], first: Answers, other: Answers) -> Difference:
    """What of a run differs from the first one."""
    pairs = list(zip(asked, first.logits, other.logits, strict=True))
    differing = [(a, x, y) for a, x, y in pairs if x.tobytes() != y.tobytes()]
    largest = max((float(np.abs(x - y).max()) for _, x, y in differing), default=0.0)
    kinds = dict(Counter(a.kind for a, _, _ in differing))
    return Difference(run, len(pairs), len(differing), kinds, largest, other.reused_tokens)
