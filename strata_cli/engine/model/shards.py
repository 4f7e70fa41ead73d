"""Rules for models split over several files: their names and the keys that tie them together.

The files are named NAME-00001-of-0000N.gguf; every one carries ``split.no`` (from 0),
``split.count`` and ``split.tensors.count`` (of all files together). Only the first describes the
model.
"""

from __future__ import annotations

import glob
import os
import re
from pathlib import Path
from typing import NamedTuple

from strata_cli.engine.model.metadata import INTEGERS, Metadata
from strata_cli.errors import ModelError, path_text

_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_HINT = "the shards are of different conversions, or renamed; download them again"


class SplitInfo(NamedTuple):
    """The split keys of one file.

    Attributes:
        shard: which file this is, from 0.
        num_shards: number of files.
        num_tensors: tensors in all files together.
    """

    shard: int
    num_shards: int
    num_tensors: int


def read_split(metadata: Metadata) -> SplitInfo | None:
    """The split keys, or None when the model is one file.

    Raises:
        ModelError: some of the keys are missing or wrong.
    """
    if "split.count" not in metadata:
        return None
    values = [_integer(metadata, f"split.{key}") for key in ("no", "count", "tensors.count")]
    info = SplitInfo(*values)
    if not 0 <= info.shard < info.num_shards or info.num_tensors < 0:
        raise ModelError(
            f"{metadata.origin}: split.no {info.shard}, split.count {info.num_shards} and "
            f"split.tensors.count {info.num_tensors} cannot be right",
            hint=_HINT,
        )
    return info


def check_name(path: Path, split: SplitInfo) -> None:
    """Refuse a shard whose name does not lead to the others, or says it is another one.

    Raises:
        ModelError: naming what the file says of itself.
    """
    if split.num_shards == 1:
        return
    match = _NAME.fullmatch(path.name)
    if match is None or int(match["count"]) != split.num_shards:
        raise ModelError(
            f"{path_text(path)} is shard {split.shard + 1} of {split.num_shards}, "
            "but its name does not lead to the others",
            hint=f"name the shards NAME-00001-of-{split.num_shards:05}.gguf and so on",
        )
    if int(match["number"]) != split.shard + 1:
        raise ModelError(
            f"{path_text(path)} is named shard {int(match['number'])}, "
            f"but split.no says it is shard {split.shard + 1} of {split.num_shards}",
            hint=_HINT,
        )


def check_continues(path: Path, shard: int, found: SplitInfo | None, first: SplitInfo) -> None:
    """Refuse a shard that does not continue the first one.

    Raises:
        ModelError: split.no, split.count or split.tensors.count disagree.
    """
    expected = first._replace(shard=shard)
    if found != expected:
        raise ModelError(
            f"{path_text(path)} does not continue the model: expected {expected}, found {found}",
            hint=_HINT,
        )


def shard_paths(path: Path, split: SplitInfo) -> list[Path]:
    """The files of the split model that path belongs to, in order; path itself if it is alone."""
    match = _NAME.fullmatch(path.name)
    if split.num_shards == 1 or match is None:
        return [path]
    names = (
        f"{match['stem']}-{number:05}-of-{split.num_shards:05}.gguf"
        for number in range(1, split.num_shards + 1)
    )
    return [path.with_name(name) for name in names]


def files_of_model(path: Path) -> list[Path]:
    """The files that are shards of one model with path by their names; without those, path."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        return [path]
    pattern = f"{glob.escape(match['stem'])}-?????-of-{match['count']}.gguf"
    return sorted({path, *path.parent.glob(pattern)})


def model_stem(path: Path) -> str:
    """The file's name without its ending, and without what numbers it as a shard.

    Bytes that are no UTF-8 become U+FFFD: the name is for messages and JSON.
    """
    match = _NAME.fullmatch(path.name)
    stem = path.stem if match is None else match["stem"]
    return os.fsencode(stem).decode("utf-8", "replace")


def _integer(metadata: Metadata, key: str) -> int:
    entry = metadata.entry(key)
    if entry is None:
        raise ModelError(f"{metadata.origin}: {key} is missing beside split.count", hint=_HINT)
    value = entry.read()
    if entry.type not in INTEGERS or not isinstance(value, int):
        raise ModelError(f"{metadata.origin}: {key} must be an integer, found {entry}", hint=_HINT)
    return value
