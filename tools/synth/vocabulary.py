"""A byte-level BPE vocabulary of any size, made of letter combinations instead of learned ones.

It reads English text at three to four characters a token, which is close enough to a real one for
timing; its tokens mean nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from strata_cli.engine.model.vocabulary import TokenType, byte_alphabet
from tools.synth.presets import NUM_ADDED_TOKENS, first_added_id

END_OF_TEXT = "<|endoftext|>"
TURN_END = "<|im_end|>"

_CONTROL = (
    END_OF_TEXT,
    "<|im_start|>",
    TURN_END,
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
_USER_DEFINED = (
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
_NUM_RESERVED = NUM_ADDED_TOKENS - len(_CONTROL) - len(_USER_DEFINED)

CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif -%}
{%- endif -%}
"""

# Most frequent first, so that what a small vocabulary keeps is of use.
_LETTERS = "etaoinshrdlcumwfgypbvkjxqz"
_SPACE = "\u0120"


class Pieces(NamedTuple):
    """What the tokenizer keys of a file hold; token id = position.

    Attributes:
        tokens: texts: 256 bytes, merged pieces, the added tokens, unused padding.
        types: TokenType of each.
        merges: "left right", in rank order.
    """

    tokens: list[str]
    types: Sequence[int]
    merges: list[str]


def make_vocabulary(vocab_size: int) -> Pieces:
    """The vocabulary of a model with so many rows in its embedding table.

    Raises:
        ValueError: too few to hold the bytes and the added tokens, or more than there are pieces.
    """
    first_added = first_added_id(vocab_size)
    num_merges = first_added - 256
    if num_merges < 0:
        raise ValueError(f"a vocabulary has at least {256 + NUM_ADDED_TOKENS} tokens: {vocab_size}")
    pairs = list(islice(_merge_pairs(), num_merges))
    if len(pairs) < num_merges:
        raise ValueError(f"a vocabulary of {vocab_size} is too large: {len(pairs)} pieces exist")
    reserved = [f"<|reserved_{number}|>" for number in range(_NUM_RESERVED)]
    num_padding = vocab_size - first_added - NUM_ADDED_TOKENS
    padding = [f"[PAD{first_added + NUM_ADDED_TOKENS + index}]" for index in range(num_padding)]
    merged = [left + right for left, right in pairs]
    return Pieces(
        tokens=[*byte_alphabet(), *merged, *_CONTROL, *_USER_DEFINED, *reserved, *padding],
        types=[TokenType.NORMAL] * first_added
        + [TokenType.CONTROL] * len(_CONTROL)
        + [TokenType.USER_DEFINED] * len(_USER_DEFINED)
        + [TokenType.CONTROL] * len(reserved)
        + [TokenType.UNUSED] * num_padding,
        merges=[f"{left} {right}" for left, right in pairs],
    )


def _merge_pairs() -> Iterator[tuple[str, str]]:
    """Every piece has one pair that makes it, and both parts are bytes or earlier pieces."""
    pairs = [a + b for a, b in _products(_LETTERS, _LETTERS)]
    yield from ((_SPACE, letter) for letter in _LETTERS)
    yield from _products(_LETTERS, _LETTERS)
    yield from _products([_SPACE + letter for letter in _LETTERS], _LETTERS)
    yield from _products([_SPACE + letter for letter in _LETTERS], pairs)
    yield from ((_SPACE, letter.upper()) for letter in _LETTERS)
    yield from _products(_LETTERS.upper(), _LETTERS)
    yield from _products(pairs, _LETTERS)
    yield from _products(pairs, pairs)


def _products(left: str | list[str], right: str | list[str]) -> Iterator[tuple[str, str]]:
    """All pairs, the sum of both places ascending: frequent with frequent first."""
    for total in range(len(left) + len(right) - 1):
        first = max(0, total - len(right) + 1)
        for place in range(first, min(total + 1, len(left))):
            yield left[place], right[total - place]
