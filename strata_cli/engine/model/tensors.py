"""A model file ready to use: its spec, and a directory of tensors that are all there and fit.

Nothing of the tensor data is read here; it is mapped, and read when it is touched.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.model import expected
from strata_cli.engine.model.expected import Shape
from strata_cli.engine.model.gguf import GgufFile, TensorInfo, open_gguf
from strata_cli.engine.model.metadata import Metadata
from strata_cli.engine.model.quants import dequantize
from strata_cli.engine.model.spec import ModelSpec, read_spec
from strata_cli.errors import ModelError

_BLOCK_NAME = re.compile(r"blk\.(\d{1,6})\.(.+)")
_HINT = "the file is incomplete or of another conversion; download or convert it again"


class ModelFile:
    """An open, checked model. Close it, or use it in a ``with``.

    Attributes:
        spec: the model's dimensions.
        metadata: of the (first) file: tokenizer, chat template and the rest.
        file: the open GGUF file.
        tensors: every tensor of the trunk by name, with the shape that ``expected`` gives it.
        draft: the tensors of the draft block, which nothing uses yet; empty without one.
    """

    def __init__(
        self,
        file: GgufFile,
        spec: ModelSpec,
        tensors: Mapping[str, TensorInfo],
        draft: Mapping[str, TensorInfo],
    ) -> None:
        self.file = file
        self.spec = spec
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(dict(tensors))
        self.draft: Mapping[str, TensorInfo] = MappingProxyType(dict(draft))

    @property
    def metadata(self) -> Metadata:
        """Metadata of the (first) file."""
        return self.file.metadata

    def tensor(self, name: str) -> TensorInfo:
        """A trunk tensor by its full name; KeyError if this model has none of that name."""
        return self.tensors[name]

    def layer_tensor(self, layer: int, name: str) -> TensorInfo:
        """A tensor of one layer, named without the ``blk.N.``; KeyError if it has none."""
        return self.tensors[f"blk.{layer}.{name}"]

    def output(self) -> TensorInfo:
        """The output matrix: its own, or the embedding table when they are tied."""
        return self.tensor(expected.TOKEN_TABLE if self.spec.tied_output else expected.OUTPUT)

    def has_fused_gate_up(self, layer: int) -> bool:
        """Whether a layer's experts keep gate and up rows in one tensor, gate rows first."""
        return f"blk.{layer}.{expected.EXPERT_GATE_UP}" in self.tensors

    def floats(self, name: str) -> NDArray[np.float32]:
        """A whole tensor as new float32 values in its own shape. For norms and small matrices."""
        info = self.tensor(name)
        cols = info.shape[-1]
        rows = info.data.reshape(-1, info.data.shape[-1])
        return dequantize(info.qtype, rows, cols).reshape(info.shape)

    def close(self) -> None:
        """Let go of the file. Safe to call twice; arrays already handed out stay valid."""
        self.tensors = MappingProxyType({})
        self.draft = MappingProxyType({})
        self.file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def load_model_file(path: Path | str) -> ModelFile:
    """Open a model (by any shard, if there are several) and check that it is whole.

    Raises:
        ModelError: the file cannot be used: not GGUF, damaged, another architecture, metadata that
            does not fit, a tensor that is missing, has another shape, or belongs nowhere.
    """
    file = open_gguf(path)
    origin = str(file.paths[0])
    spec = read_spec(file.metadata)
    draft, found = _set_draft_aside(file.tensors, spec)
    if draft and not any(name.startswith("blk.") for name in found):
        raise ModelError(
            f"{origin} holds only the draft block of a model (blk.{spec.num_layers}), no layers",
            hint="open the model itself; a draft block is an addition to it",
        )
    spec = replace(
        spec,
        tied_output=expected.OUTPUT not in found,
        num_draft_layers=spec.num_draft_layers if draft else 0,
    )
    _check_vocabulary(origin, spec, found)
    streams = (spec.num_streams, spec.hidden_size)
    tensors = _match(origin, found, _expected_shapes(origin, spec, found), streams)
    return ModelFile(file, spec, tensors, draft)


def _set_draft_aside(
    tensors: Mapping[str, TensorInfo], spec: ModelSpec
) -> tuple[dict[str, TensorInfo], dict[str, TensorInfo]]:
    """Tensors of the draft block, and all others. Its unknown names count among the others."""
    names = expected.draft_names(spec)
    draft: dict[str, TensorInfo] = {}
    others: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        match = _BLOCK_NAME.fullmatch(name)
        layer = int(match[1]) if match else -1
        is_draft = spec.num_layers <= layer < spec.num_layers + spec.num_draft_layers
        (draft if match and is_draft and match[2] in names else others)[name] = info
    return draft, others


def _check_vocabulary(origin: str, spec: ModelSpec, found: Mapping[str, TensorInfo]) -> None:
    table = found.get(expected.TOKEN_TABLE)
    if table is not None and len(table.shape) == 2 and table.shape[0] != spec.vocab_size:
        raise ModelError(
            f"{origin}: the tokenizer has {spec.vocab_size} tokens, "
            f"but {expected.TOKEN_TABLE!r} has {table.shape[0]} rows",
            hint=_HINT,
        )


def _expected_shapes(
    origin: str, spec: ModelSpec, found: Mapping[str, TensorInfo]
) -> dict[str, Shape]:
    shapes = expected.global_shapes(spec, tied_output=spec.tied_output)
    for layer in range(spec.num_layers):
        prefix = f"blk.{layer}."
        fused = prefix + expected.EXPERT_GATE_UP in found
        of_layer = expected.layer_shapes(spec, layer, fused_gate_up=fused)
        shapes |= {prefix + name: shape for name, shape in of_layer.items()}
    if spec.ngram is not None:
        shapes[expected.NGRAM_TABLE] = (_table_rows(origin, spec, found), spec.ngram.row_width)
    return shapes


def _table_rows(origin: str, spec: ModelSpec, found: Mapping[str, TensorInfo]) -> int:
    """Rows of the n-gram table: any number that all heads fit into."""
    assert spec.ngram is not None
    info = found.get(expected.NGRAM_TABLE)
    if info is None or len(info.shape) < 2:
        return spec.ngram.min_rows  # refused by the shape check, which names what it should be
    rows = info.shape[-2]
    if rows < spec.ngram.min_rows:
        raise ModelError(
            f"{origin}: tensor {expected.NGRAM_TABLE!r} has {rows} rows, "
            f"but its heads reach to row {spec.ngram.min_rows}",
            hint=_HINT,
        )
    return rows


def _match(
    origin: str, found: Mapping[str, TensorInfo], shapes: Mapping[str, Shape], streams: Shape
) -> dict[str, TensorInfo]:
    """Each expected tensor in its expected shape; streams is the shape of all residual streams.

    Raises:
        ModelError: one is missing, has another shape, or is not among the expected.
    """
    missing = [name for name in shapes if name not in found]
    if missing:
        raise ModelError(f"{origin}: {_list_names('missing', missing)}", hint=_HINT)
    left_over = [name for name in found if name not in shapes]
    if left_over:
        raise ModelError(
            f"{origin}: {_list_names('unexpected', left_over)}",
            hint="the metadata does not account for these; it may be of another conversion",
        )
    return {name: _shaped(origin, found[name], shape, streams) for name, shape in shapes.items()}


def _list_names(kind: str, names: list[str]) -> str:
    listed = ", ".join(repr(name) for name in names[:5])
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{len(names)} {kind} tensor{'s' if len(names) > 1 else ''}: {listed}{more}"


def _shaped(origin: str, info: TensorInfo, shape: Shape, streams: Shape) -> TensorInfo:
    """The tensor viewed in the shape given; no copy.

    Axes of length 1 in front do not count, and a vector over all residual streams may be stored as
    [streams, hidden]: the same bytes in the same order.
    """
    stored = _without_ones(info.shape)
    is_stream_vector = stored == streams and shape == (math.prod(streams),)
    if stored != _without_ones(shape) and not is_stream_vector:
        raise ModelError(
            f"{origin}: tensor {info.name!r} has the shape {list(info.shape)}, "
            f"expected {list(shape)} (outermost axis first)",
            hint=_HINT,
        )
    row_bytes = info.nbytes // math.prod(shape[:-1])
    return replace(info, shape=shape, data=info.data.reshape(*shape[:-1], row_bytes))


def _without_ones(shape: Shape) -> Shape:
    first = next((axis for axis, extent in enumerate(shape) if extent != 1), len(shape))
    return shape[first:]
