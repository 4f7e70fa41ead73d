"""Channels of the residual streams with a purpose, which give routing the skew of real text.

A router has no bias, and random rows would spread tokens evenly. In a trained model some channels
hardly depend on the token and others follow the text's topic; routers read both. Here:

- constant channels: the embedding gives every token the same value, and nothing writes to them.
  They are what a bias would be: for routers, and for the queries and write rates below.
- topic channels: only the topic heads of gated-delta-net layers write to them, beginning with zero.
  Such a head has a constant query, random keys and a small write rate, so what it recalls is a sum
  of its values of the last few hundred tokens with random signs: a direction that wanders slowly,
  from token to token hardly changed, in another text another one.

So a prompt reaches few experts, more the longer it is, whatever its tokens are.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.model.quants import QuantType
from strata_cli.engine.model.spec import ModelSpec
from tools.synth.blocks import Field, scale_fields
from tools.synth.plan import Patch
from tools.synth.scales import READ_RMS, stream_rms

# One block of Q8_0 each: the first two of every row that reads the streams.
CONSTANT = slice(0, 32)
TOPIC = slice(32, 64)
_BLOCK = 32
_EVERY_BLOCK = slice(None)

CONSTANT_ENERGY = 0.1  # mean square over all channels; the embedding's own is 0.25
_TOPIC_WRITE_RMS = 0.5
_TOPIC_GATE = 0.5  # sigmoid(0)
_QUERY_GAIN = 16.0  # constant part of a topic query, beside a random part of 1

# One a topic head: the share of a recalled value that a new one replaces. A token's key is one of
# head_dim directions, so a head of 128 forgets over 128 / rate tokens.
_WRITE_RATES = (0.62, 0.38)
_WRITERS = ("ssm_out.", "attn_output.", "ffn_down_exps.", "ffn_down_shexp.", "ple_value.")


def num_topic_heads(spec: ModelSpec) -> int:
    """Value heads, and key heads, that serve the topic: the first ones."""
    return min(len(_WRITE_RATES), spec.gdn_num_key_heads)


def topic_width(spec: ModelSpec) -> int:
    """Rows of all topic heads in a projection."""
    return num_topic_heads(spec) * spec.gdn_head_dim


def constant_value(spec: ModelSpec) -> float:
    """What every constant channel of every residual stream holds."""
    return math.sqrt(CONSTANT_ENERGY * spec.hidden_size / _BLOCK)


def read_constant(spec: ModelSpec, layer: int, *, behind_mixer: bool) -> float:
    """About what a read of the streams makes of a constant channel."""
    rms = stream_rms(layer, behind_mixer=behind_mixer, constant_energy=CONSTANT_ENERGY)
    return READ_RMS * constant_value(spec) / rms


def read_topic_rms(spec: ModelSpec, layer: int) -> float:
    """About the rms of the topic channels as a layer's router reads them."""
    writers = sum(spec.is_recurrent[: layer + 1])
    rms = stream_rms(layer, behind_mixer=True, constant_energy=CONSTANT_ENERGY)
    return READ_RMS * _TOPIC_WRITE_RMS * math.sqrt(writers) / rms


def channel_patches(
    spec: ModelSpec, name: str, qtype: QuantType, layer: int | None
) -> tuple[Patch, ...]:
    """What the channels' purpose demands of a quantized matrix.

    Args:
        spec: the model.
        name: without the ``blk.N.`` in front.
        qtype: how it is stored.
        layer: the layer it belongs to, if any.
    """
    if name == "token_embd.weight":
        constant = _constant_block(constant_value(spec))
        return (
            Patch(slice(0, 1), 1, _block(CONSTANT), constant),
            Patch(slice(0, 1), 1, _block(TOPIC), scale_fields(qtype, 0)),
        )
    nothing = scale_fields(qtype, 0)
    patches: list[Patch] = []
    if name.startswith(_WRITERS):
        both = slice(CONSTANT.start, TOPIC.stop)
        patches.append(Patch(both, spec.hidden_size, _EVERY_BLOCK, nothing))
    if name == "ssm_out.weight":
        std = _TOPIC_WRITE_RMS / _TOPIC_GATE / math.sqrt(topic_width(spec))
        heads = slice(0, topic_width(spec) // _BLOCK)
        patches.append(Patch(TOPIC, spec.hidden_size, heads, scale_fields(qtype, std)))
    if name == "attn_gate.weight":
        rows = slice(0, topic_width(spec))
        patches.append(Patch(rows, spec.gdn_value_width, _EVERY_BLOCK, nothing))
    if name == "attn_qkv.weight" and layer is not None:
        patches.append(_query_patch(spec, qtype, layer))
    if name == "ssm_beta.weight" and layer is not None:
        patches += _write_rate_patches(spec, layer)
    return tuple(patches)


def mix_topic_taps(spec: ModelSpec, rng: np.random.Generator, taps: NDArray[np.float32]) -> None:
    """Set the convolution [channels, taps] of the topic heads' keys and values.

    Random taps make a key of four tokens in a row, so that a word that keeps coming back does not
    pull the topic to itself. The mean of the keys must vanish: however small beside them, it would
    add up over hundreds of tokens and tie the topic to one direction. So a key's taps add up to 0,
    which cancels what does not change from token to token, and are tiny, which keeps the keys where
    silu is linear (they are normalised afterwards, so their size is free).
    """
    keys = slice(spec.gdn_key_width, spec.gdn_key_width + topic_width(spec))
    values = slice(2 * spec.gdn_key_width, 2 * spec.gdn_key_width + topic_width(spec))
    for rows, std in ((keys, 0.002), (values, 0.5)):
        taps[rows] = std * rng.standard_normal(taps[rows].shape)
    taps[keys] -= taps[keys].mean(axis=1, keepdims=True)


def _query_patch(spec: ModelSpec, qtype: QuantType, layer: int) -> Patch:
    """Queries of the topic heads hang on the constant channels."""
    constant = read_constant(spec, layer, behind_mixer=False)
    std = _QUERY_GAIN / (constant * math.sqrt(_BLOCK))
    all_rows = 2 * spec.gdn_key_width + spec.gdn_value_width
    queries = slice(0, topic_width(spec))
    return Patch(queries, all_rows, _block(CONSTANT), scale_fields(qtype, std))


def _write_rate_patches(spec: ModelSpec, layer: int) -> list[Patch]:
    """Sigmoid of what ssm_beta gives is the write rate."""
    constant = read_constant(spec, layer, behind_mixer=False)
    heads = range(num_topic_heads(spec))
    logits = [math.log(rate / (1 - rate)) for rate in _WRITE_RATES]
    return [
        Patch(
            slice(head, head + 1),
            spec.gdn_num_value_heads,
            _block(CONSTANT),
            _constant_block(logits[head] / (_BLOCK * constant)),
        )
        for head in heads
    ]


def _block(channels: slice) -> slice:
    return slice(channels.start // _BLOCK, channels.stop // _BLOCK)


def _constant_block(value: float) -> tuple[Field, ...]:
    """A Q8_0 block of 32 equal weights."""
    scale = np.array(value / 127, dtype="<f2").tobytes()
    return (Field(0, scale + b"\x7f" * _BLOCK),)
