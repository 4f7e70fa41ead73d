from __future__ import annotations

import numpy as np
import pytest

from strata_cli.engine.measuring.pairs import ARMS, PAIRS, compare, median_interval


def test_arms_are_off_on_on_off_and_mirrored_and_paired_with_their_neighbours() -> None:
    assert "".join("+" if is_on else "-" for is_on in ARMS) == "-++-+--+"
    assert PAIRS == ((1, 0), (2, 3), (4, 5), (7, 6))
    assert all(ARMS[on] and not ARMS[off] and abs(on - off) == 1 for on, off in PAIRS)


@pytest.mark.parametrize(
    ("ratios", "median", "interval"),
    [
        ((1.224, 1.212, 1.209, 1.225), 1.218, (1.209, 1.225)),
        ((1.234, 1.180, 1.269, 1.176), 1.207, (1.176, 1.269)),
    ],
)
def test_published_ratios_give_their_published_median_and_interval(
    ratios: tuple[float, ...], median: float, interval: tuple[float, float]
) -> None:
    assert np.median(ratios) == pytest.approx(median, abs=5e-4)
    assert median_interval(ratios) == pytest.approx(interval, abs=5e-4)


def plain_interval(ratios: list[float], resamples: int, seed: int) -> tuple[float, float]:
    """The bootstrap one resample at a time, and quantiles by sorting."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, len(ratios), (resamples, len(ratios)))
    medians = sorted(float(np.median([ratios[index] for index in row])) for row in rows.tolist())

    def quantile(share: float) -> float:
        place = share * (resamples - 1)
        below = int(place)
        above = min(below + 1, resamples - 1)
        return medians[below] + (place - below) * (medians[above] - medians[below])

    return quantile(0.025), quantile(0.975)


def test_the_interval_is_that_of_a_plain_bootstrap() -> None:
    ratios = np.random.default_rng(3).normal(1.1, 0.1, 9).tolist()
    fast = median_interval(ratios, resamples=1500, seed=7)
    assert fast == pytest.approx(plain_interval(ratios, 1500, 7))
    assert median_interval(ratios, resamples=1500, seed=7) == fast


def test_a_drift_that_is_linear_cancels_in_the_means() -> None:
    drifting = [100 + 3 * arm for arm in range(len(ARMS))]
    assert compare("ms", drifting, is_rate=False).change == 0
    assert compare("ms", drifting, is_rate=False).median == pytest.approx(1, abs=1e-3)


def test_ratios_are_above_one_where_on_is_better() -> None:
    times = [8.0 if is_on else 10.0 for is_on in ARMS]
    rates = [1 / time for time in times]
    of_times, of_rates = compare("ms", times, is_rate=False), compare("1/s", rates, is_rate=True)
    assert of_times.ratios == pytest.approx([1.25] * 4)
    assert of_rates.ratios == pytest.approx([1.25] * 4)
    assert (of_times.off, of_times.on) == (10, 8)
    assert of_times.change == pytest.approx(-0.2)
    assert of_rates.change == pytest.approx(0.25)
    assert of_times.low == of_times.high == of_times.median == 1.25
