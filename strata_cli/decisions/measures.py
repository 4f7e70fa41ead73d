"""How sure answers were and how often right: calibration error, coverage at a risk, temperature."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Probabilities = NDArray[np.float64]

NUM_BINS = 15
RISK = 0.05
LEAST_TEMPERATURE, MOST_TEMPERATURE = 0.2, 10.0
GOLDEN = (math.sqrt(5) - 1) / 2


class Judged(NamedTuple):
    """How sure the likeliest option of each answer was, and whether it was right; both [P]."""

    confidence: NDArray[np.float64]
    hit: NDArray[np.bool_]

    @property
    def accuracy(self) -> float:
        """Share of right answers."""
        return float(self.hit.mean())


class Bin(NamedTuple):
    """Answers of like confidence: its mean, the share that was right, and how many there are."""

    confidence: float
    accuracy: float
    num_answers: int


class Selected(NamedTuple):
    """Share of answers given at a threshold, and the share of wrong ones among them."""

    coverage: float
    risk: float


def cooled(probabilities: Probabilities, temperature: float) -> Probabilities:
    """The softmax of log-probabilities over a temperature; the order never changes.

    Args:
        probabilities: [K], of which at least one is positive.
        temperature: above 0; 1 changes nothing but the last bit.
    """
    logs = [math.log(value) if value > 0 else -math.inf for value in probabilities.tolist()]
    best = max(logs)
    weights = [math.exp((value - best) / temperature) for value in logs]
    total = math.fsum(weights)  # the same bits in whatever order options are listed
    return np.array([weight / total for weight in weights], dtype=np.float64)


def judge(answers: Sequence[Probabilities], right: Sequence[int]) -> Judged:
    """Compare the likeliest options with the right ones; of equal ones the first counts.

    Args:
        answers: probabilities [K] of the options of each; K may differ.
        right: index of the right option of each.
    """
    confidence = np.array([float(answer.max()) for answer in answers])
    top = np.array([int(np.argmax(answer)) for answer in answers])
    return Judged(confidence, top == np.array(right))


def fit_temperature(answers: Sequence[Probabilities], right: Sequence[int]) -> float:
    """The temperature under which the right options are likeliest together.

    A golden section search: the loss is convex in 1 / temperature, so it has one least value.

    Returns:
        Between LEAST_TEMPERATURE and MOST_TEMPERATURE; an end where the loss falls up to it.
    """
    most = max(map(len, answers))
    logs = np.full((len(answers), most), -np.inf)
    for row, answer in zip(logs, answers, strict=True):
        with np.errstate(divide="ignore"):
            row[: len(answer)] = np.log(answer) - np.log(answer.max())
    chosen = np.maximum(logs[np.arange(len(right)), right], -1e3)  # one option of no probability

    def loss(log_temperature: float) -> float:
        scale = math.exp(-log_temperature)
        return float(np.mean(np.log(np.exp(logs * scale).sum(axis=1)) - chosen * scale))

    low, high = math.log(LEAST_TEMPERATURE), math.log(MOST_TEMPERATURE)
    for _ in range(60):
        step = GOLDEN * (high - low)
        if loss(high - step) <= loss(low + step):
            high = low + step
        else:
            low = high - step
    return round(math.exp((low + high) / 2), 6)


def calibration_bins(judged: Judged, num_bins: int = NUM_BINS) -> list[Bin]:
    """Bins of equally many answers, the least sure first; fewer where there are few answers."""
    order = np.argsort(judged.confidence, kind="stable")
    return [
        Bin(float(judged.confidence[part].mean()), float(judged.hit[part].mean()), len(part))
        for part in np.array_split(order, min(num_bins, len(order)))
        if len(part)
    ]


def calibration_error(judged: Judged) -> float:
    """Expected calibration error over bins of equally many answers.

    Source: Nguyen and O'Connor 2015; the mean gap between confidence and accuracy.
    """
    gaps = [
        abs(one.confidence - one.accuracy) * one.num_answers for one in calibration_bins(judged)
    ]
    return math.fsum(gaps) / len(judged.confidence)


def risk_threshold(judged: Judged, risk: float = RISK) -> float:
    """The least confidence at or above which at most a share `risk` of the answers is wrong.

    Infinite where no confidence is high enough. Answers of equal confidence go together.
    """
    order = np.argsort(-judged.confidence, kind="stable")
    confidence = judged.confidence[order]
    wrong = np.cumsum(~judged.hit[order]) / np.arange(1, len(order) + 1)
    is_last = np.append(confidence[1:] != confidence[:-1], [True])
    allowed = np.flatnonzero(is_last & (wrong <= risk))
    return float(confidence[allowed[-1]]) if len(allowed) else math.inf


def select(judged: Judged, threshold: float) -> Selected:
    """Coverage and risk of giving only answers whose confidence reaches a threshold."""
    chosen = judged.confidence >= threshold
    count = int(chosen.sum())
    risk = float((~judged.hit[chosen]).mean()) if count else 0.0
    return Selected(count / len(chosen), risk)
