"""The hashed n-gram embedding of a qwen4exp model, as its metadata describes it."""

from __future__ import annotations

from dataclasses import dataclass

from strata_cli.engine.model.keys import MAX_I32, Keys
from strata_cli.engine.model.metadata import ValueType

MAX_N = 8
MAX_HEADS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramSpec:
    """The hashed n-gram embedding in front of one layer's mixer.

    Attributes:
        layer: the layer it belongs to, from 0.
        max_n: largest n-gram; also the dilation of its convolution.
        heads_per_ngram: hash heads for each n from 2 to max_n.
        conv_kernel: taps of its convolution.
        eos_token_id: the token that cuts n-grams; not the tokenizer's end of turn.
        row_width: width of a table row; heads times row_width is hidden_size.
        multipliers: hash multipliers, [max_n].
        head_offsets: first table row of each head, [(max_n - 1) * heads_per_ngram].
        head_sizes: modulus of each head, same length.
    """

    layer: int
    max_n: int
    heads_per_ngram: int
    conv_kernel: int
    eos_token_id: int
    row_width: int
    multipliers: tuple[int, ...]
    head_offsets: tuple[int, ...]
    head_sizes: tuple[int, ...]

    @property
    def num_heads(self) -> int:
        """Hash heads of all n together: table rows read per token."""
        return len(self.head_sizes)

    @property
    def min_rows(self) -> int:
        """Rows that the table must have at least."""
        return max(
            offset + size for offset, size in zip(self.head_offsets, self.head_sizes, strict=True)
        )


def read_ngram(
    keys: Keys, hidden_size: int, vocab_size: int, is_recurrent: tuple[bool, ...]
) -> NgramSpec | None:
    """The n-gram embedding that the metadata describes, or None when ``ple.layers`` is absent.

    Args:
        keys: the architecture's keys.
        hidden_size: width that the heads' rows together must have.
        vocab_size: tokens in the vocabulary.
        is_recurrent: per trunk layer; only such a layer can carry the embedding.

    Raises:
        ModelError: a key is missing, of the wrong type, out of range, or at odds with another.
    """
    if not keys.has("ple.layers"):
        return None
    (layer,) = keys.integers("ple.layers", 1)
    keys.check_range("ple.layers", layer, 0, len(is_recurrent) - 1)
    if not is_recurrent[layer]:
        raise keys.error(f"ple.layers names layer {layer}, which is an attention layer")
    max_n = keys.u32("ple.ngram_size", low=2, high=MAX_N)
    heads_per_ngram = keys.u32("ple.heads_per_ngram", high=MAX_HEADS)
    num_heads = (max_n - 1) * heads_per_ngram
    keys.check_range("ple.heads_per_ngram times n-gram sizes", num_heads, 1, MAX_HEADS)
    if keys.has("ple.image_token_id"):
        keys.u32("ple.image_token_id", low=0)
    ngram = NgramSpec(
        layer=layer,
        max_n=max_n,
        heads_per_ngram=heads_per_ngram,
        conv_kernel=keys.u32("ple.conv_kernel"),
        eos_token_id=keys.u32("ple.eos_token_id", low=0, high=vocab_size - 1),
        row_width=keys.u32("embedding_length_per_layer_input"),
        multipliers=keys.integers("ple.layer_multipliers", max_n, (ValueType.U64,)),
        head_offsets=keys.integers("ple.head_offsets", num_heads, (ValueType.U64,)),
        head_sizes=keys.integers("ple.head_vocab_sizes", num_heads, (ValueType.U64,)),
    )
    _check_ngram(keys, ngram, hidden_size, vocab_size)
    return ngram


def _check_ngram(keys: Keys, ngram: NgramSpec, hidden_size: int, vocab_size: int) -> None:
    for size in ngram.head_sizes:
        keys.check_range("ple.head_vocab_sizes", size, 1, MAX_I32)
    for offset in ngram.head_offsets:
        keys.check_range("ple.head_offsets", offset, 0, 2**62)
    # Beyond 63 bits the signed products of the training code and unsigned ones part ways.
    for multiplier in ngram.multipliers:
        keys.check_range(
            "ple.layer_multipliers", multiplier, 1, (2**63 - 1) // max(1, vocab_size - 1)
        )
    if ngram.num_heads * ngram.row_width != hidden_size:
        raise keys.error(
            f"{ngram.num_heads} n-gram heads of embedding_length_per_layer_input "
            f"{ngram.row_width} do not make embedding_length {hidden_size}"
        )
