"""The tensors of a synthetic model: which there are, how each is stored and filled."""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.model import expected
from strata_cli.engine.model.expected import Shape
from strata_cli.engine.model.quants import QuantType
from strata_cli.engine.model.spec import ModelSpec
from tools.synth.channels import channel_patches, mix_topic_taps, num_topic_heads
from tools.synth.plan import TensorPlan, Values
from tools.synth.routing import TOKEN_STD, router_rows
from tools.synth.scales import matrix_std
from tools.synth.storage import storage_type

_NGRAM_ROWS_MULTIPLE = 128
_SOFTPLUS_DT = 0.05  # decay per token is ssm_a times this, before alpha moves it
_TOPIC_LIFE_TOKENS = 260  # of what a topic head recalls, besides what is written over
_SHORTEST_LIFE_TOKENS, _LONGEST_LIFE_TOKENS = 4, 2000
_HEAD_NORM = 1.5  # of attention's queries and keys: scores of deviation 2, neither flat nor one-hot


class Recipe(NamedTuple):
    """What is to be chosen about a model besides its dimensions.

    Attributes:
        token_std: see router_rows.
    """

    token_std: float = TOKEN_STD


def plan_tensors(spec: ModelSpec, recipe: Recipe) -> list[TensorPlan]:
    """Every tensor of the model, in the order of the file."""
    shapes = expected.global_shapes(spec, tied_output=False)
    if spec.ngram is not None:
        multiple = _NGRAM_ROWS_MULTIPLE
        rows = -(-spec.ngram.min_rows // multiple) * multiple
        shapes[expected.NGRAM_TABLE] = (rows, spec.ngram.row_width)
    tensors = [_plan(spec, recipe, name, shape, None) for name, shape in shapes.items()]
    for layer in range(spec.num_layers):
        of_layer = expected.layer_shapes(spec, layer, fused_gate_up=False)
        tensors += [_plan(spec, recipe, name, shape, layer) for name, shape in of_layer.items()]
    return tensors


def _plan(
    spec: ModelSpec, recipe: Recipe, name: str, shape: Shape, layer: int | None
) -> TensorPlan:
    qtype = storage_type(name, shape, layer)
    is_quantized = qtype not in (QuantType.F32, QuantType.BF16)
    values = _values(spec, recipe, name, layer)
    return TensorPlan(
        name=name if layer is None else f"blk.{layer}.{name}",
        qtype=qtype,
        shape=shape,
        std=matrix_std(name, shape) if values is None else 1.0,
        patches=channel_patches(spec, name, qtype, layer) if is_quantized else (),
        values=values,
    )


def _values(spec: ModelSpec, recipe: Recipe, name: str, layer: int | None) -> Values | None:
    """What makes a tensor that is more than normal values, or None."""
    if "norm" in name:
        is_head_norm = name in ("attn_q_norm.weight", "attn_k_norm.weight")
        return partial(_norms, _HEAD_NORM if is_head_norm else 1.0)
    if name == "ffn_gate_inp.weight" and layer is not None:
        return lambda rng, _shape: router_rows(spec, layer, recipe.token_std, rng)
    special: dict[str, Values] = {
        "ssm_a": partial(_decays, spec),
        "ssm_dt.bias": _time_steps,
        "ssm_conv1d.weight": partial(_convolution, spec),
    }
    return special.get(name)


def _norms(mean: float, rng: np.random.Generator, shape: Shape) -> NDArray[np.float32]:
    return (mean * (1 + 0.1 * rng.standard_normal(shape))).astype(np.float32)


def _decays(spec: ModelSpec, rng: np.random.Generator, shape: Shape) -> NDArray[np.float32]:
    """Heads remember for 4 to 2,000 tokens; how long decides how fast a topic wanders."""
    shortest, longest = math.log(_SHORTEST_LIFE_TOKENS), math.log(_LONGEST_LIFE_TOKENS)
    life_tokens = np.exp(rng.uniform(shortest, longest, shape))
    life_tokens[: num_topic_heads(spec)] = _TOPIC_LIFE_TOKENS
    return (-1 / (_SOFTPLUS_DT * life_tokens)).astype(np.float32)


def _time_steps(_rng: np.random.Generator, shape: Shape) -> NDArray[np.float32]:
    """The value whose softplus is _SOFTPLUS_DT."""
    return np.full(shape, math.log(math.expm1(_SOFTPLUS_DT)), dtype=np.float32)


def _convolution(spec: ModelSpec, rng: np.random.Generator, shape: Shape) -> NDArray[np.float32]:
    """The current token and a little of those before it; the topic heads apart."""
    taps = (0.15 * rng.standard_normal(shape)).astype(np.float32)
    taps[:, -1] += 1
    mix_topic_taps(spec, rng, taps)
    return taps
