"""The sizes of model that can be written."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import accumulate

import numpy as np

from strata_cli.engine.model.ngram_spec import NgramSpec
from strata_cli.engine.model.spec import ModelSpec

NGRAM_MULTIPLIERS = (23703573157769, 20109073645365, 8052911324071)
NUM_ADDED_TOKENS = 33
FULL_VOCAB = 248_320
FULL_FIRST_ADDED_ID = 248_044
ATTENTION_INTERVAL = 4


def first_added_id(vocab_size: int) -> int:
    """Id of ``<|endoftext|>``, behind which the other added tokens follow.

    Where the published models have it in a vocabulary of their size; else as late as possible.
    """
    return FULL_FIRST_ADDED_ID if vocab_size == FULL_VOCAB else vocab_size - NUM_ADDED_TOKENS


def with_layers(spec: ModelSpec, num_layers: int) -> ModelSpec:
    """The same model with another number of layers; every fourth is an attention layer."""
    is_recurrent = tuple((layer + 1) % ATTENTION_INTERVAL != 0 for layer in range(num_layers))
    ngram = spec.ngram if num_layers > 1 else None
    return replace(
        spec,
        num_layers=num_layers,
        moe_intermediate_size=(spec.moe_intermediate_size[0],) * num_layers,
        is_recurrent=is_recurrent,
        index_ratio=tuple(0 if recurrent else 4 for recurrent in is_recurrent),
        ngram=ngram,
    )


def _ngram(hidden_size: int, heads_per_ngram: int, table_rows: int, vocab_size: int) -> NgramSpec:
    heads = 2 * heads_per_ngram
    sizes = _primes_after(table_rows // heads, heads)
    return NgramSpec(
        layer=1,
        max_n=3,
        heads_per_ngram=heads_per_ngram,
        conv_kernel=4,
        eos_token_id=first_added_id(vocab_size),
        row_width=hidden_size // heads,
        multipliers=NGRAM_MULTIPLIERS,
        head_offsets=(0, *accumulate(sizes[:-1])),
        head_sizes=sizes,
    )


def _primes_after(number: int, count: int) -> tuple[int, ...]:
    primes: list[int] = []
    while len(primes) < count:
        number += 1
        if all(number % factor for factor in range(2, math.isqrt(number) + 1)):
            primes.append(number)
    return tuple(primes)


_FULL_WIDTH = ModelSpec(
    name="",
    num_layers=1,
    num_draft_layers=0,
    context_tokens=262_144,
    hidden_size=2560,
    num_heads=24,
    num_kv_heads=2,
    head_dim=256,
    rms_eps=float(np.float32(1e-6)),  # as a file stores it
    rope_theta=1e7,
    rotary_dim=64,
    rope_sections=(11, 11, 10, 0),
    num_experts=512,
    num_experts_per_tok=10,
    moe_intermediate_size=(640,),
    shared_intermediate_size=640,
    gdn_conv_kernel=4,
    gdn_head_dim=128,
    gdn_num_key_heads=16,
    gdn_num_value_heads=48,
    is_recurrent=(True,),
    num_streams=4,
    stream_rank=320,
    indexer_num_heads=4,
    indexer_head_dim=128,
    indexer_budget_tokens=2048,
    index_ratio=(0,),
    ngram=_ngram(2560, 8, 320_000, FULL_VOCAB),
    vocab_size=FULL_VOCAB,
)

_ROUTE = replace(
    _FULL_WIDTH,
    context_tokens=32_768,
    hidden_size=512,
    num_heads=4,
    num_kv_heads=1,
    head_dim=128,
    moe_intermediate_size=(32,),
    shared_intermediate_size=32,
    gdn_num_key_heads=4,
    gdn_num_value_heads=12,
    stream_rank=64,
    ngram=_ngram(512, 8, 8_000, FULL_VOCAB),
)

_TINY = replace(
    _FULL_WIDTH,
    context_tokens=8_192,
    hidden_size=256,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    rotary_dim=32,
    rope_sections=(6, 5, 5, 0),
    num_experts=32,
    num_experts_per_tok=4,
    moe_intermediate_size=(64,),
    shared_intermediate_size=64,
    gdn_head_dim=32,
    gdn_num_key_heads=2,
    gdn_num_value_heads=8,
    stream_rank=32,
    indexer_head_dim=32,
    indexer_budget_tokens=64,
    ngram=_ngram(256, 4, 2_000, 1_024),
    vocab_size=1_024,
)

PRESETS: dict[str, ModelSpec] = {
    "tiny": with_layers(replace(_TINY, name="synthetic tiny"), 4),
    "route": with_layers(replace(_ROUTE, name="synthetic route"), 12),
    "bench12": with_layers(replace(_FULL_WIDTH, name="synthetic bench12"), 12),
    "full": with_layers(replace(_FULL_WIDTH, name="synthetic full"), 48),
}
