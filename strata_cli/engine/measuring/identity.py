"""Whether runs gave the same bits: what is compared, and what differs."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.reading import ReadResult

ARMS = ("base", "unset", "on", "base again")
"""Switch off, as by default, on, and off once more: if the last differs, runs do not repeat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """Everything of a run that a switch must not change.

    Attributes:
        reply_sha256: of the generated ids.
        logits_sha256: of the last prompt position's logits.
        dump_sha256: of the residual dump.
        state_hash: after everything was read.
        prompt_tokens, generated_tokens: how many.
        finish_reason: why the reply ended.
    """

    reply_sha256: str
    logits_sha256: str
    dump_sha256: str
    state_hash: str
    prompt_tokens: int
    generated_tokens: int
    finish_reason: str | None

    @classmethod
    def of(cls, result: ReadResult, prompt_tokens: int, dump: Path) -> Fingerprint:
        """Of a read that kept its state hash.

        Args:
            result: of the read.
            prompt_tokens: that it read.
            dump: the file that it left.
        """
        assert result.state_hash is not None
        return cls(
            reply_sha256=_sha256(np.array(result.generated_ids, np.int64)),
            logits_sha256=_sha256(result.logits),
            dump_sha256=_file_sha256(dump),
            state_hash=result.state_hash.line(),
            prompt_tokens=prompt_tokens,
            generated_tokens=len(result.generated_ids),
            finish_reason=result.finish_reason,
        )


def differences(base: Fingerprint, other: Fingerprint) -> list[str]:
    """Names of the fields that differ, in order; of the state hash, those of its components."""
    one, two = _named(base), _named(other)
    return [name for name in one | two if one.get(name) != two.get(name)]


def _named(fingerprint: Fingerprint) -> dict[str, object]:
    named: dict[str, object] = {}
    for field in fields(Fingerprint):
        value = getattr(fingerprint, field.name)
        if field.name == "state_hash":
            parts = (part.partition("=") for part in value.split()[1:])
            named |= {f"state_hash.{part}": hashed for part, _, hashed in parts}
        else:
            named[field.name] = value
    return named


def _sha256(values: NDArray[np.int64] | NDArray[np.float32]) -> str:
    return hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()


def _file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
