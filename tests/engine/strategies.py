"""Random dimensions and prompts for tiny models: everything that a qwen4exp file may vary."""

from __future__ import annotations

import zlib
from typing import Any

import hypothesis.strategies as st

from strata_cli.engine.model.expected import Shape
from strata_cli.engine.model.quants import BLOCK, QuantType
from tests.model.tiny_model import SPECIALS, TypeOf

PLAIN = (QuantType.F32, QuantType.F16, QuantType.BF16)
VOCAB = 288
EOS = VOCAB - len(SPECIALS)  # cuts n-grams


@st.composite
def dimensions(draw: st.DrawFn, blocks: bool = False) -> dict[str, Any]:
    """Fields of TinyDims; with ``blocks``, widths that quantized types divide, and those types."""
    of = st.sampled_from
    recurrent = draw(st.lists(st.booleans(), min_size=1, max_size=4))
    ngram, heads_per_ngram = draw(of([(3, 2), (4, 1), (2, 1), (2, 3), (3, 1), (5, 1)]))
    table_heads = (ngram - 1) * heads_per_ngram
    width = draw(of([32, 64, 96])) if blocks else draw(of([3, 7, 10, 12, 17]))
    rotary = 2 * draw(st.integers(1, 5))
    ratio = draw(of([4, 2, 3, 5, None]))
    kv_heads, key_heads = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    experts = draw(st.integers(1, 7))
    widths = [32, 64] if blocks else [1, 5, 9, 16, 23]
    return {
        "seed": draw(st.integers(1, 2**20)),
        "vocab": VOCAB,
        "hidden": width * table_heads,
        "layers": len(recurrent),
        "recurrent": tuple(recurrent),
        "heads": kv_heads * draw(st.integers(1, 3)),
        "kv_heads": kv_heads,
        "head_dim": rotary + draw(of([0, 1, 6])),
        "rotary": rotary,
        "theta": draw(of([1e7, 100.0])),
        "gdn_key_heads": key_heads,
        "gdn_value_heads": key_heads * draw(st.integers(1, 3)),
        "gdn_dim": draw(st.integers(1, 9)),
        "gdn_conv": draw(st.integers(1, 5)),
        "streams": draw(st.integers(2, 5)),
        "rank": draw(of(widths)),
        "experts_count": experts,
        "top_k": draw(st.integers(1, experts)),
        "ff": tuple(draw(of(widths)) for _ in recurrent),
        "shared_ff": draw(of(widths)),
        "indexer_heads": draw(st.integers(1, 4)),
        "indexer_dim": rotary + draw(of([0, 3, 8])),
        "budget": (ratio or 1) * draw(st.integers(1, 4)),
        "ratio": ratio,
        "ratio_as_scalar": draw(st.booleans()),
        "ple_layer": draw(
            of([layer for layer, gdn in enumerate(recurrent) if gdn])
            if any(recurrent)
            else st.none()
        ),
        "ple_conv": draw(st.integers(1, 4)),
        "ngram": ngram,
        "heads_per_ngram": heads_per_ngram,
        "tied": draw(st.booleans()),
        "fused": draw(st.booleans()),
        "draft": draw(st.booleans()),
        "type_of": _types(draw(st.integers(0, 99)), blocks),
    }


@st.composite
def prompts(draw: st.DrawFn, max_tokens: int = 60) -> list[int]:
    """Token ids, with the token that cuts n-grams first, doubled, inside or not at all."""
    length = draw(st.integers(1, max_tokens))
    rng = draw(st.randoms(use_true_random=False))
    eos_share = draw(st.sampled_from([0.0, 0.1, 0.5]))
    few = draw(st.sampled_from([2, 30, VOCAB]))  # of few tokens, whole n-grams repeat
    ids = [EOS if rng.random() < eos_share else rng.randrange(few) for _ in range(length)]
    if eos_share and draw(st.booleans()):
        ids[:2] = [EOS] * len(ids[:2])
    return ids


def _types(salt: int, blocks: bool) -> TypeOf:
    """A type for every tensor, by its name: one that its rows allow."""

    def choose(name: str, shape: Shape) -> QuantType:
        fitting = [qtype for qtype in QuantType if shape[-1] % BLOCK[qtype].weights == 0]
        candidates = fitting if blocks else PLAIN
        return candidates[zlib.crc32(f"{salt} {name}".encode()) % len(candidates)]

    return choose
