"""When the first block of every launch of a decoded token gets how far, in the pass itself.

    PYTHONPATH=. python benchmarks/decode_timeline.py MODEL.gguf [--device cuda:0] [--at 4096] \
        [--json FILE]

Compiles copies of the kernels whose first block stores the time as it starts, as the launches ahead
are done, and, in products of few rows, as it has loaded its activations and got its weights. From
one "ahead is done" to the next is what a launch takes in the pass.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.arguments import run_benchmark
from benchmarks.decode_parts import Launched, pass_of
from benchmarks.graph_timing import Bench, record_graph
from strata_cli.engine.device.base import empty
from strata_cli.engine.device.cuda_kernels import KERNELS_FOLDER
from strata_cli.engine.device.transfer import download
from strata_cli.engine.engine import Engine, EngineOptions

SLOTS = 1 << 20  # of stamps, by the clock: few are lost
REPLAYS = 12
STARTED, AHEAD_DONE, FOUND, LOADED, TOGETHER, ARRIVED, MADE, DONE = range(8)
PHASES = ("started", "ahead done", "found", "x loaded", "together", "arrived", "made", "done")

STAMP = """
__device__ inline void stamp(unsigned long long phase) {
    if (threadIdx.x | blockIdx.x | blockIdx.y | blockIdx.z) return;
    unsigned long long ns, clock;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns) :: "memory");
    asm volatile("mov.u64 %0, %%clock64;" : "=l"(clock) :: "memory");
    auto *slots = reinterpret_cast<unsigned long long *>(STAMP_AT);
    auto *slot = slots + 3 * (clock >> 3 & (STAMP_SLOTS - 1));
    slot[0] = ns, slot[1] = clock, slot[2] = STAMP_TAG << 8 | phase << 4 | 1;
}
"""
# Texts of the sources, and what takes their place.
CHANGES = {
    "overlap.cuh": (
        ("#pragma once\n", "#pragma once\n" + STAMP),
        ("void let_next_start() {\n", f"void let_next_start() {{\n    stamp({STARTED});\n"),
        (
            'volatile("griddepcontrol.wait;" ::: "memory");\n#endif\n',
            f'volatile("griddepcontrol.wait;" ::: "memory");\n#endif\n    stamp({AHEAD_DONE});\n',
        ),
    ),
    "matmul_few.cu": (
        ("    return found.count > 0;\n", f"    stamp({FOUND});\n    return found.count > 0;\n"),
    ),
    "few_block.cuh": (
        (  # grouped ones have waited before
            "    wait_for_launches_ahead();  // weights",
            "    if (!columns.source) wait_for_launches_ahead();  // weights",
        ),
        (
            "columns, gate, warps);\n    block_barrier();\n",
            f"columns, gate, warps);\n    stamp({LOADED});\n    block_barrier();\n"
            f"    stamp({TOGETHER});\n",
        ),
        (
            "pass_gate(shared.full + own_slot, turn.parity);\n#else",
            "pass_gate(shared.full + own_slot, turn.parity);\n"
            f"            stamp({ARRIVED});\n#else",
        ),
        (
            "        team.wait();\n        finish_tiles(",
            f"        stamp({MADE});\n        team.wait();\n        finish_tiles(",
        ),
        (
            "    make_tiles(work, shared, columns, team, results);\n",
            f"    make_tiles(work, shared, columns, team, results);\n    stamp({DONE});\n",
        ),
    ),
}


class Stamp(NamedTuple):
    """When block 0 of a launch, known by its tag, got to a phase."""

    ns: int
    clock: int
    tag: int
    phase: int


def changed_sources(folder: Path) -> None:
    """Copies of all kernels, with stamps."""
    for path in KERNELS_FOLDER.iterdir():
        if path.suffix not in (".cu", ".cuh"):
            continue
        text = path.read_text(encoding="utf-8")
        for old, new in CHANGES.get(path.name, ()):
            assert text.count(old) == 1, f"{path.name}: {old!r} comes {text.count(old)} times"
            text = text.replace(old, new)
        (folder / path.name).write_text(text, encoding="utf-8")


def stamped(launches: Sequence[Launched], folder: Path, address: int) -> list[Launched]:
    """The launches with the changed kernels; the tag tells the kind of launch."""
    tags = {name: index for index, name in enumerate(dict.fromkeys(own.name for own in launches))}
    found = []
    for own in launches:
        numbers = (f"STAMP_TAG={tags[own.name]}ull", f"STAMP_AT={address}ull")
        defines = (*own.kernel.defines, *numbers, f"STAMP_SLOTS={SLOTS}")
        source = str(folder / own.kernel.source)
        found.append(own._replace(kernel=replace(own.kernel, source=source, defines=defines)))
    return found


def replays(bench: Bench, launches: Sequence[Launched], buffer: Any) -> Iterator[list[Stamp]]:
    """Stamps of each replay, in the order of time."""
    graph = record_graph(
        bench, [partial(bench.stream.launch, own.kernel, own.launch, *own.args) for own in launches]
    )
    for turn in range(REPLAYS + 1):
        bench.stream.fill(buffer, 0)
        bench.stream.replay(graph)
        slots = download(bench.device, bench.stream, buffer).reshape(SLOTS, 3)
        if turn:
            yield stamps_of(slots)
    graph.close()


def stamps_of(slots: np.ndarray) -> list[Stamp]:
    own = slots[slots[:, 2] != 0]
    return sorted(Stamp(ns, clock, word >> 8, word >> 4 & 15) for ns, clock, word in own.tolist())


def in_launch_order(waited: Sequence[Stamp], tags: Sequence[int]) -> list[Stamp]:
    """Stamps of one kind; where the timer tells no two apart, as they were launched.

    Args:
        waited: in the order of time, one for each launch; few may be lost.
        tags: of all launches.
    """
    found: list[Stamp] = []
    left, at = list(waited), 0
    while left:
        same = [stamp for stamp in left if stamp.ns == left[0].ns]
        ahead = {
            tag: index for index, tag in reversed(list(enumerate(tags[at : at + len(same) + 2])))
        }
        chosen = min(same, key=lambda stamp: ahead.get(stamp.tag, len(tags)))
        at += ahead.get(chosen.tag, 0) + 1
        left.remove(chosen)
        found.append(chosen)
    return found


def durations(stamps: Sequence[Stamp], tags: Sequence[int], into: dict[int, list[int]]) -> None:
    """Nanoseconds from the launches ahead of a launch being done to those of the next."""
    waited = [stamp for stamp in stamps if stamp.phase == AHEAD_DONE]
    for own, following in itertools.pairwise(in_launch_order(waited, tags)):
        into[own.tag].append(following.ns - own.ns)


def progress(stamps: Sequence[Stamp], into: dict[tuple[int, int], list[int]]) -> None:
    """Clocks of each phase of a block since the launches ahead were done; before it: negative."""
    start: dict[int, Stamp] = {}
    begun: dict[int, Stamp] = {}
    for stamp in stamps:
        if stamp.phase == STARTED:
            begun[stamp.tag] = stamp
        elif stamp.phase == AHEAD_DONE:
            start[stamp.tag] = stamp
            if stamp.tag in begun:
                into[stamp.tag, STARTED].append(begun[stamp.tag].clock - stamp.clock)
        elif stamp.phase > AHEAD_DONE and stamp.tag in start:
            into[stamp.tag, stamp.phase].append(stamp.clock - start[stamp.tag].clock)


def report(launches: Sequence[Launched], passes: Sequence[list[Stamp]]) -> list[dict[str, Any]]:
    names = list(dict.fromkeys(each.name for each in launches))
    tags = [names.index(each.name) for each in launches]
    ns: dict[int, list[int]] = defaultdict(list)
    clocks: dict[tuple[int, int], list[int]] = defaultdict(list)
    for stamps in passes:
        durations(stamps, tags, ns)
        progress(stamps, clocks)
    rows = []
    for tag, name in enumerate(names):
        phases = {
            PHASES[phase]: statistics.median(values)
            for (own, phase), values in sorted(clocks.items())
            if own == tag
        }
        mean = statistics.fmean(ns[tag]) if ns[tag] else float("nan")
        rows.append(
            {"kernel": name, "launches": tags.count(tag), "us": mean / 1e3, "clocks": phases}
        )
    return sorted(rows, key=lambda row: -row["us"] * row["launches"])


def show(rows: Sequence[dict[str, Any]], passes: Sequence[list[Stamp]]) -> None:
    spans = [stamps[-1].ns - stamps[0].ns for stamps in passes]
    print(f"pass {statistics.median(spans) / 1e3:.1f} us, {len(passes[0])} stamps")
    print("    us in all = launches x each; clocks after the launches ahead are done")
    for row in rows:
        phases = "  ".join(f"{name} {clocks:.0f}" for name, clocks in row["clocks"].items())
        print(
            f"  {row['us'] * row['launches']:9.1f} {row['launches']:5} x {row['us']:7.2f}  "
            f"{row['kernel']}  {phases}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--at", type=int, default=4096, help="position of the token")
    parser.add_argument("--json", type=Path, help="file for all figures")
    arguments = parser.parse_args()
    options = EngineOptions(model=arguments.model, device=arguments.device)
    with (
        Engine.open(options) as engine,
        engine.sequence() as sequence,
        tempfile.TemporaryDirectory() as folder,
    ):
        rng = np.random.default_rng(3)
        ids = rng.integers(0, engine.spec.vocab_size - 64, arguments.at).tolist()
        sequence.prefill(ids, logits="none")
        sequence.step(ids[0])
        bench = Bench(engine._device, engine._stream)
        buffer = empty(bench.device, (3 * SLOTS,), np.int64)
        changed_sources(Path(folder))
        launches = pass_of(engine, sequence)
        own = stamped(launches, Path(folder), buffer.address)
        bench.device.prepare(dict.fromkeys(each.kernel for each in own))
        passes = list(replays(bench, own, buffer))
    rows = report(launches, passes)
    show(rows, passes)
    if arguments.json is not None:
        first = [stamp._asdict() for stamp in passes[0]]
        arguments.json.write_text(json.dumps({"parts": rows, "first": first}, indent=1))


if __name__ == "__main__":
    run_benchmark(main)
