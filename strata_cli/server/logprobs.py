"""Log-probabilities as OpenAI's two kinds of completion write them.

Values are natural logarithms over the whole vocabulary, before temperature, penalties and masks.
Where the answer was restricted to allowed tokens, those are what is reported, all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from strata_cli.engine.model.tokenizer import Tokenizer
from strata_cli.server.protocol import Ranked, Token

LOWEST = -9999.0
"""Stands for whatever JSON has no number for, as at OpenAI."""


class TopLogprob(msgspec.Struct, frozen=True):
    """An alternative of one position."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    """A token of a chat's answer, and what else could have come."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Of one choice of a chat, or of one piece of it."""

    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Of one choice of a completion, or of one piece of it; all lists are equally long."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class Entry(NamedTuple):
    """What is known of one position.

    Attributes:
        token_id: the token that stands there.
        logprob: its own; None for the first token of a prompt, which nothing came before.
        reported: the tokens to be listed, best first; None where nothing is known.
        offset: character at which its text begins.
    """

    token_id: int
    logprob: float | None
    reported: tuple[Ranked, ...] | None
    offset: int


def reported(token: Token, num_allowed: int) -> tuple[Ranked, ...]:
    """The tokens to be listed for a position, best first, ties to the lower id.

    Args:
        token: what the engine says about the position.
        num_allowed: how many of its named tokens are the only ones that could come; 0: all could.
    """
    if num_allowed:
        return _ranked(token.named)
    return _ranked((*token.top, *token.named))


class Spelling:
    """How tokens are written.

    Args:
        tokenizer: the model's.
        as_ids: write ``token_id:17`` instead of a token's text.
    """

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def name(self, token_id: int) -> str:
        """A token by itself; bytes that are no whole character as ``bytes:\\xe2``."""
        return _as_id(token_id) if self._as_ids else self._tokenizer.token_text(token_id)

    def chat(self, entry: Entry) -> TokenLogprob:
        """One position of a chat's answer."""
        return TokenLogprob(
            token=self.name(entry.token_id),
            logprob=finite(entry.logprob),
            bytes=self._bytes(entry.token_id),
            top_logprobs=[
                TopLogprob(
                    self.name(item.token_id), finite(item.logprob), self._bytes(item.token_id)
                )
                for item in entry.reported or ()
            ],
        )

    def completion(self, entries: Sequence[Entry], *, has_chosen: bool) -> CompletionLogprobs:
        """Positions of a completion.

        Args:
            entries: one for each position.
            has_chosen: list the token that stands there besides the reported ones.
        """
        return CompletionLogprobs(
            tokens=[self.name(entry.token_id) for entry in entries],
            token_logprobs=[
                None if entry.logprob is None else finite(entry.logprob) for entry in entries
            ],
            top_logprobs=[self._table(entry, has_chosen=has_chosen) for entry in entries],
            text_offset=[entry.offset for entry in entries],
        )

    def _table(self, entry: Entry, *, has_chosen: bool) -> dict[str, float] | None:
        """Log-probabilities by token. Of two tokens with one text the second is named by its id."""
        if entry.reported is None:
            return None
        listed = entry.reported
        if has_chosen and entry.logprob is not None:
            listed = _ranked((*listed, Ranked(entry.token_id, entry.logprob)))
        table: dict[str, float] = {}
        for item in listed:
            name = self.name(item.token_id)
            table[_as_id(item.token_id) if name in table else name] = finite(item.logprob)
        return table

    def _bytes(self, token_id: int) -> list[int]:
        return list(self._tokenizer.token_bytes(token_id))


def finite(logprob: float | None) -> float:
    """A number that JSON can hold."""
    return logprob if logprob is not None and logprob > LOWEST else LOWEST


def _ranked(items: Iterable[Ranked]) -> tuple[Ranked, ...]:
    by_id = {item.token_id: item for item in items}
    return tuple(sorted(by_id.values(), key=lambda item: (-item.logprob, item.token_id)))


def _as_id(token_id: int) -> str:
    return f"token_id:{token_id}"
