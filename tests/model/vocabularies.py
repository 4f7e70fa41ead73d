"""A small byte-level vocabulary as GGUF metadata, for tests that need tokens of their own."""

from __future__ import annotations

import numpy as np

from strata_cli.engine.model.metadata import Value
from strata_cli.engine.model.vocabulary import TokenType, byte_alphabet

MERGES = ["h e", "l l", "he ll", "Ġ hell", "hell o"]
SPECIALS = {
    "<|endoftext|>": TokenType.CONTROL,
    "<|im_start|>": TokenType.CONTROL,
    "<|im_end|>": TokenType.CONTROL,
    "<|image_pad|>": TokenType.CONTROL,
    "<think>": TokenType.USER_DEFINED,
    "</think>": TokenType.USER_DEFINED,
}


def small_metadata(
    changes: dict[str, Value | None] | None = None,
    specials: dict[str, TokenType] | None = None,
) -> dict[str, Value]:
    """Bytes, a few merges and special tokens. A change of None removes the key."""
    merged = [merge.replace(" ", "") for merge in MERGES]
    special = SPECIALS if specials is None else specials
    tokens = [*byte_alphabet(), *merged, *special]
    types = [TokenType.NORMAL] * (len(tokens) - len(special)) + list(special.values())
    values: dict[str, Value | None] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen35",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, dtype=np.int32),
        "tokenizer.ggml.merges": MERGES,
        **{f"tokenizer.ggml.{key}": value for key, value in (changes or {}).items()},
    }
    return {key: value for key, value in values.items() if value is not None}
