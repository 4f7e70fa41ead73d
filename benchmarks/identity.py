"""Whether the ways of streaming a prompt's experts agree in every bit, at several lengths.

    PYTHONPATH=. python benchmarks/identity.py MODEL.gguf [--device NAME] [--slots N]
        [--lengths 1046,1437,1965,4867] [--turns 14277,1979] [--json FILE]

Arms, each with an engine of its own: base (everything copied), unset (as by default: foreseen ones
first), on (routed experts alone), likely (likely ones first), keep (kept between chunks), likely or
foreseen ones and keep, all resident, and base again, which shows that equal settings repeat. Every
arm reads each prompt, and two turns of which the second goes on from the first, and generates a few
tokens; reply, logits, counts, state hash and residual dump must be those of the first arm. Chunks
below 512 tokens copy routed experts alone, and foreseen ones where any are: give --prefill where
chunks are short by default.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.arguments import run_benchmark
from strata_cli.engine.engine import Engine, EngineOptions, Sequence
from strata_cli.engine.experts.placing import ExpertHome
from strata_cli.engine.forward.planning import Homes
from strata_cli.engine.measuring.identity import Fingerprint, differences
from strata_cli.engine.model.tensors import load_model_file
from strata_cli.engine.prefill.prompt_stream import StreamRules
from strata_cli.engine.reading import ReadRequest, read
from strata_cli.errors import OutOfMemory
from tools.synth.prompts import zipf_prompt

PLAIN = StreamRules()
KEPT_SLOTS = 256
ANSWER = 8


def ways(kept_slots: int) -> dict[str, StreamRules | None]:
    """By arm; None: nothing is streamed."""
    by_id = replace(PLAIN, is_likely=False)
    base = replace(by_id, stream=replace(PLAIN.stream, skips_unrouted=False))
    on = replace(by_id, stream=replace(PLAIN.stream, skips_unrouted=True))
    return {
        "base": base,
        "unset": PLAIN,
        "on": on,
        "likely": replace(on, is_likely=True, foresees=False),
        "keep": replace(on, kept_slots=kept_slots),
        "likely and keep": replace(on, is_likely=True, foresees=False, kept_slots=kept_slots),
        "foreseen and keep": replace(PLAIN, kept_slots=kept_slots),
        "all resident": None,
        "base again": base,
    }


@dataclass(frozen=True)
class Seen:
    """One prompt of one arm; copied and skipped may differ, since they depend on timing."""

    arm: str
    prompt: str
    fingerprint: Fingerprint
    differs: list[str]
    copied: int
    skipped: int
    seconds: float

    def line(self) -> str:
        verdict = f"differs in {', '.join(self.differs)}" if self.differs else "same"
        return (
            f"{self.arm:<16}{self.prompt:<22}{self.fingerprint.reply_sha256[:8]} "
            f"{self.fingerprint.dump_sha256[:8]} copied {self.copied:6} skipped {self.skipped:6} "
            f"{self.seconds:7.2f} s  {verdict}"
        )


def reads(
    options: EngineOptions, lengths: list[int], turns: list[int]
) -> Iterator[tuple[str, Fingerprint, int, int, float]]:
    """What each prompt, and then a second turn, left: name, bits, copied, skipped, seconds."""
    dump = options.prefill_dump_r
    assert dump is not None
    with Engine.open(options) as engine:
        if engine._streamer is not None:
            print(
                f"chunks of {engine.chunk_tokens}: {engine._streamer.describe(engine.chunk_tokens)}"
            )
        vocab_size = engine.spec.vocab_size

        def told(
            name: str, sequence: Sequence, ids: list[int]
        ) -> tuple[str, Fingerprint, int, int, float]:
            request = ReadRequest(ids=ids, max_tokens=ANSWER, state_hash=True)
            began = time.perf_counter()
            result = read(engine, sequence, request)
            seconds = time.perf_counter() - began
            counts = [] if engine._streamer is None else engine._streamer.counts
            copied, skipped = (sum(getattr(c, n) for c in counts) for n in ("copied", "skipped"))
            return name, Fingerprint.of(result, len(ids), dump), copied, skipped, seconds

        for length in lengths:
            with engine.sequence() as sequence:
                yield told(f"{length} tokens", sequence, zipf_prompt(vocab_size, length, 1))
        with engine.sequence() as sequence:
            for number, length in enumerate(turns, 1):
                ids = zipf_prompt(vocab_size, length, 1 + number)
                yield told(f"turn {number}, {length} tokens", sequence, ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", default="host")
    parser.add_argument("--vram-mib", type=int, default=0, help="of device memory, at most")
    parser.add_argument("--slots", type=int, help="of the expert cache; a sixth of the pairs")
    parser.add_argument("--profile", type=Path, help="of the experts")
    parser.add_argument("--prefill", type=int, default=0, help="tokens of a chunk")
    parser.add_argument("--lengths", default="1046,1437,1965,4867")
    parser.add_argument("--turns", default="1046,1979")
    parser.add_argument("--arms", help="of them, in order; base first")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    lengths, turns = (
        [int(part) for part in text.split(",") if part]
        for text in (arguments.lengths, arguments.turns)
    )
    with load_model_file(arguments.model) as model:
        pairs = model.spec.num_layers * model.spec.num_experts
    slots = arguments.slots or pairs // 6
    arms = ways(min(KEPT_SLOTS, max(slots // 4, 1)))
    chosen = arguments.arms.split(",") if arguments.arms else list(arms)
    found: list[Seen] = []
    first: dict[str, Fingerprint] = {}
    for arm in chosen:
        with tempfile.TemporaryDirectory(prefix="strata-identity-") as folder:
            options = EngineOptions(
                model=arguments.model,
                device=arguments.device,
                vram_bytes=arguments.vram_mib << 20,
                max_context=max(*lengths, sum(turns)) + (len(turns) + 1) * ANSWER,
                prefill=arguments.prefill,
                expert_cache=slots,
                expert_profile=arguments.profile,
                prefill_dump_r=Path(folder) / "residual",
            )
            rules = arms[arm]
            if rules is None:
                options = replace(options, expert_cache=None, homes=Homes(ExpertHome.DEVICE))
            else:
                options = replace(options, streaming=rules)
            try:
                for name, fingerprint, copied, skipped, seconds in reads(options, lengths, turns):
                    base = first.setdefault(name, fingerprint)
                    differs = differences(base, fingerprint)
                    seen = Seen(arm, name, fingerprint, differs, copied, skipped, seconds)
                    found.append(seen)
                    print(seen.line(), flush=True)
            except OutOfMemory as error:
                print(f"{arm}: left out, {error.message}", flush=True)
    other = [seen for seen in found if seen.differs]
    print(f"{len(other)} of {len(found)} reads differ" if other else "every bit is the same")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(seen) for seen in found], indent=1))
    raise SystemExit(bool(other))


if __name__ == "__main__":
    run_benchmark(main)
