"""What a streamed prompt costs, way by way, and that none of them changes a bit.

    PYTHONPATH=. python benchmarks/streamed_prompts.py MODEL.gguf [--device cuda:0]
        [--slots N | --vram-gib G] [--lengths 1046,1979,4096,8192] [--prefill 8192] [--ring N]
        [--ways "all copied;likely, depth auto"] [--json FILE]

First all experts are resident, where they fit: the logits that count, and the time that computing
takes. Then an engine with fewer cache slots reads the same prompts in every way, in turn, so that
noise falls on all alike. A prompt's bound is the larger of the resident time and of its routed,
not resident bytes over the link's rate, measured in the same run. One more read, not timed, finds
these bytes: through a small ring only what is routed is copied.
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

from strata_cli.engine.device import open_device
from strata_cli.engine.device.base import Tensor
from strata_cli.engine.engine import Engine, EngineOptions
from strata_cli.engine.experts.streaming import StreamOptions
from strata_cli.engine.model.tensors import load_model_file
from strata_cli.engine.prefill.prompt_stream import StreamRules
from strata_cli.engine.prefill.streamer import PromptStreamer
from strata_cli.errors import OutOfMemory
from tools.synth.prompts import zipf_prompt

LINK_BYTES = 1 << 30
PLAIN = StreamRules(is_likely=False, stream=StreamOptions(depth=16))
WAYS = {
    "all copied": replace(PLAIN, stream=replace(PLAIN.stream, skips_unrouted=False)),
    "routed": PLAIN,
    "routed, depth auto": replace(PLAIN, stream=replace(PLAIN.stream, depth=0)),
    "likely": replace(PLAIN, is_likely=True),
    "likely, depth auto": replace(PLAIN, is_likely=True, stream=replace(PLAIN.stream, depth=0)),
    "likely, depth 48": replace(PLAIN, is_likely=True, stream=replace(PLAIN.stream, depth=48)),
    "likely, depth 128": replace(PLAIN, is_likely=True, stream=replace(PLAIN.stream, depth=128)),
    "likely, inline": replace(
        PLAIN, is_likely=True, stream=replace(PLAIN.stream, has_thread=False)
    ),
    "likely, kept 256": replace(PLAIN, is_likely=True, kept_slots=256),
}
ROUTED_ONLY = replace(PLAIN, ring=replace(PLAIN.ring, slots=8))


@dataclass(frozen=True)
class Read:
    """One way of reading one prompt. Counts are of one read; seconds of all."""

    tokens: int
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
    same_bits: bool


@dataclass(frozen=True)
class Bound:
    """What no way can beat: computing, and carrying what is routed."""

    logits: NDArray[np.float32] | None
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


def read(engine: Engine, ids: list[int]) -> tuple[NDArray[np.float32], float]:
    with engine.sequence() as sequence:
        start = time.perf_counter()
        logits = sequence.prefill(ids)
        return logits, time.perf_counter() - start


def streamer_of(engine: Engine) -> PromptStreamer:
    streamer = engine._streamer
    assert streamer is not None, "every expert is resident: lower --slots or --vram-gib"
    return streamer


@contextmanager
def way(engine: Engine, rules: StreamRules) -> Iterator[PromptStreamer]:
    """The engine's streamer with other rules, for the length of the block."""
    streamer = streamer_of(engine)
    before, streamer._rules = streamer._rules, rules
    try:
        yield streamer
    finally:
        streamer._rules = before


def resident_reads(
    options: EngineOptions, prompts: list[list[int]], runs: int
) -> list[tuple[NDArray[np.float32] | None, float]]:
    """Logits and median seconds with every expert on the device; (None, 0) where they don't fit."""
    try:
        engine = Engine.open(options)
    except OutOfMemory as error:
        print(f"not all resident: {error.message}")
        return [(None, 0.0)] * len(prompts)
    with engine:
        found: list[tuple[NDArray[np.float32] | None, float]] = []
        for ids in prompts:
            logits, _ = read(engine, ids)
            found.append((logits, statistics.median(read(engine, ids)[1] for _ in range(runs))))
    return found


def bound_of(
    engine: Engine, ids: list[int], resident: tuple[NDArray[np.float32] | None, float]
) -> Bound:
    logits, seconds = resident
    with way(engine, ROUTED_ONLY) as streamer:
        small, _ = read(engine, ids)
        routed = sum(counts.copied_bytes for counts in streamer.counts)
    with way(engine, WAYS["all copied"]) as streamer:
        read(engine, ids)
        entries = sum(counts.copied_bytes for counts in streamer.counts)
    return Bound(small if logits is None else logits, seconds, routed, entries)


def reads_of(
    engine: Engine, ids: list[int], bound: Bound, link: float, runs: int, ways: list[str]
) -> Iterator[Read]:
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    same = dict.fromkeys(ways, True)
    counts = {}
    for _ in range(runs):
        for name in ways:
            rules = WAYS[name]
            with way(engine, replace(rules, ring=streamer_of(engine)._rules.ring)) as streamer:
                logits, taken = read(engine, ids)
                seconds[name].append(taken)
                same[name] &= bound.logits is None or logits.tobytes() == bound.logits.tobytes()
                counts[name] = streamer.counts
    least_s = max(bound.resident_s, bound.routed_bytes / link)
    for name, taken_s in seconds.items():
        median = statistics.median(taken_s)
        copied = sum(c.copied_bytes for c in counts[name])
        unrouted = max(bound.entry_bytes - bound.routed_bytes, 1)
        yield Read(
            tokens=len(ids),
            way=name,
            seconds=median,
            least=min(taken_s),
            most=max(taken_s),
            tokens_per_s=len(ids) / median,
            copied=sum(c.copied for c in counts[name]),
            skipped=sum(c.skipped for c in counts[name]),
            copied_bytes=copied,
            link_gbps=copied / median / 1e9,
            link_share=copied / median / link,
            waited_share=sum(c.waited_us for c in counts[name]) / 1e6 / median,
            times_bound=median / least_s,
            avoided_share=(bound.entry_bytes - copied) / unrouted,
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
    lengths = [int(text) for text in arguments.lengths.split(",")]
    link = link_rate(arguments.device)
    print(f"link {link / 1e9:.1f} GB/s")
    resident = EngineOptions(
        model=arguments.model,
        device=arguments.device,
        prefill=arguments.prefill,
        max_context=max(lengths) + 64,
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
    prompts = [zipf_prompt(vocab_size, count, seed=1) for count in lengths]
    rows: list[Read] = []
    found: list[tuple[NDArray[np.float32] | None, float]] = [(None, 0.0)] * len(prompts)
    if not arguments.no_resident:
        found = resident_reads(resident, prompts, arguments.runs)
    start = time.perf_counter()
    with Engine.open(cached) as engine:
        slots = streamer_of(engine).setting.store.cache.num_slots
        print(f"opened in {time.perf_counter() - start:.1f} s, {slots} slots")
        for ids, known in zip(prompts, found, strict=True):
            bound = bound_of(engine, ids, known)
            routed_s = bound.routed_bytes / link
            print(
                f"{len(ids)} tokens: resident {bound.resident_s * 1e3:.1f} ms, routed and not "
                f"resident {bound.routed_bytes / 1e9:.2f} of {bound.entry_bytes / 1e9:.2f} GB, "
                f"{routed_s * 1e3:.1f} ms of the link"
            )
            for row in reads_of(engine, ids, bound, link, arguments.runs, ways):
                rows.append(row)
                print(
                    f"  {row.way:<20} {row.seconds * 1e3:8.1f} ms {row.tokens_per_s:9.0f} tokens/s "
                    f"copied {row.copied:6d} skipped {row.skipped:6d} "
                    f"link {row.link_gbps:5.1f} GB/s {row.link_share:4.0%} "
                    f"waited {row.waited_share:4.0%} bound x {row.times_bound:5.2f} "
                    f"avoided {row.avoided_share:4.0%} {'same' if row.same_bits else 'OTHER'} bits",
                    flush=True,
                )
            if arguments.json:
                document = {"link_gbps": link / 1e9, "rows": [asdict(row) for row in rows]}
                arguments.json.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
