"""Experts that are all where kernels can read them: the address tables the grouped products use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from strata_cli.engine.device.base import Tensor
from strata_cli.engine.experts.blobs import BlobLayout
from strata_cli.engine.experts.placing import ExpertHome, Stores, place_experts
from strata_cli.engine.kernels.weight import WeightLayout
from strata_cli.engine.model.gguf import TensorInfo
from strata_cli.engine.model.tensors import ModelFile


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


def load_experts(model: ModelFile, layer: int, home: ExpertHome, stores: Stores) -> ExpertMatrices:
    """Place a layer's expert tensors and tabulate the address of every expert.

    A fused gate_up tensor holds, per expert, the gate rows and then the up rows.
    """
    prefix = f"blk.{layer}."
    down = _whole(model.tensor(prefix + "ffn_down_exps.weight"), home, stores)
    fused_name = prefix + "ffn_gate_up_exps.weight"
    if fused_name in model.tensors:
        gate, up = _halves(_whole(model.tensor(fused_name), home, stores))
    else:
        gate = _whole(model.tensor(prefix + "ffn_gate_exps.weight"), home, stores)
        up = _whole(model.tensor(prefix + "ffn_up_exps.weight"), home, stores)
    return ExpertMatrices(gate, up, down)


def blob_experts(layouts: Sequence[BlobLayout], addresses: Tensor) -> tuple[ExpertMatrices, ...]:
    """Experts whose matrices lie side by side.

    Args:
        layouts: of each layer's blobs.
        addresses: where the blobs are, int64 [L, E].
    """
    return tuple(
        ExpertMatrices(
            *(
                ExpertMatrix(addresses.rows(layer, layer + 1).reshape(addresses.shape[1]), matrix)
                for matrix in (layout.gate, layout.up, layout.down)
            )
        )
        for layer, layout in enumerate(layouts)
    )


def _whole(info: TensorInfo, home: ExpertHome, stores: Stores) -> ExpertMatrix:
    num_experts, rows, cols = info.shape
    addresses = place_experts(info, home, stores)
    blobs = stores.device.add((num_experts,), np.int64, lambda: addresses)
    return ExpertMatrix(blobs, WeightLayout(info.qtype, rows, cols, 0))


def _halves(fused: ExpertMatrix) -> tuple[ExpertMatrix, ExpertMatrix]:
    layout = fused.layout
    rows = layout.rows // 2
    gate = WeightLayout(layout.qtype, rows, layout.cols, 0)
    up = WeightLayout(layout.qtype, rows, layout.cols, gate.nbytes)
    return ExpertMatrix(fused.blobs, gate), ExpertMatrix(fused.blobs, up)
