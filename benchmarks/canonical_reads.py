"""Whether canonical reads keep every bit, whatever runs before, between and beside them.

    PYTHONPATH=. python benchmarks/canonical_reads.py [MODEL.gguf] [--device NAME]
        [--only NAME,...] [--first FILE.npy] [--broken NAME] [--json FILE]

65 reads (benchmarks/canonical_protocol.py), four times: plain reads of 3,051 and 1,032 tokens and
four chats between them, a new engine before the fourth. Then in other manners, then by engines with
other settings, and by `strata read`. Every run is compared with the first, bit by bit; the exit
code is 1 where one differs. --broken breaks the arithmetic on purpose and counts what that moves.

The model's experts are cached in 4,360 slots for 24,576 pairs of layer and expert, to scale, the
others streamed. With --first the first run is kept in a file, or comes from there: a new process is
the best restart, and what takes long can be taken in parts. The embedded model, which is read where
no other is named, has room for --small alone.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.arguments import new_file, run_benchmark, whole
from benchmarks.canonical_breaks import BREAKS, Break, share_prompts, share_steps, skip_tail
from benchmarks.canonical_protocol import (
    MANNERS,
    SMALL_SIZES,
    SPEC_SIZES,
    Answers,
    Asked,
    Difference,
    Manner,
    Protocol,
    Sizes,
    asked_of,
    compare,
)
from strata_cli.engine.engine import Engine, EngineOptions
from strata_cli.engine.experts.adapting import STATIC
from strata_cli.engine.experts.placing import ExpertHome
from strata_cli.engine.forward.planning import Homes
from strata_cli.engine.model.tensors import load_model_file
from strata_cli.engine.prefill.prompt_stream import StreamRules
from strata_cli.engine.prompt_cache import CacheRules
from strata_cli.engine.session import Session
from strata_cli.errors import OutOfMemory
from strata_cli.models import DEMO_MODEL_PATH

SLOTS_OF = (4360, 24_576)
FEWER_SLOTS_OF = (1995, 24_576)
RULES = CacheRules(conversation_cache_mib=2048)
SMALL_RULES = replace(  # else nothing of short prompts would be reused
    RULES, prompt_cache_every=64, prompt_cache_root=8, least_parked_tokens=4
)
NUM_RUNS = 4
CLI_READS = 3
CLI = "strata read"


class Facts(NamedTuple):
    """Of a model: (layer, expert) pairs, experts of a token, and tokens that there are."""

    pairs: int
    top_k: int
    vocab_size: int

    def slots(self, share: tuple[int, int]) -> int:
        return max(self.pairs * share[0] // share[1], 1)


Change = Callable[[EngineOptions, Facts], EngineOptions]


def _all_copied(rules: StreamRules) -> StreamRules:
    return replace(rules, stream=replace(rules.stream, skips_unrouted=False))


SETTINGS: dict[str, Change] = {
    "chunks of 512": lambda options, _facts: replace(options, prefill=512),
    "chunks of 2048": lambda options, _facts: replace(options, prefill=2048),
    "routed stream off": lambda options, _facts: replace(
        options, prefill=2048, streaming=_all_copied(options.streaming)
    ),
    "order of ids": lambda options, _facts: replace(
        options, prefill=2048, streaming=replace(options.streaming, is_likely=False)
    ),
    "fewer slots": lambda options, facts: replace(
        options, expert_cache=facts.slots(FEWER_SLOTS_OF)
    ),
    "experts stay put": lambda options, _facts: replace(options, adapt=STATIC),
    "tail skip": lambda options, facts: skip_tail(options, facts.top_k),
    "processor's share": lambda options, facts: share_steps(
        share_prompts(options, facts.top_k), facts.top_k
    ),
    "all resident": lambda options, _facts: replace(
        options, expert_cache=None, homes=Homes(ExpertHome.DEVICE)
    ),
}
RUNS = ("runs", *MANNERS, *SETTINGS, CLI)


@dataclass
class Bench:
    """All runs of one model on one device.

    Attributes:
        options: of the engine; its experts are cached.
        facts: of the model.
        sizes: of the protocol.
        broken: how the arithmetic is broken, or None.
        first_file: where the first run is kept, or None.
        times: runs, the last behind a restart; 1: behind churn, if the first is known.
        manner: of reading in runs and other settings; None: one by one, or where a break shows.
        found: what every run differed in, in order.
        seconds: that each run took, by name.
    """

    options: EngineOptions
    facts: Facts
    sizes: Sizes = SPEC_SIZES
    broken: Break | None = None
    first_file: Path | None = None
    times: int = NUM_RUNS
    manner: str | None = None
    found: list[Difference] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    first: Answers | None = None
    asked: list[Asked] = field(default_factory=list)

    @contextmanager
    def protocol(self, options: EngineOptions) -> Iterator[Protocol]:
        """A fresh engine, and a session of it."""
        if self.broken is not None:
            options = self.broken.change(options, self.facts.top_k)
        with ExitStack() as stack:
            engine = stack.enter_context(Engine.open(options))
            rules = SMALL_RULES if self.sizes is SMALL_SIZES else RULES
            session = stack.enter_context(Session(engine, rules))
            deterministic = None
            if self.broken is not None:
                stack.enter_context(self.broken.around(engine))
                deterministic = self.broken.deterministic
            self.asked = self.asked or asked_of(engine.spec.vocab_size, self.sizes)
            yield Protocol(session, self.asked, self.sizes, deterministic)

    def run(self, name: str, read: Callable[[], Answers]) -> None:
        """Read everything once and compare it with the first time."""
        began = time.perf_counter()
        answers = read()
        self.seconds[name] = time.perf_counter() - began
        if self.first is None:
            self.first = answers
            if self.first_file is not None:
                with self.first_file.open("wb") as file:  # np.save would add to another name
                    np.save(file, np.stack(answers.logits))
        difference = compare(name, self.asked, self.first, answers)
        self.found.append(difference)
        print(f"{difference.line()} {self.seconds[name]:.1f} s", flush=True)

    def load_first(self) -> None:
        """The first run, if another process has kept it."""
        if self.first_file is None or not self.first_file.exists():
            return
        try:
            kept = np.load(self.first_file)
        except (OSError, ValueError, EOFError):
            raise SystemExit(f"{self.first_file} holds no first run: no .npy file") from None
        expected = (len(self.asked), self.facts.vocab_size)
        if kept.shape != expected or kept.dtype != np.float32:
            raise SystemExit(
                f"{self.first_file} holds {kept.dtype} {list(kept.shape)}, no first run of this "
                f"model: float32 {list(expected)} (reads, vocabulary)"
            )
        self.first = Answers(list(kept))

    def reading(self) -> Manner:
        """How runs and settings read."""
        usual = "ABC" if self.broken is None else self.broken.manner
        return MANNERS[self.manner or usual]

    def runs(self) -> None:
        """So many runs with churn between them, and a restart before the last."""
        with self.protocol(self.options) as protocol:
            for number in range(1, max(self.times, 2)):
                if number > 1 or self.first is not None:
                    protocol.churn(number)
                self.run(f"run {number}", partial(self.reading(), protocol))
        if self.times > 1:
            with self.protocol(self.options) as protocol:
                self.run(f"run {self.times}, behind a restart", partial(self.reading(), protocol))

    def manners(self, names: list[str]) -> None:
        """Other manners of reading, one after the other in one session, with churn between."""
        with self.protocol(self.options) as protocol:
            for seed, name in enumerate(names, 10):
                protocol.churn(seed)
                self.run(name, partial(MANNERS[name], protocol))

    def setting(self, name: str) -> None:
        """An engine with other settings, its first reads behind churn."""
        try:
            with self.protocol(SETTINGS[name](self.options, self.facts)) as protocol:
                protocol.churn(20)
                self.run(name, partial(self.reading(), protocol))
        except OutOfMemory as error:
            print(f"{name}: left out, {error.message}", flush=True)

    def command(self) -> None:
        """`strata read`, a process for each of a few reads, one of every kind."""
        assert self.first is not None
        every = self.asked[:: max(len(self.asked) // CLI_READS, 1)][:CLI_READS]
        indices = [self.asked.index(asked) for asked in every]
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            rows = [_read_by_command(self.options, asked, Path(folder)) for asked in every]
        self.seconds[CLI] = time.perf_counter() - began
        firsts = Answers([self.first.logits[index] for index in indices])
        difference = compare(CLI, every, firsts, Answers(rows))
        self.found.append(difference)
        print(f"{difference.line()} {self.seconds[CLI]:.1f} s", flush=True)


def _read_by_command(options: EngineOptions, asked: Asked, folder: Path) -> np.ndarray:
    file, tokens = folder / "logits.npy", folder / "tokens.json"
    tokens.write_text(json.dumps(asked.ids))
    command = [sys.executable, "-m", "strata_cli", "read", "--tokens-file", str(tokens)]
    command += ["--model", str(options.model), "--device", options.device, "--top", "3", "--json"]
    command += ["--expert-cache", str(options.expert_cache), "--logits-out", str(file)]
    command += ["--max-context", str(options.max_context)]
    if options.vram_bytes:
        command += ["--vram-bytes", f"{options.vram_bytes >> 20}MiB"]
    if options.expert_profile is not None:
        command += ["--expert-profile", str(options.expert_profile)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"strata read failed: {done.stderr}")
    assert json.loads(done.stdout)["canonical"] is True
    logits: np.ndarray = np.load(file)
    file.unlink()
    return logits


def measure(bench: Bench, names: list[str]) -> None:
    bench.load_first()
    if "runs" in names or bench.first is None:
        bench.runs()
    manners = [name for name in names if name in MANNERS]
    if manners:
        bench.manners(manners)
    for name in names:
        if name in SETTINGS:
            bench.setting(name)
    if CLI in names:
        bench.command()


def report(bench: Bench) -> dict[str, Any]:
    return {
        "model": str(bench.options.model),
        "device": bench.options.device,
        "expert_cache": bench.options.expert_cache,
        "pairs": bench.facts.pairs,
        "broken": None if bench.broken is None else bench.broken.what,
        "reads": len(bench.asked),
        "runs": [asdict(found) for found in bench.found],
        "seconds": bench.seconds,
    }


def bench_of(arguments: argparse.Namespace) -> Bench:
    with load_model_file(arguments.model) as model:
        spec = model.spec
        facts = Facts(spec.num_layers * spec.num_experts, spec.num_experts_per_tok, spec.vocab_size)
    sizes = SMALL_SIZES if arguments.small else SPEC_SIZES
    if sizes.context_tokens >= spec.context_tokens:
        raise SystemExit(
            f"{arguments.model} has a context of {spec.context_tokens} tokens, the protocol takes "
            f"{sizes.context_tokens + 1}; --small takes {SMALL_SIZES.context_tokens + 1}"
        )
    options = EngineOptions(
        model=arguments.model,
        device=arguments.device,
        vram_bytes=arguments.vram_mib << 20,
        max_context=max(sizes.context_tokens + 1, 64),
        expert_cache=arguments.slots or facts.slots(SLOTS_OF),
        expert_profile=arguments.profile,
    )
    broken = BREAKS[arguments.broken] if arguments.broken else None
    bench = Bench(options, facts, sizes, broken, arguments.first)
    bench.times, bench.manner = arguments.times, arguments.manner
    bench.asked = asked_of(spec.vocab_size, sizes)
    return bench


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path, nargs="?", default=DEMO_MODEL_PATH)
    parser.add_argument("--device", default="host")
    parser.add_argument("--vram-mib", type=whole(0), default=0, help="of device memory, at most")
    parser.add_argument("--slots", type=whole(1), help="of the expert cache")
    parser.add_argument("--profile", type=Path, help="of the experts")
    parser.add_argument("--small", action="store_true", help="short prompts")
    parser.add_argument("--only", default=",".join(RUNS), help=", ".join(RUNS))
    parser.add_argument("--times", type=whole(1), default=NUM_RUNS, help="of runs")
    parser.add_argument("--manner", choices=MANNERS, help="of reading in runs and settings")
    parser.add_argument("--first", type=new_file, help="file of the first run")
    parser.add_argument("--broken", choices=BREAKS)
    parser.add_argument("--json", type=new_file)
    arguments = parser.parse_args()
    names = arguments.only.split(",")
    unknown = set(names) - set(RUNS)
    if unknown:
        parser.error(f"no such runs: {', '.join(sorted(unknown))}")
    bench = bench_of(arguments)
    measure(bench, names)
    moved = [found for found in bench.found if found.differing]
    print(f"{len(moved)} of {len(bench.found)} runs differ" if moved else "every bit is the same")
    if arguments.json:
        arguments.json.write_text(json.dumps(report(bench), indent=1))
    raise SystemExit(bool(moved) and bench.broken is None)


if __name__ == "__main__":
    run_benchmark(main)
