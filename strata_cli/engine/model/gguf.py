"""Opens a GGUF model, one file or several shards, as memory-mapped tensors.

Opening reads the headers alone; the bytes of a tensor are read from disk when they are touched.
"""

from __future__ import annotations

import mmap
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.model.directory import TensorEntry
from strata_cli.engine.model.header import parse_header
from strata_cli.engine.model.metadata import Metadata
from strata_cli.engine.model.quants import QuantType
from strata_cli.engine.model.shards import (
    SplitInfo,
    check_continues,
    check_name,
    read_split,
    shard_paths,
)
from strata_cli.errors import ModelError, path_text


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of an open model.

    Attributes:
        name: as in the file.
        qtype: how its weights are stored.
        shape: numpy order, outermost axis first; the last axis is contiguous and made of blocks.
        data: its bytes, read-only uint8 [*shape[:-1], bytes of one row]; not read until touched.
        path: the file it lies in.
        start: its first byte in that file.
    """

    name: str
    qtype: QuantType
    shape: tuple[int, ...]
    data: NDArray[np.uint8]
    path: Path
    start: int

    @property
    def nbytes(self) -> int:
        """Bytes that the tensor takes in the file."""
        return self.data.nbytes


class GgufFile:
    """An open model: metadata and tensors of all its shards. Close it, or use it in a ``with``.

    Attributes:
        metadata: of the first shard, which is the one that describes the model.
        tensors: by name, in file order.
        paths: the files, first shard first.
    """

    def __init__(
        self, metadata: Metadata, tensors: Mapping[str, TensorInfo], paths: tuple[Path, ...]
    ) -> None:
        self.metadata = metadata
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(dict(tensors))
        self.paths = paths

    def close(self) -> None:
        """Let go of the tensors. Safe to call twice.

        Memory stays mapped as long as somebody still holds one of the tensors' arrays.
        """
        self.tensors = MappingProxyType({})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def open_gguf(path: Path | str) -> GgufFile:
    """Open a model file, and with it all shards if it is any one of several.

    Raises:
        ModelError: a file is missing, unreadable, not GGUF, truncated or damaged, a tensor has an
            unsupported type, or the shards do not belong together.
    """
    given = _open_one(Path(path), if_missing="check the path of the model")
    split = read_split(given.metadata)
    if split is None:
        return given
    check_name(given.paths[0], split)
    return _merge(_open_shards(given, split), split)


def _open_shards(given: GgufFile, split: SplitInfo) -> list[GgufFile]:
    """All shards in order, one of which is open already and says how many there are."""
    all_here = f"all {split.num_shards} shards of the model must lie in one folder"
    shards = []
    for index, path in enumerate(shard_paths(given.paths[0], split)):
        shard = given if index == split.shard else _open_one(path, if_missing=all_here)
        check_continues(path, index, read_split(shard.metadata), split)
        shards.append(shard)
    return shards


def _merge(shards: list[GgufFile], split: SplitInfo) -> GgufFile:
    tensors: dict[str, TensorInfo] = {}
    for shard in shards:
        for name, info in shard.tensors.items():
            if name in tensors:
                raise ModelError(
                    f"tensor {name!r} is in two shards: {tensors[name].path} and {info.path}",
                    hint="the shards are of different conversions; download them again",
                )
            tensors[name] = info
    paths = tuple(shard.paths[0] for shard in shards)
    if len(tensors) != split.num_tensors:
        raise ModelError(
            f"{paths[0]}: the {len(paths)} shards hold {len(tensors)} tensors, "
            f"but split.tensors.count says {split.num_tensors}",
            hint="the shards are of different conversions; download them again",
        )
    return GgufFile(shards[0].metadata, tensors, paths)


def _open_one(path: Path, if_missing: str) -> GgufFile:
    data = _map_file(path, if_missing)
    header = parse_header(data, str(path))
    whole: NDArray[np.uint8] = np.frombuffer(data, dtype=np.uint8)
    tensors = {entry.name: _tensor_info(path, whole, entry) for entry in header.tensors}
    return GgufFile(header.metadata, tensors, (path,))


def _tensor_info(path: Path, whole: NDArray[np.uint8], entry: TensorEntry) -> TensorInfo:
    data = whole[entry.start : entry.start + entry.nbytes].reshape(*entry.shape[:-1], -1)
    return TensorInfo(entry.name, entry.qtype, entry.shape, data, path, entry.start)


def _map_file(path: Path, if_missing: str) -> mmap.mmap:
    shown, check_path = path_text(path), "check the path of the model"
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise ModelError(f"{shown} is a directory", hint="pass the .gguf file inside it")
        if not stat.S_ISREG(status.st_mode):
            raise ModelError(f"{shown} is not a regular file", hint="pass a .gguf file")
        if status.st_size == 0:
            raise ModelError(f"{shown} is empty (0 bytes)", hint="download the model again")
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError as error:
        raise ModelError(f"no such file: {shown}", hint=if_missing) from error
    except PermissionError as error:
        raise ModelError(
            f"{shown} cannot be read: permission denied", hint="check the file's permissions"
        ) from error
    except OSError as error:
        raise ModelError(f"{shown} cannot be opened: {error.strerror}", hint=check_path) from error
    except ValueError as error:  # a NUL in the path, or a file cut to nothing meanwhile
        raise ModelError(f"{shown} cannot be opened: {error}", hint=check_path) from error
