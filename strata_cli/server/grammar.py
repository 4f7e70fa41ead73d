"""Answers held to a grammar: which tokens may come next, by llguidance.

A grammar is a text of llguidance's: its Lark, or the JSON form that a JSON schema is compiled to.
Used in the engine's process. Nothing here is asked for log-probabilities: those stay the model's
own, over the whole vocabulary.
"""

from __future__ import annotations

from typing import Any

import llguidance
import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.model.tokenizer import Tokenizer
from strata_cli.errors import InputError
from strata_cli.server.constraint import Constraint, Rule

WORD_BITS = 32


class Grammars:
    """Makes constraints for one model.

    Reads the whole vocabulary at once: a second and 114 MiB for 248,320 tokens, in which no other
    thread of Python's runs.

    Args:
        tokenizer: of the model.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens = _vocabulary(tokenizer)

    def make(self, text: str) -> Constraint:
        """See MakeConstraint. Any thread; others go on meanwhile."""
        rule = Rule.of_text(text)
        grammar = GrammarConstraint(self._matcher(rule.grammar), self._tokenizer)
        return (
            grammar if rule.after is None else _AfterThought(grammar, self._tokenizer, rule.after)
        )

    def _matcher(self, grammar: str) -> llguidance.LLMatcher:
        matcher = llguidance.LLMatcher(self._tokens, grammar, log_level=0)
        if matcher.is_error():
            raise InputError(
                f"the grammar or schema cannot be used: {_first_line(matcher.get_error())}",
                hint="leave out what the message names",
            )
        return matcher


class GrammarConstraint:
    """One answer's place in its grammar.

    Args:
        matcher: at its beginning.
        tokenizer: of the model.
    """

    def __init__(self, matcher: llguidance.LLMatcher, tokenizer: Tokenizer) -> None:
        self._matcher = matcher
        self._size = tokenizer.vocab_size
        self._ends = np.array(sorted(tokenizer.eos_ids), np.int64)

    def mask(self) -> NDArray[np.bool_]:
        """See Constraint.

        Raises:
            InputError: the grammar is too complex, or allows no token of the model's.
        """
        words = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
        bits = words[:, None] >> np.arange(WORD_BITS, dtype=np.uint32) & 1
        mask: NDArray[np.bool_] = bits.reshape(-1)[: self._size].astype(np.bool_)
        mask[self._ends] = self._matcher.is_accepting() or self._matcher.is_stopped()
        if not mask.any():
            raise InputError(
                f"the answer cannot go on within its grammar: {self._problem()}",
                hint="ask for a simpler schema",
            )
        return mask

    def accept(self, token_id: int) -> None:
        """See Constraint."""
        self._matcher.consume_token(token_id)

    def _problem(self) -> str:
        return _first_line(self._matcher.get_error()) or "no token of the model's fits"


class _AfterThought:
    """A grammar that holds from the end of a thought on."""

    def __init__(self, grammar: GrammarConstraint, tokenizer: Tokenizer, close_id: int) -> None:
        self._grammar = grammar
        self._close_id = close_id
        self._is_closed = False
        self._free = np.ones(tokenizer.vocab_size, np.bool_)
        self._free[sorted(tokenizer.eos_ids)] = False  # an answer has to follow

    def mask(self) -> NDArray[np.bool_]:
        """See Constraint."""
        return self._grammar.mask() if self._is_closed else self._free

    def accept(self, token_id: int) -> None:
        """See Constraint."""
        if self._is_closed:
            self._grammar.accept(token_id)
        self._is_closed |= token_id == self._close_id


class _Vocabulary:
    """What llguidance asks of a tokenizer: its tokens as bytes, and how it would cut a text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        ends = sorted(tokenizer.eos_ids)
        self.eos_token_id = ends[0] if ends else 0
        self.bos_token_id = None
        self.special_token_ids = [i for i in range(tokenizer.vocab_size) if tokenizer.is_control(i)]
        self.tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenizer.encode(text.decode("utf-8", "replace"), parse_special=False)


def _vocabulary(tokenizer: Tokenizer) -> llguidance.LLTokenizer:
    wrapper: Any = llguidance.TokenizerWrapper(_Vocabulary(tokenizer))
    return llguidance.LLTokenizer(wrapper, n_vocab=tokenizer.vocab_size)


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else ""
