"""AnyJev's backend in this process: prompts that begin alike are read from where they part.

Every value equals that of a fresh read of its whole prompt in every bit: prompts are encoded whole,
and what is shared is a prefix of their tokens, not of their text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np
from numpy.typing import NDArray

from strata_cli.decisions.lanes import LEAST_HEAD_TOKENS, LaneGroup, Lanes
from strata_cli.decisions.path_reads import score_paths
from strata_cli.decisions.paths import PathScores, TokenPath, ended
from strata_cli.decisions.prompts import PromptTokenizer
from strata_cli.decisions.reads import TokenCounts, check_room
from strata_cli.engine.engine import Engine
from strata_cli.engine.model.prefixes import common_prefix, common_tokens
from strata_cli.engine.prompt_cache import CacheRules
from strata_cli.engine.reading import next_token_logprobs
from strata_cli.engine.session import Session

RULES = CacheRules(prompt_cache_every=0, prompt_cache_root=0)
"""Prompts part behind their states, and there alone: a checkpoint amid one costs a pass."""

LOGIT_BYTES = 64 << 20
"""So much host memory, about, holds logits of paths at a time."""


class EngineBackend:
    """Next-token log-probabilities of labels. Owned by the engine's thread.

    Args:
        engine: reads.
        reuse: False reads every prompt anew; changes no value.
        lanes: states that are read side by side where several are given at once; changes no value.

    Attributes:
        name: the model's.
        tokenizer: see PromptTokenizer.

    Raises:
        OutOfMemory: a sequence does not fit.
    """

    def __init__(self, engine: Engine, *, reuse: bool = True, lanes: int = 1) -> None:
        self.name = engine.model_name
        self.tokenizer = PromptTokenizer(engine.tokenizer, engine.chat_template)
        self._engine = engine
        self._reuse = reuse
        self._session = Session(engine, RULES, canonical=True)
        self._lanes = Lanes(engine, lanes) if reuse and lanes > 1 else None
        self._prompt_tokens = 0

    @property
    def counts(self) -> TokenCounts:
        """Since this was made."""
        in_lanes = 0 if self._lanes is None else self._lanes.read_tokens
        return TokenCounts(self._prompt_tokens, self._session.read_tokens + in_lanes)

    def expect(self, prompts: Sequence[str], another: str, *, at_once: bool = False) -> None:
        """Read what prompts to come have in common, in whatever order and groups they will come.

        Changes no value, only what has to be read.

        Args:
            prompts: one of each question about a state.
            another: the first of them about another state: what it shares with them is read first,
                so that states to come begin behind it.
            at_once: all prompts will come in one call. Then their beginning is only begun to be
                read: who renders and encodes them does so meanwhile.

        Raises:
            InputError: a prompt does not fit the context.
        """
        ids = self._encode(prompts)
        if not self._reuse:
            return
        head = common_prefix([*ids, self.tokenizer.prompt_ids(another)])
        if len(head) >= LEAST_HEAD_TOKENS:
            self._session.read_prefix(head)
        if len(ids) > 1:
            self._session.read_prefix(common_prefix(ids), keeps=not at_once)

    def next_token_logprobs(
        self, prompts: Sequence[str], token_ids: Sequence[Sequence[int]]
    ) -> list[NDArray[np.float64]]:
        """Log-probabilities over the whole vocabulary, as AnyJev's backends give them.

        Args:
            prompts: rendered.
            token_ids: for each prompt the tokens asked for.

        Returns:
            For each prompt one value per token asked for.

        Raises:
            InputError: a prompt does not fit the context.
        """
        ids = self._encode(prompts)
        self._prompt_tokens += sum(map(len, ids))
        groups = _alike(ids)
        if self._lanes is not None and 1 < len(groups) < len(ids):
            rows = [row for found in _side_by_side(self._lanes, groups) for row in found]
        else:
            rows = self._read(ids)
        return [_logprobs(row, labels) for row, labels in zip(rows, token_ids, strict=True)]

    def score_shared(
        self, groups: Sequence[tuple[str, Sequence[str]]], token_ids: Sequence[Sequence[int]]
    ) -> list[list[NDArray[np.float64]]]:
        """The same for prompts given as a beginning and several ends.

        Args:
            groups: beginning and ends of each group; each end makes a prompt of its own.
            token_ids: for each group the tokens asked for.

        Returns:
            For each group and end one value per token asked for.

        Raises:
            InputError: a prompt does not fit the context.
        """
        prompts = [[prefix + suffix for suffix in suffixes] for prefix, suffixes in groups]
        if self._lanes is not None and len(groups) > 1:
            encoded = [self._encode(group) for group in prompts]
            self._prompt_tokens += sum(len(ids) for group in encoded for ids in group)
            return [
                [_logprobs(row, labels) for row in rows]
                for rows, labels in zip(_side_by_side(self._lanes, encoded), token_ids, strict=True)
            ]
        if len(prompts) > 1:
            ids = self._encode([prompt for group in prompts for prompt in group])
            if self._reuse:
                self._session.read_prefix(common_prefix(ids))
        return [
            self.next_token_logprobs(group, [labels] * len(group))
            for group, labels in zip(prompts, token_ids, strict=True)
        ]

    def score_paths(self, prompt: str, options: Sequence[str]) -> PathScores:
        """Log-probabilities of whole texts behind one prompt, which is read once.

        Args:
            prompt: rendered.
            options: texts, each another one; all of them known to the tokenizer's protect().

        Raises:
            InputError: the prompt does not fit the context with each text, or merges with one.
        """
        (ids,) = self._encode([prompt])
        paths = ended([tuple(self.tokenizer.continuation(prompt, text)) for text in options])
        self._check_room(len(ids) + max(map(len, paths)) - 1)

        def read(branches: Sequence[TokenPath]) -> list[NDArray[np.float32]]:
            self._prompt_tokens += sum(
                len(branch) * len(ids) + len(branch) * (len(branch) + 1) // 2 or len(ids)
                for branch in branches
            )
            if not self._reuse:
                return [np.stack(self._anew(ids, branch)) for branch in branches]
            if branches[0] == ():
                return [self._session.read(ids).logits[None]]
            suffixes = [list(branch) for branch in branches]
            return self._session.score_suffixes(ids, suffixes, logits="all")

        engine = self._engine
        most_rows = max(1, LOGIT_BYTES // (4 * engine.spec.vocab_size))
        return score_paths(paths, read, most_rows, engine.tokenizer.eos_ids)

    def close(self) -> None:
        """Gives the sequences' memory back. Safe to call twice."""
        self._session.close()
        if self._lanes is not None:
            self._lanes.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _read(self, prompts: Sequence[list[int]]) -> list[NDArray[np.float32]]:
        if not self._reuse:
            return [self._session.read(ids, reuse=False).logits for ids in prompts]
        prefix = common_prefix(prompts)
        return self._session.score_suffixes(prefix, [ids[len(prefix) :] for ids in prompts])

    def _anew(self, ids: list[int], branch: TokenPath) -> list[NDArray[np.float32]]:
        """The rows of a branch behind a prompt, each by a read of its own."""
        stops = range(1, len(branch) + 1) if branch else [0]
        prompts = [[*ids, *branch[:stop]] for stop in stops]
        return [self._session.read(prompt, reuse=False).logits for prompt in prompts]

    def _encode(self, prompts: Sequence[str]) -> list[list[int]]:
        encoded = [self.tokenizer.prompt_ids(prompt) for prompt in prompts]
        self._check_room(max(map(len, encoded), default=0))
        return encoded

    def _check_room(self, longest: int) -> None:
        engine = self._engine
        check_room(longest, engine.context_tokens, engine.spec.context_tokens)


def _side_by_side(
    lanes: Lanes, prompts: Sequence[list[list[int]]]
) -> list[list[NDArray[np.float32]]]:
    """The logits behind groups of prompts, each group about one state."""
    groups = []
    for group in prompts:
        prefix = common_prefix(group)
        groups.append(LaneGroup(prefix, [ids[len(prefix) :] for ids in group]))
    rows = []
    for start in range(0, len(groups), len(lanes)):
        rows += lanes.score(groups[start : start + len(lanes)])
    return rows


def _alike(prompts: Sequence[list[int]]) -> list[list[list[int]]]:
    """Neighbours that share three quarters of their tokens, as orders of one state do."""
    groups: list[list[list[int]]] = []
    for ids in prompts:
        first = groups[-1][0] if groups else []
        if 4 * common_tokens(first, ids) >= 3 * max(len(ids), 1):
            groups[-1].append(ids)
        else:
            groups.append([ids])
    return groups


def _logprobs(row: NDArray[np.float32], labels: Sequence[int]) -> NDArray[np.float64]:
    _, named = next_token_logprobs(row, 0, tuple(labels))
    return np.array([item.logprob for item in named], dtype=np.float64)
