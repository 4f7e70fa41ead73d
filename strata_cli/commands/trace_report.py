"""How a trace is shown: tables and a timeline for people, or one JSON object."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from strata_cli.engine.experts.residency_counts import ResidencyCounts
from strata_cli.engine.measuring.summary import (
    ChunkSummary,
    LayerSummary,
    RunSummary,
    Traffic,
    add,
)
from strata_cli.engine.measuring.timeline import SHADES, timeline
from strata_cli.engine.trace import Event

SCHEMA_VERSION = 1
WIDTH = 80  # columns of the timeline

COLUMNS = (
    f"{'ms':>9}{'routed':>8}{'resident':>9}{'copied':>8}{'skipped':>8}{'cpu':>6}{'MB':>9}"
    f"{'GB/s':>7}{'copy wait ms':>13}{'host wait ms':>13}"
)


def as_text(run: RunSummary, events: Sequence[Event], *, every_layer: bool) -> str:
    """Tables of chunks and layers, and the timeline of each chunk.

    Args:
        run: the summary of the events.
        events: of the trace.
        every_layer: the layers of each chunk, not of all chunks together.
    """
    parts = ["\n".join(_head(run)), "\n".join(_chunk_table(run))]
    if every_layer:
        parts += [
            "\n".join([f"chunk {chunk.chunk}", *_layer_table(chunk.layers)]) for chunk in run.chunks
        ]
    else:
        parts.append("\n".join(_layer_table(_together(run))))
    parts += ["\n".join(_timeline(chunk, events)) for chunk in run.chunks]
    return "\n\n".join(parts)


def as_json(run: RunSummary) -> Any:
    """The documented object of `strata trace --json` (docs/trace.md)."""
    return {
        "version": SCHEMA_VERSION,
        **asdict(run),
        "tokens_per_s": run.tokens_per_s,
        "link_share": run.link_share,
        "link_gbps": run.traffic.link_gbps,
        "avoided_share": run.traffic.avoided_share,
        "needed_ms": run.traffic.needed_ms,
        "steps": run.steps.as_dict(),
        "chunks": [
            {
                **asdict(chunk),
                "wall_us": chunk.wall_us,
                "link_share": chunk.link_share,
                "link_gbps": chunk.traffic.link_gbps,
                "avoided_share": chunk.traffic.avoided_share,
                "needed_ms": chunk.traffic.needed_ms,
            }
            for chunk in run.chunks
        ],
    }


def _head(run: RunSummary) -> Iterator[str]:
    total = run.traffic
    chunks = "1 chunk" if len(run.chunks) == 1 else f"{len(run.chunks)} chunks"
    yield (
        f"{run.model} on {run.device}: {run.tokens} tokens in {chunks}, "
        f"{run.prompt_ms:.1f} ms, {run.tokens_per_s:.0f} tokens/s"
    )
    yield from _steps(run.steps)
    if not run.is_streamed:
        where = (
            "all are resident"
            if run.num_resident == run.num_pairs
            else f"{run.num_resident} of {run.num_pairs} are resident, others read where they are"
        )
        yield f"0 experts streamed: {where}"
        return
    yield (
        f"experts: {total.copied} copied, {total.skipped} skipped, {total.resident} resident, "
        f"{total.cpu} on the CPU; of {total.unrouted} that no token wanted "
        f"{100 * total.avoided_share:.1f} % did not come"
    )
    yield (
        f"link: busy for {100 * run.link_share:.1f} % of the prompt, "
        f"{total.bytes / 1e6:.1f} MB at {total.link_gbps:.2f} GB/s; "
        f"for what was needed {total.needed_ms:.2f} ms are enough"
    )
    yield (
        f"waits: the device for copies {total.copy_wait_us / 1e3:.2f} ms, "
        f"for the host {total.host_wait_us / 1e3:.2f} ms; "
        f"the link for the ring {total.ring_wait_us / 1e3:.2f} ms"
    )
    yield f"threads: {', '.join(f'{what} {us / 1e3:.2f} ms' for what, us in _thread_waits(run))}"


def _steps(steps: ResidencyCounts) -> Iterator[str]:
    if steps.windows:
        yield (
            f"steps: {steps.windows}, {100 * steps.hit_rate:.1f} % of {steps.routed} experts in "
            f"the cache, {100 * steps.pcie_share:.1f} % read over the link, "
            f"{steps.cpu} on the CPU, {steps.dropped} left out, {steps.swaps} swapped"
        )


def _thread_waits(run: RunSummary) -> Iterator[tuple[str, float]]:
    yield "compute for the device", sum(chunk.device_wait_us for chunk in run.chunks)
    yield "compute for the issuer", sum(chunk.issue_wait_us for chunk in run.chunks)
    waits: defaultdict[str, float] = defaultdict(float)
    for chunk in run.chunks:
        for reason, us in chunk.issuer_wait_us.items():
            waits[reason] += us
    for reason in sorted(waits):
        yield f"issuer, {reason.replace('_', ' ')}", waits[reason]


def _chunk_table(run: RunSummary) -> Iterator[str]:
    yield f"{'chunk':>5}{'position':>10}{'tokens':>8}{COLUMNS}{'link busy':>11}"
    for chunk in run.chunks:
        yield (
            f"{chunk.chunk:>5}{chunk.position:>10}{chunk.tokens:>8}"
            f"{_row(chunk.traffic, chunk.wall_us, is_streamed=_is_streamed(chunk))}"
            f"{100 * chunk.link_share:>9.1f} %"
        )


def _layer_table(layers: Sequence[LayerSummary]) -> Iterator[str]:
    yield f"{'layer':>5}{COLUMNS}"
    for layer in layers:
        traffic = layer.traffic
        is_streamed = bool(traffic.routed or traffic.copied or traffic.skipped)
        yield f"{layer.layer:>5}{_row(traffic, traffic.run_us, is_streamed=is_streamed)}"


def _row(traffic: Traffic, wall_us: float, *, is_streamed: bool) -> str:
    routed, resident = (traffic.routed, traffic.resident) if is_streamed else ("-", "-")
    return (
        f"{wall_us / 1e3:>9.2f}{routed:>8}{resident:>9}{traffic.copied:>8}{traffic.skipped:>8}"
        f"{traffic.cpu:>6}{traffic.bytes / 1e6:>9.1f}{traffic.link_gbps:>7.2f}"
        f"{traffic.copy_wait_us / 1e3:>13.2f}{traffic.host_wait_us / 1e3:>13.2f}"
    )


def _is_streamed(chunk: ChunkSummary) -> bool:
    return bool(chunk.ring_slots or chunk.traffic.routed)


def _together(run: RunSummary) -> list[LayerSummary]:
    """Each layer over all chunks."""
    parts: defaultdict[int, list[Traffic]] = defaultdict(list)
    for chunk in run.chunks:
        for layer in chunk.layers:
            parts[layer.layer].append(layer.traffic)
    return [LayerSummary(layer=layer, traffic=add(parts[layer])) for layer in sorted(parts)]


def _timeline(chunk: ChunkSummary, events: Sequence[Event]) -> Iterator[str]:
    yield (
        f"chunk {chunk.chunk}: {chunk.wall_us / 1e3:.2f} ms, a column is "
        f"{chunk.wall_us / WIDTH:.1f} us, '{SHADES}' from idle to busy"
    )
    for name, line in timeline(chunk, events, WIDTH).items():
        yield f"{name:>8} |{line}|"
