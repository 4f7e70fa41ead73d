"""Temperatures that make confidences true, and the file they are kept in.

A temperature belongs to one model, one question and one prior: with any other of these the file is
refused. The options' order and the question's id do not matter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from strata_cli.decisions.measures import LEAST_TEMPERATURE, MOST_TEMPERATURE
from strata_cli.decisions.questions import Question
from strata_cli.errors import InputError, quoted

SCHEMA_VERSION = 1
KIND = "strata calibration"
AGAIN_HINT = "make one with strata decide calibrate"


@dataclass(frozen=True, slots=True)
class Calibration:
    """Temperatures by question.

    Attributes:
        origin: where they came from, for messages.
        model_hash: of the model; see model_hash().
        prior: that answers were divided by.
        temperatures: by Question.key.
    """

    origin: str
    model_hash: str
    prior: str
    temperatures: Mapping[str, float]

    def check(self, model_hash: str, prior: str) -> None:
        """Refuse another model or prior.

        Raises:
            InputError: naming which.
        """
        if model_hash != self.model_hash:
            raise InputError(
                f"{self.origin} was made for another model: {self.model_hash[:12]}, and this one "
                f"is {model_hash[:12]}",
                hint=AGAIN_HINT,
            )
        if prior != self.prior:
            raise InputError(
                f"{self.origin} was made with --prior {self.prior}, and this is {prior}",
                hint=f"use --prior {self.prior}, or {AGAIN_HINT}",
            )

    def temperature(self, question: Question) -> float:
        """The temperature of a question.

        Raises:
            InputError: there is none for it.
        """
        if question.key not in self.temperatures:
            raise InputError(
                f"{self.origin} was made for other questions than {quoted(question.text)} with "
                f"these answers",
                hint=AGAIN_HINT,
            )
        return self.temperatures[question.key]


def calibration_as_json(calibration: Calibration, model: str, entries: Mapping[str, Any]) -> bytes:
    """The file (docs/calibration-json.md).

    Args:
        calibration: what is kept.
        model: its name, for people.
        entries: by Question.key: what else is to be kept of a question.
    """
    questions = {
        key: {"temperature": value, **entries[key]}
        for key, value in calibration.temperatures.items()
    }
    file = {
        "version": SCHEMA_VERSION,
        "kind": KIND,
        "model": {"name": model, "hash": calibration.model_hash},
        "prior": calibration.prior,
        "questions": questions,
    }
    return orjson.dumps(file, option=orjson.OPT_INDENT_2) + b"\n"


def parse_calibration(data: bytes, origin: str) -> Calibration:
    """What a file has.

    Args:
        data: its bytes.
        origin: its name, for messages.

    Raises:
        InputError: it is no such file, of another version, or damaged.
    """
    try:
        file = orjson.loads(data)
        if file["kind"] != KIND:
            raise KeyError("kind")
        version, model_hash, prior = file["version"], file["model"]["hash"], file["prior"]
        found = {key: entry["temperature"] for key, entry in file["questions"].items()}
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        raise InputError(f"{origin} is no calibration", hint=AGAIN_HINT) from None
    if version != SCHEMA_VERSION:
        raise InputError(
            f"{origin} is a calibration of version {version}, and {SCHEMA_VERSION} is known",
            hint=AGAIN_HINT,
        )
    for value in found.values():
        is_number = type(value) in (int, float)
        if not is_number or not LEAST_TEMPERATURE <= value <= MOST_TEMPERATURE:
            raise InputError(f"{origin} has a temperature of {value}", hint=AGAIN_HINT)
    temperatures = {key: float(value) for key, value in found.items()}
    return Calibration(origin, str(model_hash), str(prior), temperatures)
