"""What canonical reads and what they reuse cost, as ratios of neighbouring runs.

    PYTHONPATH=. python benchmarks/canonical_costs.py [MODEL.gguf] [--device NAME] [--prefix N]
        [--runs N] [--json FILE]

Ratios, each with the bound that it must keep: a canonical over a plain first read of one prompt; a
prompt whose prefix is cached over a fresh read of it, and the same behind other prompts with that
prefix; sixteen suffixes with their prefix over one of them with its prefix. The two sides take
turns, in changing order, so that noise falls on both alike; a ratio is the median of the turns'
ratios (least to most). On the host, processor time counts, which others that use the machine
disturb less than wall time. The logits of both are compared bit by bit.

Where not all experts are resident, the second ratio has a bound that no order of copies can mend:
what its tail routes to must be in slots or come over the link. That is stated too, for the slots as
they are and for those that would hold the most of it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.arguments import new_file, run_benchmark, whole
from strata_cli.engine import reading
from strata_cli.engine.engine import Engine, EngineOptions
from strata_cli.engine.model.tensors import load_model_file
from strata_cli.engine.reading import ReadRequest
from strata_cli.engine.session import Session
from strata_cli.models import DEMO_MODEL_PATH
from tools.synth.prompts import zipf_prompt

TAIL, SUFFIX, NUM_SUFFIXES = 100, 64, 16
ASKED = 2
FIRST = 1032
PREFIX = 8192
ROOM = NUM_SUFFIXES * SUFFIX + TAIL + 1  # of the context, behind the prefix

Rows = list[NDArray[np.float32]]
Clock = Callable[[], float]


@dataclass(frozen=True)
class Ratio:
    """One cost over another.

    Attributes:
        what: in words.
        bound: that the ratio must keep.
        ratio, least, most: over the turns.
        over_ms, under_ms: medians of both sides.
    """

    what: str
    bound: float
    ratio: float
    least: float
    most: float
    over_ms: float
    under_ms: float

    @property
    def holds(self) -> bool:
        return self.ratio <= self.bound

    def line(self) -> str:
        return (
            f"{self.what:<58} {self.ratio:7.4f} ({self.least:.4f} to {self.most:.4f})  "
            f"at most {self.bound:<5} {'holds' if self.holds else 'MISSED':<7}"
            f"{self.over_ms:9.1f} / {self.under_ms:9.1f} ms"
        )


@dataclass(frozen=True)
class TailLink:
    """What the link carries for a tail whose prefix is cached.

    Attributes:
        routed: experts that it routes to, of all layers together.
        copied: of them, over the link; copied_mb: their size.
        link_gbps: as measured when the cache was filled.
        copied_ms: at that rate.
        least_ms: the same if every slot held one of the routed experts.
    """

    routed: int
    copied: int
    copied_mb: float
    link_gbps: float
    copied_ms: float
    least_ms: float

    @classmethod
    def of(cls, engine: Engine) -> TailLink | None:
        """Of the last prompt; None: it needed no link."""
        streamer = engine._streamer
        if streamer is None or streamer.use is None or not engine._device.has_own_memory:
            return None
        store = streamer.setting.store
        routed = int((streamer.use > 0).sum())
        copied = sum(counts.copied for counts in streamer.counts)
        nbytes = sum(counts.copied_bytes for counts in streamer.counts)
        rate = store.link_gbps * 1e6  # bytes in a millisecond
        least = max(routed - store.cache.num_slots, 0) * nbytes / max(copied, 1)
        return cls(routed, copied, nbytes / 1e6, rate / 1e6, nbytes / rate, least / rate)

    def line(self) -> str:
        return (
            f"  its tail routes to {self.routed} experts; {self.copied} come over the link, "
            f"{self.copied_mb:.0f} MB, {self.copied_ms:.1f} ms at {self.link_gbps:.1f} GB/s; "
            f"at least {self.least_ms:.1f} ms with the slots there are"
        )


@dataclass(frozen=True)
class Side:
    """One side of a ratio: what is made ready, untimed, and what is timed; gives logits."""

    run: Callable[[], Rows]
    prepare: Callable[[], object] = lambda: None

    def timed(self, clock: Clock) -> tuple[float, Rows]:
        self.prepare()
        began = clock()
        rows = self.run()
        return clock() - began, rows


def ratio_of(engine: Engine, what: str, bound: float, over: Side, under: Side, runs: int) -> Ratio:
    clock = time.process_time if engine.device_name == "host" else time.perf_counter
    over_s, under_s = [], []
    for turn in range(runs + 1):  # the first warms up
        sides = (over, under) if turn % 2 else (under, over)
        timed = {id(side): side.timed(clock) for side in sides}
        (a, rows), (b, others) = timed[id(over)], timed[id(under)]
        if any(x.tobytes() != y.tobytes() for x, y in zip(rows, others, strict=False)):
            raise SystemExit(f"{what}: other bits")
        if turn:
            over_s.append(a)
            under_s.append(b)
    ratios = [a / b for a, b in zip(over_s, under_s, strict=True)]
    return Ratio(
        what,
        bound,
        statistics.median(ratios),
        min(ratios),
        max(ratios),
        1e3 * statistics.median(over_s),
        1e3 * statistics.median(under_s),
    )


def canonical_over_plain(engine: Engine, session: Session, runs: int) -> Ratio:
    ids = zipf_prompt(engine.spec.vocab_size, FIRST, 1)

    def side(*, deterministic: bool) -> Side:
        request = ReadRequest(ids=ids, top=5, deterministic=deterministic, reuse=False)
        return Side(lambda: [reading.read_in(session, request).logits])

    what = f"canonical over plain first read of {FIRST} tokens"
    return ratio_of(engine, what, 1.02, side(deterministic=True), side(deterministic=False), runs)


def cached_over_fresh(
    engine: Engine, session: Session, prefix: int, runs: int, asked: int
) -> tuple[Ratio, TailLink | None]:
    """Of a tail behind so many others with its prefix; see the module."""
    vocab_size = engine.spec.vocab_size
    ids = zipf_prompt(vocab_size, prefix + TAIL, 2)
    request = ReadRequest(ids=ids, top=5)

    def ask() -> None:
        session.read_prefix(ids[:prefix], reuse=False)
        for number in range(1, asked + 1):
            tail = zipf_prompt(vocab_size, prefix + TAIL + number, 2)[-TAIL:]
            reading.read_in(session, ReadRequest(ids=ids[:prefix] + tail, top=5))

    cached = Side(lambda: [reading.read_in(session, request).logits], ask)

    def fresh() -> Rows:
        with engine.sequence() as sequence:
            return [reading.read(engine, sequence, request).logits]

    what = f"{TAIL} tokens behind {prefix} cached ones over a fresh read"
    if asked:
        what = f"the same, {asked} others asked before"
    ratio = ratio_of(engine, what, 0.05, cached, Side(fresh), runs)
    cached.timed(time.perf_counter)
    return ratio, TailLink.of(engine)


def suffixes_over_one(engine: Engine, session: Session, prefix: int, runs: int) -> Ratio:
    ids = zipf_prompt(engine.spec.vocab_size, prefix, 3)
    suffixes = [zipf_prompt(engine.spec.vocab_size, SUFFIX, 4 + i) for i in range(NUM_SUFFIXES)]

    def score(count: int) -> Side:
        def run() -> Rows:
            with engine.canonical():
                return session.score_suffixes(ids, suffixes[:count], reuse=False)

        return Side(run)

    what = f"{NUM_SUFFIXES} suffixes of {SUFFIX} with a prefix of {prefix} over one"
    return ratio_of(engine, what, 1.5, score(NUM_SUFFIXES), score(1), runs)


def usual_prefix(path: Path) -> int:
    """Tokens of the prefix: as many as the bounds are meant for, where the context has them."""
    with load_model_file(path) as model:
        return min(PREFIX, model.spec.context_tokens - ROOM)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path, nargs="?", default=DEMO_MODEL_PATH)
    parser.add_argument("--device", default="host")
    parser.add_argument("--vram-mib", type=whole(0), default=0)
    parser.add_argument("--slots", type=whole(0), help="of the expert cache")
    parser.add_argument("--profile", type=Path, help="of the experts")
    parser.add_argument(
        "--prefix", type=whole(1), help="8,192 tokens, or what the model has room for"
    )
    parser.add_argument("--runs", type=whole(1), default=7)
    parser.add_argument("--json", type=new_file)
    arguments = parser.parse_args()
    if arguments.prefix is None:
        arguments.prefix = usual_prefix(arguments.model)
    options = EngineOptions(
        model=arguments.model,
        device=arguments.device,
        vram_bytes=arguments.vram_mib << 20,
        max_context=arguments.prefix + ROOM,
        expert_cache=arguments.slots,
        expert_profile=arguments.profile,
    )
    ratios = []
    with Engine.open(options) as engine, Session(engine) as session:
        ratios.append(canonical_over_plain(engine, session, 3 * arguments.runs))
        print(ratios[-1].line(), flush=True)
        links = []
        for asked in (0, ASKED):
            ratio, link = cached_over_fresh(
                engine, session, arguments.prefix, arguments.runs, asked
            )
            ratios.append(ratio)
            links.append(None if link is None else asdict(link))
            print("\n".join([ratio.line()] + ([] if link is None else [link.line()])), flush=True)
        ratios.append(suffixes_over_one(engine, session, arguments.prefix, arguments.runs))
        print(ratios[-1].line(), flush=True)
        about = {
            "commit": subprocess.run(
                ["git", "describe", "--always", "--dirty"], capture_output=True, text=True
            ).stdout.strip(),
            "model": engine.model_name,
            "device": engine.device_name,
            "chunk_tokens": engine.chunk_tokens,
            "tail_links": links,
        }
    if arguments.json:
        rows = [asdict(ratio) | {"holds": ratio.holds} for ratio in ratios]
        arguments.json.write_text(json.dumps({**about, "ratios": rows}, indent=1))


if __name__ == "__main__":
    run_benchmark(main)
