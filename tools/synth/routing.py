"""Router matrices, tuned so that a prompt leaves as many experts unrouted as real text does.

A logit is the sum of three parts: the expert's popularity (through the constant channels), how well
it suits the topic, and what the token itself adds. Only the ratio of their sizes matters for who is
chosen. Wider popularity leaves more experts unrouted at all lengths, a topic that wanders more
slowly does so most at short ones. What the presets come to is in
benchmarks/results/synthetic_models.md: one prompt differs from another by some 3 points, tokens
drawn evenly leave up to 5 less, and layers near the embedding more than deep ones.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.model.spec import ModelSpec
from tools.synth.channels import CONSTANT, TOPIC, read_constant, read_topic_rms
from tools.synth.scales import READ_RMS

UNROUTED_TARGETS = {1046: 0.42, 1437: 0.33, 1965: 0.28, 4867: 0.14}
"""Prompt tokens -> share of (layer, expert) pairs that no token of real text routes to."""

TOKEN_STD = 0.4
_POPULARITY_STD = 0.9
_TOPIC_STD = 2.0


def router_rows(
    spec: ModelSpec, layer: int, token_std: float, rng: np.random.Generator
) -> NDArray[np.float32]:
    """The router of a layer, [num_experts, hidden_size].

    Args:
        spec: the model.
        layer: from 0.
        token_std: size of what the token itself adds to a logit; TOKEN_STD is calibrated. More of
            it spreads a prompt over more experts.
        rng: source of randomness.
    """
    experts, hidden = spec.num_experts, spec.hidden_size
    rows = rng.standard_normal((experts, hidden), dtype=np.float32)
    rows *= np.float32(token_std / (READ_RMS * math.sqrt(hidden)))
    constant = read_constant(spec, layer, behind_mixer=True)
    width = CONSTANT.stop - CONSTANT.start
    rows[:, CONSTANT] = (_popularity(experts, rng) / (width * constant))[:, None]
    rows[:, TOPIC] = _suited_topics(experts, rng) * (_TOPIC_STD / read_topic_rms(spec, layer))
    return rows


def _popularity(experts: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Evenly spread: a normal distribution's tail would hold experts that no text ever reaches."""
    ranks = (rng.permutation(experts) + 0.5) / experts
    return (2 * ranks - 1) * (math.sqrt(3) * _POPULARITY_STD)


def _suited_topics(experts: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """A direction an expert, all of length 1: none suits every topic, none suits no topic."""
    directions = rng.standard_normal((experts, TOPIC.stop - TOPIC.start))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    return directions
