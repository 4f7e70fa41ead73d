"""Options scored by their own text: each is a path of tokens behind one prompt.

The score of an option is the sum of the log-probabilities of its tokens, each given those before
it: the probability that the model writes exactly this text next. No score is divided by a length,
so of two options that suit the model equally the one of fewer tokens is likelier. Where an option's
tokens begin another's, the shorter one would hold the longer one's probability as well; then, and
only then, every option of the question ends with the token that ends an answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

TokenPath: TypeAlias = tuple[int, ...]

END = -1
"""Stands at the end of a path for any token that ends an answer."""

PATH_SYSTEM = (
    "You are a decision function. You will be given a state and one question. Reply with one of "
    "the options, word for word: no other words, no punctuation, no explanation."
)


class PathPrompt(NamedTuple):
    """System and user text of a question whose options are read by their text."""

    system: str
    user: str


@dataclass(frozen=True, slots=True)
class PathScores:
    """What the model thinks of each path.

    Attributes:
        scores: natural-log probability of each whole path.
        num_tokens: of each option's text.
        with_end: whether the paths end with the end of the answer.
    """

    scores: tuple[float, ...]
    num_tokens: tuple[int, ...]
    with_end: bool

    @property
    def mass(self) -> float:
        """Probability of all paths together."""
        return math.fsum(math.exp(score) for score in self.scores)

    @property
    def probabilities(self) -> NDArray[np.float64]:
        """Of each path among them, [K]; they sum to 1."""
        best = max(self.scores)
        weights = [math.exp(score - best) for score in self.scores]
        total = math.fsum(weights)
        return np.array([weight / total for weight in weights], dtype=np.float64)


def path_prompt(state: str, text: str, options: Sequence[str]) -> PathPrompt:
    """Word a question; options are listed once, in the order given."""
    lines = "\n".join(f"- {option}" for option in options)
    user = (
        f"State:\n{state}\n\nQuestion: {text}\nOptions:\n{lines}\n"
        "Answer with the text of one option only."
    )
    return PathPrompt(PATH_SYSTEM, user)


def ended(paths: Sequence[TokenPath]) -> list[TokenPath]:
    """The paths as they are scored: each with an END if one of them begins another."""
    begun = {path[:stop] for path in paths for stop in range(1, len(path))}
    if not begun.intersection(paths):
        return list(paths)
    return [(*path, END) for path in paths]


def branching(paths: Sequence[TokenPath]) -> dict[TokenPath, list[int]]:
    """The trie of paths: for each beginning that goes on, the root () first, its next tokens."""
    followers: dict[TokenPath, dict[int, None]] = {(): {}}
    for path in paths:
        for stop, token in enumerate(path):
            followers.setdefault(path[:stop], {})[token] = None
    return {node: list(tokens) for node, tokens in followers.items()}


def branches_of(nodes: Collection[TokenPath]) -> list[TokenPath]:
    """The nodes of a trie that begin no other: reading these reads all of them."""
    begun = {node[:stop] for node in nodes for stop in range(len(node))}
    return [node for node in nodes if node and node not in begun]


def step(logprob_of: Callable[[int], float], token: int, end_ids: Collection[int]) -> float:
    """Log-probability of a path's next token; of END, that of all tokens that end an answer.

    Args:
        logprob_of: the log-probability of any token at this place.
        token: a token, or END.
        end_ids: tokens that end an answer.
    """
    if token != END:
        return logprob_of(token)
    ends = [logprob_of(end) for end in sorted(end_ids)]
    return max(ends) + math.log(math.fsum(math.exp(one - max(ends)) for one in ends))


def sum_paths(
    paths: Sequence[TokenPath], steps: Mapping[TokenPath, Mapping[int, float]]
) -> PathScores:
    """Sum the log-probabilities along each path.

    Args:
        paths: from ended(); each at least one token.
        steps: for each node of their trie, those of its next tokens; see step().
    """
    scores = [
        math.fsum(steps[path[:stop]][token] for stop, token in enumerate(path)) for path in paths
    ]
    with_end = paths[0][-1] == END
    return PathScores(tuple(scores), tuple(len(path) - with_end for path in paths), with_end)
