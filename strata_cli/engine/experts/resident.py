"""Experts that are all where kernels can read them: the address tables the grouped products use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.device.base import Tensor
from strata_cli.engine.kernels.weight import WeightLayout
from strata_cli.engine.model.gguf import TensorInfo
from strata_cli.engine.model.tensors import ModelFile

Place: TypeAlias = Callable[[TensorInfo], Tensor]
Upload: TypeAlias = Callable[[NDArray[np.generic]], Tensor]


@dataclass(frozen=True, slots=True)
class ExpertMatrix:
    """One projection of every expert of a layer.

    Attributes:
        blobs: address of each expert's bytes, [num_experts] int64.
        layout: type, shape and byte offset of the matrix inside them.
    """

    blobs: Tensor
    layout: WeightLayout


@dataclass(frozen=True, slots=True)
class ExpertMatrices:
    """A layer's routed experts: gate and up [F, D], down [D, F]."""

    gate: ExpertMatrix
    up: ExpertMatrix
    down: ExpertMatrix


def load_experts(model: ModelFile, layer: int, place: Place, upload: Upload) -> ExpertMatrices:
    """Place a layer's expert tensors and tabulate the address of every expert.

    A fused gate_up tensor holds, per expert, the gate rows and then the up rows.
    """
    prefix = f"blk.{layer}."
    down = _whole(model.tensor(prefix + "ffn_down_exps.weight"), place, upload)
    fused_name = prefix + "ffn_gate_up_exps.weight"
    if fused_name in model.tensors:
        fused = _whole(model.tensor(fused_name), place, upload)
        gate, up = _halves(fused)
    else:
        gate = _whole(model.tensor(prefix + "ffn_gate_exps.weight"), place, upload)
        up = _whole(model.tensor(prefix + "ffn_up_exps.weight"), place, upload)
    return ExpertMatrices(gate, up, down)


def _whole(info: TensorInfo, place: Place, upload: Upload) -> ExpertMatrix:
    num_experts, rows, cols = info.shape
    expert_bytes = info.data.nbytes // num_experts
    address = place(info).address
    blobs = upload(np.arange(num_experts, dtype=np.int64) * expert_bytes + address)
    return ExpertMatrix(blobs, WeightLayout(info.qtype, rows, cols, 0))


def _halves(fused: ExpertMatrix) -> tuple[ExpertMatrix, ExpertMatrix]:
    layout = fused.layout
    rows = layout.rows // 2
    gate = WeightLayout(layout.qtype, rows, layout.cols, 0)
    up = WeightLayout(layout.qtype, rows, layout.cols, gate.nbytes)
    return ExpertMatrix(fused.blobs, gate), ExpertMatrix(fused.blobs, up)
