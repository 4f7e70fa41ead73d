"""Reads that are timed: a warm-up, then some whose median counts."""

from __future__ import annotations

import collections.abc
from dataclasses import dataclass, replace
from statistics import median

from strata_cli.engine.engine import Engine, Sequence
from strata_cli.engine.measuring.pairs import Comparison, compare
from strata_cli.engine.reading import ReadRequest, Timings, read
from strata_cli.errors import InputError

WARM_UPS = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmTimes:
    """Medians of one arm's reads.

    Attributes:
        prompt_ms: wall time of the prompt.
        prompt_tokens_per_s: that follow from it.
        generate_tokens_per_s: 0 when nothing was generated.
    """

    prompt_ms: float
    prompt_tokens_per_s: float
    generate_tokens_per_s: float


def time_reads(engine: Engine, request: ReadRequest, repeat: int, reuse: int = 0) -> ArmTimes:
    """Read the same in new sequences, once to warm up and then as often as asked.

    Args:
        engine: a fresh one.
        request: what to read.
        repeat: reads that are timed, at least one.
        reuse: tokens of the prompt that are read before, untimed.
    """
    timings = [_read(engine, request, reuse) for _ in range(WARM_UPS + repeat)][WARM_UPS:]
    return ArmTimes(
        prompt_ms=median(timing.prompt_ms for timing in timings),
        prompt_tokens_per_s=median(timing.prompt_tokens_per_s for timing in timings),
        generate_tokens_per_s=median(timing.generate_tokens_per_s for timing in timings),
    )


def compare_arms(arms: collections.abc.Sequence[ArmTimes]) -> list[Comparison]:
    """Every measure that the arms, in the order of pairs.ARMS, have."""
    prompt_ms = [arm.prompt_ms for arm in arms]
    prompt_rates = [arm.prompt_tokens_per_s for arm in arms]
    comparisons = [
        compare("prompt, ms", prompt_ms, is_rate=False),
        compare("prompt, tokens/s", prompt_rates, is_rate=True),
    ]
    rates = [arm.generate_tokens_per_s for arm in arms]
    if all(rates):
        comparisons.append(compare("generation, tokens/s", rates, is_rate=True))
    return comparisons


def read_before(sequence: Sequence, request: ReadRequest, reuse: int) -> ReadRequest:
    """Read the first tokens of a prompt, as an earlier turn did; what is then left to read.

    Args:
        sequence: a new one.
        request: with all of the prompt.
        reuse: tokens to read now.

    Raises:
        InputError: the prompt has no more than those.
    """
    if reuse >= len(request.ids):
        raise InputError(
            f"--reuse {reuse} leaves nothing of a prompt of {len(request.ids)} tokens",
            hint="give a longer prompt",
        )
    if not reuse:
        return request
    sequence.prefill(request.ids[:reuse])
    return replace(request, ids=request.ids[reuse:])


def _read(engine: Engine, request: ReadRequest, reuse: int) -> Timings:
    with engine.sequence() as sequence:
        return read(engine, sequence, read_before(sequence, request, reuse)).timings
