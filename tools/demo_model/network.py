"""The training model: parameters by checkpoint name, forward pass over packed rows, losses.

The parameters are exactly those of the Hugging Face checkpoint, plus one training-only vector
(`option_head`), so a trained state is written without renaming.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from tools.demo_model.architecture import HASH_MULTIPLIERS, DemoConfig
from tools.demo_model.attention import qsa
from tools.demo_model.layers import (
    gdn,
    mixture,
    ngram_embedding,
    ngram_rows,
    read_streams,
    write_streams,
)
from tools.demo_model.shapes import checkpoint_shapes

Tensor = Any
Parameters = dict[str, Tensor]

OPTION_HEAD = "option_head"  # scores an option from the streams behind OPTION_LAYER
OPTION_LAYER = 5
SMOOTHING = 0.08  # probability spread over all labels where the label itself is uncertain


@dataclass(frozen=True, slots=True)
class LossWeights:
    """What each part of the loss counts."""

    answer: float = 1.0
    options: float = 0.3
    balance: float = 0.01
    router_z: float = 1e-4
    indexer: float = 0.05


class Losses(NamedTuple):
    """The parts of the loss, scalars, and what answers look like, [Q]."""

    total: Tensor
    text: Tensor
    answer: Tensor
    options: Tensor
    balance: Tensor
    indexer: Tensor
    hits: Tensor  # whether the right label is the likeliest label
    missed: Tensor  # cross entropy of every answer


def make_parameters(config: DemoConfig, seed: int, device: str) -> Parameters:
    """Draw float32 parameters: 1/sqrt(fan-in), half of it where a block writes its output."""
    generator = torch.Generator().manual_seed(seed)
    parameters = {}
    for name, shape in checkpoint_shapes(config).items():
        parameters[name] = initial(name, shape, generator).to(device)
    parameters[OPTION_HEAD] = torch.zeros(config.hidden_size, device=device)
    for parameter in parameters.values():
        parameter.requires_grad_(True)
    return parameters


def initial(name: str, shape: tuple[int, ...], generator: Any) -> Tensor:
    """Draw one parameter by its role."""
    noise = torch.randn(shape, generator=generator)
    if name.endswith("linear_attn.norm.weight"):
        return torch.ones(shape)
    if "norm" in name:
        return torch.zeros(shape)  # multiplies as 1 + w
    if name.endswith("A_log"):
        return torch.rand(shape, generator=generator).mul(15).add(1).log()
    if name.endswith("dt_bias"):
        low, high = math.log(0.001), math.log(0.1)
        step = (torch.rand(shape, generator=generator) * (high - low) + low).exp()
        return step + torch.log(-torch.expm1(-step))  # inverse of softplus
    if name.endswith("conv1d.weight"):
        identity = torch.zeros(shape)
        identity[..., -1] = 0.0 if ".ple." in name else 1.0
        return identity + 0.1 * noise
    if name.endswith("block_inject_weight.weight"):
        return torch.zeros(shape)  # every stream is written with gate 1 at first
    scale = shape[-1] ** -0.5
    if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj", "down_proj.weight")):
        scale *= 0.5
    return noise * scale


def of_prefix(weights: Mapping[str, Tensor], prefix: str) -> Parameters:
    """Return the weights below a prefix by their short names."""
    length = len(prefix)
    return {name[length:]: w for name, w in weights.items() if name.startswith(prefix)}


def recurrent_block(
    x: Tensor, positions: Tensor, w: Parameters, config: DemoConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """Run a GDN layer on the streams [B, T, S, D]; also balance and z loss."""
    y, gates = read_streams(x, of_prefix(w, "attn_hyper_connection."), config)
    x = write_streams(x, gdn(y, positions, of_prefix(w, "linear_attn."), config), gates)
    return expert_block(x, w, config)


def attention_block(
    x: Tensor, positions: Tensor, dense: Tensor, w: Parameters, config: DemoConfig, short: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run a QSA layer on the streams; also balance, z and indexer loss."""
    y, gates = read_streams(x, of_prefix(w, "attn_hyper_connection."), config)
    out, indexer = qsa(y, positions, dense, of_prefix(w, "self_attn."), config, short)
    x, balance, router_z = expert_block(write_streams(x, out, gates), w, config)
    return x, balance, router_z, indexer


def expert_block(x: Tensor, w: Parameters, config: DemoConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Run the second half of a layer: the mixture of experts."""
    y, gates = read_streams(x, of_prefix(w, "mlp_hyper_connection."), config)
    out, balance, router_z = mixture(y, of_prefix(w, "mlp."), config)
    return write_streams(x, out, gates), balance, router_z


def text_loss(x: Tensor, ids: Tensor, weights: Tensor, mixer: Parameters, embedding: Tensor,
              config: DemoConfig) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the weighted mean cross entropy of the next tokens, and the head's input [B, T, D]."""
    y, _ = read_streams(x, mixer, config)
    logits = (y[:, :-1] @ embedding.T).float()
    loss = functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    counted = weights[:, 1:].flatten()
    return (loss * counted).sum() / counted.sum().clamp_min(1), y


class Network:
    """The model around its parameters; `compile_blocks` replaces its parts by compiled ones."""

    def __init__(self, config: DemoConfig, parameters: Parameters, short: int) -> None:
        self.config, self.parameters, self.short = config, parameters, short
        device = parameters[OPTION_HEAD].device
        self.constants = {
            "multipliers": torch.tensor(HASH_MULTIPLIERS[: config.ngram_size], device=device),
            "sizes": torch.tensor(config.ngram_head_sizes, device=device),
            "offsets": torch.tensor(config.ngram_head_offsets, device=device),
        }
        self.recurrent: Callable[..., Any] = recurrent_block
        self.attention: Callable[..., Any] = attention_block
        self.ngram: Callable[..., Any] = ngram_embedding
        self.text_loss: Callable[..., Any] = text_loss

    def compile_blocks(self) -> None:
        """Compile each kind of block once; layers of one kind share the code."""
        for name in ("recurrent", "attention", "ngram", "text_loss"):
            setattr(self, name, torch.compile(getattr(self, name), fullgraph=True, dynamic=False))

    def streams(
        self, w: Parameters, ids: Tensor, positions: Tensor, dense: Tensor
    ) -> dict[str, Tensor]:
        """Run all layers; returns the streams `x`, `option` (behind OPTION_LAYER), and losses."""
        config = self.config
        embedded = functional.embedding(ids, w["model.embed_tokens.weight"])
        x = embedded[..., None, :].expand(-1, -1, config.hc_count, -1).contiguous()
        rows = ngram_rows(ids, positions, self.constants)
        result: dict[str, Any] = {"balance": 0.0, "router_z": 0.0, "indexer": 0.0}
        for layer in range(config.num_hidden_layers):
            weights = of_prefix(w, f"model.layers.{layer}.")
            if layer == config.ple_layer:
                x = self.ngram(x, rows, positions, of_prefix(weights, "ple."), config)
                weights = {k: v for k, v in weights.items() if not k.startswith("ple.")}
            if config.is_attention(layer):
                x, balance, router_z, indexer = self.attention(
                    x, positions, dense, weights, config, self.short
                )
                result["indexer"] += indexer
            else:
                x, balance, router_z = self.recurrent(x, positions, weights, config)
            result["balance"] += balance
            result["router_z"] += router_z
            if layer == OPTION_LAYER:
                result["option"] = x.mean(-2)
        return result | {"x": x}

    def losses(
        self, w: Parameters, batch: Mapping[str, Tensor], dense: Tensor, part: LossWeights
    ) -> Losses:
        """Run a batch (see `rows.Batch`, as tensors) and return its losses."""
        ids = batch["ids"].long()
        found = self.streams(w, ids, batch["positions"], dense)
        embedding = w["model.embed_tokens.weight"]
        mixer = of_prefix(w, "model.hyper_connection_mixer.")
        text, y = self.text_loss(found["x"], ids, batch["weights"], mixer, embedding, self.config)
        before = y[batch["row"], batch["at"] - 1]  # [Q, D]
        answer, hits, missed = answer_loss(before, embedding, batch)
        options = option_loss(found["option"], w[OPTION_HEAD], batch)
        total = text + part.answer * answer + part.options * options
        total = total + part.balance * found["balance"] + part.router_z * found["router_z"]
        total = total + part.indexer * found["indexer"]
        balance, indexer = found["balance"], found["indexer"]
        return Losses(total, text, answer, options, balance, indexer, hits, missed)


def label_mask(batch: Mapping[str, Tensor]) -> Tensor:
    """Return which of the padded labels [Q, 26] are real."""
    numbers = torch.arange(batch["labels"].shape[1], device=batch["labels"].device)
    return numbers < batch["counts"][:, None]


def answer_loss(
    before: Tensor, embedding: Tensor, batch: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean cross entropy of the answer tokens over the whole vocabulary, and [Q] each.

    Hits and cross entropies of the single answers, in this order.

    Where the label is uncertain, SMOOTHING of the target is spread over all labels.
    """
    scores = (before @ embedding.T).float().log_softmax(-1).gather(1, batch["labels"])  # [Q, 26]
    real = label_mask(batch)
    right = scores.gather(1, batch["right"][:, None])[:, 0]
    spread = (scores * real).sum(1) / batch["counts"]
    smooth = SMOOTHING * batch["smooth"]
    loss = -((1 - smooth) * right + smooth * spread)
    best = scores.masked_fill(~real, float("-inf")).argmax(1)
    valid = batch["valid"]
    mean = (loss * valid).sum() / valid.sum().clamp_min(1)
    return mean, (best == batch["right"]).float() * valid, loss.detach()


def option_loss(mean_stream: Tensor, head: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the cross entropy of choosing the right option from the options' last tokens."""
    ends, real = batch["ends"], label_mask(batch)
    use = batch["valid"] * (ends[:, 0] >= 0)
    seen = mean_stream[batch["row"][:, None], ends.clamp_min(0)]  # [Q, 26, D]
    scores = (seen @ head).float().masked_fill(~real, -1e4).log_softmax(1)
    loss = -scores.gather(1, batch["right"][:, None])[:, 0]
    return (loss * use).sum() / use.sum().clamp_min(1)
