"""A small model read on the GPU in every way there is, for compute-sanitizer to watch.

compute-sanitizer --tool memcheck python -m tests.engine.sanitized [resident|streamed] [DEVICE]
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from strata_cli.engine.engine import Engine, EngineOptions
from strata_cli.engine.experts.placing import ExpertHome
from strata_cli.engine.forward.planning import Homes
from tests.engine.passes import read_together
from tests.engine.readings import text
from tests.engine.streams import Way, write_streamed_model
from tests.model.oracle import MODELS, load_oracle


def resident(device: str) -> None:
    """Passes of many rows and of few, steps, a mixed batch, a snapshot; experts in both homes."""
    name = "mixB-quant"
    ids = load_oracle(name)["p130.ids"].tolist()
    options = EngineOptions(
        model=MODELS[name],
        device=device,
        prefill=100,
        max_context=256,
        homes=Homes(experts=ExpertHome.MIXED),
    )
    with Engine.open(options) as engine, engine.sequence() as one, engine.sequence() as two:
        one.prefill(ids, logits="all")
        snapshot = one.snapshot()
        for token in ids[:3]:
            one.step(token)
        one.restore(snapshot)
        read_together(engine, [(one, ids[:9]), (two, ids[:40])])
        sys.stdout.write(one.state_hash().line())


def streamed(device: str) -> None:
    """Experts through the ring, from the cache, fetched by steps, and over the link."""
    way = Way(fetch=12, ahead=5, stream={"watchdog_s": 600.0})
    with tempfile.TemporaryDirectory() as folder:
        path = write_streamed_model(Path(folder) / "m.gguf", fused=False)
        with way.open(path, device) as engine, engine.sequence() as sequence:
            for length in (100, 50):  # streamed ahead; as routed
                sequence.prefill(text(length), logits="none")
                for token in (5, 9, 2):
                    sequence.step(token)
            sys.stdout.write(sequence.state_hash().line())


READS: dict[str, Callable[[str], None]] = {"resident": resident, "streamed": streamed}

if __name__ == "__main__":
    reads, device = (*sys.argv[1:], *("resident", "cuda:0")[len(sys.argv) - 1 :])
    READS[reads](device)
