"""Which level of decisions the flags ask for, and the calibration that it needs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click
from click.core import ParameterSource

from strata_cli.commands.prompt import input_bytes
from strata_cli.config import StrataConfig
from strata_cli.decisions.calibration import Calibration, parse_calibration
from strata_cli.decisions.rules import DecisionRules, Level, Prior
from strata_cli.engine.model.fingerprint import model_hash
from strata_cli.errors import ConfigError
from strata_cli.models import DEMO_MODEL_PATH


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelFlags:
    """As they were given."""

    level: Level
    prior: Prior
    calibration: Path | None

    def check(self) -> None:
        """Refuse flags that contradict each other.

        Raises:
            ConfigError: naming the flags.
        """
        if self.level == "L1" and self.calibration is None:
            raise ConfigError(
                "--level L1 needs --calibration FILE", hint="make one with strata decide calibrate"
            )
        if self.level != "L1" and self.calibration is not None:
            raise ConfigError(
                f"--calibration is for --level L1, and this is {self.level}", hint="--level L1"
            )

        source = click.get_current_context().get_parameter_source("prior")
        if self.level == "raw" and source is ParameterSource.COMMANDLINE:
            raise ConfigError(
                f"--prior {self.prior} would have no effect: --level raw divides nothing out",
                hint="leave it out, or --level L0",
            )

    def rules(self, config: StrataConfig) -> DecisionRules:
        """How answers are read; a calibration is loaded and compared with the model's files.

        Raises:
            StrataError: it is of another model or prior, or no calibration.
        """
        return DecisionRules(
            level=self.level,
            prior=self.prior,
            reuse=config.reuse,
            calibration=self._calibration(config),
        )

    def _calibration(self, config: StrataConfig) -> Calibration | None:
        if self.calibration is None:
            return None
        calibration = parse_calibration(*input_bytes(self.calibration))
        calibration.check(model_hash(config.model or DEMO_MODEL_PATH), self.prior)
        return calibration
