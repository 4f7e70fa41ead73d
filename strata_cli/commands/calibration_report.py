"""How a calibration is shown: a table of what it is worth, and a plot of confidence and truth."""

from __future__ import annotations

from collections.abc import Sequence

from strata_cli.decisions.fitting import Figures, Fit
from strata_cli.decisions.measures import Bin, Judged, calibration_bins

PLOT_BINS, PLOT_COLUMNS = 10, 40
LEGEND = f"confidence from 0 to 1 over {PLOT_COLUMNS} columns: o said, x true, * both"


def fits_as_text(fits: Sequence[Fit]) -> str:
    """A block of lines for each question."""
    return "\n\n".join(_block(one) for one in fits)


def _block(fit: Fit) -> str:
    lines = [
        fit.question.text,
        f"  temperature {fit.temperature:.3f}, fitted on {fit.num_fitted} states; the figures are "
        f"about {fit.num_tested} others",
        *(f"  warning: {warning}" for warning in fit.warnings),
        "",
        f"  {'level':<6} {'accuracy':>8} {'ECE':>8} {'flips':>8} {'coverage at 5 % risk':>21} "
        f"{'(risk)':>8}",
        *(_row(level, figures) for level, figures in fit.levels.items()),
        "",
        f"  {LEGEND}",
    ]
    for level in ("L0", "L1"):
        lines += ["", *_plot(level, fit.judged[level])]
    return "\n".join(lines)


def _row(level: str, figures: Figures) -> str:
    flips = "-" if figures.flips is None else f"{figures.flips:.3f}"
    return (
        f"  {level:<6} {figures.accuracy:8.3f} {figures.ece:8.3f} {flips:>8} "
        f"{figures.coverage:21.3f} {f'({figures.risk:.3f})':>8}"
    )


def _plot(level: str, judged: Judged) -> list[str]:
    header = f"  {level:<6} {'said':>6} {'true':>6} {'states':>7}"
    return [header, *(_line(one) for one in calibration_bins(judged, PLOT_BINS))]


def _line(one: Bin) -> str:
    marks = [" "] * (PLOT_COLUMNS + 1)
    said, true = (round(value * PLOT_COLUMNS) for value in (one.confidence, one.accuracy))
    marks[said] = "o"
    marks[true] = "*" if said == true else "x"
    shown = "".join(marks).rstrip()
    return f"  {'':6} {one.confidence:6.3f} {one.accuracy:6.3f} {one.num_answers:7}  |{shown}"
