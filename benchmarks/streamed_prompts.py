"""What a streamed prompt costs, way by way, and that none of them changes a bit.

    PYTHONPATH=. python benchmarks/streamed_prompts.py MODEL.gguf [--device cuda:0]
        [--slots N | --vram-gib G] [--lengths 1046,1979,18763+1790] [--prefill 8192] [--ring N]
        [--ways "all copied;likely, depth auto"] [--json FILE]

First all experts are resident, where they fit: the logits that count, and the time that computing
takes. Then an engine with fewer cache slots reads the same prompts in every way, in turn, so that
noise falls on all alike; "A+B" is B tokens behind A that were read before. A prompt's bound is the
larger of the resident time and of its routed, not resident bytes over the link's rate, measured in
the same run.

What a read expects of routing comes from another prompt of the same length, or of the tokens
before: a prompt that is read again and again must not know itself. The way "oracle" does, which
shows what the best order of copies would avoid.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.arguments import run_benchmark
from strata_cli.engine.device import open_device
from strata_cli.engine.device.base import Tensor
from strata_cli.engine.engine import Engine, EngineOptions, Sequence
from strata_cli.engine.experts.order import LIKELY_TOKENS, oracle
from strata_cli.engine.experts.streaming import ChunkStream, StreamOptions
from strata_cli.engine.forward.state import Snapshot
from strata_cli.engine.model.tensors import load_model_file
from strata_cli.engine.prefill.prompt_stream import History, StreamRules
from strata_cli.engine.prefill.streamer import PromptStreamer
from strata_cli.errors import OutOfMemory
from tools.synth.prompts import zipf_prompt

LINK_BYTES = 1 << 30
PLAIN = StreamRules(is_likely=False, foresees=False, stream=StreamOptions(depth=16))
WAYS = {
    "all copied": replace(PLAIN, stream=replace(PLAIN.stream, skips_unrouted=False)),
    "routed": PLAIN,
    "routed, depth auto": replace(PLAIN, stream=replace(PLAIN.stream, depth=0)),
    "likely": replace(PLAIN, is_likely=True),
    "likely, depth auto": replace(PLAIN, is_likely=True, stream=replace(PLAIN.stream, depth=0)),
    "foreseen": replace(
        PLAIN, is_likely=True, foresees=True, stream=replace(PLAIN.stream, depth=0)
    ),
    "foreseen, ahead 64": replace(
        PLAIN, is_likely=True, foresees=True, stream=replace(PLAIN.stream, depth=0, ahead=64)
    ),
    "foreseen, kept 1024": replace(
        PLAIN,
        is_likely=True,
        foresees=True,
        stream=replace(PLAIN.stream, depth=0),
        kept_slots=1024,
    ),
    "likely, ahead 256": replace(
        PLAIN, is_likely=True, stream=replace(PLAIN.stream, depth=0, ahead=256)
    ),
    "likely, depth 48": replace(PLAIN, is_likely=True, stream=replace(PLAIN.stream, depth=48)),
    "likely, depth 128": replace(PLAIN, is_likely=True, stream=replace(PLAIN.stream, depth=128)),
    "likely, inline": replace(
        PLAIN, is_likely=True, stream=replace(PLAIN.stream, has_thread=False)
    ),
    "likely, kept 256": replace(PLAIN, is_likely=True, kept_slots=256),
    "oracle": replace(PLAIN, is_likely=True, stream=replace(PLAIN.stream, depth=0)),
}
ORACLE = "oracle"


@dataclass(frozen=True)
class Read:
    """One way of reading one prompt. Counts are of one read; seconds of all.

    Attributes:
        pairs: for each run, the first way's seconds over this one's.
        avoided_share: of the bytes that need not come, those that did not.
    """

    tokens: int
    reused: int
    way: str
    seconds: float
    least: float
    most: float
    tokens_per_s: float
    copied: int
    skipped: int
    copied_bytes: int
    link_gbps: float
    link_share: float
    waited_share: float
    times_bound: float
    avoided_share: float
    pairs: list[float]
    same_bits: bool


@dataclass(frozen=True)
class Prompt:
    """Tokens to read, behind others that were read before."""

    before: list[int]
    ids: list[int]
    name: str


@dataclass(frozen=True)
class Bound:
    """What no way can beat: computing, and carrying what is routed."""

    logits: NDArray[np.float32]
    resident_s: float
    routed_bytes: int
    entry_bytes: int


def link_rate(name: str) -> float:
    """Bytes per second of one large copy to the device."""
    with open_device(name) as device:
        source, room = device.allocate_pinned(LINK_BYTES), device.allocate(LINK_BYTES)
        stream = device.stream("link")
        src = Tensor.over(source, (LINK_BYTES,), np.uint8)
        dst = Tensor.over(room, (LINK_BYTES,), np.uint8)
        seconds = []
        for _ in range(4):
            start = time.perf_counter()
            stream.copy(dst, src)
            stream.synchronize()
            seconds.append(time.perf_counter() - start)
        stream.close()
    return LINK_BYTES / min(seconds)


def prompt_of(vocab_size: int, length: str, seed: int) -> Prompt:
    reused, _, new = length.rpartition("+")
    before = zipf_prompt(vocab_size, int(reused), seed + 100) if reused else []
    return Prompt(before, zipf_prompt(vocab_size, int(new), seed), length)


class Reader:
    """Reads one prompt again and again."""

    def __init__(self, engine: Engine, prompt: Prompt) -> None:
        self._prompt = prompt
        self._sequence: Sequence = engine.sequence()
        if prompt.before:
            self._sequence.prefill(prompt.before)
        self._start: Snapshot = self._sequence.snapshot()

    def read(self) -> tuple[NDArray[np.float32], float]:
        self._sequence.restore(self._start)
        start = time.perf_counter()
        logits = self._sequence.prefill(self._prompt.ids)
        return logits, time.perf_counter() - start

    def close(self) -> None:
        self._sequence.close()


def streamer_of(engine: Engine) -> PromptStreamer:
    streamer = engine._streamer
    assert streamer is not None, "every expert is resident: lower --slots or --vram-gib"
    return streamer


class Expecting(History):
    """A history that says what is expected of routing, whatever was read; see by_oracle."""

    def __init__(self, history: History) -> None:
        super().__init__(history.scores)
        self.depth = history.depth
        self.expected: NDArray[np.int64] | None = None
        self.oracle: list[NDArray[np.int64]] = []
        self.uses: list[NDArray[np.int64]] = []

    def expect(self, use: NDArray[np.int64] | None, known: list[NDArray[np.int64]]) -> None:
        """Of the next prompt, from the use of another; or known, chunk by chunk."""
        self._last_use = use
        self.oracle = list(known)
        self.uses = []

    def order(self) -> NDArray[np.int64]:
        return oracle(self.oracle.pop(0)) if self.oracle else super().order()

    def num_likely(
        self,
        num_tokens: int,
        is_streamed: NDArray[np.bool_],
        least_tokens: float = LIKELY_TOKENS,
    ) -> list[int]:
        """Asked for before the order."""
        if not self.oracle:
            return super().num_likely(num_tokens, is_streamed, least_tokens)
        counts: list[int] = ((self.oracle[0] > 0) & is_streamed).sum(axis=1).tolist()
        return counts

    def add(self, stream: ChunkStream, num_tokens: int, *, is_typical: bool) -> None:
        super().add(stream, num_tokens, is_typical=is_typical)
        self.uses.append(stream.use.copy())


def expecting(streamer: PromptStreamer) -> Expecting:
    if not isinstance(streamer._history, Expecting):
        streamer._history = Expecting(streamer._history)
    return streamer._history


@contextmanager
def way(engine: Engine, rules: StreamRules) -> Iterator[PromptStreamer]:
    """The engine's streamer with other rules, for the length of the block."""
    streamer = streamer_of(engine)
    before, streamer._rules = streamer._rules, replace(rules, ring=streamer._rules.ring)
    try:
        yield streamer
    finally:
        streamer._rules = before


def resident_reads(
    options: EngineOptions, prompts: list[Prompt], runs: int
) -> list[tuple[NDArray[np.float32] | None, float]]:
    """Logits and median seconds with every expert on the device; (None, 0) where they don't fit."""
    try:
        engine = Engine.open(options)
    except OutOfMemory as error:
        print(f"not all resident: {error.message}")
        return [(None, 0.0)] * len(prompts)
    with engine:
        found: list[tuple[NDArray[np.float32] | None, float]] = []
        for prompt in prompts:
            reader = Reader(engine, prompt)
            logits, _ = reader.read()
            found.append((logits, statistics.median(reader.read()[1] for _ in range(runs))))
            reader.close()
    return found


class Expected:
    """What is known of a prompt before it is timed."""

    def __init__(self, engine: Engine, reader: Reader, prompt: Prompt, other: Prompt) -> None:
        streamer = streamer_of(engine)
        history, cache = expecting(streamer), streamer.setting.store.cache
        if not prompt.before:
            unlike = Reader(engine, other)
            unlike.read()
            unlike.close()
        self.last_use = history._last_use
        history.expect(self.last_use, [])
        self.logits, _ = reader.read()
        self.uses = history.uses
        blob_bytes = np.array([layout.nbytes for layout in streamer.setting.store.layouts])
        entries = ~cache.is_resident
        routed = [(use > 0) & entries for use in self.uses]
        self.routed_bytes = sum(int(chunk.sum(axis=1) @ blob_bytes) for chunk in routed)
        self.entry_bytes = len(routed) * int(entries.sum(axis=1) @ blob_bytes)


def reads_of(
    engine: Engine,
    prompt: Prompt,
    other: Prompt,
    resident: tuple[NDArray[np.float32] | None, float],
    link: float,
    runs: int,
    ways: list[str],
) -> Iterator[Read]:
    reader = Reader(engine, prompt)
    known = Expected(engine, reader, prompt, other)
    logits = known.logits if resident[0] is None else resident[0]
    bound = Bound(logits, resident[1], known.routed_bytes, known.entry_bytes)
    print(
        f"{prompt.name} tokens: resident {bound.resident_s * 1e3:.1f} ms, routed and not "
        f"resident {bound.routed_bytes / 1e9:.2f} of {bound.entry_bytes / 1e9:.2f} GB, "
        f"{bound.routed_bytes / link * 1e3:.1f} ms of the link"
    )
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    same = dict.fromkeys(ways, True)
    counts = {}
    for _ in range(runs):
        for name in ways:
            with way(engine, WAYS[name]) as streamer:
                history = expecting(streamer)
                history.expect(known.last_use, known.uses if name == ORACLE else [])
                read, taken = reader.read()
                seconds[name].append(taken)
                same[name] &= bound.logits.tobytes() == read.tobytes()
                counts[name] = streamer.counts
    reader.close()
    least_s = max(bound.resident_s, bound.routed_bytes / link)
    for name, taken_s in seconds.items():
        median = statistics.median(taken_s)
        copied = sum(c.copied_bytes for c in counts[name])
        unrouted = max(bound.entry_bytes - bound.routed_bytes, 1)
        yield Read(
            tokens=len(prompt.ids),
            reused=len(prompt.before),
            way=name,
            seconds=median,
            least=min(taken_s),
            most=max(taken_s),
            tokens_per_s=len(prompt.ids) / median,
            copied=sum(c.copied for c in counts[name]),
            skipped=sum(c.skipped for c in counts[name]),
            copied_bytes=copied,
            link_gbps=copied / median / 1e9,
            link_share=copied / median / link,
            waited_share=sum(c.waited_us for c in counts[name]) / 1e6 / median,
            times_bound=median / least_s,
            avoided_share=(bound.entry_bytes - copied) / unrouted,
            pairs=[off / on for off, on in zip(seconds[ways[0]], taken_s, strict=True)],
            same_bits=same[name],
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--slots", type=int, help="of the expert cache; else as many as fit")
    parser.add_argument(
        "--vram-gib", type=float, default=0.0, help="device memory; 0: what is free"
    )
    parser.add_argument("--ways", help="those with these names, between semicolons; else all")
    parser.add_argument("--least-slots", type=int, default=128, help="that are not lent")
    parser.add_argument("--lengths", default="1046,1979,4096,8192")
    parser.add_argument("--prefill", type=int, default=8192)
    parser.add_argument("--ring", type=int, default=0, help="slots of the ring; 0: automatic")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--no-resident", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    lengths = arguments.lengths.split(",")
    link = link_rate(arguments.device)
    print(f"link {link / 1e9:.1f} GB/s")
    resident = EngineOptions(
        model=arguments.model,
        device=arguments.device,
        prefill=arguments.prefill,
        max_context=max(sum(map(int, length.split("+"))) for length in lengths) + 64,
        streaming=replace(PLAIN, ring=replace(PLAIN.ring, slots=arguments.ring)),
    )
    cached = replace(
        resident,
        expert_cache=arguments.slots,
        least_slots=arguments.least_slots,
        vram_bytes=int(arguments.vram_gib * (1 << 30)),
    )
    ways = arguments.ways.split(";") if arguments.ways else list(WAYS)
    with load_model_file(arguments.model) as model:
        vocab_size = model.spec.vocab_size
    prompts = [prompt_of(vocab_size, length, seed=1) for length in lengths]
    others = [prompt_of(vocab_size, length, seed=2) for length in lengths]
    rows: list[Read] = []
    found: list[tuple[NDArray[np.float32] | None, float]] = [(None, 0.0)] * len(prompts)
    if not arguments.no_resident:
        found = resident_reads(resident, prompts, arguments.runs)
    start = time.perf_counter()
    with Engine.open(cached) as engine:
        slots = streamer_of(engine).setting.store.cache.num_slots
        print(f"opened in {time.perf_counter() - start:.1f} s, {slots} slots")
        for prompt, other, known in zip(prompts, others, found, strict=True):
            for row in reads_of(engine, prompt, other, known, link, arguments.runs, ways):
                rows.append(row)
                ratios = " ".join(f"{ratio:.3f}" for ratio in row.pairs)
                print(
                    f"  {row.way:<20} {row.seconds * 1e3:8.1f} ms {row.tokens_per_s:9.0f} tokens/s "
                    f"copied {row.copied:6d} skipped {row.skipped:6d} "
                    f"link {row.link_gbps:5.1f} GB/s {row.link_share:4.0%} "
                    f"waited {row.waited_share:4.0%} bound x {row.times_bound:5.2f} "
                    f"avoided {row.avoided_share:4.0%} {'same' if row.same_bits else 'OTHER'} bits "
                    f"pairs {ratios}",
                    flush=True,
                )
            if arguments.json:
                document = {"link_gbps": link / 1e9, "rows": [asdict(row) for row in rows]}
                arguments.json.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    run_benchmark(main)
