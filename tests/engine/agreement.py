"""Host and GPU on one text: how far their logits lie apart, and that near-ties are the cause.

A GPU rounds what products multiply to 16 bits. Where a choice of experts or of index blocks hangs
by less than that it may fall otherwise, and every token that reads the state behind it then differs
by more than rounding. So there are two comparisons: of the devices, and of the GPU with a reference
that makes the GPU's selections, whose differences are rounding alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from strata_cli.engine.engine import Engine, EngineOptions
from tests.engine.comparing import Agreement, agreement, differing_tokens
from tests.engine.passes import read_in_the_open
from tests.reference.qwen4exp import ModelPass, Reference

TOLERANCE = 2e-2
"""Largest difference of a logit, whose standard deviation is 1.5 to 3 in the models compared."""

DIVERGENCE = 1e-4
"""Largest Kullback-Leibler divergence of a token's distribution, in nats."""

MARGIN = 5e-3
"""Selections closer than this share of their scores may fall otherwise in 16 bits."""


@dataclass(frozen=True)
class Comparison:
    """Two devices and a reference on the same tokens.

    Attributes:
        devices: the GPU against the host.
        rounding: the GPU against the reference that makes its selections.
        otherwise: tokens for which the GPU selects otherwise than the host, ascending.
        shortfall: largest of all selections, of the GPU: how far one lies below the best choice.
    """

    devices: Agreement
    rounding: Agreement
    otherwise: list[int]
    shortfall: float

    @property
    def num_before(self) -> int:
        """Tokens before the first selection that differs."""
        return min(self.otherwise, default=len(self.devices.errors))

    def figures(self) -> dict[str, float]:
        """What a report says."""
        devices, rounding = self.devices, self.rounding
        within = devices.is_within(TOLERANCE, DIVERGENCE)
        return {
            "tokens": len(within),
            "largest difference of a logit": float(devices.errors.max()),
            "nats per token, mean": float(devices.nats.mean()),
            "nats per token, largest": float(devices.nats.max()),
            "same most likely token, share": float(devices.same_best.mean()),
            "tokens beyond the bounds": int((~within).sum()),
            "the first of them": int(within.argmin()) if not within.all() else len(within),
            "tokens that select otherwise": len(self.otherwise),
            "the first of those": self.num_before,
            "largest shortfall of a selection": self.shortfall,
            "same selections: largest difference of a logit": float(rounding.errors.max()),
            "same selections: nats per token, mean": float(rounding.nats.mean()),
            "same selections: nats per token, largest": float(rounding.nats.max()),
            "same selections: same most likely token, share": float(rounding.same_best.mean()),
            "same selections: tokens beyond the bounds": int(
                (~rounding.is_within(TOLERANCE, DIVERGENCE)).sum()
            ),
        }


def compare(model: Path, device: str, text: str, num_tokens: int) -> Comparison:
    """The first tokens of a text, in one chunk, read by the host and by another device."""
    host, ids = read(model, "host", text, num_tokens)
    found, _ = read(model, device, text, num_tokens)
    followed = Reference(model).forward(ids, found)
    return Comparison(
        devices=agreement(host.logits, found.logits),
        rounding=agreement(followed.logits, found.logits),
        otherwise=differing_tokens(host, found),
        shortfall=float(followed.shortfall.max()),
    )


def read(model: Path, device: str, text: str, num_tokens: int) -> tuple[ModelPass, list[int]]:
    """A pass laid open, and its tokens."""
    with Engine.open(EngineOptions(model=model, device=device, prefill=num_tokens)) as engine:
        ids = engine.tokenizer.encode(text, parse_special=False)[:num_tokens]
        assert len(ids) == num_tokens, "the text is too short"
        return read_in_the_open(engine, ids), ids
