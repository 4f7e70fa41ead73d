"""How answers are read: the level, what the labels' bias is taken from, and the temperature."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from strata_cli.decisions.calibration import Calibration

Level: TypeAlias = Literal["raw", "L0", "L1"]
Prior: TypeAlias = Literal["content_free", "none", "batch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionRules:
    """How answers are read.

    Attributes:
        level: "raw" reads one prompt, options as listed; "L0" reads every rotation of the sorted
            options and divides the labels' prior out; "L1" then applies a fitted temperature.
        prior: where that prior comes from: states without content, nowhere, or the states decided
            on so far ("batch"), which makes answers depend on traffic.
        reuse: read once what prompts have in common; changes no value.
        calibration: for L1, already checked for this model and prior.
    """

    level: Level = "L0"
    prior: Prior = "content_free"
    reuse: bool = True
    calibration: Calibration | None = None

    @property
    def temperatures(self) -> dict[str, float]:
        """By which answers are cooled, by Question.key; none but at L1."""
        if self.level != "L1":
            return {}
        assert self.calibration is not None
        return dict(sorted(self.calibration.temperatures.items()))

    @property
    def depends_on_traffic(self) -> bool:
        """Whether states decided on earlier move an answer."""
        return self.level != "raw" and self.prior == "batch"


DEFAULT_RULES = DecisionRules()
