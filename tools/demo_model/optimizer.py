"""Muon for the matrices and AdamW for the rest, with one learning-rate factor for both."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch

Tensor = Any

MUON_RATE, MUON_MOMENTUM, MUON_DECAY, MUON_STEPS = 0.02, 0.95, 0.02, 5
EMBEDDING_RATE, OTHER_RATE = 3e-3, 2e-3
ADAM_BETAS = (0.9, 0.95)
CLIP_NORM = 1.0
# Newton-Schulz coefficients that pull all singular values towards 1 in few steps.
# Source: Muon (Jordan et al., 2024).
QUINTIC = (3.4445, -4.7750, 2.0315)

MATRIX_ENDS = (
    "in_proj_qkv.weight", "in_proj_z.weight", "out_proj.weight", "q_proj.weight", "k_proj.weight",
    "v_proj.weight", "o_proj.weight", "gate_up_proj", "down_proj", "gate_proj.weight",
    "up_proj.weight", "down_proj.weight", "key_proj.weight", "value_proj.weight",
)  # fmt: skip


def is_matrix(name: str) -> bool:
    """Whether Muon updates a parameter."""
    return name.endswith(MATRIX_ENDS) and "indexer" not in name


def orthogonalize(update: Tensor) -> Tensor:
    """Bring the singular values of matrices [..., m, n] near 1, by Newton-Schulz in bfloat16."""
    a, b, c = QUINTIC
    x = update.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.transpose(-1, -2)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(MUON_STEPS):
        square = x @ x.transpose(-1, -2)
        x = a * x + (b * square + c * square @ square) @ x
    return (x.transpose(-1, -2) if tall else x).float()


class Optimizer:
    """Steps all parameters; matrices of one shape are orthogonalized together."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self.parameters = dict(parameters)
        self.groups: dict[tuple[int, ...], list[str]] = defaultdict(list)
        for name, parameter in parameters.items():
            if is_matrix(name):
                self.groups[tuple(self.matrices(name, parameter).shape[-2:])].append(name)
        names = [name for group in self.groups.values() for name in group]
        self.momentum = {name: torch.zeros_like(parameters[name]) for name in names}
        rest = {name: p for name, p in parameters.items() if name not in self.momentum}
        embeddings = [p for name, p in rest.items() if "embed" in name]
        others = [p for name, p in rest.items() if "embed" not in name]
        self.adam = torch.optim.AdamW(
            [
                {"params": embeddings, "lr": EMBEDDING_RATE, "rate": EMBEDDING_RATE},
                {"params": others, "lr": OTHER_RATE, "rate": OTHER_RATE},
            ],
            betas=ADAM_BETAS,
            weight_decay=0.0,
            fused=embeddings[0].is_cuda,
        )

    @staticmethod
    def matrices(name: str, tensor: Tensor) -> Tensor:
        """View a parameter as matrices [n, rows, columns]; a fused gate_up is two per expert."""
        if name.endswith("gate_up_proj"):
            return tensor.reshape(2 * tensor.shape[0], tensor.shape[1] // 2, tensor.shape[2])
        return tensor if tensor.ndim == 3 else tensor[None]

    def clip(self) -> Tensor:
        """Scale all gradients to a norm of at most CLIP_NORM; returns the norm before."""
        found = [p for p in self.parameters.values() if p.grad is not None]
        return torch.nn.utils.clip_grad_norm_(found, CLIP_NORM, foreach=True)

    def step(self, factor: float) -> None:
        """Update every parameter; `factor` scales all learning rates. Clears the gradients."""
        for group in self.adam.param_groups:
            group["lr"] = group["rate"] * factor
        self.adam.step()
        with torch.no_grad():
            for shape, names in self.groups.items():
                self.muon_step(shape, names, MUON_RATE * factor)
        for parameter in self.parameters.values():
            parameter.grad = None

    def muon_step(self, shape: tuple[int, ...], names: list[str], rate: float) -> None:
        """Update the matrices of one shape with orthogonalized Nesterov momentum."""
        gradients = [self.parameters[name].grad for name in names]
        momenta = [self.momentum[name] for name in names]
        torch._foreach_lerp_(momenta, gradients, 1 - MUON_MOMENTUM)
        looked = torch._foreach_lerp(gradients, momenta, MUON_MOMENTUM)
        parts = [self.matrices(name, tensor) for name, tensor in zip(names, looked, strict=True)]
        updates = orthogonalize(torch.cat(parts)).split([len(part) for part in parts])
        scale = rate * max(1.0, shape[0] / shape[1]) ** 0.5
        targets = [self.parameters[name] for name in names]
        shaped = [u.reshape(t.shape) for u, t in zip(updates, targets, strict=True)]
        torch._foreach_mul_(targets, 1 - rate * MUON_DECAY)
        torch._foreach_add_(targets, shaped, alpha=-scale)
