"""Measures how a model routes: the share of experts that no token of a prompt needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.device.base import Device, Tensor
from strata_cli.engine.device.transfer import download
from strata_cli.engine.engine import Engine, EngineOptions
from strata_cli.engine.forward.layers import Batch, Forward
from strata_cli.engine.forward.weights import LayerWeights
from tools.synth.prompts import random_prompt, zipf_prompt
from tools.synth.routing import UNROUTED_TARGETS

_PREFILL_TOKENS = 512


class Reading(NamedTuple):
    """What one prompt showed.

    Attributes:
        unrouted: share of unrouted pairs of each layer, [counts, num_layers].
        logits: of the last token, [V].
    """

    unrouted: NDArray[np.float64]
    logits: NDArray[np.float32]


def measure_routing(
    model: Path, counts: Sequence[int], *, device: str, text: str | None = None
) -> dict[str, Reading]:
    """Read prompts and count who was routed to in their first tokens.

    Args:
        model: a model file.
        counts: prompt lengths; one prompt of the longest serves all, as reading is causal.
        device: "host" or "cuda:N".
        text: a text to read besides the made-up prompts; its first tokens are used.

    Returns:
        Readings of "random", "zipf" and, with a text that is long enough, "text".
    """
    longest = max(counts)
    options = EngineOptions(
        model=model, device=device, max_context=longest, prefill=min(longest, _PREFILL_TOKENS)
    )
    with Engine.open(options) as engine:
        watching = _watch(engine)
        vocab_size = engine.spec.vocab_size
        prompts = {
            "random": random_prompt(vocab_size, longest, seed=1),
            "zipf": zipf_prompt(vocab_size, longest, seed=1),
        }
        if text is not None:
            ids = engine.tokenizer.encode(text, parse_special=False)
            if len(ids) >= longest:
                prompts["text"] = ids[:longest]
        return {name: _read(engine, watching, ids, counts) for name, ids in prompts.items()}


def routing_table(readings: Mapping[str, Reading], counts: Sequence[int]) -> str:
    """Lines of text: unrouted shares by prompt length, beside those of real text and model."""
    lines = ["share of (layer, expert) pairs that no token routes to"]
    lines.append(f"{'tokens':>8}{'target':>9}" + "".join(f"{name:>9}" for name in readings))
    for row, count in enumerate(counts):
        target = UNROUTED_TARGETS.get(count)
        cells = ["" if target is None else f"{target:.1%}"]
        cells += [f"{reading.unrouted[row].mean():.1%}" for reading in readings.values()]
        lines.append(f"{count:>8,}" + "".join(f"{cell:>9}" for cell in cells))
    for name, (unrouted, logits) in readings.items():
        last = unrouted[-1]
        lines.append(
            f"{name}: layers from {last.min():.1%} (layer {last.argmin()}) to {last.max():.1%} "
            f"(layer {last.argmax()}) at {counts[-1]:,} tokens; last logits: deviation "
            f"{logits.std():.2f}, largest probability {_largest_probability(logits):.4f}"
        )
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class _WatchingForward(Forward):
    """A forward pass that keeps which experts every row of every layer was routed to.

    Attributes:
        device: where the model runs.
        routed: per layer, the expert ids [tokens, k] of each pass in turn.
    """

    device: Device
    routed: dict[int, list[NDArray[Any]]] = field(default_factory=dict)

    def layer(self, index: int, layer: LayerWeights, batch: Batch, x: Tensor) -> None:
        """Enqueue one layer, wait for it, and note its routing."""
        Forward.layer(self, index, layer, batch, x)
        ids = self.workspace.take("expert_ids", batch.num_tokens)
        self.routed.setdefault(index, []).append(download(self.device, self.stream, ids))


def _watch(engine: Engine) -> _WatchingForward:
    """Put a watching pass in the engine's place for it.

    The engine has no door for observers: only a measurement wants to stop after every layer.
    """
    parts = {part.name: getattr(engine._forward, part.name) for part in fields(Forward)}
    watching = _WatchingForward(**parts, device=engine._device)
    engine._forward = watching
    return watching


def _read(
    engine: Engine, watching: _WatchingForward, ids: list[int], counts: Sequence[int]
) -> Reading:
    watching.routed.clear()
    with engine.sequence() as sequence:
        logits = sequence.prefill(ids)
    layers = [np.concatenate(watching.routed[layer]) for layer in range(engine.spec.num_layers)]
    num_experts = engine.spec.num_experts
    shares = [
        [1 - len(np.unique(routed[:count])) / num_experts for routed in layers] for count in counts
    ]
    return Reading(np.array(shares), logits)


def _largest_probability(logits: NDArray[np.float32]) -> float:
    scaled = np.exp(logits.astype(np.float64) - float(logits.max()))
    return float(1 / scaled.sum())
