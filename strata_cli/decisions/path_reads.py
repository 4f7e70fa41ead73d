"""Reads the trie of paths behind a prompt in this process, branch by branch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from strata_cli.decisions.paths import (
    PathScores,
    TokenPath,
    branches_of,
    branching,
    step,
    sum_paths,
)
from strata_cli.engine.kernels.head import log_softmax_row
from strata_cli.engine.prefill.branches import plan_batches


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

            def logprob_of(token: int) -> float:
                return float(logprobs[token])

            steps[node] = {token: step(logprob_of, token, end_ids) for token in followers[node]}

    keep((), read([()])[0][0])
    branches = branches_of(followers)
    for part in plan_batches([len(branch) for branch in branches], most_rows):
        some = [branches[index] for index in part]
        for branch, rows in zip(some, read(some), strict=True):
            for stop, row in enumerate(rows, 1):
                keep(branch[:stop], row)
    return sum_paths(paths, steps)
