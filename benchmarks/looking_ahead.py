"""How much comes before a layer is routed, how much of it is of use, and what steps gain.

    PYTHONPATH=. python benchmarks/looking_ahead.py MODEL.gguf [--device cuda:0] [--slots N,...]
        [--vram-mib N] [--cases static,adaptive] [--ways off,BLOCKSxSTAGES,...] [--fetch N]
        [--ahead N] [--likely F] [--steps N] [--json FILE]

A way is how many blocks bring experts ahead and how many spans each keeps under way; off: none do.
Ways take turns on the same engine, each behind the same prompt and with the cache as at first. That
the last token's logits have the same bits in all ways is checked.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.arguments import listed, or_auto, run_benchmark, whole
from benchmarks.decode_table import CASES, adapting
from strata_cli.engine.device.transfer import download
from strata_cli.engine.engine import Engine, EngineOptions, Sequence
from strata_cli.engine.experts.adapting import STATIC
from strata_cli.engine.forward import fetching
from strata_cli.engine.forward.fetching import Fetcher
from strata_cli.engine.kernels import fetch
from tools.synth.prompts import zipf_prompt

WARM_UPS = 8
MOST_LOOKED_AT = 24  # steps whose states are brought to the host: that takes its time


@dataclass(frozen=True)
class Row:
    """One way.

    Attributes:
        slots, case, way: what was run.
        tokens_per_s: of the median step.
        layer_us: of a layer in it.
        hit: share of routed experts that were in the cache.
        missed, came, useful: experts a layer.
        is_same: whether the last logits have the bits of the first way's.
    """

    slots: str
    case: str
    way: str
    tokens_per_s: float
    layer_us: float
    hit: float
    missed: float
    came: float
    useful: float
    is_same: bool

    def line(self) -> str:
        bits = "same bits" if self.is_same else "OTHER BITS"
        return (
            f"{self.slots:>6} {self.case:9}{self.way:>8}{self.tokens_per_s:10.1f}"
            f"{self.layer_us:10.1f}{self.hit:8.1%}{self.missed:8.2f}{self.came:8.2f}"
            f"{self.useful:8.2f}  {bits}"
        )


HEADER = (
    f"{'slots':>6} {'case':9}{'way':>8}{'tokens/s':>10}{'us/layer':>10}{'hits':>8}{'missed':>8}"
    f"{'came':>8}{'of use':>8}  a layer"
)


@contextmanager
def looking(fetcher: Fetcher, way: str) -> Iterator[None]:
    """The fetcher with so many blocks, or none, that bring experts ahead."""
    foresight, usual = fetcher._foresight, (fetch.LAYERS_BLOCKS, fetch.LAYERS_STAGES)
    assert foresight is not None, "no experts come ahead: raise --vram-mib or lower --slots"
    try:
        if way == "off":
            fetcher._foresight = None
        else:
            blocks, _, stages = way.partition("x")
            fetch.LAYERS_BLOCKS, fetch.LAYERS_STAGES = int(blocks), int(stages or usual[1])
        yield
    finally:
        fetcher._foresight = foresight
        fetch.LAYERS_BLOCKS, fetch.LAYERS_STAGES = usual


def came(engine: Engine, fetcher: Fetcher) -> tuple[float, float]:
    """Experts a layer that came ahead in the last step, and those of them that were wanted."""
    if fetcher._foresight is None:
        return 0.0, 0.0
    assert engine._residency is not None
    states = download(engine._device, engine._stream, fetcher._foresight.states)[1:]
    routed = engine._residency._on_host(1).numpy()[1:, 0]
    spans = [fetch._spans_of(layout.nbytes) for layout in fetcher._layouts[1:]]
    done = states[:, fetch._DONE :] / np.array(spans)[:, None]
    experts = states[:, fetch._EXPERTS : fetch._DONE]
    is_wanted = (experts[:, :, None] == routed[:, None, :]).any(axis=2)
    return float(done.sum(axis=1).mean()), float((done * is_wanted).sum(axis=1).mean())


def steps(
    sequence: Sequence, fetcher: Fetcher, ids: list[int]
) -> tuple[list[float], np.ndarray, bytes]:
    """Seconds of each step, what came ahead and was of use in some, the last logits."""
    seconds: list[float] = []
    found: list[tuple[float, float]] = []
    for token in ids:
        began = time.perf_counter()
        logits = sequence.step(token)
        seconds.append(time.perf_counter() - began)
        if len(found) < MOST_LOOKED_AT:
            found.append(came(sequence._engine, fetcher))
    return seconds, np.mean(found, axis=0), logits.tobytes()


def rows_of(engine: Engine, slots: str, arguments: argparse.Namespace) -> Iterator[Row]:
    fetcher = engine._forward.fetcher
    assert fetcher is not None, "nothing is missed: lower --slots"
    count, prompt = arguments.steps, arguments.prompt
    ids = zipf_prompt(engine.spec.vocab_size, prompt + WARM_UPS + count, seed=11)
    first = b""
    for case in arguments.cases.split(","):
        for way in arguments.ways.split(","):
            with looking(fetcher, way), adapting(engine, CASES[case]), engine.sequence() as one:
                one.prefill(ids[:prompt], logits="none")
                for token in ids[prompt : prompt + WARM_UPS]:
                    one.step(token)
                before = engine.residency_counts
                assert before is not None
                seconds, (all_came, useful), bits = steps(one, fetcher, ids[prompt + WARM_UPS :])
                now = engine.residency_counts
                assert now is not None
            counts, first = now - before, first or bits
            median, layers = statistics.median(seconds), engine.spec.num_layers
            yield Row(
                slots=slots,
                case=case,
                way=way,
                tokens_per_s=1 / median,
                layer_us=1e6 * median / layers,
                hit=counts.hit_rate,
                missed=counts.pcie / counts.windows / layers,
                came=float(all_came),
                useful=float(useful),
                is_same=bits == first,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--vram-mib", type=int, default=0, help="of device memory, at most")
    counts = listed(or_auto(whole(0)))
    parser.add_argument(
        "--slots", type=counts, default="auto", help="of the expert cache: auto or N,..."
    )
    parser.add_argument("--fetch", type=int, help="slots for what a layer misses")
    parser.add_argument("--ahead", type=int, help="slots for what the next layer may miss")
    parser.add_argument("--likely", type=float, default=fetching.LIKELY, help="of top k")
    parser.add_argument("--cases", default="static")
    parser.add_argument("--ways", default="off,12x8", help="off or BLOCKSxSTAGES,...")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    fetching.LIKELY = arguments.likely
    rows: list[Row] = []
    print(HEADER, flush=True)
    for slots in arguments.slots:
        options = EngineOptions(
            model=arguments.model,
            device=arguments.device,
            vram_bytes=arguments.vram_mib << 20,
            max_context=arguments.prompt + WARM_UPS + arguments.steps,
            expert_cache=slots,
            least_slots=0,
            fetch_slots=arguments.fetch,
            ahead_slots=arguments.ahead,
            adapt=STATIC,
        )
        with Engine.open(options) as engine:
            for row in rows_of(engine, "auto" if slots is None else str(slots), arguments):
                rows.append(row)
                print(row.line(), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    run_benchmark(main)
