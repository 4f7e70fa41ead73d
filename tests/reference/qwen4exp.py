"""The qwen4exp model in plain float64 numpy: what the engine is compared with.

Written from the architecture's equations alone, for any dimensions, all positions of a prompt at
once and no state. It shares the engine's GGUF reader and plain dequantizer, which have references
of their own; metadata is read here anew, and every other width follows from the tensors' shapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.model.gguf import TensorInfo, open_gguf
from strata_cli.engine.model.quants import dequantize

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]


class Selection(NamedTuple):
    """A choice of the best entries of each row.

    Attributes:
        ids: best first, ties to the lower id, [rows, count].
        margin: how far each row is from choosing otherwise, as a share of its scores, [rows].
    """

    ids: Ids
    margin: Floats


@dataclass
class ModelPass:
    """Everything a pass over T tokens shows.

    Attributes:
        logits: [T, V].
        final: what the output matrix multiplies, [T, D].
        residual: the streams after each layer, [T, S, D].
        router_ids, router_weights: per layer, best expert first, [T, k].
        allowed: per attention layer with an index, the positions attended to, [T, T].
        ngram_rows: rows of the n-gram table, [T, heads]; None without one.
        margin: per token, the smallest margin of its own selections in any layer, [T].
        follows: the pass whose selections this one took instead of its own.
        shortfall: per token, how much worse the worst entry it took was than the worst it would
            have chosen itself, as a share of the scores, the most in any layer, [T]; zeros where
            it follows no other.
    """

    logits: NDArray[Any]
    final: NDArray[Any]
    residual: list[NDArray[Any]] = field(default_factory=list)
    router_ids: list[NDArray[Any]] = field(default_factory=list)
    router_weights: list[NDArray[Any]] = field(default_factory=list)
    allowed: dict[int, NDArray[np.bool_]] = field(default_factory=dict)
    ngram_rows: NDArray[Any] | None = None
    margin: Floats = field(default_factory=lambda: np.empty(0))
    follows: ModelPass | None = None
    shortfall: Floats = field(default_factory=lambda: np.empty(0))

    def num_decided(self, margin: float) -> int:
        """Leading tokens whose every selection, and those before, would survive rounding."""
        doubtful = np.flatnonzero(self.margin < margin)
        return int(doubtful[0]) if doubtful.size else len(self.margin)


class Reference:
    """A model file as float64 arrays, and the forward pass over them."""

    def __init__(self, path: Path) -> None:
        with open_gguf(path) as file:
            self._keys: Mapping[str, Any] = file.metadata
            self._tensors = {name: _values(info) for name, info in file.tensors.items()}
        self.eps = float(self.key("attention.layer_norm_rms_epsilon"))
        self.streams = int(self.key("hyper_connection.count"))
        layers = int(self.key("block_count")) - int(self.key("nextn_predict_layers", 0))
        self.layers = range(layers)

    def key(self, name: str, default: Any = None) -> Any:
        """A value of the metadata."""
        if default is not None and f"qwen4exp.{name}" not in self._keys:
            return default
        return self._keys[f"qwen4exp.{name}"]

    def w(self, name: str) -> Floats:
        """A tensor in numpy order: matrices are [out, in]."""
        return self._tensors[name if name in self._tensors else f"{name}.weight"]

    def has(self, name: str) -> bool:
        return f"{name}.weight" in self._tensors

    def forward(self, ids: Sequence[int], follows: ModelPass | None = None) -> ModelPass:
        """All positions of one prompt; by the experts and blocks of another pass, if given."""
        tokens = np.asarray(ids, dtype=np.int64)
        seen = ModelPass(_NONE, _NONE, follows=follows, shortfall=np.zeros(len(tokens)))
        seen.margin = np.full(len(tokens), np.inf)
        x = np.repeat(self.w("token_embd")[tokens][:, None], self.streams, axis=1)
        for layer in self.layers:
            x = self._layer(layer, tokens, x, seen)
            seen.residual.append(x)
        seen.final, _ = self._read("output_hc", x)
        output = "output" if self.has("output") else "token_embd"
        seen.logits = seen.final @ self.w(output).T
        return seen

    def _layer(self, layer: int, ids: Ids, x: Floats, seen: ModelPass) -> Floats:
        blk = f"blk.{layer}."
        if layer in list(self.key("ple.layers", [])):
            x = x + self._ngram(blk, ids, x, seen)
        y, inject = self._read(blk + "hc_attn", x)
        mixed = self._gdn(blk, y) if self._is_gdn(layer) else self._attention(layer, y, seen)
        x = x + inject[:, :, None] * mixed[:, None, :]
        y, inject = self._read(blk + "hc_ffn", x)
        return x + inject[:, :, None] * self._moe(blk, y, seen)[:, None, :]

    def _is_gdn(self, layer: int) -> bool:
        listed = self.key("attention.recurrent_layers", [])
        if len(listed):
            return bool(listed[layer])
        return (layer + 1) % int(self.key("full_attention_interval", 4)) != 0

    def _read(self, prefix: str, x: Floats) -> tuple[Floats, Floats]:
        """Mixer input [T, D] and write gains [T, S] (empty without an inject matrix)."""
        tokens, streams, width = x.shape
        normed = rms(x, self.w(prefix + "_norm").reshape(streams, width), self.eps)
        flat = normed.reshape(tokens, streams * width)
        low = silu(flat @ self.w(prefix + "_down").T / streams)
        gate = sigmoid(low @ self.w(prefix + "_up").T).reshape(x.shape)
        y = (gate * normed).mean(axis=1)
        if not self.has(prefix + "_inject"):
            return y, _NONE
        return y, 2 * sigmoid(flat @ self.w(prefix + "_inject").T / streams)

    def _moe(self, blk: str, y: Floats, seen: ModelPass) -> Floats:
        gate, up = self._gate_up(blk)
        down = self.w(blk + "ffn_down_exps")
        logits = y @ self.w(blk + "ffn_gate_inp").T
        chosen = select(logits, int(self.key("expert_used_count")))
        seen.margin = np.minimum(seen.margin, chosen.margin)
        ids = chosen.ids
        if seen.follows is not None:
            ids = seen.follows.router_ids[len(seen.router_ids)]
            seen.shortfall = np.maximum(seen.shortfall, shortfall(logits, chosen.ids, ids))
        probability = softmax(logits)
        weights = np.take_along_axis(probability, ids, axis=1)
        weights = weights / weights.sum(axis=1, keepdims=True)
        out = np.zeros_like(y)
        for expert in range(len(down)):
            t, rank = np.nonzero(ids == expert)
            hidden = silu(y[t] @ gate[expert].T) * (y[t] @ up[expert].T)
            out[t] += weights[t, rank, None] * (hidden @ down[expert].T)
        shared_gate, shared_up = self.w(blk + "ffn_gate_shexp"), self.w(blk + "ffn_up_shexp")
        shared = (silu(y @ shared_gate.T) * (y @ shared_up.T)) @ self.w(blk + "ffn_down_shexp").T
        share = sigmoid(y @ self.w(blk + "ffn_gate_inp_shexp").reshape(-1))
        seen.router_ids.append(ids)
        seen.router_weights.append(weights)
        return out + share[:, None] * shared

    def _gate_up(self, blk: str) -> tuple[Floats, Floats]:
        if not self.has(blk + "ffn_gate_up_exps"):
            return self.w(blk + "ffn_gate_exps"), self.w(blk + "ffn_up_exps")
        fused = self.w(blk + "ffn_gate_up_exps")
        half = fused.shape[1] // 2
        return fused[:, :half], fused[:, half:]

    def _gdn(self, blk: str, y: Floats) -> Floats:
        """Gated delta net, token by token."""
        dim = int(self.key("ssm.state_size"))
        nk, nv = int(self.key("ssm.group_count")), int(self.key("ssm.time_step_rank"))
        mixed = silu(causal_conv(y @ self.w(blk + "attn_qkv").T, self.w(blk + "ssm_conv1d"), 1))
        q, k, v = np.split(mixed, [nk * dim, 2 * nk * dim], axis=1)
        q = unit(q.reshape(-1, nk, dim), self.eps) / np.sqrt(dim)
        k, v = unit(k.reshape(-1, nk, dim), self.eps), v.reshape(-1, nv, dim)
        beta = sigmoid(y @ self.w(blk + "ssm_beta").T)
        step = np.logaddexp(0, y @ self.w(blk + "ssm_alpha").T + self.w(blk + "ssm_dt.bias"))
        decay = np.exp(self.w(blk + "ssm_a") * step)
        q, k = (part[:, np.arange(nv) % nk] for part in (q, k))  # each value head's own key head
        out, state = np.zeros_like(v), np.zeros((nv, dim, dim))
        for t in range(len(y)):
            state = decay[t, :, None, None] * state
            error = v[t] - np.einsum("hkv,hk->hv", state, k[t])
            state = state + k[t, :, :, None] * (beta[t, :, None] * error)[:, None, :]
            out[t] = np.einsum("hkv,hk->hv", state, q[t])
        z = (y @ self.w(blk + "attn_gate").T).reshape(out.shape)
        gated = rms(out, self.w(blk + "ssm_norm"), self.eps) * sigmoid(z)
        return gated.reshape(len(y), nv * dim) @ self.w(blk + "ssm_out").T

    def _attention(self, layer: int, y: Floats, seen: ModelPass) -> Floats:
        blk, tokens = f"blk.{layer}.", len(y)
        heads, kv_heads = (
            int(self.key("attention.head_count")),
            int(self.key("attention.head_count_kv")),
        )
        positions = np.arange(tokens)
        qg = (y @ self.w(blk + "attn_q").T).reshape(tokens, heads, 2, -1)
        k = (y @ self.w(blk + "attn_k").T).reshape(tokens, kv_heads, -1)
        v = (y @ self.w(blk + "attn_v").T).reshape(tokens, kv_heads, -1)
        q = self._rope(rms(qg[:, :, 0], self.w(blk + "attn_q_norm"), self.eps), positions)
        k = self._rope(rms(k, self.w(blk + "attn_k_norm"), self.eps), positions)
        allowed = np.tri(tokens, dtype=bool)
        if ratio := self._ratio(layer):
            allowed = self._index(layer, y, ratio, seen)
            seen.allowed[layer] = allowed
        out = np.zeros_like(q)
        for head in range(heads):
            kv = head // (heads // kv_heads)
            scores = q[:, head] @ k[:, kv].T / np.sqrt(q.shape[-1])
            out[:, head] = softmax(np.where(allowed, scores, -np.inf)) @ v[:, kv]
        gated = (out * sigmoid(qg[:, :, 1])).reshape(tokens, -1)
        return gated @ self.w(blk + "attn_output").T

    def _ratio(self, layer: int) -> int:
        ratios = self.key("attention.compress_ratios", 0)
        return int(ratios) if np.ndim(ratios) == 0 else int(ratios[layer])

    def _index(self, layer: int, y: Floats, ratio: int, seen: ModelPass) -> NDArray[np.bool_]:
        """Which positions each token attends to: its best blocks and the tail, [T, T]."""
        blk, tokens = f"blk.{layer}.", len(y)
        keep = int(self.key("attention.indexer.top_k")) // ratio
        heads = int(self.key("attention.indexer.head_count"))
        q = (y @ self.w(blk + "indexer.q_proj").T).reshape(tokens, heads, -1)
        q = self._rope(rms(q, self.w(blk + "indexer.q_norm"), self.eps), np.arange(tokens))
        raw = y @ self.w(blk + "indexer.k_proj").T
        blocks = tokens // ratio
        pooled = raw[: blocks * ratio].reshape(blocks, ratio, raw.shape[1]).mean(axis=1)
        pooled = rms(pooled, self.w(blk + "indexer.k_norm"), self.eps)[:, None]
        pooled = self._rope(pooled, np.arange(blocks) * ratio)[:, 0]
        dots = np.einsum("thd,bd->tbh", q, pooled)
        allowed = np.zeros((tokens, tokens), dtype=bool)
        for t in range(tokens):
            complete = (t + 1) // ratio
            scores = np.maximum(dots[None, t, :complete], 0).sum(axis=2)
            chosen = select(scores, keep)
            if chosen.margin[0] == 0:  # a tie of zeros: is every product clearly below zero?
                doubt = np.abs(dots[t, :complete][scores[0] == 0]).min()
                chosen = Selection(chosen.ids, np.array([doubt]))
            ids = chosen.ids
            if seen.follows is not None and ids.size:
                ids = np.flatnonzero(seen.follows.allowed[layer][t, : complete * ratio : ratio])[
                    None
                ]
                seen.shortfall[t] = max(seen.shortfall[t], shortfall(scores, chosen.ids, ids)[0])
            for block in ids[0]:
                allowed[t, block * ratio : (block + 1) * ratio] = True
            allowed[t, complete * ratio : t + 1] = True
            seen.margin[t] = min(seen.margin[t], chosen.margin[0])
        return allowed

    def _rope(self, x: Floats, positions: NDArray[np.int64]) -> Floats:
        """Rotate the first dimensions of x [T, heads, dim], pairs (j, j + half)."""
        rotary = int(self.key("rope.dimension_count"))
        half = rotary // 2
        frequency = float(self.key("rope.freq_base")) ** (-2 * np.arange(half) / rotary)
        angle = positions[:, None, None] * frequency
        cos, sin = np.cos(angle), np.sin(angle)
        a, b = x[..., :half], x[..., half:rotary]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., rotary:]], axis=-1)

    def _ngram(self, blk: str, ids: Ids, x: Floats, seen: ModelPass) -> Floats:
        """What the hashed n-gram embedding adds to the streams, [T, S, D]."""
        tokens, streams, width = x.shape
        rows = self._ngram_rows(ids)
        seen.ngram_rows = rows
        embedding = self.w("per_layer_token_embd")[rows].reshape(tokens, -1)
        key = (embedding @ self.w(blk + "ple_key").T).reshape(x.shape)
        key = rms(key, self.w(blk + "ple_norm_key").reshape(streams, width), self.eps)
        query = rms(x, self.w(blk + "ple_norm_query").reshape(streams, width), self.eps)
        score = (key * query).sum(axis=2) / np.sqrt(width)
        score = np.sign(score) * np.sqrt(np.maximum(np.abs(score), 1e-6))
        value = embedding @ self.w(blk + "ple_value").T
        gated = sigmoid(score)[:, :, None] * value[:, None, :]
        normed = rms(gated, self.w(blk + "ple_norm_conv").reshape(streams, width), self.eps)
        dilation = int(self.key("ple.ngram_size"))
        conv = causal_conv(normed.reshape(tokens, -1), self.w(blk + "ple_conv1d"), dilation)
        return gated + silu(conv).reshape(x.shape)

    def _ngram_rows(self, ids: Ids) -> Ids:
        largest, per_n = int(self.key("ple.ngram_size")), int(self.key("ple.heads_per_ngram"))
        eos = int(self.key("ple.eos_token_id"))
        multipliers = [int(m) for m in self.key("ple.layer_multipliers")]
        offsets = [int(o) for o in self.key("ple.head_offsets")]
        sizes = [int(s) for s in self.key("ple.head_vocab_sizes")]
        rows = np.zeros((len(ids), (largest - 1) * per_n), dtype=np.int64)
        for t in range(len(ids)):
            context, cut = [int(ids[t])], False
            for back in range(1, largest):
                cut = cut or t < back or int(ids[t - back]) == eos
                context.append(eos if cut else int(ids[t - back]))
            for n in range(2, largest + 1):
                mix = 0
                for token, multiplier in zip(context[:n], multipliers, strict=False):
                    mix ^= token * multiplier % 2**64
                for head in range((n - 2) * per_n, (n - 1) * per_n):
                    rows[t, head] = mix % sizes[head] + offsets[head]
        return rows


_NONE: Floats = np.empty(0)


def _values(info: TensorInfo) -> Floats:
    rows = info.data.reshape(-1, info.data.shape[-1])
    return dequantize(info.qtype, rows, info.shape[-1]).astype(np.float64).reshape(info.shape)


def rms(x: Floats, weight: Floats, eps: float) -> Floats:
    size: Floats = np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps)
    return x / size * weight


def unit(x: Floats, eps: float) -> Floats:
    length: Floats = np.sqrt((x * x).sum(axis=-1, keepdims=True) + eps)
    return x / length


def sigmoid(x: Floats) -> Floats:
    result: Floats = np.exp(-np.logaddexp(0, -x))
    return result


def silu(x: Floats) -> Floats:
    return x * sigmoid(x)


def softmax(x: Floats) -> Floats:
    weights: Floats = np.exp(x - x.max(axis=-1, keepdims=True))
    result: Floats = weights / weights.sum(axis=-1, keepdims=True)
    return result


def causal_conv(x: Floats, taps: Floats, dilation: int) -> Floats:
    """Depthwise over x [T, C], taps [C, K], the last tap on the token itself, zeros before."""
    kernel = taps.shape[1]
    padded = np.concatenate([np.zeros(((kernel - 1) * dilation, x.shape[1])), x])
    out = np.zeros_like(x)
    for tap in range(kernel):
        out += taps[:, tap] * padded[tap * dilation : tap * dilation + len(x)]
    return out


def shortfall(scores: Floats, best: Ids, taken: Ids) -> Floats:
    """How far the worst entry taken lies below the worst of the best, as a share of the scores."""
    worst = (np.take_along_axis(scores, ids, axis=1).min(axis=1) for ids in (best, taken))
    gap: Floats = (next(worst) - next(worst)) / (1 + np.abs(scores).max(axis=1))
    return gap


def select(scores: Floats, count: int) -> Selection:
    """The best entries of each row of scores [rows, entries]; all, if there are no more."""
    order = np.argsort(-scores, axis=1, kind="stable")
    if scores.shape[1] <= count:
        return Selection(order, np.full(len(scores), np.inf))
    ranked = np.take_along_axis(scores, order, axis=1)
    gap = ranked[:, count - 1] - ranked[:, count]
    return Selection(order[:, :count], gap / (1 + np.abs(scores).max(axis=1)))
