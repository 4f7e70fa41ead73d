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

from strata_cli.engine.kernels.head import log_softmax_row
from strata_cli.engine.prefill.branches import plan_batches

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


def score_paths(
    paths: Sequence[TokenPath],
    read: Callable[[Sequence[TokenPath]], Sequence[NDArray[np.float32]]],
    most_rows: int,
    end_ids: Collection[int],
) -> PathScores:
    """Sum the log-probabilities along each path.

    Args:
        paths: from ended(); each at least one token.
        read: gives for each of some branches the logits [its tokens, V] behind its tokens; () comes
            first and by itself, for those [1, V] behind the prompt.
        most_rows: rows to ask for at once; a longer branch comes by itself.
        end_ids: tokens that end an answer.
    """
    followers = branching(paths)
    steps = dict[TokenPath, Mapping[int, float]]()

    def keep(node: TokenPath, logits: NDArray[np.float32]) -> None:
        if node not in steps:
            logprobs = log_softmax_row(logits)
            steps[node] = {token: _step(logprobs, token, end_ids) for token in followers[node]}

    keep((), read([()])[0][0])
    branches = branches_of(followers)
    for part in plan_batches([len(branch) for branch in branches], most_rows):
        some = [branches[index] for index in part]
        for branch, rows in zip(some, read(some), strict=True):
            for stop, row in enumerate(rows, 1):
                keep(branch[:stop], row)
    scores = [
        math.fsum(steps[path[:stop]][token] for stop, token in enumerate(path)) for path in paths
    ]
    with_end = paths[0][-1] == END
    return PathScores(tuple(scores), tuple(len(path) - with_end for path in paths), with_end)


def _step(logprobs: NDArray[np.float32], token: int, end_ids: Collection[int]) -> float:
    if token != END:
        return float(logprobs[token])
    ends = [float(logprobs[end]) for end in sorted(end_ids)]
    return max(ends) + math.log(math.fsum(math.exp(one - max(ends)) for one in ends))
