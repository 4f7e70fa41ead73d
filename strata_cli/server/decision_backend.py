"""A Decider's reads, made by the engine's process; the tokens are counted and compared here.

One request to the engine has all prompts that are wanted at a time: what they begin with, and their
ends. Every value is a canonical read's, so it has the bits of EngineBackend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from strata_cli.decisions.paths import END, PathScores, branching, ended, step, sum_paths
from strata_cli.decisions.prompts import PromptTokenizer
from strata_cli.decisions.reads import TokenCounts, check_room
from strata_cli.engine.model.prefixes import common_prefix, common_tokens
from strata_cli.errors import InputError
from strata_cli.server.protocol import ModelFacts, Score, Scores
from strata_cli.server.texts import ModelTexts

Ids: TypeAlias = list[int]
Row: TypeAlias = tuple[float, ...]

MOST_TOKENS = 1 << 18
"""Of the ends in one request to the engine, about; more are asked in several."""

MOST_ENDS = 256
"""In one request to the engine, which holds the logits of those that it reads together."""

OWN_TOKENS = 512
"""A group that would read more tokens several times is asked for by itself."""


class ContextError(InputError):
    """A state does not fit the context with a question."""


class Group(NamedTuple):
    """Prompts that begin alike, and the tokens that are wanted behind each of them."""

    prompts: list[Ids]
    labels: Sequence[int]


class DecisionBackend:
    """See decisions.reads.Backend. Used by one thread at a time, inside asking().

    Args:
        texts: of the model.
        facts: of the model.

    Attributes:
        name: the model's.
        tokenizer: see PromptTokenizer.
        counts: since this was made.
        input_tokens: of the request that asking() was entered for: of all prompts about its state,
            what several begin with counted once. Neither what was known before nor reads behind
            states without content matter.
    """

    def __init__(self, texts: ModelTexts, facts: ModelFacts) -> None:
        self.name = texts.name
        self.tokenizer = PromptTokenizer(texts.tokenizer, texts.template)
        self.counts = TokenCounts(0, 0)
        self._facts = facts
        self._state = ""
        self._own: list[Ids] = []
        self._expected: Ids = []
        self._is_held = False
        self._ask: Callable[[Score], Scores] | None = None

    @property
    def input_tokens(self) -> int:
        """See the class."""
        prompts = sorted(self._own)
        shared = sum(common_tokens(one, other) for one, other in pairwise(prompts))
        return sum(map(len, prompts)) - shared

    @contextmanager
    def asking(self, state: str, ask: Callable[[Score], Scores]) -> Iterator[None]:
        """Inside, questions about a state may be asked.

        Args:
            state: as the Decider gets it.
            ask: gets scores from the engine.
        """
        self._state, self._ask, self._own = state, ask, []
        self._expected, self._is_held = [], False
        try:
            yield
        finally:
            self._ask = None

    def expect(
        self,
        prompts: Sequence[str],
        another: str,  # noqa: ARG002 what other states share is not known here
        *,
        at_once: bool = False,  # noqa: ARG002 nothing is begun here
    ) -> None:
        """See EngineBackend. Nothing is read yet."""
        ids = self._encode(prompts)
        self._expected = common_prefix(ids) if len(ids) > 1 else []
        self._is_held = False

    def next_token_logprobs(
        self, prompts: Sequence[str], token_ids: Sequence[Sequence[int]]
    ) -> list[NDArray[np.float64]]:
        """See EngineBackend."""
        ids = self._encode(prompts)
        groups = [Group([one], labels) for one, labels in zip(ids, token_ids, strict=True)]
        return [rows[0] for rows in self._read(groups)]

    def score_shared(
        self, groups: Sequence[tuple[str, Sequence[str]]], token_ids: Sequence[Sequence[int]]
    ) -> list[list[NDArray[np.float64]]]:
        """See EngineBackend."""
        return self._read(
            [
                Group(self._encode([prefix + suffix for suffix in suffixes]), labels)
                for (prefix, suffixes), labels in zip(groups, token_ids, strict=True)
            ]
        )

    def score_paths(self, prompt: str, options: Sequence[str]) -> PathScores:
        """See EngineBackend. Asks for each node of the trie as an end of the prompt."""
        (ids,) = self._encode([prompt])
        paths = ended([tuple(self.tokenizer.continuation(prompt, text)) for text in options])
        self._check_room(len(ids) + max(map(len, paths)) - 1)
        self._hold()
        followers = branching(paths)
        end_ids = self._facts.eos_ids
        wanted = [
            [*dict.fromkeys(one for token in tokens for one in ends_of(token, end_ids))]
            for tokens in followers.values()
        ]
        prompts = [[*ids, *node] for node in followers]
        rows = self._score(ids[:-1], prompts, wanted)
        steps = {}
        for (node, tokens), labels, row in zip(followers.items(), wanted, rows, strict=True):
            known = dict(zip(labels, row, strict=True))
            steps[node] = {token: step(known.__getitem__, token, end_ids) for token in tokens}
        return sum_paths(paths, steps)

    def close(self) -> None:
        """Nothing is held here."""

    def _read(self, groups: Sequence[Group]) -> list[list[NDArray[np.float64]]]:
        prefix = self._prefix([prompt for group in groups for prompt in group.prompts])
        own = {number for number, group in enumerate(groups) if _reads_again(group, len(prefix))}
        together = [group for number, group in enumerate(groups) if number not in own]
        found: dict[int, list[Row]] = {}
        if together:
            prompts = [prompt for group in together for prompt in group.prompts]
            labels = [group.labels for group in together for _ in group.prompts]
            rows = iter(self._score(prefix, prompts, labels))
            for number, group in enumerate(groups):
                if number not in own:
                    found[number] = [next(rows) for _ in group.prompts]
        elif len(own) > 1:
            self._hold()
        for number in sorted(own):
            group = groups[number]
            labels = [group.labels] * len(group.prompts)
            found[number] = self._score(common_prefix(group.prompts), group.prompts, labels)
        return [[np.array(row) for row in found[number]] for number in range(len(groups))]

    def _prefix(self, prompts: Sequence[Ids]) -> Ids:
        """What the prompts begin with, up to where others to come part from them."""
        length = len(self._expected)
        if length and all(one[:length] == self._expected and one[length:] for one in prompts):
            return self._expected
        return common_prefix(prompts)

    def _hold(self) -> None:
        """Have what is expected read, for prompts that are asked for one by one."""
        if self._expected and not self._is_held:
            self._score(self._expected, [], [])

    def _score(
        self, prefix: Ids, prompts: Sequence[Ids], labels: Sequence[Sequence[int]]
    ) -> list[Row]:
        """The log-probabilities of each prompt's labels."""
        assert self._ask is not None
        ends = [tuple(prompt[len(prefix) :]) for prompt in prompts]
        rows: list[Row] = []
        for part in _parts([len(end) for end in ends]):
            found = self._ask(
                Score(
                    prefix=tuple(prefix),
                    suffixes=tuple(ends[part]),
                    ids=tuple(tuple(wanted) for wanted in labels[part]),
                    canonical=True,
                )
            )
            rows += found.rows
            prompt_tokens, read_tokens = self.counts
            self.counts = TokenCounts(
                prompt_tokens + found.prompt_tokens, read_tokens + found.read_tokens
            )
        self._is_held = self._is_held or prefix == self._expected
        return rows

    def _encode(self, prompts: Sequence[str]) -> list[Ids]:
        mark = f"State:\n{self.tokenizer.shown(self._state)}\n\nQuestion: "
        encoded = [self.tokenizer.prompt_ids(prompt) for prompt in prompts]
        self._check_room(max(map(len, encoded), default=0))
        self._own += [ids for prompt, ids in zip(prompts, encoded, strict=True) if mark in prompt]
        return encoded

    def _check_room(self, longest: int) -> None:
        facts = self._facts
        check_room(longest, facts.context_tokens, facts.model_context_tokens, ContextError)


def ends_of(token: int, end_ids: Sequence[int]) -> Sequence[int]:
    """The tokens that a path's next token stands for."""
    return end_ids if token == END else (token,)


def _reads_again(group: Group, shared_tokens: int) -> bool:
    """Whether too much is read for each prompt of a group that all of them begin with."""
    again = len(common_prefix(group.prompts)) - shared_tokens
    return again * (len(group.prompts) - 1) > OWN_TOKENS


def _parts(lengths: Sequence[int]) -> Iterator[slice]:
    """Consecutive ends that are asked for at once; no ends are one part."""
    start, tokens = 0, 0
    for number, length in enumerate(lengths):
        is_full = tokens + length > MOST_TOKENS or number - start >= MOST_ENDS
        if number > start and is_full:
            yield slice(start, number)
            start, tokens = number, 0
        tokens += length
    yield slice(start, len(lengths))
