"""Chooses the next token from one row of logits: pure functions on the host.

Order of operations: penalties, allowed tokens, temperature, top-k, top-p, min-p, draw. So top-p and
min-p look at the tempered distribution, as in vLLM and transformers (llama.cpp tempers last; at
temperature 1 all agree), top-p adds up to its share of what top-k left, and min-p compares with the
most probable token. Equal logits rank by token id, the lower first.

The draw depends on seed and step alone: a reply can be resumed at any step, and neither other
sequences nor numpy's global state can change it. Logits are ranked in float32, as they come;
probabilities are float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from strata_cli.errors import ConfigError, ShapeError, StrataError

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]

_FACTOR, _PENALTY = "between 0.01 and 100", "between -100 and 100"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """How tokens are chosen; the defaults choose the most probable one.

    Attributes:
        temperature: divides the logits; 0 takes the most probable token (greedy).
        top_k: how many of the most probable tokens stay; 0 or -1 keeps all.
        top_p: the most probable tokens stay until their probabilities add up to this; 1 keeps all,
            0 the most probable one.
        min_p: tokens stay whose probability is at least this share of the highest; 0 keeps all.
        repetition_penalty: logits of recent tokens are divided by it (multiplied when negative);
            1 does nothing.
        frequency_penalty: subtracted once for each time the token occurred recently.
        presence_penalty: subtracted once if the token occurred recently.
        penalty_last_n: how many recent tokens count; 0 none, -1 all.
        seed: which of the possible replies, 0 to 2**64 - 1.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    penalty_last_n: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse values out of range.

        Raises:
            ConfigError: names the setting, its value and what it may be.
        """
        _check("temperature", self.temperature, lambda x: x >= 0, "0 (greedy) or more")
        _check("top_k", self.top_k, lambda x: x >= -1, "1 or more, or 0 for all tokens")
        _check("top_p", self.top_p, lambda x: 0 <= x <= 1, "between 0 and 1")
        _check("min_p", self.min_p, lambda x: 0 <= x <= 1, "between 0 and 1")
        _check("repetition_penalty", self.repetition_penalty, lambda x: 0.01 <= x <= 100, _FACTOR)
        _check("frequency_penalty", self.frequency_penalty, lambda x: abs(x) <= 100, _PENALTY)
        _check("presence_penalty", self.presence_penalty, lambda x: abs(x) <= 100, _PENALTY)
        _check("penalty_last_n", self.penalty_last_n, lambda x: x >= -1, "0 or more, or -1")
        _check("seed", self.seed, lambda x: 0 <= x < 2**64, "from 0 to 2**64 - 1")

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is taken, without a draw."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        """Whether recent tokens change the logits."""
        changes = self.repetition_penalty != 1 or self.frequency_penalty or self.presence_penalty
        return bool(changes) and self.penalty_last_n != 0


class Candidates(NamedTuple):
    """The tokens that can be drawn.

    Attributes:
        ids: token ids, [n], most probable first, n >= 1.
        probs: their probabilities, [n], adding up to 1.
    """

    ids: Ids
    probs: NDArray[np.float64]


def choose(
    logits: Floats,
    sampler: Sampler,
    *,
    step: int,
    history: Sequence[int] = (),
    allowed: Sequence[int] | Ids | None = None,
) -> int:
    """The next token.

    Args:
        logits: [vocab_size]; -inf marks a token that cannot come.
        sampler: how to choose.
        step: index of the token in its reply, 0 for the first; part of the draw.
        history: tokens so far, prompt included, most recent last; read by penalties only.
        allowed: when given, only these token ids can come.

    Raises:
        ShapeError: logits is no row of numbers, or an id of history or allowed is outside it.
        StrataError: no token can come, or a logit is NaN or +inf.
    """
    scores = _scores(logits, sampler, history, allowed)
    if sampler.is_greedy:
        return int(np.argmax(scores))
    ids, probs = _candidates(scores, sampler)
    cumulative = np.cumsum(probs)
    chosen = np.searchsorted(cumulative, draw(sampler.seed, step) * cumulative[-1], side="right")
    return int(ids[min(int(chosen), ids.size - 1)])


def candidates(
    logits: Floats,
    sampler: Sampler,
    *,
    history: Sequence[int] = (),
    allowed: Sequence[int] | Ids | None = None,
) -> Candidates:
    """The tokens that ``choose`` draws from, and how probable each is; one when greedy.

    Arguments and errors are those of ``choose``.
    """
    scores = _scores(logits, sampler, history, allowed)
    if sampler.is_greedy:
        return Candidates(np.array([np.argmax(scores)]), np.ones(1))
    return _candidates(scores, sampler)


def draw(seed: int, step: int) -> float:
    """A number in [0, 1) that depends on seed and step alone.

    Source: Philox 4x64, a counter-based generator: key seed, counter step; its upper 53 bits.
    """
    bits = int(np.random.Philox(key=seed, counter=step).random_raw())
    return (bits >> 11) * 2.0**-53


def largest(values: Floats, count: int) -> Ids:
    """Indices of the ``count`` largest values, largest first; equal ones by index.

    Args:
        values: [n] float32, no NaN.
        count: 1 or more; n or more takes all.
    """
    # One unsigned integer holds value and index: all differ, so any way of sorting gives one order.
    bits = (values + np.float32(0)).view(np.uint32)  # -0 + 0 = 0
    descending = np.where(bits >> 31, bits, ~bits & 0x7FFF_FFFF)
    keys = descending.astype(np.uint64) << 32 | np.arange(values.size, dtype=np.uint64)
    if count < keys.size:
        keys = np.partition(keys, count - 1)[:count]
    return (np.sort(keys) & 0xFFFF_FFFF).astype(np.int64)


def penalize(scores: Floats, sampler: Sampler, history: Sequence[int]) -> Floats:
    """Logits with the penalties for recent tokens applied; a copy.

    Args:
        scores: [vocab_size].
        sampler: its penalties, in the order repetition, frequency, presence.
        history: tokens so far, most recent last.

    Source: CTRL's repetition penalty and OpenAI's two others, as vLLM and llama.cpp have them.
    """
    last_n = len(history) if sampler.penalty_last_n < 0 else sampler.penalty_last_n
    recent = np.asarray(history[max(0, len(history) - last_n) :], dtype=np.int64)
    ids, counts = np.unique(_checked_ids(recent, scores.size, "history"), return_counts=True)
    seen, factor = scores[ids].astype(np.float64), sampler.repetition_penalty
    seen = np.where(seen > 0, seen / factor, seen * factor)
    seen -= sampler.frequency_penalty * counts
    penalized = scores.copy()
    penalized[ids] = seen - sampler.presence_penalty
    return penalized


def _scores(
    logits: Floats,
    sampler: Sampler,
    history: Sequence[int],
    allowed: Sequence[int] | Ids | None,
) -> Floats:
    """Logits after penalties and the allowed tokens; at least one is finite."""
    if logits.ndim != 1 or logits.size == 0:
        raise ShapeError(f"logits must be one row of numbers, got shape {list(logits.shape)}")
    scores = logits.astype(np.float32, copy=False)
    highest = float(np.max(scores))
    if not highest < math.inf:  # NaN too
        raise StrataError(
            f"the logits cannot be sampled: their maximum is {highest}",
            hint="the model file or its computation is damaged; try another build of the model",
        )
    if sampler.has_penalties:
        scores = penalize(scores, sampler, history)
    if allowed is not None:
        ids = _checked_ids(np.asarray(allowed, dtype=np.int64), scores.size, "allowed")
        masked = np.full_like(scores, -np.inf)
        masked[ids] = scores[ids]
        scores = masked
    if np.max(scores) == -np.inf:
        raise StrataError(
            "no token can come next: every allowed logit is -inf",
            hint="allow at least one token that the model can produce",
        )
    return scores


def _candidates(scores: Floats, sampler: Sampler) -> Candidates:
    ids = largest(scores, sampler.top_k if sampler.top_k > 0 else scores.size)
    ranked = scores[ids].astype(np.float64)
    with np.errstate(over="ignore"):  # a tiny temperature makes all but the best -inf, rightly
        weights = np.exp((ranked - ranked[0]) / sampler.temperature)
    cumulative = np.cumsum(weights)
    num = weights.size
    if sampler.top_p < 1:
        num = int(np.searchsorted(cumulative, sampler.top_p * cumulative[-1])) + 1
    # min-p compares with the highest weight, exp(0) = 1; a weight of 0 cannot be drawn.
    num = min(num, np.count_nonzero((weights >= sampler.min_p) & (weights > 0)))
    return Candidates(ids[:num], weights[:num] / cumulative[num - 1])


def _checked_ids(ids: Ids, vocab_size: int, name: str) -> Ids:
    if ids.size and not (ids.min() >= 0 and ids.max() < vocab_size):
        raise ShapeError(
            f"{name} has token ids from {ids.min()} to {ids.max()}; "
            f"the logits have 0 to {vocab_size - 1}"
        )
    return ids


def _check(name: str, value: float, is_valid: Callable[[float], bool], expected: str) -> None:
    if not math.isfinite(value) or not is_valid(value):
        raise ConfigError(
            f"{name} must be {expected}, got {value}", hint=f"leave {name} at its default"
        )
