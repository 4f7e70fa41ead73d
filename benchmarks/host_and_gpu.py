"""How far a GPU's answers lie from the host's, token by token, and why.

    PYTHONPATH=. python benchmarks/host_and_gpu.py [MODEL.gguf] [--device cuda:0] [--tokens 2000]
        [--text FILE] [--json FILE]

Both read the same tokens in the same run: of the project's pages unless a text is given. The model
must be small: a third pass, in float64 on the host, makes the GPU's selections of experts and index
blocks, so that what is left of the difference is rounding. Exit code 1 where that leaves the bounds
(2e-2 of a logit, 1e-4 nats), or a selection that differs was no near-tie.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks.arguments import run_benchmark
from strata_cli.models import DEMO_MODEL_PATH
from tests.engine.agreement import DIVERGENCE, MARGIN, TOLERANCE, compare

PAGES = Path(__file__).resolve().parent.parent / "docs"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", type=Path, default=DEMO_MODEL_PATH)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    files = [arguments.text] if arguments.text else sorted(PAGES.glob("*.md"))
    text = "".join(path.read_text("utf-8") for path in files)
    found = compare(arguments.model, arguments.device, text, arguments.tokens)
    figures = found.figures()
    for name, value in figures.items():
        print(f"{name:52s} {value:.6g}")
    if arguments.json:
        tokens = {
            "errors": found.devices.errors.tolist(),
            "nats": found.devices.nats.tolist(),
            "otherwise": found.otherwise,
        }
        arguments.json.write_text(json.dumps({"figures": figures, "tokens": tokens}))
    is_rounding = found.rounding.is_within(TOLERANCE, DIVERGENCE).all()
    return 0 if is_rounding and found.shortfall < MARGIN else 1


if __name__ == "__main__":
    run_benchmark(main)
