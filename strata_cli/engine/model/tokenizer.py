"""Text to token ids and back, by the byte-level BPE vocabulary of the model file itself.

No Unicode normalisation: a text's bytes are exactly the bytes of its tokens. Merging and splitting
are done by the ``tokenizers`` library; special tokens are cut out here, because the library would
find them in every text, and what a user typed must be able to stay plain text.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Mapping, Sequence

import tokenizers
from tokenizers import Regex, models, pre_tokenizers

from strata_cli.engine.model.metadata import Value
from strata_cli.engine.model.piece_memory import PieceMemory
from strata_cli.engine.model.vocabulary import (
    TokenType,
    Vocabulary,
    byte_alphabet,
    read_vocabulary,
)
from strata_cli.errors import InputError, quoted

MOST_NAMED = 8  # tokens that a message about a text names

_BYTE_OF = {char: byte for byte, char in enumerate(byte_alphabet())}
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPECIAL_TYPES = frozenset({TokenType.CONTROL, TokenType.USER_DEFINED})


class Tokenizer:
    """One model's tokenizer. Holds no state between calls; safe to share between threads.

    Attributes:
        vocab_size: number of token ids, unused padding included.
        eos_ids: tokens that end a reply: the file's eos, and ``<|endoftext|>``, ``<|im_end|>`` etc.
        special_ids: text -> id of the control and user-defined tokens.
        control_texts: the special tokens that steer the model, which a user's text must not form:
            the control tokens and whatever looks like ``<|...|>``. ``<think>`` and its like are
            user-defined: part of what a model reads and writes.
        bos_id: token that begins a text, or None.
        padding_id: token that fills unused places, or None.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._tokens = vocabulary.tokens
        self._types = vocabulary.types
        self._adds_bos = vocabulary.adds_bos
        self._bpe = _build_bpe(vocabulary)
        self.vocab_size = len(vocabulary.tokens)
        self.eos_ids = vocabulary.eos_ids
        self.bos_id = vocabulary.bos_id
        self.padding_id = vocabulary.padding_id
        self.special_ids: Mapping[str, int] = {
            text: token_id
            for token_id, text in enumerate(self._tokens)
            if self._types[token_id] in _SPECIAL_TYPES and text
        }
        self.control_texts = frozenset(
            text
            for text, token_id in self.special_ids.items()
            if self._types[token_id] == TokenType.CONTROL or text.startswith("<|")
        )
        self._longest_first = sorted(self.special_ids, key=len, reverse=True)
        # An empty alternation would match everywhere; "(?!)" matches nowhere.
        self._any_special = re.compile("|".join(map(re.escape, self._longest_first)) or "(?!)")

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Value]) -> Tokenizer:
        """Build the tokenizer a model file describes.

        Args:
            metadata: GGUF keys and values; the ``tokenizer.ggml.*`` keys are read.

        Raises:
            ModelError: the vocabulary is missing, of an unsupported kind, or contradicts itself.
        """
        return cls(read_vocabulary(metadata))

    def encode(
        self,
        text: str,
        *,
        parse_special: bool,
        add_bos: bool = True,
        restore: Mapping[int, str] | None = None,
        memory: PieceMemory | None = None,
    ) -> list[int]:
        """Token ids of a text.

        Args:
            text: any text, empty included.
            parse_special: whether ``<|im_start|>`` and the like become their tokens (longest
                first, before anything is split); False reads them as the characters they are.
            add_bos: False leaves out the token that the file may want in front of a text.
            restore: characters (a ``str.translate`` table) to put back once special tokens are
                cut out, so that a character put in a special text's way never reaches the model.
            memory: from memory(): saves time where texts begin alike, and changes no id.

        Raises:
            InputError: the text has half a surrogate pair, which is no character.
        """
        _check_characters(text)
        ids = [self.bos_id] if add_bos and self._adds_bos and self.bos_id is not None else []
        for piece in self._cut_specials(text) if parse_special else [text]:
            if isinstance(piece, int):
                ids.append(piece)
            elif piece:
                plain = piece.translate(restore) if restore else piece
                ids += self._plain_ids(plain) if memory is None else memory.ids(plain)
        return ids

    def memory(self) -> PieceMemory:
        """A new memory for encode(), of this tokenizer, for one thread."""
        return PieceMemory(self._bpe)

    def _plain_ids(self, text: str) -> list[int]:
        return list(self._bpe.encode(text, add_special_tokens=False).ids)

    def single_token(self, text: str) -> int:
        """Id of a text that is exactly one token, such as a label or a control token.

        Raises:
            InputError: the text is empty or several tokens, which the message names.
        """
        ids = self.encode(text, parse_special=True, add_bos=False)
        if len(ids) == 1:
            return ids[0]
        names = [f"{self.token_text(i)!r} ({i})" for i in ids[:MOST_NAMED]]
        more = [f"and {len(ids) - MOST_NAMED} more"] if len(ids) > MOST_NAMED else []
        raise InputError(
            f"{quoted(text)} is {len(ids)} tokens, not one: {', '.join(names + more) or 'none'}",
            hint=self._one_token_hint(text, ids),
        )

    def _one_token_hint(self, text: str, ids: list[int]) -> str:
        other = text[1:] if text.startswith(" ") else f" {text}"
        is_one = len(self.encode(other, parse_special=True, add_bos=False)) == 1
        label = f"{quoted(other)} is one token" if is_one else "choose a text that is one token"
        example = ",".join(map(str, ids[:MOST_NAMED])) or "32,33"
        return f"{label}, or give ids, each reported by itself: --allowed-token-ids {example}"

    def decode(self, ids: Iterable[int], *, skip_control: bool = False) -> str:
        """Text of tokens in a row; bytes that are no UTF-8 become U+FFFD.

        Args:
            ids: token ids.
            skip_control: leave out control tokens (``<|im_end|>``), not user-defined ones.

        Raises:
            InputError: an id is out of range.
        """
        pieces = (self.token_bytes(i) for i in ids if not (skip_control and self.is_control(i)))
        return b"".join(pieces).decode("utf-8", "replace")

    def is_control(self, token_id: int) -> bool:
        """Whether a token steers the model rather than being part of its text."""
        return self._types[self._checked(token_id)] == TokenType.CONTROL

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token adds to the text: maybe part of a character; none when unused.

        Raises:
            InputError: the id is out of range.
        """
        text, kind = self._tokens[self._checked(token_id)], self._types[token_id]
        if kind == TokenType.UNUSED:
            return b""
        if kind == TokenType.BYTE and (match := _BYTE_TOKEN.fullmatch(text)):
            return bytes.fromhex(match[1])
        if kind in (TokenType.NORMAL, TokenType.UNDEFINED) and _BYTE_OF.keys() >= set(text):
            return bytes(_BYTE_OF[char] for char in text)
        return text.encode()

    def token_text(self, token_id: int) -> str:
        r"""A token on its own, for people and for JSON keys.

        Bytes that are no complete UTF-8 read ``bytes:\xe2\x80`` (the OpenAI form), never U+FFFD,
        so two halves of characters do not collide; an unused token reads as its stored name.

        Raises:
            InputError: the id is out of range.
        """
        data = self.token_bytes(token_id)
        if not data:
            return self._tokens[token_id]
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def check_ids(self, ids: Iterable[int]) -> None:
        """Refuse token ids that the vocabulary does not have.

        Raises:
            InputError: the first id out of range.
        """
        for token_id in ids:
            self._checked(token_id)

    def _checked(self, token_id: int) -> int:
        if 0 <= token_id < self.vocab_size:
            return token_id
        raise InputError(
            f"token id {token_id} is out of range: the vocabulary has {self.vocab_size} tokens",
            hint=f"use ids from 0 to {self.vocab_size - 1}",
        )

    def _cut_specials(self, text: str) -> Sequence[str | int]:
        """Plain pieces and ids of special tokens, in order; longer tokens are cut out first."""
        pieces: list[str | int] = [text]
        if not self._any_special.search(text):
            return pieces
        for special in self._longest_first:
            if special in text:
                pieces = _cut(pieces, special, self.special_ids[special])
        return pieces


class StreamDecoder:
    """Text of tokens as they arrive: only whole characters, never half of one.

    Whatever the tokens, the pushed texts and the finishing one together equal ``decode``.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_control: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip_control = skip_control
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The characters this token completes; empty while a character is unfinished.

        Raises:
            InputError: the id is out of range.
        """
        if self._skip_control and self._tokenizer.is_control(token_id):
            return ""
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        """What is left: U+FFFD for a character that never completed. Starts afresh afterwards."""
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return rest


def _build_bpe(vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    bpe = tokenizers.Tokenizer(models.BPE(vocab=vocabulary.ids, merges=vocabulary.merges))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(vocabulary.split_pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return bpe


def _check_characters(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"the text has half a surrogate pair (U+{ord(text[error.start]):04X}) "
            f"at character {error.start}",
            hint="give valid Unicode text",
        ) from error


def _cut(pieces: Sequence[str | int], special: str, token_id: int) -> list[str | int]:
    """Replace every occurrence of one special text in the plain pieces by its id."""
    result: list[str | int] = []
    for piece in pieces:
        if isinstance(piece, int):
            result.append(piece)
            continue
        first, *rest = piece.split(special)
        result.append(first)
        for text in rest:
            result += [token_id, text]
    return result
