"""Indexed attention (QSA) of the training model, and the loss that trains its indexer.

A row is attended to in windows that no document crosses. Every document starts at a multiple of
the index ratio, so index blocks are aligned to the row. Shapes: B windows, T tokens, H heads,
R = T / ratio index blocks.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional

from tools.demo_model.architecture import DemoConfig
from tools.demo_model.layers import rms

Tensor = Any
Weights = Mapping[str, Tensor]

INDEXER_ROWS = 2  # windows per batch that teach the indexer: full attention maps are large


def rotate(x: Tensor, positions: Tensor, config: DemoConfig) -> Tensor:
    """Rotate the first dimensions of heads [B, T, H, d] by position [B, T]."""
    half = config.rotary_dim // 2
    steps = torch.arange(half, device=x.device, dtype=torch.float32)
    angles = positions[..., None].float() * config.rope_theta ** (-steps / half)
    cos, sin = (part[..., None, :].to(x.dtype) for part in (angles.cos(), angles.sin()))
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


def normed_heads(x: Tensor, weight: Tensor, positions: Tensor, config: DemoConfig) -> Tensor:
    """Norm each head of [B, T, H, d], then rotate it."""
    return rotate(rms(x, 1 + weight.float(), config.rms_norm_eps), positions, config)


def documents_mask(positions: Tensor) -> Tensor:
    """Return which tokens [B, T, T] are earlier (or equal) ones of the same document."""
    numbers = torch.cumsum((positions == 0).int(), 1)
    same = numbers[:, :, None] == numbers[:, None, :]
    size = positions.shape[1]
    return same & torch.ones(size, size, device=positions.device, dtype=torch.bool).tril()


def index_scores(y: Tensor, positions: Tensor, w: Weights, config: DemoConfig) -> Tensor:
    """Score every index block for every token: [B, T, D] -> [B, T, R] float32.

    A block's key is the mean of its raw keys, normed and rotated to its first position.
    """
    dim, ratio = config.indexer_head_dim, config.indexer_compress_ratio
    both = y @ w["indexer.index_qk_proj.weight"].T
    queries, keys = both.split([config.indexer_n_heads * dim, dim], -1)
    queries = normed_heads(
        queries.unflatten(-1, (-1, dim)), w["indexer.q_layernorm.weight"], positions, config
    )
    keys = keys.unflatten(1, (-1, ratio)).mean(2)[:, :, None]
    starts = positions[:, ::ratio]
    keys = normed_heads(keys, w["indexer.k_layernorm.weight"], starts, config)[:, :, 0]
    hits = torch.einsum("bthd,brd->bthr", queries, keys).float()
    return functional.relu(hits).sum(2) * dim**-0.5


def complete_blocks(allowed: Tensor, ratio: int) -> Tensor:
    """Return which blocks [B, T, R] of a token's document are complete at that token."""
    return allowed[:, :, ratio - 1 :: ratio]


def chosen_tokens(scores: Tensor, allowed: Tensor, dense: Tensor, config: DemoConfig) -> Tensor:
    """Keep the tokens [B, T, T] of the best blocks, and the tail that fills no block yet.

    `dense` (a boolean scalar) keeps everything. Scores [B, T, R] take no gradient.
    """
    ratio = config.indexer_compress_ratio
    complete = complete_blocks(allowed, ratio)
    kept = min(config.indexer_budget // ratio, scores.shape[-1])
    ranked = scores.masked_fill(~complete, float("-inf"))
    best = ranked.topk(kept, -1).indices
    chosen = torch.zeros_like(complete).scatter(-1, best, True)
    open_block = ~complete | chosen | dense
    return allowed & open_block.repeat_interleave(ratio, -1)


def attend(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    """Attend with heads [B, T, H, d] where `allowed` [B, T, T]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    bias = torch.where(allowed, 0.0, float("-inf"))[:, None].to(q.dtype)
    bias = bias.expand(-1, q.shape[1], -1, -1)
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2)


def indexer_loss(
    scores: Tensor, q: Tensor, k: Tensor, allowed: Tensor, config: DemoConfig
) -> Tensor:
    """Return how far the blocks' scores are from where attention looks (KL divergence).

    scores [b, T, R] with gradient; q, k [b, T, H, d] without. Only tokens with more complete
    blocks than the budget count a full share; the others still teach.
    """
    ratio = config.indexer_compress_ratio
    with torch.no_grad():
        logits = torch.einsum("bqhd,bkhd->bhqk", q, k).float() * config.head_dim**-0.5
        logits = logits.masked_fill(~allowed[:, None], float("-inf"))
        complete = complete_blocks(allowed, ratio)
        mass = logits.softmax(-1).mean(1).unflatten(-1, (-1, ratio)).sum(-1) * complete
        target = mass / mass.sum(-1, keepdim=True).clamp_min(1e-6)
        counts = complete.sum(-1) > 1
    guess = scores.masked_fill(~complete, -1e4).log_softmax(-1)
    loss = torch.where(target > 0, target * (target.clamp_min(1e-9).log() - guess), 0.0).sum(-1)
    return (loss * counts).sum() / counts.sum().clamp_min(1)


def qsa(
    y: Tensor, positions: Tensor, dense: Tensor, w: Weights, config: DemoConfig, short: int
) -> tuple[Tensor, Tensor]:
    """Run the indexed attention mixer on [B, T, D]; also the indexer's loss.

    The first `short` rows are two windows each, the rest one.
    """
    size, heads = config.head_dim, config.num_attention_heads
    both = (y @ w["q_proj.weight"].T).unflatten(-1, (heads, 2, size))
    query, gate = both.unbind(-2)
    q = normed_heads(query, w["q_norm.weight"], positions, config)
    key = (y @ w["k_proj.weight"].T).unflatten(-1, (-1, size))
    k = normed_heads(key, w["k_norm.weight"], positions, config)
    v = (y @ w["v_proj.weight"].T).unflatten(-1, (-1, size))
    share = heads // config.num_key_value_heads
    k, v = k.repeat_interleave(share, 2), v.repeat_interleave(share, 2)
    parts, losses = [], []
    for windows, rows in ((2, slice(0, short)), (1, slice(short, None))):
        if y[rows].shape[0]:
            q_cut, k_cut, v_cut = (window(x[rows], windows) for x in (q, k, v))
            y_cut, at = window(y[rows], windows), window(positions[rows], windows)
            allowed = documents_mask(at)
            scores = index_scores(y_cut.detach(), at, w, config)
            chosen = chosen_tokens(scores.detach(), allowed, dense, config)
            out = attend(q_cut, k_cut, v_cut, chosen)
            parts.append(out.reshape(-1, y.shape[1], heads, size))
            few = slice(0, INDEXER_ROWS)
            losses.append(indexer_loss(scores[few], q_cut[few], k_cut[few], allowed[few], config))
    out = torch.cat(parts) * torch.sigmoid(gate)
    return out.flatten(-2) @ w["o_proj.weight"].T, torch.stack(losses).mean()


def window(x: Tensor, windows: int) -> Tensor:
    """Cut rows [B, T, ...] into `windows` windows each."""
    return x.reshape(x.shape[0] * windows, x.shape[1] // windows, *x.shape[2:])
