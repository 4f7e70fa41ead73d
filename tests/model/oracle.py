"""Where the reference models and their expected values lie (tests/fixtures/oracle/README.md)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ORACLE = Path(__file__).parent.parent / "fixtures" / "oracle"

MODELS = {
    "tinyA-q8_0": ORACLE / "tinyA-q8_0.gguf",
    "tinyA-iq4nl-fused": ORACLE / "tinyA-iq4nl-fused.gguf",
    "mixB-quant": ORACLE / "mixB-quant-split-00001-of-00003.gguf",
}
"""Model name to the file that opens it."""


def load_oracle(model: str) -> dict[str, NDArray[Any]]:
    """All expected arrays of one model, from its .npz files."""
    arrays: dict[str, NDArray[Any]] = {}
    for path in (ORACLE / f"{model}.npz", *sorted(ORACLE.glob(f"{model}-*.npz"))):
        with np.load(path) as stored:
            arrays |= {key: stored[key] for key in stored.files}
    return arrays
