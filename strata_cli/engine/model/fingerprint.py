"""What tells a model's files from any other's, without reading all of a large one."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import BinaryIO

from strata_cli.engine.model.shards import files_of_model
from strata_cli.errors import ModelError, path_text

HEAD_BYTES = 16 << 20  # metadata, vocabulary and template of any model known
SAMPLE_BYTES = 64 << 10
NUM_SAMPLES = 1024


def model_hash(path: Path) -> str:
    """64 hex digits that follow from a model's bytes; names and places do not matter.

    Of each file: its size, its first 16 MiB, and 1,024 samples of 64 KiB, evenly spread: all of a
    file up to 64 MiB. Weights that were trained further, or quantised anew, differ everywhere.

    Args:
        path: the file, or any of its shards.

    Raises:
        ModelError: a file cannot be read.
    """
    digest = hashlib.sha256()
    for file_path in files_of_model(path):
        try:
            with open(file_path, "rb") as file:
                _add_file(digest, file)
        except OSError as error:
            raise ModelError(
                f"cannot read {path_text(file_path)}: {error.strerror}", hint="check the path"
            ) from error
    return digest.hexdigest()


def _add_file(digest: hashlib._Hash, file: BinaryIO) -> None:
    nbytes = os.fstat(file.fileno()).st_size
    digest.update(nbytes.to_bytes(8, "little"))
    digest.update(file.read(HEAD_BYTES))
    step = max(SAMPLE_BYTES, -(-(nbytes - HEAD_BYTES) // NUM_SAMPLES))
    for start in range(HEAD_BYTES, nbytes, step):
        file.seek(start)
        digest.update(file.read(SAMPLE_BYTES))
