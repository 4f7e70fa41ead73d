"""What a Decider asks of whoever reads for it: in this process or in another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from strata_cli.decisions.paths import PathScores
from strata_cli.decisions.prompts import PromptTokenizer
from strata_cli.errors import InputError


class TokenCounts(NamedTuple):
    """Tokens of all prompts together, and how many of them were read."""

    prompt_tokens: int
    read_tokens: int

    @property
    def reused_tokens(self) -> int:
        """Tokens that another prompt had read."""
        return self.prompt_tokens - self.read_tokens

    def since(self, earlier: TokenCounts) -> TokenCounts:
        """What was added to earlier counts."""
        return TokenCounts(
            self.prompt_tokens - earlier.prompt_tokens, self.read_tokens - earlier.read_tokens
        )


def check_room(longest: int, context: int, most: int, error: type[InputError] = InputError) -> None:
    """Refuse a prompt that does not fit.

    Args:
        longest: tokens of the longest one.
        context: tokens that fit.
        most: tokens that would fit by the highest setting.
        error: what to raise.

    Raises:
        InputError: with both numbers.
    """
    if longest <= context:
        return
    more = f", or raise --max-context, to {most} at most" if context < most else ""
    raise error(
        f"state and question take {longest} tokens and do not fit the context of {context} tokens",
        hint=f"shorten the state{more}",
    )


@runtime_checkable
class Backend(Protocol):
    """Reads of one model, each with the bits of a fresh read of its whole prompt.

    EngineBackend says what its methods do.
    """

    @property
    def name(self) -> str:
        """The model's."""

    @property
    def tokenizer(self) -> PromptTokenizer:
        """Of the model."""

    @property
    def counts(self) -> TokenCounts:
        """Since the backend was made."""

    def expect(self, prompts: Sequence[str], another: str, *, at_once: bool = False) -> None:
        """Learn what prompts to come have in common; changes no value."""

    def next_token_logprobs(
        self, prompts: Sequence[str], token_ids: Sequence[Sequence[int]]
    ) -> list[NDArray[np.float64]]:
        """Log-probabilities over the whole vocabulary, for each prompt of the tokens asked for."""

    def score_shared(
        self, groups: Sequence[tuple[str, Sequence[str]]], token_ids: Sequence[Sequence[int]]
    ) -> list[list[NDArray[np.float64]]]:
        """The same for prompts given as a beginning and several ends."""

    def score_paths(self, prompt: str, options: Sequence[str]) -> PathScores:
        """Log-probabilities of whole texts behind one prompt."""

    def close(self) -> None:
        """Give memory back. Safe to call twice."""
