"""Writes the file: header first, then every tensor by threads, each slice to its own place."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from numpy.typing import NDArray

from strata_cli.engine.model.spec import ARCHITECTURE, ModelSpec
from strata_cli.errors import InputError
from tools.synth.metadata import write_metadata
from tools.synth.plan import Slice, TensorPlan, make_slice, slices_of

ALIGNMENT = 32


class Placed(NamedTuple):
    """A slice and the byte of the file it starts at."""

    part: Slice
    offset: int


def write_model(
    path: Path,
    spec: ModelSpec,
    tensors: Sequence[TensorPlan],
    *,
    seed: int,
    threads: int,
    progress: Callable[[int], None] = lambda _nbytes: None,
) -> int:
    """Write a model file; replaces ``path`` only when all of it is written.

    Holds one slice a thread in memory, besides the vocabulary. The bytes do not depend on threads.

    Args:
        path: the file to write.
        spec: its metadata.
        tensors: what it holds, in file order.
        seed: any number of at least 0; other seeds give other weights.
        threads: that make and write slices.
        progress: called with the bytes of each slice written.

    Returns:
        The size of the file in bytes.

    Raises:
        InputError: the disk has not enough room, or the file cannot be written.
    """
    with _replacing(path) as draft:
        data_start = _write_header(draft, spec, tensors)
        sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors]
        total = data_start + sum(sizes)
        _check_room(draft, total)
        starts = accumulate(sizes, initial=data_start)
        parts = [
            placed
            for tensor, start in zip(tensors, starts, strict=False)
            for placed in _place(tensor, start)
        ]
        with open(draft, "r+b") as file, ThreadPoolExecutor(threads) as pool:
            # The whole length at once: threads then write anywhere, and padding reads as zeros.
            os.ftruncate(file.fileno(), total)

            def write(placed: Placed) -> int:
                data = make_slice(placed.part, seed)
                _write_all(file.fileno(), data, placed.offset)
                return data.nbytes

            for nbytes in pool.map(write, parts):
                progress(nbytes)
    return total


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A draft beside the file, which becomes it at the end, or goes when something fails."""
    draft = path.with_name(path.name + ".part")
    try:
        yield draft
        os.replace(draft, path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise InputError(
            f"cannot write {path}: {error.strerror or error}", hint="check the folder and its space"
        ) from error
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def _write_header(path: Path, spec: ModelSpec, tensors: Sequence[TensorPlan]) -> int:
    """Write all before the tensor data; returns the byte at which that starts."""
    writer = GGUFWriter(path, ARCHITECTURE)
    try:
        write_metadata(writer, spec)
        for tensor in tensors:
            qtype = GGMLQuantizationType(int(tensor.qtype))
            # The dtype is not looked at beside raw_dtype, as long as it is not uint8.
            writer.add_tensor_info(
                tensor.name, tensor.shape, np.dtype(np.float32), tensor.nbytes, raw_dtype=qtype
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
    finally:
        writer.close()
    return -(-path.stat().st_size // ALIGNMENT) * ALIGNMENT


def _check_room(path: Path, total: int) -> None:
    free = shutil.disk_usage(path.parent).free
    if total > free:
        raise InputError(
            f"{path.parent} has no room for the model: need {total / 2**30:.1f} GiB, "
            f"free {free / 2**30:.1f} GiB",
            hint="write to another disk, or fewer layers with --layers",
        )


def _place(tensor: TensorPlan, start: int) -> Iterator[Placed]:
    for part in slices_of(tensor):
        yield Placed(part, start + part.first_row * tensor.row_bytes)


def _write_all(descriptor: int, data: NDArray[np.uint8], offset: int) -> None:
    left = data.reshape(-1)
    while left.size:
        written = os.pwrite(descriptor, left.data, offset)
        left, offset = left[written:], offset + written
