"""Reads a byte-level BPE vocabulary from GGUF metadata, and refuses one that cannot work.

Source: the ``tokenizer.ggml.*`` keys as converters write them for Qwen models.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeVar

import numpy as np

from strata_cli.engine.model.metadata import Value
from strata_cli.errors import ModelError

PREFIX = "tokenizer.ggml."

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
SPLIT_PATTERNS = {
    "qwen2": rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",
    "qwen35": rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
}
"""``tokenizer.ggml.pre`` -> the expression whose every match is one BPE word.

qwen35 differs by counting combining marks as letters.
"""

END_TEXTS = frozenset({"<|endoftext|>", "<|im_end|>", "<|end|>", "<|eot_id|>", "<|eom_id|>"})
"""Tokens that end a reply by their name, whichever id the file calls eos (as llama.cpp does)."""

# Only for files without token types.
_CONTROL_TEXT = re.compile(r"<\|[^|\s]+\|>")
_USER_DEFINED_TEXT = re.compile(r"</?(?:think|tool_call|tool_response)>")

_RECONVERT = "convert the model again, or download another build of it"
# Bytes that no UTF-8 text contains; a vocabulary may lack them.
_IMPOSSIBLE_BYTES = frozenset({0xC0, 0xC1, *range(0xF5, 0x100)})

_T = TypeVar("_T", bool, int, str)


class TokenType(IntEnum):
    """``tokenizer.ggml.token_type``; the numbers are GGUF's."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_NUM_TYPES = len(TokenType)


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """What the file says about text; every field is checked.

    Attributes:
        split_pattern: the expression that cuts text into BPE words.
        tokens: text of each id: in the byte alphabet when normal, as it is when special.
        types: the TokenType value of each id.
        ids: text -> id, the inverse of tokens.
        merges: pairs in rank order; both parts and the result are tokens.
        bos_id: token that begins a text, or None.
        padding_id: token that fills unused places, or None.
        eos_ids: tokens that end a reply.
        adds_bos: whether a text is read with bos_id in front.
    """

    split_pattern: str
    tokens: Sequence[str]
    types: Sequence[int]
    ids: dict[str, int]
    merges: list[tuple[str, str]]
    bos_id: int | None
    padding_id: int | None
    eos_ids: frozenset[int]
    adds_bos: bool


def byte_alphabet() -> list[str]:
    """The character that stands for each byte value, [256].

    Source: GPT-2. Printable Latin-1 bytes stand for themselves; the others, in order, are the
    characters from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def read_vocabulary(metadata: Mapping[str, Value]) -> Vocabulary:
    """Read and check the tokenizer keys of a model file.

    Raises:
        ModelError: a key is missing, of the wrong type or out of range, the tokenizer is of an
            unsupported kind, or tokens and merges contradict each other.
    """
    pattern = _split_pattern(metadata)
    tokens = _texts(metadata, "tokens")
    ids = _index(tokens)
    types = _token_types(metadata, tokens)
    special_ids = {
        name: _token_id(metadata, f"{name}_token_id", len(tokens))
        for name in ("bos", "eos", "eot", "eom", "padding")
    }
    ends = {ids[text] for text in END_TEXTS if text in ids}
    for token_id in ends:
        types[token_id] = TokenType.CONTROL  # some converters forget to say so
    ends |= {i for name in ("eos", "eot", "eom") if (i := special_ids[name]) is not None}
    adds_bos = _scalar(metadata, "add_bos_token", bool) or False
    if adds_bos and special_ids["bos"] is None:
        raise ModelError(
            f"{PREFIX}add_bos_token is true, but the file has no {PREFIX}bos_token_id",
            hint=_RECONVERT,
        )
    return Vocabulary(
        split_pattern=pattern,
        tokens=tokens,
        types=types,
        ids=ids,
        merges=_read_merges(metadata, ids),
        bos_id=special_ids["bos"],
        padding_id=special_ids["padding"],
        eos_ids=frozenset(ends),
        adds_bos=adds_bos,
    )


def _split_pattern(metadata: Mapping[str, Value]) -> str:
    kind = _scalar(metadata, "model", str)
    if kind != "gpt2":
        raise ModelError(
            f"{PREFIX}model is {kind!r}, and only 'gpt2' (byte-level BPE) is supported",
            hint="use a Qwen model file",
        )
    pre = _scalar(metadata, "pre", str)
    if pre is None or pre not in SPLIT_PATTERNS:
        raise ModelError(
            f"{PREFIX}pre is {pre!r}; supported: {', '.join(sorted(SPLIT_PATTERNS))}",
            hint="another splitting would give other token ids, so none is guessed",
        )
    return SPLIT_PATTERNS[pre]


def _index(tokens: Sequence[str]) -> dict[str, int]:
    """Text -> id; every byte that text can hold must be a token, or BPE would drop it silently."""
    ids = dict(zip(tokens, range(len(tokens)), strict=True))
    if len(ids) != len(tokens):
        later = next(i for i, text in enumerate(tokens) if ids[text] != i)
        raise ModelError(
            f"{PREFIX}tokens has {tokens[later]!r} twice: ids {later} and {ids[tokens[later]]}",
            hint=_RECONVERT,
        )
    for byte, char in enumerate(byte_alphabet()):
        if char not in ids and byte not in _IMPOSSIBLE_BYTES:
            raise ModelError(
                f"{PREFIX}tokens has no token for byte 0x{byte:02X} (text {char!r}) "
                f"among its {len(tokens)}",
                hint=_RECONVERT,
            )
    return ids


def _token_types(metadata: Mapping[str, Value], tokens: Sequence[str]) -> list[int]:
    value = metadata.get(f"{PREFIX}token_type")
    if value is None:
        return [_guess_type(text) for text in tokens]
    types = np.asarray(value)
    if types.dtype.kind not in "iu" or types.shape != (len(tokens),):
        raise ModelError(
            f"{PREFIX}token_type must be {len(tokens)} integers, one a token; "
            f"it is {types.dtype} of shape {list(types.shape)}",
            hint=_RECONVERT,
        )
    wrong = np.flatnonzero((types < 0) | (types >= _NUM_TYPES))
    if wrong.size:
        raise ModelError(
            f"{PREFIX}token_type of token {wrong[0]} is {types[wrong[0]]}, "
            f"which is not in 0..{_NUM_TYPES - 1}",
            hint=_RECONVERT,
        )
    numbers: list[int] = types.tolist()
    return numbers


def _guess_type(text: str) -> TokenType:
    if _CONTROL_TEXT.fullmatch(text):
        return TokenType.CONTROL
    return TokenType.USER_DEFINED if _USER_DEFINED_TEXT.fullmatch(text) else TokenType.NORMAL


def _read_merges(metadata: Mapping[str, Value], ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """Each merge is "left right", cut at the first space that has something before it."""
    merges: list[tuple[str, str]] = []
    for rank, text in enumerate(_texts(metadata, "merges")):
        left, _, right = text.partition(" ")
        if not left:
            left, _, right = text[1:].partition(" ")
            left = " " + left
        if left not in ids or right not in ids or left + right not in ids:
            raise _malformed_merge(rank, text, left, right, ids)
        merges.append((left, right))
    return merges


def _malformed_merge(
    rank: int, text: str, left: str, right: str, ids: Mapping[str, int]
) -> ModelError:
    if not right:
        problem = "is not two parts with a space between"
    else:
        missing = next(part for part in (left, right, left + right) if part not in ids)
        problem = f"needs {missing!r}, which is not a token"
    return ModelError(f"{PREFIX}merges[{rank}] {text!r} {problem}", hint=_RECONVERT)


def _texts(metadata: Mapping[str, Value], name: str) -> Sequence[str]:
    value = metadata.get(PREFIX + name)
    if value is None:
        raise ModelError(
            f"the file has no {PREFIX}{name}", hint="use a model file that has its own tokenizer"
        )
    if not isinstance(value, (list, tuple)) or any(
        kind is not str for kind in set(map(type, value))
    ):
        raise ModelError(f"{PREFIX}{name} must be an array of strings", hint=_RECONVERT)
    return value


def _token_id(metadata: Mapping[str, Value], name: str, num_tokens: int) -> int | None:
    token_id = _scalar(metadata, name, int)
    if token_id is not None and not 0 <= token_id < num_tokens:
        raise ModelError(
            f"{PREFIX}{name} is {token_id}, and the vocabulary has {num_tokens} tokens",
            hint=_RECONVERT,
        )
    return token_id


def _scalar(metadata: Mapping[str, Value], name: str, kind: type[_T]) -> _T | None:
    value = metadata.get(PREFIX + name)
    if value is None:
        return None
    if type(value) is not kind:  # a bool is an int to isinstance
        raise ModelError(
            f"{PREFIX}{name} must be of type {kind.__name__}, not {type(value).__name__}",
            hint=_RECONVERT,
        )
    return value
