"""Where decoded tokens find their experts, how fast they come, and what the machine would allow.

    PYTHONPATH=. python benchmarks/decode_table.py MODEL.gguf [--device cuda:0] [--slots N,...]
        [--ahead N] [--tail-skip R,...] [--pcie-frac F|auto,...] [--cases NAME,...] [--steps N]
        [--unmissed] [--json FILE]

A conversation of words that keep coming back goes on token by token behind its prompt, with experts
that stay in their slots and with ones that follow what is used. A step can be no faster than the
slowest of three, all at rates measured in the same run: the device's memory gives the weights, the
experts in slots and the running state; the link carries the experts that are not; the host computes
its share out of its own memory. The table has that roofline and the share of it that was reached.

It supposes that all three work all the time. But layers come in turn, and what a layer misses is
known when it is routed: only what was foreseen can come while something else is computed. Without
foresight no step is faster than memory and link after each other, the bound "in turn".

It supposes, too, that memory gives all that it can. But a step is some hundred launches one after
the other, and where little is missed they take longer than the bytes. --unmissed measures that
bound: the same tokens by the same model with all experts in the device's memory, in the same run
and before the others. The last column is the share that was reached of the lower of the two,
roofline and steps that miss nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.arguments import fraction, listed, new_file, or_auto, run_benchmark, whole
from benchmarks.cuda_model import bytes_per_token, copy_rates, machine
from strata_cli.engine.device import open_device
from strata_cli.engine.engine import Engine, EngineOptions, Sequence
from strata_cli.engine.experts.adapting import STATIC, AdaptRules, Returns
from strata_cli.engine.experts.residency_counts import ResidencyCounts
from tools.synth.prompts import zipf_prompt

RAM_BYTES = 1 << 30
PARTS = 4
WARM_UPS = 4

CASES = {"static": STATIC, "adaptive": AdaptRules()}


class Rates(NamedTuple):
    """Bytes per second: of the memory that kernels read, of the link, of the host's memory."""

    memory: float
    link: float
    ram: float


class Traffic(NamedTuple):
    """Bytes that one token needs of each."""

    memory: float
    link: float
    ram: float

    def least_seconds(self, rates: Rates) -> float:
        """Of a step that keeps all three busy at once. What crosses the link leaves RAM too."""
        return max(
            self.memory / rates.memory,
            self.link / rates.link,
            (self.link + self.ram) / rates.ram,
        )

    def seconds_in_turn(self, rates: Rates) -> float:
        """Of a step that knows what it misses when it is routed, and computes when that is there.

        What the host computes may go on beside the link.
        """
        return self.memory / rates.memory + max(self.link / rates.link, self.ram / rates.ram)


@dataclass(frozen=True)
class Row:
    """One case. Shares are of the experts that steps routed to; rates are per second.

    Attributes:
        case, slots, tail_skip, pcie_frac: what was run.
        steps: decoded tokens.
        hit, pcie, cpu, dropped: shares.
        hit_by_part: of each part of the steps, in order.
        swaps: experts that changed places.
        tokens_per_s, least, most: of single steps, the median first.
        memory_mb, link_mb, ram_mb: that a token needs.
        roofline: tokens per second that the rates allow for that traffic.
        share: tokens_per_s of it.
        in_turn: tokens per second where memory and link work one after the other.
        unmissed: tokens per second with all experts in the device's memory; 0: not measured.
    """

    case: str
    slots: int
    tail_skip: int
    pcie_frac: str
    steps: int
    hit: float
    pcie: float
    cpu: float
    dropped: float
    hit_by_part: list[float]
    swaps: int
    tokens_per_s: float
    least: float
    most: float
    memory_mb: float
    link_mb: float
    ram_mb: float
    roofline: float
    share: float
    in_turn: float
    unmissed: float

    @property
    def share_of_lower(self) -> float:
        """Of the lower bound: the roofline, or steps that miss nothing."""
        return self.tokens_per_s / min(self.roofline, self.unmissed or self.roofline)

    def line(self) -> str:
        parts = " ".join(f"{hit:4.0%}" for hit in self.hit_by_part)
        return (
            f"{self.case:<10}{self.slots:>6}{self.tail_skip:>5}{self.pcie_frac:>6}  "
            f"{self.hit:6.1%} ({parts})"
            f"{self.pcie:7.1%}{self.cpu:7.1%}{self.dropped:7.1%}{self.swaps:7}"
            f"{self.tokens_per_s:9.1f} ({self.least:.1f} to {self.most:.1f})"
            f"{self.memory_mb:9.1f}{self.link_mb:8.1f}{self.ram_mb:8.1f}"
            f"{self.roofline:10.1f}{self.share:7.1%}{self.in_turn:9.1f}"
            f"{self.unmissed:10.1f}{self.share_of_lower:10.1%}"
        )


HEADER = (
    f"{'case':<10}{'slots':>6}{'skip':>5}{'frac':>6}  {'hits':>6} ({'by quarter':^19})"
    f"{'PCIe':>7}{'CPU':>7}"
    f"{'left':>7}{'swaps':>7}{'tokens/s':>9} (least to most)"
    f"{'memory':>9}{'link':>8}{'RAM MB':>8}{'roofline':>10}{'share':>7}{'in turn':>9}"
    f"{'unmissed':>10}{'of lower':>10}"
)


def ram_rate(threads: int) -> float:
    """Bytes per second that threads read out of host memory together."""
    data = np.ones(RAM_BYTES // 8, np.uint64)
    pieces = np.array_split(data, 4 * threads)
    seconds = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(4):
            began = time.perf_counter()
            list(pool.map(np.bitwise_or.reduce, pieces))
            seconds.append(time.perf_counter() - began)
    return RAM_BYTES / min(seconds)


def rates_of(name: str) -> Rates:
    ram = ram_rate(len(os.sched_getaffinity(0)))
    with open_device(name) as device:
        if not device.has_own_memory:
            return Rates(ram, ram, ram)
        stream = device.stream("rates")
        copies = copy_rates(device, stream)
        stream.close()
    memory, link = (copies[key]["median"] * 1e9 for key in ("memory_gbps", "host_to_device_gbps"))
    return Rates(memory, link, ram)


@contextmanager
def adapting(engine: Engine, rules: AdaptRules) -> Iterator[None]:
    """The engine with its cache as at first, and other rules."""
    residency, streamer = engine._residency, engine._streamer
    assert residency is not None
    assert streamer is not None, "every expert is resident: lower --slots"
    cache = streamer.setting.store.cache
    first, before = cache.pair_in.copy(), residency._rules
    residency._rules = rules
    residency._use[:] = 0
    residency._returns = Returns()
    try:
        yield
    finally:
        residency._rules = before
        cache.mend()
        cache.fill(first[first >= 0])


def traffic_of(engine: Engine, counts: ResidencyCounts, state_bytes: int) -> Traffic:
    """Of one token, in the mean. Where the device has no memory of its own there is no link."""
    weights, routed = bytes_per_token(engine), max(counts.routed, 1)
    share = weights.experts / routed
    memory = weights.others + 2 * state_bytes + share * counts.hits
    link, ram = share * counts.pcie, share * counts.cpu
    if not engine._device.has_own_memory:
        return Traffic(memory + link + ram, 0.0, 0.0)
    return Traffic(memory, link, ram)


def _counts(engine: Engine) -> ResidencyCounts:
    counts = engine.residency_counts
    assert counts is not None
    return counts


def decode(sequence: Sequence, ids: list[int]) -> tuple[list[float], list[ResidencyCounts]]:
    """Seconds of each step, and the counts of each part of them."""
    engine = sequence._engine
    seconds: list[float] = []
    parts: list[ResidencyCounts] = []
    before = _counts(engine)
    for index, token in enumerate(ids):
        began = time.perf_counter()
        sequence.step(token)
        seconds.append(time.perf_counter() - began)
        if (index + 1) * PARTS // len(ids) > len(parts):
            now = _counts(engine)
            parts.append(now - before)
            before = now
    return seconds, parts


def row_of(
    engine: Engine,
    case: str,
    options: EngineOptions,
    slots: int,
    prompt: int,
    steps: int,
    rates: Rates,
    unmissed: float,
) -> Row:
    with adapting(engine, CASES[case]), engine.sequence() as sequence:
        seconds, parts = decode(sequence, warmed_up(sequence, prompt, steps))
        state_bytes = sequence.snapshot().nbytes
    counts = sum(parts, ResidencyCounts())
    traffic = traffic_of(engine, counts, state_bytes)
    roofline, per_s = 1 / traffic.least_seconds(rates), 1 / statistics.median(seconds)
    routed = max(counts.routed, 1)
    return Row(
        case=case,
        slots=slots,
        tail_skip=options.tail_skip,
        pcie_frac="auto" if options.link_share is None else f"{options.link_share:g}",
        steps=steps,
        hit=counts.hit_rate,
        pcie=counts.pcie_share,
        cpu=counts.cpu / routed,
        dropped=counts.dropped / routed,
        hit_by_part=[part.hit_rate for part in parts],
        swaps=counts.swaps,
        tokens_per_s=per_s,
        least=1 / max(seconds),
        most=1 / min(seconds),
        memory_mb=traffic.memory / 1e6,
        link_mb=traffic.link / 1e6,
        ram_mb=traffic.ram / 1e6,
        roofline=roofline,
        share=per_s / roofline,
        in_turn=1 / traffic.seconds_in_turn(rates),
        unmissed=unmissed,
    )


def unmissed_per_s(options: EngineOptions, prompt: int, steps: int) -> float:
    """Steps per second with all experts in the device's memory."""
    with Engine.open(options) as engine, engine.sequence() as sequence:
        if engine._streamer is not None:
            raise SystemExit("not all experts fit: leave --unmissed out")
        seconds: list[float] = []
        for token in warmed_up(sequence, prompt, steps):
            began = time.perf_counter()
            sequence.step(token)
            seconds.append(time.perf_counter() - began)
    return 1 / statistics.median(seconds)


def warmed_up(sequence: Sequence, prompt: int, steps: int) -> list[int]:
    """Reads the prompt, makes a few steps; returns the tokens of those to time."""
    vocab_size = sequence._engine.spec.vocab_size
    ids = zipf_prompt(vocab_size, prompt + WARM_UPS + steps, seed=11)
    sequence.prefill(ids[:prompt], logits="none")
    for token in ids[prompt : prompt + WARM_UPS]:
        sequence.step(token)
    return ids[prompt + WARM_UPS :]


def cases(text: str) -> list[str]:
    names = text.split(",")
    unknown = sorted(set(names) - set(CASES))
    if unknown:
        raise argparse.ArgumentTypeError(f"no such cases: {', '.join(unknown)}")
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--vram-mib", type=whole(0), default=0, help="of device memory, at most")
    counts, ranks, shares = listed(or_auto(whole(0))), listed(whole(0)), listed(or_auto(fraction))
    parser.add_argument(
        "--slots", type=counts, default="auto", help="of the expert cache: auto or N,..."
    )
    parser.add_argument("--ahead", type=whole(0), help="slots for what the next layer may miss")
    parser.add_argument(
        "--tail-skip", type=ranks, default="0", help="ranks from which misses are left out"
    )
    parser.add_argument(
        "--pcie-frac", type=shares, default="1", help="share of misses that the link carries"
    )
    parser.add_argument("--profile", type=Path, help="of the experts")
    parser.add_argument("--cases", type=cases, default=",".join(CASES))
    parser.add_argument("--prompt", type=whole(1), default=512)
    parser.add_argument("--steps", type=whole(1), default=256)
    parser.add_argument("--unmissed", action="store_true", help="also with all experts on board")
    parser.add_argument("--json", type=new_file)
    arguments = parser.parse_args()
    rates = rates_of(arguments.device)
    print(
        f"memory {rates.memory / 1e9:.1f} GB/s, link {rates.link / 1e9:.1f} GB/s, "
        f"RAM {rates.ram / 1e9:.1f} GB/s\n{HEADER}",
        flush=True,
    )
    unmissed, steps = 0.0, (arguments.prompt, arguments.steps)
    context = arguments.prompt + WARM_UPS + arguments.steps
    if arguments.unmissed:
        model, device = arguments.model, arguments.device
        options = EngineOptions(model=model, device=device, max_context=context)
        unmissed = unmissed_per_s(options, *steps)
    rows: list[Row] = []
    for slots in arguments.slots:
        for tail_skip, share in product(arguments.tail_skip, arguments.pcie_frac):
            options = EngineOptions(
                model=arguments.model,
                device=arguments.device,
                vram_bytes=arguments.vram_mib << 20,
                max_context=context,
                expert_cache=slots,
                ahead_slots=arguments.ahead,
                expert_profile=arguments.profile,
                tail_skip=tail_skip,
                link_share=share,
            )
            with Engine.open(options) as engine:
                if engine._streamer is None:
                    raise SystemExit("every expert fits: give --slots")
                held = engine._streamer.setting.store.cache.num_slots
                for case in arguments.cases:
                    row = row_of(engine, case, options, held, *steps, rates, unmissed)
                    rows.append(row)
                    print(row.line(), flush=True)
    if arguments.json:
        document = {
            "machine": machine(arguments.device),
            "model": str(arguments.model),
            "rates": rates._asdict(),
            "rows": [asdict(row) for row in rows],
        }
        arguments.json.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    run_benchmark(main)
