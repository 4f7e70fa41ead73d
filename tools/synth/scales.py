"""How large weights are, so that signals keep their size through any number of layers.

Random weights keep what a trained model keeps: a read of the residual streams has an rms of about a
half (its gates are sigmoids around 1/2), what is projected from it has about 1, and each mixer or
mixture of experts adds WRITE_RMS to streams that begin at EMBEDDING_RMS. So streams grow with the
square root of depth and logits have a standard deviation of LOGIT_STD.
"""

from __future__ import annotations

import math

from strata_cli.engine.model.expected import Shape

EMBEDDING_RMS = 0.5
WRITE_RMS = 0.3
LOGIT_STD = 2.5
READ_RMS = 0.5

# Sizes that the outputs of random mixers have in front of their last projection.
_GATED_GDN_RMS = 0.54
_ATTENDED_RMS = 0.25
_SWIGLU_RMS = 0.6
_TOP_K_RMS = 0.35  # of the weighted sum of experts, for experts of rms 1
_ROUTED_SHARE, _SHARED_SHARE = 0.9, 0.44  # their squares add to 1

# Of the stream mixers (hc_*), by the last part of the name. The first and last are divided by 4.
_MIXER_GAINS = {"down": 4.0, "up": 1.5, "inject": 2.0}

_UNIT = 1 / READ_RMS
# What a matrix makes of inputs of rms 1, by its name; _UNIT where there is no line.
_GAINS = {
    "output.weight": LOGIT_STD * _UNIT,
    "ssm_alpha.weight": 0.5 * _UNIT,
    "ssm_out.weight": WRITE_RMS / _GATED_GDN_RMS,
    "attn_output.weight": WRITE_RMS / _ATTENDED_RMS,
    "ple_value.weight": 2 * WRITE_RMS,
    "ffn_down_exps.weight": _ROUTED_SHARE * WRITE_RMS / (_SWIGLU_RMS * _TOP_K_RMS),
    "ffn_down_shexp.weight": _SHARED_SHARE * WRITE_RMS / (_SWIGLU_RMS * 0.5),
}


def matrix_std(name: str, shape: Shape) -> float:
    """Standard deviation of a matrix's weights.

    Args:
        name: without the ``blk.N.`` in front.
        shape: numpy order.
    """
    if name == "token_embd.weight":
        return EMBEDDING_RMS
    if name == "per_layer_token_embd.weight":
        return 1.0
    if name == "ple_conv1d.weight":
        return 0.3
    return _gain(name) / math.sqrt(shape[-1])


def _gain(name: str) -> float:
    if "hc_" in name:
        part = name.removesuffix(".weight").rpartition("_")[2]
        return _MIXER_GAINS[part]
    return _GAINS.get(name, _UNIT)


def stream_rms(layer: int, *, behind_mixer: bool, constant_energy: float) -> float:
    """The rms of a residual stream that a layer's mixer, or what is behind it, reads.

    Args:
        layer: from 0.
        behind_mixer: whether the layer's mixer has written already.
        constant_energy: mean square that the constant channels add.
    """
    writes = 2 * layer + behind_mixer
    return math.sqrt(EMBEDDING_RMS**2 + constant_energy + writes * WRITE_RMS**2)
