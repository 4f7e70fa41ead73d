"""The parts of a layer, as functions of a dictionary of weights with checkpoint names.

Shapes: B rows, T tokens, S streams, D hidden size, E experts, F expert width. `positions` [B, T]
count from 0 in every document of a row.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional

from tools.demo_model.architecture import DemoConfig
from tools.demo_model.gdn import RESET_DECAY, chunk_delta_rule

Tensor = Any
Weights = Mapping[str, Tensor]


def rms(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """Divide by the root mean square over the last axis and scale, in float32; keeps the dtype."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale.float()).to(x.dtype)


def read_streams(x: Tensor, w: Weights, config: DemoConfig) -> tuple[Tensor, Tensor]:
    """Mix the streams [B, T, S, D] into one input [B, T, D]; also the gates of writing [B, T, S].

    The last mixer has no gates: then the second value is None.
    """
    streams = config.hc_count
    scale = (1 + w["hc_norm.weight"].float()).view(streams, -1)
    normed = rms(x, scale, config.rms_norm_eps)
    flat = normed.flatten(-2)
    low = functional.silu((flat @ w["input_mix_weight_down.weight"].T) / streams)
    gate = torch.sigmoid(low @ w["input_mix_weight_up.weight"].T).view_as(normed)
    mixed = (gate * normed).mean(-2)
    if "block_inject_weight.weight" not in w:
        return mixed, None
    return mixed, 2 * torch.sigmoid((flat @ w["block_inject_weight.weight"].T) / streams)


def write_streams(x: Tensor, out: Tensor, gates: Tensor) -> Tensor:
    """Add a block's output to every stream by its gate."""
    return x + gates[..., None] * out[..., None, :]


def shifted(x: Tensor, by: int, positions: Tensor) -> Tensor:
    """Return x [B, T, ...] moved `by` tokens later; zero where that leaves the document."""
    if by == 0:
        return x
    moved = torch.roll(x, by, 1)
    inside = (positions >= by).view(*positions.shape, *[1] * (x.ndim - 2))
    return torch.where(inside, moved, torch.zeros((), dtype=x.dtype, device=x.device))


def causal_conv(x: Tensor, weight: Tensor, positions: Tensor, dilation: int = 1) -> Tensor:
    """Convolve each channel over time; x [B, T, Ch], weight [Ch, 1, K], the last tap is now."""
    taps = weight.shape[-1]
    out = x * weight[:, 0, taps - 1]
    for back in range(1, taps):
        out = out + shifted(x, back * dilation, positions) * weight[:, 0, taps - 1 - back]
    return out


def gdn(y: Tensor, positions: Tensor, w: Weights, config: DemoConfig) -> Tensor:
    """Run the gated delta net mixer on [B, T, D]."""
    heads, dim = config.linear_num_value_heads, config.linear_key_head_dim
    keys = config.linear_num_key_heads * dim
    mixed = y @ w["in_proj_qkv.weight"].T
    mixed = functional.silu(causal_conv(mixed, w["conv1d.weight"], positions))
    q, k, v = mixed.split([keys, keys, heads * dim], -1)
    q, k = (unit(x.unflatten(-1, (-1, dim))) for x in (q, k))
    share = heads // config.linear_num_key_heads
    q, k = (x.repeat_interleave(share, -2) for x in (q * dim**-0.5, k))
    beta = torch.sigmoid((y @ w["in_proj_b.weight"].T).float())
    step = functional.softplus((y @ w["in_proj_a.weight"].T).float() + w["dt_bias"].float())
    decay = -w["A_log"].float().exp() * step
    decay = torch.where(positions[..., None] == 0, RESET_DECAY, decay)
    out = chunk_delta_rule(q, k, v.unflatten(-1, (heads, dim)), beta, decay)
    gate = torch.sigmoid(y @ w["in_proj_z.weight"].T).view_as(out)
    out = rms(out, w["norm.weight"], config.rms_norm_eps) * gate
    return out.flatten(-2) @ w["out_proj.weight"].T


def unit(x: Tensor) -> Tensor:
    """Scale to unit length over the last axis, in float32, keeping the dtype."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)


def mixture(y: Tensor, w: Weights, config: DemoConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Run the experts on [B, T, D]; also the balance and the z loss of the router.

    All experts are computed and the unchosen ones weighted zero: two large products are faster
    than many small ones at this size.
    """
    logits = y.float() @ w["gate.weight"].float().T
    shares = logits.softmax(-1)
    top, ids = shares.topk(config.num_experts_per_tok, -1)
    weights = torch.zeros_like(shares).scatter(-1, ids, top / top.sum(-1, keepdim=True))
    gate_up = y @ w["experts.gate_up_proj"].flatten(0, 1).T  # [B, T, E 2F]
    gate, up = gate_up.unflatten(-1, (config.num_experts, 2, -1)).unbind(-2)
    hidden = functional.silu(gate) * up * weights[..., None].to(y.dtype)
    down = w["experts.down_proj"].transpose(1, 2).flatten(0, 1)  # [E F, D]
    routed = hidden.flatten(-2) @ down
    shared = functional.silu(y @ w["shared_expert.gate_proj.weight"].T)
    shared = (shared * (y @ w["shared_expert.up_proj.weight"].T)) @ w[
        "shared_expert.down_proj.weight"
    ].T
    opening = torch.sigmoid(y @ w["shared_expert_gate.weight"].T)
    chosen = (weights > 0).float().mean((0, 1)) / config.num_experts_per_tok
    balance = config.num_experts * (chosen.detach() * shares.mean((0, 1))).sum()
    return routed + opening * shared, balance, logits.logsumexp(-1).square().mean()


def ngram_rows(ids: Tensor, positions: Tensor, constants: Mapping[str, Tensor]) -> Tensor:
    """Hash every token with its predecessors to table rows; ids int64 [B, T] -> [B, T, heads].

    A predecessor outside the document, or behind an end-of-text token, counts as end-of-text.
    """
    end = 0
    multipliers = constants["multipliers"]
    mixes, mix, cut = [], ids * multipliers[0], torch.zeros_like(ids, dtype=torch.bool)
    for back in range(1, len(multipliers)):
        before = torch.where(positions >= back, torch.roll(ids, back, 1), end)
        cut = cut | (before == end)
        mix = mix ^ (torch.where(cut, end, before) * multipliers[back])
        mixes.append(mix)
    heads = constants["sizes"].view(len(mixes), -1)
    rows = torch.stack(mixes, -1)[..., None] % heads
    return rows.flatten(-2) + constants["offsets"]


def ngram_embedding(
    x: Tensor, rows: Tensor, positions: Tensor, w: Weights, config: DemoConfig
) -> Tensor:
    """Add the hashed n-gram embedding to the streams [B, T, S, D]."""
    eps, streams = config.rms_norm_eps, config.hc_count
    found = functional.embedding(rows, w["ple_embedding.ngram_embedding.weight"]).flatten(-2)

    def normed(values: Tensor, name: str) -> Tensor:
        return rms(values, (1 + w[name].float()).view(streams, -1), eps)

    key = normed((found @ w["key_proj.weight"].T).unflatten(-1, (streams, -1)), "norm_key.weight")
    query = normed(x, "norm_query.weight")
    match = (key.float() * query.float()).sum(-1) * config.hidden_size**-0.5
    match = match.sign() * match.abs().clamp_min(1e-6).sqrt()
    value = found @ w["value_proj.weight"].T
    gated = torch.sigmoid(match)[..., None].to(x.dtype) * value[..., None, :]
    moved = normed(gated, "norm_conv.weight").flatten(-2)
    moved = functional.silu(causal_conv(moved, w["conv1d.weight"], positions, config.ngram_size))
    return x + gated + moved.view_as(x)
