"""What prompts begin with in common, token by token."""

from __future__ import annotations

from collections.abc import Sequence

STEP = 256


def common_tokens(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two sequences begin with in common."""
    one, other = tuple(one), tuple(other)  # a list never equals a tuple
    most, start = min(len(one), len(other)), 0
    if one[:most] == other[:most]:  # nearly always: prompts go on from each other
        return most
    while start < most and one[start : start + STEP] == other[start : start + STEP]:
        start += STEP  # alike, or one ends here; slices are compared much faster than their items
    pairs = zip(one[start : start + STEP], other[start : start + STEP], strict=False)
    return next((start + i for i, (a, b) in enumerate(pairs) if a != b), most)


def common_prefix(prompts: Sequence[list[int]]) -> list[int]:
    """What all prompts begin with, less a last token, so that each has one left to read.

    Args:
        prompts: at least one.
    """
    first, last = min(prompts), max(prompts)  # in order, these two differ first
    return first[: min(common_tokens(first, last), min(map(len, prompts)) - 1)]
