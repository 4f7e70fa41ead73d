"""Blobs: an expert's gate, up and down matrices side by side, and where the file has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.device.arena import ALIGNMENT_BYTES
from strata_cli.engine.device.filling import read_ahead
from strata_cli.engine.kernels.weight import WeightLayout
from strata_cli.engine.model.expected import EXPERT_DOWN, EXPERT_GATE, EXPERT_GATE_UP, EXPERT_UP
from strata_cli.engine.model.gguf import TensorInfo
from strata_cli.engine.model.tensors import ModelFile


@dataclass(frozen=True, slots=True)
class BlobLayout:
    """Where the matrices lie in each blob of a layer.

    A tensor's part begins at a multiple of ALIGNMENT_BYTES; a fused tensor has the up rows right
    behind the gate rows. What lies between parts is never looked at.

    Attributes:
        gate, up: [F, D], the projections into the expert.
        down: [D, F], the projection out of it.
        nbytes: of a blob, a multiple of ALIGNMENT_BYTES.
    """

    gate: WeightLayout
    up: WeightLayout
    down: WeightLayout
    nbytes: int


class BlobPart(NamedTuple):
    """What one tensor of the file contributes to every blob of its layer.

    Attributes:
        offset_bytes: where it begins in the blob.
        rows: its bytes for each expert, uint8 [E, nbytes], in the memory map; not read yet.
    """

    offset_bytes: int
    rows: NDArray[np.uint8]

    @property
    def end_bytes(self) -> int:
        """Where it ends in the blob."""
        return self.offset_bytes + int(self.rows.shape[1])


def blob_layouts(model: ModelFile) -> tuple[BlobLayout, ...]:
    """The layout of every trunk layer's blobs. Layers may differ in type, width and form."""
    return tuple(_layout(model, layer) for layer in range(model.spec.num_layers))


def blob_parts(model: ModelFile, layer: int) -> tuple[BlobPart, ...]:
    """The parts of a layer's blobs, in the order in which they lie there."""
    parts: list[BlobPart] = []
    for info in _tensors(model, layer):
        start = _aligned(parts[-1].end_bytes) if parts else 0
        parts.append(BlobPart(start, info.data.reshape(info.shape[0], -1)))
    return tuple(parts)


def slot_bytes(layouts: Sequence[BlobLayout]) -> int:
    """Bytes of a slot that holds any layer's blob: a multiple of ALIGNMENT_BYTES."""
    return max(layout.nbytes for layout in layouts)


def arena_bytes(layouts: Sequence[BlobLayout], num_experts: int) -> int:
    """Bytes of all blobs of all layers."""
    return sum(layout.nbytes for layout in layouts) * num_experts


class BlobReader:
    """Copies single blobs out of the memory-mapped file. Any thread may, several at once.

    Args:
        model: must stay open as long.
    """

    def __init__(self, model: ModelFile) -> None:
        self._parts = [blob_parts(model, layer) for layer in range(model.spec.num_layers)]

    def blob_bytes(self, layer: int) -> int:
        """Bytes of each blob of a layer."""
        return _aligned(self._parts[layer][-1].end_bytes)

    def read(self, layer: int, expert: int, out: NDArray[np.uint8]) -> None:
        """Copy a blob over out, uint8 [blob_bytes]; what lies between its parts is left alone.

        Raises:
            DeviceError: the file cannot be read any more.
        """
        for part in self._parts[layer]:
            source = part.rows[expert]
            read_ahead(source, least_bytes=1)
            np.copyto(out[part.offset_bytes : part.end_bytes], source)


def _tensors(model: ModelFile, layer: int) -> list[TensorInfo]:
    is_fused = model.has_fused_gate_up(layer)
    into = (EXPERT_GATE_UP,) if is_fused else (EXPERT_GATE, EXPERT_UP)
    return [model.layer_tensor(layer, name) for name in (*into, EXPERT_DOWN)]


def _layout(model: ModelFile, layer: int) -> BlobLayout:
    infos, parts = _tensors(model, layer), blob_parts(model, layer)
    matrices = [
        WeightLayout(info.qtype, info.shape[1], info.shape[2], part.offset_bytes)
        for info, part in zip(infos, parts, strict=True)
    ]
    if len(matrices) == 2:
        matrices[:1] = _halves(matrices[0])
    gate, up, down = matrices
    return BlobLayout(gate, up, down, _aligned(parts[-1].end_bytes))


def _halves(fused: WeightLayout) -> tuple[WeightLayout, WeightLayout]:
    rows = fused.rows // 2
    gate = WeightLayout(fused.qtype, rows, fused.cols, fused.offset_bytes)
    up = WeightLayout(fused.qtype, rows, fused.cols, fused.offset_bytes + gate.nbytes)
    return gate, up


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
