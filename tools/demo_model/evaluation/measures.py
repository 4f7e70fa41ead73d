"""What is computed from the label log-probabilities of many prompts; plain numpy.

A prompt's scores are log-probabilities [n] of its n options, a choice's position in them is its
option number. Prompts of one task may have different numbers of options.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Scores = NDArray[np.float64]

BINS = 15
RISK = 0.05
NUM_DRAWS = 200
TEMPERATURES = np.geomspace(0.2, 10, 393)  # steps of 1 %


class Judged(NamedTuple):
    """How sure the model was of its top option, and whether that was right; both [P]."""

    confidence: NDArray[np.float64]
    hit: NDArray[np.bool_]


class Selected(NamedTuple):
    """The share of prompts that are answered at a threshold, and the share of wrong answers."""

    coverage: float
    risk: float


def normalised(scores: Scores) -> Scores:
    """Return scores shifted so that the options' probabilities sum to 1."""
    peak = scores.max()
    result: Scores = scores - (peak + np.log(np.exp(scores - peak).sum()))
    return result


def judge(scores: Sequence[Scores], right: Sequence[int], temperature: float = 1.0) -> Judged:
    """Compare the likeliest options with the right ones; of equal ones the first counts."""
    cooled = [normalised(score / temperature) for score in scores]
    confidence = np.array([np.exp(score.max()) for score in cooled])
    top = [int(np.argmax(score)) for score in cooled]
    return Judged(confidence, np.array(top) == np.array(right))


def fit_temperature(scores: Sequence[Scores], right: Sequence[int]) -> float:
    """Return the temperature, of a fixed grid, under which the right options are likeliest."""
    padded = np.full((len(scores), max(map(len, scores))), -np.inf)
    for row, score in zip(padded, scores, strict=True):
        row[: len(score)] = score - score.max()
    chosen = padded[np.arange(len(right)), right]

    def mean_loss(temperature: float) -> float:
        totals = np.log(np.exp(padded / temperature).sum(axis=1))
        return float(np.mean(totals - chosen / temperature))

    return float(min(TEMPERATURES, key=mean_loss))


def calibration_error(judged: Judged) -> float:
    """Return the expected calibration error over BINS bins of equally many prompts."""
    order = np.argsort(judged.confidence, kind="stable")
    gaps = [
        abs(judged.confidence[part].mean() - judged.hit[part].mean()) * len(part)
        for part in np.array_split(order, BINS)
        if len(part)
    ]
    return float(sum(gaps) / len(order))


def least_calibration_error(judged: Judged) -> float:
    """Return the calibration error that chance alone gives a perfectly calibrated model.

    The mean over NUM_DRAWS draws of right answers from these very confidences.
    """
    rng = np.random.default_rng(0)
    drawn = rng.random((NUM_DRAWS, len(judged.confidence))) < judged.confidence
    return float(np.mean([calibration_error(Judged(judged.confidence, hit)) for hit in drawn]))


def risk_threshold(judged: Judged, risk: float = RISK) -> float:
    """Return the least confidence above which at most `risk` of the answers are wrong.

    Infinite where no confidence is high enough. Prompts of equal confidence go together.
    """
    order = np.argsort(-judged.confidence, kind="stable")
    confidence = judged.confidence[order]
    wrong = np.cumsum(~judged.hit[order]) / np.arange(1, len(order) + 1)
    last = np.append(confidence[1:] != confidence[:-1], [True])
    allowed = np.flatnonzero(last & (wrong <= risk))
    return float(confidence[allowed[-1]]) if len(allowed) else float("inf")


def select(judged: Judged, threshold: float) -> Selected:
    """Return coverage and risk of answering only at `threshold` or more."""
    chosen = judged.confidence >= threshold
    count = int(chosen.sum())
    risk = float((~judged.hit[chosen]).mean()) if count else 0.0
    return Selected(count / len(chosen), risk)


def half_width(share: float, count: int) -> float:
    """Return half the width of the 95 % interval of a share of `count` prompts."""
    return 1.96 * float(np.sqrt(share * (1 - share) / count))


def ranked_right(positive: Scores, negative: Scores) -> float:
    """Return how often a positive scores above a negative (area under the ROC curve)."""
    above = (positive[:, None] > negative[None]).mean()
    return float(above + 0.5 * (positive[:, None] == negative[None]).mean())
