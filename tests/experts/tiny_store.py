"""Tiny models with their experts as they should lie in memory, for tests of the store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.device.base import Device, Tensor
from strata_cli.engine.experts.blobs import blob_layouts
from strata_cli.engine.model.expected import Shape
from strata_cli.engine.model.quants import QuantType
from strata_cli.engine.model.tensors import ModelFile, load_model_file
from tests.model.tiny_model import write_tiny_model


def odd_types(name: str, shape: Shape) -> QuantType:
    """Layers of experts that differ in type, inside a layer too."""
    if ".1." in name and "_exps" in name:
        return QuantType.F16
    return QuantType.F32 if "down" in name else QuantType.BF16


FORMS: dict[str, dict[str, Any]] = {
    "separate": {},
    "fused": {"fused": True},
    "uneven": {"ff": (16, 8, 24, 20), "type_of": odd_types},
    "uneven fused": {"ff": (16, 8, 24, 20), "type_of": odd_types, "fused": True},
    "halves apart": {"hidden": 20, "ff": 4, "fused": True, "ple_layer": None},
}


def open_tiny(folder: Path, form: str = "uneven", **dims: Any) -> ModelFile:
    return load_model_file(write_tiny_model(folder / "tiny.gguf", **{**FORMS[form], **dims}))


def file_bytes(model: ModelFile, layer: int, matrix: str, expert: int) -> NDArray[np.uint8]:
    """An expert's gate, up or down in the file, found without the code under test."""
    if matrix == "down" or not model.has_fused_gate_up(layer):
        info = model.layer_tensor(layer, f"ffn_{matrix}_exps.weight")
        data: NDArray[np.uint8] = info.data[expert]
        return data.reshape(-1)
    gate, up = np.split(model.layer_tensor(layer, "ffn_gate_up_exps.weight").data[expert], 2)
    return (gate if matrix == "gate" else up).reshape(-1)


def has_expert(model: ModelFile, layer: int, expert: int, blob: NDArray[np.uint8]) -> bool:
    """Whether a blob holds the bytes of this expert where its layout has them."""
    layout = blob_layouts(model)[layer]
    places = {"gate": layout.gate, "up": layout.up, "down": layout.down}
    return all(
        np.array_equal(
            blob[place.offset_bytes : place.offset_bytes + place.nbytes],
            file_bytes(model, layer, matrix, expert),
        )
        for matrix, place in places.items()
    )


def tensor_at(device: Device, whole: Tensor, address: int, nbytes: int) -> Tensor:
    """A window at an address inside a tensor."""
    return Tensor.over(whole.buffer, (nbytes,), np.uint8, address - whole.buffer.address)
