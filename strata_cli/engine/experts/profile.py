"""The expert profile: how much each expert is used, counted, kept in a file, and as a ranking."""

from __future__ import annotations

import hashlib
import io
import json
import lzma
import os
import tokenize
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.model.expected import EXPERT_DOWN
from strata_cli.engine.model.tensors import ModelFile
from strata_cli.errors import ConfigError, ShapeError, path_text
from strata_cli.output_files import replace_file, target_of, write_in_place

VERSION = 1
_SPARE_BYTES = 1 << 16  # of a profile beside its numbers
_MOST_USE = 1e30  # scores are float32
_HINT = "leave --expert-profile out: a new one is then measured"

_UNREADABLE = (
    zipfile.BadZipFile, zlib.error, lzma.LZMAError, tokenize.TokenError, ArithmeticError, EOFError,
    LookupError, MemoryError, RuntimeError, TypeError, ValueError,
)  # fmt: skip
"""What zipfile and numpy raise for files that they cannot read: numpy parses headers as Python."""


@dataclass(frozen=True, slots=True, eq=False)
class ExpertProfile:
    """How much each expert of one model is used.

    Attributes:
        key: of the model, see model_key().
        use: tokens, or any measure in proportion, at least 0, float64 [L, E].
    """

    key: str
    use: NDArray[np.float64]

    @property
    def scores(self) -> NDArray[np.float32]:
        """Use as the scores that copy orders are made from, [L, E]."""
        return self.use.astype(np.float32)

    def ranking(self) -> NDArray[np.int64]:
        """All pairs, layer * E + expert, most used first, [L * E].

        Pairs of equal use take turns between the layers, so that nobody is favoured.
        """
        num_layers, num_experts = self.use.shape
        pairs = np.arange(num_layers * num_experts).reshape(num_layers, num_experts)
        by_turns = pairs.T.reshape(-1)
        order = np.argsort(-self.use.T.reshape(-1), kind="stable")
        ranking: NDArray[np.int64] = by_turns[order]
        return ranking

    def plus(self, use: NDArray[np.integer]) -> ExpertProfile:
        """The profile after more tokens.

        Args:
            use: tokens of each expert, [L, E].

        Raises:
            ShapeError: use has another shape.
        """
        if use.shape != self.use.shape:
            raise ShapeError(f"use of {list(use.shape)} experts for {list(self.use.shape)}")
        return replace(self, use=self.use + use)


def even_profile(model: ModelFile) -> ExpertProfile:
    """That of a model about which nothing is known: no expert is used."""
    shape = (model.spec.num_layers, model.spec.num_experts)
    return ExpertProfile(model_key(model), np.zeros(shape))


def model_key(model: ModelFile) -> str:
    """32 hex digits that tell models apart: by name, dimensions, expert types and bytes of weights.

    A model that was moved, renamed or split keeps its key. Two that differ in their weights' values
    alone have the same one: a profile then fits less well, but nothing breaks.
    """
    spec = model.spec
    facts = {
        "name": spec.name,
        "layers": spec.num_layers,
        "experts": [spec.num_experts, spec.num_experts_per_tok],
        "hidden": spec.hidden_size,
        "widths": list(spec.moe_intermediate_size),
        "vocabulary": spec.vocab_size,
        "types": [
            int(model.layer_tensor(layer, EXPERT_DOWN).qtype) for layer in range(spec.num_layers)
        ],
        "bytes": sum(info.nbytes for info in model.tensors.values()),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def save_profile(path: Path, profile: ExpertProfile) -> None:
    """Write a profile. Whatever happens, a regular file is the old one or the new one, whole.

    Links are followed; a pipe or a device is written as it is.

    Raises:
        ConfigError: it cannot be written there.
    """
    try:
        _write(path, profile)
    except OSError as error:
        raise ConfigError(
            f"the expert profile {path_text(path)} cannot be written: {error.strerror}",
            hint="check the folder of --expert-profile",
        ) from error


def _write(path: Path, profile: ExpertProfile) -> None:
    data = io.BytesIO()  # an archive is not written in order, as a pipe needs it
    np.savez(data, version=VERSION, key=np.array(profile.key), use=profile.use)
    name, write = os.fspath(path), partial(_put, data.getvalue())
    target = target_of(name)
    if target is None:
        write_in_place(name, write)
    else:
        replace_file(target, write, is_durable=True)


def _put(data: bytes, file: BinaryIO) -> None:
    file.write(data)


def load_profile(path: Path, model: ModelFile) -> ExpertProfile:
    """Read a profile of this model.

    Raises:
        ConfigError: it is not there, damaged, of another model, or of other dimensions.
    """
    shape = (model.spec.num_layers, model.spec.num_experts)
    values = _read(path, shape)
    shown, key = path_text(path), model_key(model)
    if values["version"].tolist() != VERSION:
        raise ConfigError(f"the expert profile {shown} is of another version", hint=_HINT)
    if values["key"].tolist() != key:
        raise ConfigError(
            f"the expert profile {shown} belongs to another model ({values['key']!s:.32}, "
            f"not {key})",
            hint=_HINT,
        )
    use = values["use"]
    if use.shape != shape or use.dtype != np.float64:
        raise ConfigError(
            f"the expert profile {shown} has {use.dtype} {list(use.shape)}, "
            f"expected float64 {list(shape)} (layers, experts)",
            hint=_HINT,
        )
    if not ((use >= 0) & (use <= _MOST_USE)).all():  # what is no number is neither
        raise ConfigError(f"the expert profile {shown} has uses that are no counts", hint=_HINT)
    return ExpertProfile(key, use)


def _read(path: Path, shape: tuple[int, int]) -> Mapping[str, NDArray[Any]]:
    """The arrays of the file, as they are; refuses what is much too large before it is read."""
    if path.exists() and not path.is_file() and not path.is_dir():  # a pipe would be waited for
        raise _damaged(path, "no regular file")
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            most_bytes = shape[0] * shape[1] * 8 + _SPARE_BYTES
            if sum(info.file_size for info in archive.infolist()) > most_bytes:
                raise _damaged(path, f"more than {most_bytes} bytes")
            file.seek(0)
            with np.load(file, allow_pickle=False) as arrays:
                return {name: arrays[name] for name in ("version", "key", "use")}
    except OSError as error:
        raise ConfigError(
            f"the expert profile {path_text(path)} cannot be read: {error.strerror}",
            hint="check --expert-profile",
        ) from error
    except _UNREADABLE as error:
        raise _damaged(path, str(error)) from error


def _damaged(path: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"the expert profile {path_text(path)} is damaged or none: {reason}", hint=_HINT
    )
