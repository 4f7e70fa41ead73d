"""How much the host's threads help with missed experts of steps: by their number and their share.

    PYTHONPATH=. python benchmarks/window_pool.py MODEL.gguf [--device cuda:0] [--slots N]
        [--ahead N] [--threads N,...] [--pcie-frac F|auto,...] [--steps N] [--json FILE]

One engine, whose cache keeps its experts; for each case a pool of its own and a new sequence that
decodes the same tokens. ``expert us`` is what an expert takes all threads together, with the GPU
reading the same memory meanwhile; ``logits`` is how far the last step's are from those of the
device alone, at most, beside their standard deviation.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.arguments import run_benchmark
from strata_cli.engine.decode.residency import Residency
from strata_cli.engine.decode.sharing import ShareRules, Sharing
from strata_cli.engine.engine import Engine, EngineOptions
from strata_cli.engine.experts.adapting import STATIC
from strata_cli.engine.experts.window_pool import WindowPool, pool_threads
from tools.synth.prompts import zipf_prompt

WARM_UPS = 8  # steps in which an automatic share settles


@dataclass(frozen=True)
class Row:
    """One case.

    Attributes:
        threads: of the pool; 0: there is none.
        pcie_frac: as asked for.
        tokens_per_s, least, most: of single steps, the median first.
        pcie, cpu: misses of a step, in the mean.
        expert_us: that an expert takes all threads.
        off: largest difference of a logit from the device's own.
        spread: standard deviation of the logits.
    """

    threads: int
    pcie_frac: str
    tokens_per_s: float
    least: float
    most: float
    pcie: float
    cpu: float
    expert_us: float
    off: float
    spread: float

    def line(self) -> str:
        return (
            f"{self.threads:>7}{self.pcie_frac:>6}{self.tokens_per_s:10.1f}"
            f" ({self.least:.1f} to {self.most:.1f}){self.pcie:8.1f}{self.cpu:8.1f}"
            f"{self.expert_us:11.1f}{self.off:9.4f} of {self.spread:.2f}"
        )


HEADER = (
    f"{'threads':>7}{'frac':>6}{'tokens/s':>10} (least to most){'PCIe':>8}{'CPU':>8}"
    f"{'expert us':>11}{'logits':>9}"
)


class Bench:
    """An engine and the tokens that every case decodes."""

    def __init__(self, engine: Engine, steps: int) -> None:
        self._engine = engine
        self._ids = zipf_prompt(engine.spec.vocab_size, WARM_UPS + steps, seed=5)
        self._alone: NDArray[np.float32] | None = None

    @property
    def _residency(self) -> Residency:
        residency = self._engine._residency
        assert residency is not None
        return residency

    def row(self, threads: int, share: float | None) -> Row:
        """Decode with a pool of so many threads; 0: with none."""
        engine, residency = self._engine, self._residency
        assert engine._streamer is not None, "every expert is resident: give fewer --slots"
        store, pool = engine._streamer.setting.store, None
        with ExitStack() as stack:
            if threads:
                top_k = engine.spec.num_experts_per_tok
                addresses = store.host_addresses
                pool = stack.enter_context(
                    WindowPool(engine._device, store.layouts, addresses, top_k, threads)
                )
                rules = ShareRules(0, share)
                sharing = Sharing(engine._device, engine._forward, store, rules, pool)
                residency._sharing = sharing
                stack.callback(setattr, residency, "_sharing", None)
            sequence = stack.enter_context(engine.sequence())
            for token in self._ids[:WARM_UPS]:
                sequence.step(token)
            before, seconds = residency.counts, []
            for token in self._ids[WARM_UPS:]:
                began = time.perf_counter()
                logits = sequence.step(token)
                seconds.append(time.perf_counter() - began)
            counts = residency.counts - before
        if self._alone is None:
            self._alone = logits
        return Row(
            threads=threads,
            pcie_frac="auto" if share is None else f"{share:g}",
            tokens_per_s=1 / statistics.median(seconds),
            least=1 / max(seconds),
            most=1 / min(seconds),
            pcie=counts.pcie / counts.windows,
            cpu=counts.cpu / counts.windows,
            expert_us=0.0 if pool is None else 1e6 * pool.expert_s,
            off=float(np.abs(logits - self._alone).max()),
            spread=float(logits.std()),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--slots", type=int, default=1, help="of the expert cache")
    parser.add_argument("--ahead", type=int, help="slots for what the next layer may miss")
    parser.add_argument("--threads", default="", help="of the pool; five eighths of the processors")
    parser.add_argument("--pcie-frac", default="auto", help="share of misses that the link carries")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    threads = [int(part) for part in arguments.threads.split(",") if part] or [pool_threads()]
    parts = arguments.pcie_frac.split(",")
    shares = [None if part == "auto" else float(part) for part in parts]
    options = EngineOptions(
        model=arguments.model,
        device=arguments.device,
        max_context=WARM_UPS + arguments.steps + 8,
        expert_cache=arguments.slots,
        ahead_slots=arguments.ahead,
        least_slots=0,
        adapt=STATIC,
    )
    print(HEADER, flush=True)
    rows: list[Row] = []
    with Engine.open(options) as engine:
        bench = Bench(engine, arguments.steps)
        for count, share in [(0, 1.0), *product(threads, shares)]:
            rows.append(bench.row(count, share))
            print(rows[-1].line(), flush=True)
        store = engine._streamer.setting.store if engine._streamer else None
        link_gbps = 0.0 if store is None else store.link_gbps
        print(f"link {link_gbps:.1f} GB/s, as the cache was filled")
    if arguments.json:
        document = {"rows": [asdict(row) for row in rows], "link_gbps": link_gbps}
        arguments.json.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    run_benchmark(main)
