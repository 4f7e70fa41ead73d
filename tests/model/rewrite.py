"""Writes a model again in another form: as one file, or with every tensor in float32."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import numpy as np

from strata_cli.engine.model.gguf import TensorInfo, open_gguf
from strata_cli.engine.model.quants import QuantType, dequantize
from tests.model.gguf_writer import GgufBuilder, Scalar


def join_shards(first_shard: Path, path: Path) -> Path:
    """The same model in one file."""
    return _rewrite(first_shard, path, as_floats=False)


def write_float_copy(source: Path, path: Path) -> Path:
    """The same model in one file with the dequantized weights stored as F32: same outputs."""
    return _rewrite(source, path, as_floats=True)


def _rewrite(source: Path, path: Path, *, as_floats: bool) -> Path:
    builder = GgufBuilder()
    with open_gguf(source) as file:
        for key, value in file.metadata.items():
            entry = file.metadata.entry(key)
            assert entry is not None
            if key.startswith("split."):
                continue
            is_array = entry.num_items is not None
            plain = np.asarray(value).tolist() if is_array else cast(Scalar, value)
            builder.add(key, entry.type, plain)
        for info in file.tensors.values():
            if as_floats:
                builder.add_tensor(info.name, int(QuantType.F32), info.shape, _floats(info))
            else:
                builder.add_tensor(info.name, int(info.qtype), info.shape, info.data.tobytes())
    return builder.write(path)


def _floats(info: TensorInfo) -> bytes:
    rows = info.data.reshape(-1, info.data.shape[-1])
    return dequantize(info.qtype, rows, info.shape[-1]).tobytes()
