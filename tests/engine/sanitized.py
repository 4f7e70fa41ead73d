"""A small model read on the GPU in every way there is, for compute-sanitizer to watch.

compute-sanitizer --tool memcheck python -m tests.engine.sanitized
"""

from __future__ import annotations

import sys

from strata_cli.engine.engine import Engine, EngineOptions
from strata_cli.engine.experts.placing import ExpertHome
from strata_cli.engine.forward.planning import Homes
from tests.engine.passes import read_together
from tests.model.oracle import MODELS, load_oracle


def main() -> None:
    """Passes of many rows and of few, steps, a mixed batch, a snapshot; experts in both homes."""
    name = "mixB-quant"
    ids = load_oracle(name)["p130.ids"].tolist()
    options = EngineOptions(
        model=MODELS[name],
        device="cuda:0",
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


if __name__ == "__main__":
    main()
