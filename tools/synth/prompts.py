"""Prompts to measure routing on: token ids drawn evenly, and drawn as words of a text are."""

from __future__ import annotations

import numpy as np

from tools.synth.presets import first_added_id

_FIRST_ID = 256  # below it are single bytes
_NUM_COMMON, _NUM_OWN = 2000, 600
_COMMON_SHARE = 0.55


def random_prompt(vocab_size: int, num_tokens: int, seed: int) -> list[int]:
    """Every token of the vocabulary equally likely."""
    rng = np.random.default_rng(seed)
    ids: list[int] = rng.integers(_FIRST_ID, first_added_id(vocab_size), num_tokens).tolist()
    return ids


def zipf_prompt(vocab_size: int, num_tokens: int, seed: int) -> list[int]:
    """Words that every text has and words of this text, the n-th of each as likely as 1/n.

    1,000 tokens have about 480 different ones, 5,000 about 1,200.
    """
    rng = np.random.default_rng(seed)
    pieces = np.arange(_FIRST_ID, first_added_id(vocab_size))
    common = pieces[:_NUM_COMMON]
    own = rng.choice(pieces, min(_NUM_OWN, len(pieces)), replace=False)
    is_common = rng.random(num_tokens) < _COMMON_SHARE
    ids = np.where(is_common, _zipf(rng, common, num_tokens), _zipf(rng, own, num_tokens))
    drawn: list[int] = ids.tolist()
    return drawn


def _zipf(rng: np.random.Generator, ids: np.ndarray, count: int) -> np.ndarray:
    weights = 1 / np.arange(1, len(ids) + 1)
    return rng.choice(ids, count, p=weights / weights.sum())
