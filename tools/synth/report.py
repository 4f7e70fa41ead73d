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
from strata_cli.engine.forward.batch import Batch
from strata_cli.engine.forward.feeding import ExpertFeed
from strata_cli.engine.forward.layers import Forward
from strata_cli.engine.forward.weights import LayerWeights
from strata_cli.errors import InputError
from tools.synth.prompts import random_prompt, zipf_prompt
from tools.synth.routing import UNROUTED_TARGETS

_PREFILL_TOKENS = 512


class Reading(NamedTuple):
    """What one prompt showed.

    Attributes:
        unrouted: share of unrouted pairs of each layer, [counts, num_layers].
        common_near: experts that two tokens in a row have in common, mean over tokens and layers.
        common_far: the same of tokens half the prompt apart.
        logits: of the last token, [V].
    """

    unrouted: NDArray[np.float64]
    common_near: float
    common_far: float
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
        Readings of "random", "zipf" and, with a text, "text".

    Raises:
        InputError: the text is too short, or the lengths exceed the model's context.
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
            prompts["text"] = _start(engine.tokenizer.encode(text, parse_special=False), longest)
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
    lines += [line for name, reading in readings.items() for line in _details(name, reading)]
    return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class _WatchingForward(Forward):
    """A forward pass that keeps which experts every row of every layer was routed to.

    Attributes:
        device: where the model runs.
        choices: per layer, the expert ids [tokens, k] of each pass in turn.
    """

    device: Device
    choices: dict[int, list[NDArray[Any]]] = field(default_factory=dict)

    def layer(
        self,
        index: int,
        layer: LayerWeights,
        batch: Batch,
        x: Tensor,
        feed: ExpertFeed | None = None,
    ) -> None:
        """Enqueue one layer, wait for it, and note its routing."""
        Forward.layer(self, index, layer, batch, x, feed)
        ids = self.expert_ids(index, batch.num_tokens)
        self.choices.setdefault(index, []).append(download(self.device, self.stream, ids))


def _watch(engine: Engine) -> _WatchingForward:
    """Put a watching pass in the engine's place for it.

    The engine has no door for observers: only a measurement wants to stop after every layer.
    """
    parts = {
        part.name: getattr(engine._forward, part.name) for part in fields(Forward) if part.init
    }
    watching = _WatchingForward(**parts, device=engine._device)
    engine._forward = watching
    return watching


def _start(ids: list[int], count: int) -> list[int]:
    if len(ids) < count:
        raise InputError(
            f"the text has {len(ids):,} tokens, and {count:,} are to be read",
            hint="take a longer text, or shorter lengths for --report-routing",
        )
    return ids[:count]


def _read(
    engine: Engine, watching: _WatchingForward, ids: list[int], counts: Sequence[int]
) -> Reading:
    watching.choices.clear()
    with engine.sequence() as sequence:
        logits = sequence.prefill(ids)
    layers = [np.concatenate(watching.choices[layer]) for layer in range(engine.spec.num_layers)]
    num_experts = engine.spec.num_experts
    shares = [
        [1 - len(np.unique(routed[:count])) / num_experts for routed in layers] for count in counts
    ]
    near = np.mean([_common(routed, 1) for routed in layers])
    far = np.mean([_common(routed, max(1, len(ids) // 2)) for routed in layers])
    return Reading(np.array(shares), float(near), float(far), logits)


def _common(routed: NDArray[np.int32], distance: int) -> float:
    """Experts that tokens so far apart have in common, mean; 0 where there are no two."""
    earlier, later = routed[:-distance], routed[distance:]
    is_same = earlier[:, :, None] == later[:, None, :]
    return float(is_same.sum() / max(len(earlier), 1))


def _details(name: str, reading: Reading) -> list[str]:
    """Whether any layer stands out, routing follows the tokens and logits are of use."""
    last, logits = reading.unrouted[-1], reading.logits
    return [
        f"{name}: least unrouted {last.min():.1%} (layer {last.argmin()}), "
        f"most {last.max():.1%} (layer {last.argmax()})",
        f"  experts in common: {reading.common_near:.1f} of neighbours, {reading.common_far:.1f} "
        f"of tokens half a prompt apart",
        f"  last logits: deviation {logits.std():.2f}, "
        f"largest probability {_largest_probability(logits):.4f}",
    ]


def _largest_probability(logits: NDArray[np.float32]) -> float:
    scaled = np.exp(logits.astype(np.float64) - float(logits.max()))
    return float(1 / scaled.sum())
