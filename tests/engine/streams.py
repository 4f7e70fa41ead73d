"""Engines whose experts are cached and streamed, and a conversation that they must read alike."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from strata_cli.engine.cancelling import NEVER, Cancellation
from strata_cli.engine.engine import Engine, EngineOptions, Sequence
from strata_cli.engine.experts.adapting import STATIC, AdaptRules
from strata_cli.engine.experts.blobs import blob_layouts
from strata_cli.engine.experts.sizing import RingRules
from strata_cli.engine.experts.store import ExpertStore
from strata_cli.engine.experts.streaming import StreamOptions
from strata_cli.engine.forward.state import StateHash
from strata_cli.engine.model.expected import Shape
from strata_cli.engine.model.quants import QuantType
from strata_cli.engine.model.tensors import load_model_file
from strata_cli.engine.prefill.prompt_stream import StreamRules
from strata_cli.engine.prefill.streamer import PromptStreamer
from strata_cli.engine.trace import NO_TRACE, Trace
from strata_cli.errors import StateError
from tests.engine.readings import bits, text
from tests.model.tiny_model import write_tiny_model

NUM_EXPERTS = 20
NUM_LAYERS = 4
CONTEXT = 600
TURNS = (text(230), text(170)[::-1])
STEPS = (5, 9, 2)
STREAM_MIN = 60
WATCHDOG_S = 20.0


@dataclass(frozen=True, kw_only=True)
class Way:
    """How an engine gets at its experts. Nothing of it may change a bit.

    Attributes:
        cache: experts in the cache.
        least: of those that are never lent.
        chunk: tokens.
        ring: slots, 0 automatic.
        stream_min: tokens from which on chunks are streamed ahead.
        stream: options of the stream.
        is_likely, foresees, keep, short: as in StreamRules.
        adapt: when experts change places.
        tail_skip: rank from which on steps leave out misses.
        link_share: of the other misses, what the device reads.
        pinned: experts of each layer in page-locked memory; None: all.
        cpu: share of the host's processor, as in StreamRules. On a GPU it does change bits.
        fetch: slots that steps fetch experts into; None: some on a GPU, none on the host.
        ahead: slots for what the next layer will probably miss; None: likewise.
    """

    cache: int = 45
    least: int = 20
    chunk: int = 64
    ring: int = 0
    stream_min: int = STREAM_MIN
    stream: dict[str, Any] = field(default_factory=dict)
    is_likely: bool = False
    foresees: bool = False
    keep: int = 0
    short: int = 8
    adapt: AdaptRules = STATIC
    tail_skip: int = 0
    link_share: float | None = 1.0
    pinned: int | None = None
    cpu: float | None = 0.0
    fetch: int | None = None
    ahead: int | None = None

    def open(self, path: Path, device: str, trace: Trace = NO_TRACE) -> Engine:
        rules = StreamRules(
            ring=RingRules(stream_min=self.stream_min, slots=self.ring),
            stream=StreamOptions(**{"watchdog_s": WATCHDOG_S, **self.stream}),
            is_likely=self.is_likely,
            foresees=self.foresees,
            kept_slots=self.keep,
            short_tokens=self.short,
            cpu_share=self.cpu,
            cpu_threads=2,
        )
        pinned_bytes = None
        if self.pinned is not None:
            with load_model_file(path) as model:
                layers = blob_layouts(model)
            pinned_bytes = sum(layer.nbytes for layer in layers) * self.pinned
        return Engine.open(
            EngineOptions(
                model=path,
                device=device,
                threads=2,
                prefill=self.chunk,
                expert_cache=self.cache,
                least_slots=self.least,
                adapt=self.adapt,
                tail_skip=self.tail_skip,
                link_share=self.link_share,
                pool_threads=2,
                pinned_bytes=pinned_bytes,
                fetch_slots=self.fetch,
                ahead_slots=self.ahead,
                streaming=rules,
                trace=trace,
            )
        )


WAYS = {
    "routed": Way(),
    "plain": Way(stream={"skips_unrouted": False}),
    "routed, inline": Way(stream={"has_thread": False}),
    "plain, inline": Way(stream={"skips_unrouted": False, "has_thread": False}),
    "depth 1": Way(stream={"depth": 1}),
    "depth 256": Way(stream={"depth": 256}),
    "depth auto, one by one": Way(stream={"depth": 0, "together": 1, "group": 3}),
    "likely": Way(is_likely=True),
    "foreseen": Way(is_likely=True, foresees=True),
    "foreseen, inline": Way(is_likely=True, foresees=True, stream={"has_thread": False}),
    "foreseen and keep": Way(cache=60, least=10, ring=16, keep=30, is_likely=True, foresees=True),
    "short and foreseen": Way(chunk=40, stream_min=1000, is_likely=True, foresees=True),
    "short and foreseen, inline, no cache": Way(
        cache=0,
        chunk=40,
        stream_min=1000,
        is_likely=True,
        foresees=True,
        stream={"has_thread": False},
    ),
    "short, long and foreseen, half pinned": Way(
        chunk=50, pinned=10, cache=79, least=0, is_likely=True, foresees=True
    ),
    "foreseen, half pinned": Way(pinned=10, cache=79, least=0, is_likely=True, foresees=True),
    "keep": Way(cache=60, least=10, ring=16, keep=9),
    "likely and keep": Way(cache=60, least=10, ring=16, keep=30, is_likely=True),
    "ring of 8": Way(ring=8),
    "ring of 16": Way(ring=16),
    "large ring": Way(cache=79, least=0, ring=512),
    "chunk 192": Way(chunk=192),
    "whole": Way(chunk=CONTEXT),
    "small chunks": Way(chunk=24),
    "no cache, ring of its own": Way(cache=0),
    "no cache, keep": Way(cache=0, ring=16, keep=9),
    "no cache, small ring of its own": Way(cache=0, ring=8),
    "no cache, small chunks, likely": Way(cache=0, stream_min=1000, is_likely=True),
    "one slot above a layer's need": Way(cache=NUM_EXPERTS + 1, least=0),
    "one expert": Way(cache=1),
    "all but one": Way(cache=NUM_EXPERTS * NUM_LAYERS - 1, least=0),
    "all": Way(cache=NUM_EXPERTS * NUM_LAYERS),
    "fetched": Way(fetch=12),
    "fetched and ahead": Way(fetch=12, ahead=5),
    "no cache, few fetched, more ahead": Way(cache=0, fetch=3, ahead=16),
    "half pinned": Way(pinned=NUM_EXPERTS // 2),
    "half pinned, inline": Way(pinned=NUM_EXPERTS // 2, stream={"has_thread": False}),
    "half pinned, long ring": Way(pinned=NUM_EXPERTS // 2, cache=79, least=0, ring=16),
    "half pinned, likely and keep": Way(
        pinned=10, cache=60, least=10, ring=16, keep=9, is_likely=True
    ),
    "none pinned": Way(pinned=0),
    "none pinned, small chunks": Way(pinned=0, chunk=24),
    "none pinned, no cache": Way(pinned=0, cache=0),
    "none pinned, small ring": Way(pinned=0, cache=0, ring=8),
    "none pinned, all cached": Way(pinned=0, cache=NUM_EXPERTS * NUM_LAYERS),
}


def write_streamed_model(path: Path, *, fused: bool) -> Path:
    """Four layers with blobs of several types; fused ones also of two widths."""

    def type_of(name: str, _shape: Shape) -> QuantType:
        if "_exps." not in name:
            return QuantType.F32
        if name.startswith("blk.1."):
            return QuantType.Q4_0
        return QuantType.F16 if "down" in name else QuantType.Q8_0

    return write_tiny_model(
        path,
        seed=3 + fused,
        context=CONTEXT,
        hidden=64,
        layers=NUM_LAYERS,
        recurrent=(True, False, True, False),
        ple_layer=2,
        experts_count=NUM_EXPERTS,
        top_k=3,
        ff=(32, 64, 32, 32) if fused else 32,
        fused=fused,
        type_of=type_of,
    )


@dataclass(frozen=True)
class Talk:
    """What two turns gave: logits of every token read, [T, V], and the state behind each turn."""

    logits: NDArray[np.float32]
    states: tuple[StateHash, ...]


def talk(engine: Engine) -> Talk:
    """Read two turns, each followed by steps, in one sequence."""
    logits, states = [], []
    with engine.sequence() as sequence:
        for turn in TURNS:
            logits.append(sequence.prefill(turn, logits="all"))
            logits += [sequence.step(token)[None] for token in STEPS]
            states.append(sequence.state_hash())
    return Talk(np.concatenate(logits), tuple(states))


def assert_same_talk(actual: Talk, expected: Talk) -> None:
    assert np.array_equal(bits(actual.logits), bits(expected.logits))
    assert actual.states == expected.states


def streamer_of(engine: Engine) -> PromptStreamer:
    assert engine._streamer is not None
    return engine._streamer


def store_of(engine: Engine) -> ExpertStore:
    return streamer_of(engine).setting.store


class WatchedCancellation(Cancellation):
    """Tells when a read has come to what it can be stopped in."""

    def __init__(self) -> None:
        super().__init__()
        self.is_awaited = threading.Event()

    @contextmanager
    def stopping(self, stop: Callable[[], None]) -> Iterator[None]:
        with super().stopping(stop):
            self.is_awaited.set()
            yield


LAUNCHES = ("launch", "repeat")  # of a stream


@contextmanager
def counting(owner: Any, names: tuple[str, ...]) -> Iterator[list[str]]:
    """Names of these methods, one for each call inside the block."""
    calls: list[str] = []

    def counted(name: str) -> Callable[..., Any]:
        method = getattr(owner, name)

        def call(*args: Any, **more: Any) -> Any:
            calls.append(name)
            return method(*args, **more)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(owner, name, counted(name))
        yield calls


@contextmanager
def failing(owner: Any, names: tuple[str, ...], after: int, error: BaseException) -> Iterator[None]:
    """Inside the block, these methods raise the error, after so many calls that pass."""
    left = after

    def counted(name: str) -> Callable[..., Any]:
        method = getattr(owner, name)

        def call(*args: Any, **more: Any) -> Any:
            nonlocal left
            if left == 0:
                raise error
            left -= 1
            return method(*args, **more)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(owner, name, counted(name))
        yield


def break_off(
    engine: Engine,
    sequence: Sequence,
    error: type[BaseException],
    match: str | None = None,
    cancellation: Cancellation = NEVER,
) -> None:
    """Read until the error comes: the sequence says so, and all experts are where they were."""
    cache = store_of(engine).cache
    held = cache.pair_in.copy()
    with pytest.raises(error, match=match):
        sequence.prefill(list(TURNS[0]), cancellation=cancellation)
    assert not issuers()
    assert cache.loan is None
    assert (cache.pair_in == held).all()
    with pytest.raises(StateError, match="interrupted"):
        sequence.step(1)


def issuers() -> list[str]:
    """Threads that still issue copies."""
    return [t.name for t in threading.enumerate() if t.name == "strata-issuer"]
