"""The model's weights where the device's kernels can read them, grouped as the layers use them.

Quantized matrices keep the file's bytes; kernels dequantize them as they read. Small float vectors
(norms, convolutions, decays) become float32 tensors of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.device.base import Buffer, Device, Tensor
from strata_cli.engine.experts.resident import ExpertMatrices, load_experts
from strata_cli.engine.kernels.rope import rope_table
from strata_cli.engine.kernels.weight import Weight
from strata_cli.engine.model.gguf import TensorInfo
from strata_cli.engine.model.ngram_spec import NgramSpec
from strata_cli.engine.model.tensors import ModelFile

Progress: TypeAlias = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class ReadWeights:
    """One hyper-connection read: norm [S*D], down [R, S*D], up [S*D, R], inject [S, S*D]."""

    norm: Tensor
    down: Weight
    up: Weight
    inject: Weight | None


@dataclass(frozen=True, slots=True)
class GdnWeights:
    """Gated delta net: qkv [2kd+vd, D], gate [vd, D], conv [2kd+vd, K], alpha/beta [nv, D]."""

    qkv: Weight
    gate: Weight
    conv: Tensor
    alpha: Weight
    beta: Weight
    a: Tensor
    dt: Tensor
    norm: Tensor
    out: Weight


@dataclass(frozen=True, slots=True)
class IndexerWeights:
    """QSA's block indexer: q [heads*dim, D], k [dim, D], norms [dim]."""

    q: Weight
    k: Weight
    q_norm: Tensor
    k_norm: Tensor


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """Gated attention: q [heads*2*dim, D] (query rows then gate rows per head), k, v, out."""

    q: Weight
    k: Weight
    v: Weight
    q_norm: Tensor
    k_norm: Tensor
    out: Weight
    indexer: IndexerWeights


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """Router [E, D], routed experts, and the shared expert with its scalar gate [1, D]."""

    router: Weight
    experts: ExpertMatrices
    shared_logit: Weight
    shared_gate: Weight
    shared_up: Weight
    shared_down: Weight


@dataclass(frozen=True, slots=True)
class NgramWeights:
    """Hashed n-gram embedding: table [rows, width], key [S*D, D], value [D, D], conv [S*D, K]."""

    spec: NgramSpec
    table: Weight
    multipliers: Tensor
    offsets: Tensor
    sizes: Tensor
    key: Weight
    value: Weight
    norm_key: Tensor
    norm_query: Tensor
    norm_conv: Tensor
    conv: Tensor


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer; exactly one of gdn and attention is set."""

    ngram: NgramWeights | None
    mixer_read: ReadWeights
    gdn: GdnWeights | None
    attention: AttentionWeights | None
    ffn_read: ReadWeights
    moe: MoeWeights


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """Everything the forward pass reads. embed and head are [V, D]; rope [context, rotary/2, 2]."""

    embed: Weight
    head: Weight
    final_read: ReadWeights
    layers: tuple[LayerWeights, ...]
    rope: Tensor
    buffers: tuple[Buffer, ...]

    def close(self) -> None:
        """Gives the memory back. Safe to call twice."""
        for buffer in self.buffers:
            buffer.close()


class WeightLoader:
    """Brings tensors of one model file to one device, counting bytes for the progress display."""

    def __init__(self, model: ModelFile, device: Device, progress: Progress | None) -> None:
        self._model = model
        self._device = device
        self._progress = progress
        self._done_bytes = 0
        self._total_bytes = sum(t.data.nbytes for t in model.tensors.values())
        self.buffers: list[Buffer] = []

    def matrix(self, name: str) -> Weight:
        """A matrix [rows, cols] in the file's own quantization; a vector counts as one row."""
        info = self._model.tensor(name)
        rows = info.shape[0] if len(info.shape) == 2 else 1
        return Weight(self.bytes_of(info), info.qtype, rows, info.shape[-1])

    def bytes_of(self, info: TensorInfo) -> Tensor:
        """The tensor's raw bytes, readable by kernels."""
        buffer = self._device.resident(info.data.reshape(-1))
        self.buffers.append(buffer)
        self._count(info)
        return Tensor.over(buffer, (info.data.nbytes,), np.uint8)

    def vector(self, name: str) -> Tensor:
        """A small tensor as float32, in its file shape."""
        self._count(self._model.tensor(name))
        return self.upload(self._model.floats(name))

    def upload(self, values: NDArray[np.generic]) -> Tensor:
        """A host array as a tensor that kernels can read."""
        data = np.ascontiguousarray(values)
        buffer = self._device.resident(data.reshape(-1).view(np.uint8))
        self.buffers.append(buffer)
        return Tensor.over(buffer, data.shape, data.dtype)

    def _count(self, info: TensorInfo) -> None:
        self._done_bytes += info.data.nbytes
        if self._progress is not None:
            self._progress(self._done_bytes, self._total_bytes)


def load_weights(
    model: ModelFile, device: Device, context_tokens: int, progress: Progress | None = None
) -> ModelWeights:
    """Make every trunk tensor readable by the device's kernels.

    The n-gram table stays where it is: its rows are read one by one.

    Args:
        model: an opened, checked model file; it must outlive the result.
        device: where the kernels run.
        context_tokens: positions that the rope table covers.
        progress: called with (bytes done, bytes in the file).

    Raises:
        OutOfMemory: the weights do not fit.
    """
    spec = model.spec
    loader = WeightLoader(model, device, progress)
    embed = loader.matrix("token_embd.weight")
    head = embed if spec.tied_output else loader.matrix("output.weight")
    layers = tuple(_load_layer(loader, model, layer) for layer in range(spec.num_layers))
    rope = loader.upload(rope_table(context_tokens, spec.rotary_dim, spec.rope_theta))
    final_read = _load_read(loader, "output_hc", with_inject=False)
    return ModelWeights(embed, head, final_read, layers, rope, tuple(loader.buffers))


def _load_read(loader: WeightLoader, prefix: str, *, with_inject: bool = True) -> ReadWeights:
    norm = loader.vector(f"{prefix}_norm.weight")
    return ReadWeights(
        norm=norm.reshape(norm.size),
        down=loader.matrix(f"{prefix}_down.weight"),
        up=loader.matrix(f"{prefix}_up.weight"),
        inject=loader.matrix(f"{prefix}_inject.weight") if with_inject else None,
    )


def _load_layer(loader: WeightLoader, model: ModelFile, layer: int) -> LayerWeights:
    spec = model.spec
    prefix = f"blk.{layer}."
    has_ngram = spec.ngram is not None and spec.ngram.layer == layer
    is_recurrent = spec.is_recurrent[layer]
    return LayerWeights(
        ngram=_load_ngram(loader, prefix, spec.ngram) if has_ngram and spec.ngram else None,
        mixer_read=_load_read(loader, prefix + "hc_attn"),
        gdn=_load_gdn(loader, prefix) if is_recurrent else None,
        attention=None if is_recurrent else _load_attention(loader, prefix),
        ffn_read=_load_read(loader, prefix + "hc_ffn"),
        moe=_load_moe(loader, model, layer),
    )


def _load_gdn(loader: WeightLoader, prefix: str) -> GdnWeights:
    return GdnWeights(
        qkv=loader.matrix(prefix + "attn_qkv.weight"),
        gate=loader.matrix(prefix + "attn_gate.weight"),
        conv=loader.vector(prefix + "ssm_conv1d.weight"),
        alpha=loader.matrix(prefix + "ssm_alpha.weight"),
        beta=loader.matrix(prefix + "ssm_beta.weight"),
        a=loader.vector(prefix + "ssm_a"),
        dt=loader.vector(prefix + "ssm_dt.bias"),
        norm=loader.vector(prefix + "ssm_norm.weight"),
        out=loader.matrix(prefix + "ssm_out.weight"),
    )


def _load_attention(loader: WeightLoader, prefix: str) -> AttentionWeights:
    return AttentionWeights(
        q=loader.matrix(prefix + "attn_q.weight"),
        k=loader.matrix(prefix + "attn_k.weight"),
        v=loader.matrix(prefix + "attn_v.weight"),
        q_norm=loader.vector(prefix + "attn_q_norm.weight"),
        k_norm=loader.vector(prefix + "attn_k_norm.weight"),
        out=loader.matrix(prefix + "attn_output.weight"),
        indexer=IndexerWeights(
            q=loader.matrix(prefix + "indexer.q_proj.weight"),
            k=loader.matrix(prefix + "indexer.k_proj.weight"),
            q_norm=loader.vector(prefix + "indexer.q_norm.weight"),
            k_norm=loader.vector(prefix + "indexer.k_norm.weight"),
        ),
    )


def _load_moe(loader: WeightLoader, model: ModelFile, layer: int) -> MoeWeights:
    prefix = f"blk.{layer}."
    return MoeWeights(
        router=loader.matrix(prefix + "ffn_gate_inp.weight"),
        experts=load_experts(model, layer, loader.bytes_of, loader.upload),
        shared_logit=loader.matrix(prefix + "ffn_gate_inp_shexp.weight"),
        shared_gate=loader.matrix(prefix + "ffn_gate_shexp.weight"),
        shared_up=loader.matrix(prefix + "ffn_up_shexp.weight"),
        shared_down=loader.matrix(prefix + "ffn_down_shexp.weight"),
    )


def _load_ngram(loader: WeightLoader, prefix: str, spec: NgramSpec) -> NgramWeights:
    return NgramWeights(
        spec=spec,
        table=loader.matrix("per_layer_token_embd.weight"),
        multipliers=loader.upload(np.array(spec.multipliers, dtype=np.int64)),
        offsets=loader.upload(np.array(spec.head_offsets, dtype=np.int64)),
        sizes=loader.upload(np.array(spec.head_sizes, dtype=np.int64)),
        key=loader.matrix(prefix + "ple_key.weight"),
        value=loader.matrix(prefix + "ple_value.weight"),
        norm_key=_flat(loader.vector(prefix + "ple_norm_key.weight")),
        norm_query=_flat(loader.vector(prefix + "ple_norm_query.weight")),
        norm_conv=_flat(loader.vector(prefix + "ple_norm_conv.weight")),
        conv=loader.vector(prefix + "ple_conv1d.weight"),
    )


def _flat(tensor: Tensor) -> Tensor:
    return tensor.reshape(tensor.size)
