"""A reliability plot as PNG, where matplotlib is installed."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from strata_cli.decisions.fitting import Fit
from strata_cli.decisions.measures import calibration_bins
from strata_cli.errors import ConfigError


def require_matplotlib() -> Any:
    """The library's figures, which need no screen.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        from matplotlib import figure
    except ImportError:
        raise ConfigError(
            "--plot needs the plot extra, which is not installed",
            hint="pip install 'strata-cli[plot]', or look at the plot of text",
        ) from None
    return figure


def reliability_png(fits: Sequence[Fit]) -> bytes:
    """Confidence against accuracy at L0 and L1, one panel for each question.

    Raises:
        ConfigError: see require_matplotlib().
    """
    sheet = require_matplotlib().Figure(figsize=(4 * len(fits), 4.2), layout="constrained")
    for panel, fit in zip(sheet.subplots(1, len(fits), squeeze=False)[0], fits, strict=True):
        panel.plot([0, 1], [0, 1], color="gray", linewidth=0.8)
        for level, mark in (("L0", "o"), ("L1", "s")):
            bins = calibration_bins(fit.judged[level])
            said, true = [one.confidence for one in bins], [one.accuracy for one in bins]
            ece = fit.levels[level].ece
            panel.plot(said, true, mark, markersize=4, label=f"{level}, ECE {ece:.3f}")
        panel.set(xlim=(0, 1), ylim=(0, 1), xlabel="confidence", ylabel="share right")
        panel.set_title(fit.question.id)
        panel.legend(loc="upper left")
    image = io.BytesIO()
    sheet.savefig(image, format="png", dpi=120)
    return image.getvalue()
