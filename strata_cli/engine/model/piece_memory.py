"""Token ids of long texts that begin alike: what they share is split into tokens once.

A text may be cut where a line begins with something else than a space: no rule for splitting text
reaches over that place. That the rules of the model at hand do not is checked on the text that is
remembered, whose rest must have the same tokens by itself.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from typing import NamedTuple

import tokenizers

LEAST_SHARED = 256
"""Characters; fewer are not worth a comparison."""

MOST_KEPT = 4


class _Known(NamedTuple):
    """A text, its tokens, and the character that each of them begins with."""

    text: str
    ids: list[int]
    starts: list[int]


class PieceMemory:
    """Encodes pieces of plain text, remembering a few long ones. For one thread.

    Args:
        bpe: splits and merges.
    """

    def __init__(self, bpe: tokenizers.Tokenizer) -> None:
        self._bpe = bpe
        self._known: deque[_Known] = deque(maxlen=MOST_KEPT)

    def ids(self, text: str) -> list[int]:
        """The token ids that the text would have without any memory."""
        if len(text) < LEAST_SHARED:
            return self._fresh(text)
        known, shared = None, LEAST_SHARED - 1
        for one in self._known:
            length = common_characters(one.text, text)
            if length > shared:
                known, shared = one, length
        if known is not None and shared == len(text) == len(known.text):
            return list(known.ids)
        if known is not None and (place := self._cut(known, shared)) is not None:
            return known.ids[: place.token] + self._fresh(text[place.character :])
        encoding = self._bpe.encode(text, add_special_tokens=False)
        starts = [start for start, _ in encoding.offsets]
        self._known.append(_Known(text, list(encoding.ids), starts))
        return list(encoding.ids)

    def _cut(self, known: _Known, shared: int) -> _Place | None:
        """The last place among the shared characters where both texts may be cut."""
        text = known.text
        character = text.rfind("\n", 0, max(shared - 2, 0)) + 1
        if not character or text[character].isspace():
            return None
        token = bisect_left(known.starts, character)
        is_cut = known.starts[token : token + 1] == [character]
        if is_cut and self._fresh(text[character:]) == known.ids[token:]:
            return _Place(character, token)
        return None

    def _fresh(self, text: str) -> list[int]:
        return list(self._bpe.encode(text, add_special_tokens=False).ids)


class _Place(NamedTuple):
    """A character that begins a line, and the token that begins with it."""

    character: int
    token: int


def common_characters(one: str, other: str) -> int:
    """How many characters two texts begin with in common."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one.startswith(other[low:middle], low):
            low = middle
        else:
            high = middle - 1
    return low
