"""Attention over a float32 cache on a GPU: the form before attention.cu, until that is proven.

Many tokens: a thread block takes all positions of two tokens and the query heads that share a key
head. Few tokens: it takes one unit of a token's positions, so that they fill the GPU, and a second
launch joins the units in order.
"""

from __future__ import annotations

from dataclasses import dataclass

from strata_cli.engine.device.base import Launch, Tensor
from strata_cli.engine.kernels.shapes import blocks

SOURCE = "attention_lists.cu"
THREADS = 256  # per block
PART_POSITIONS = 64  # added up before they join those before
FEW_TOKENS = 16  # at most so many are cut into units
TOKENS_TOGETHER = 2  # share a thread block where they are not few
TILE_ROWS = 16  # (token, query head) pairs that a tensor core takes together
MOST_ROWS = 32  # that a thread block takes


@dataclass(frozen=True, slots=True)
class ListsPlan:
    """The launches of one call; the attributes are extents of attend's arguments."""

    num_tokens: int
    num_heads: int
    num_kv_heads: int
    dim: int
    budget: int
    unit_parts: int  # parts that are joined before they join the whole
    num_units: int  # units that the longest list of positions can have

    @classmethod
    def of(cls, q: Tensor, keys: Tensor, budget: int, ratio: int) -> ListsPlan:
        """The plan for queries [T, H, dim] over a cache [context, KV * dim]."""
        (num_tokens, num_heads, dim), (context, width) = q.shape, keys.shape
        parts = 1 if ratio else 16
        most = min(context, budget * ratio + ratio - 1) if ratio else context
        units = blocks(most, PART_POSITIONS * parts)
        return cls(num_tokens, num_heads, width // dim, dim, budget, parts, units)

    def is_cut(self, scratch_floats: int) -> bool:
        """Whether tokens are cut into units: they are few, and the scratch holds their sums."""
        rows = self.num_tokens * self.num_units * self.num_heads
        return self.num_tokens <= FEW_TOKENS and rows * (self.dim + 2) <= scratch_floats

    @property
    def padded_dim(self) -> int:
        """Columns of a head as tiles hold them."""
        return next(n for n in (32, 64, 128, 256) if n >= self.dim)

    @property
    def _heads(self) -> int:
        return min(self.num_heads // self.num_kv_heads, MOST_ROWS)

    @property
    def _groups(self) -> int:
        return self.num_kv_heads * blocks(self.num_heads // self.num_kv_heads, self._heads)

    @property
    def whole_tiles(self) -> int:
        """Tiles of a thread block that takes all positions."""
        return MOST_ROWS // TILE_ROWS

    @property
    def unit_tiles(self) -> int:
        """Tiles of a thread block that takes one unit of one token."""
        return blocks(self._heads, TILE_ROWS)

    @property
    def whole(self) -> Launch:
        """All positions of each token."""
        grid = (self._groups, blocks(self.num_tokens, TOKENS_TOGETHER), 1)
        return self._launch(grid, self.whole_tiles)

    @property
    def units(self) -> Launch:
        """One unit per thread block."""
        return self._launch((self.num_units, self._groups, self.num_tokens), self.unit_tiles)

    @property
    def join(self) -> Launch:
        """All units of each token and head."""
        return Launch(
            items=1,
            grid=(self.num_heads, self.num_tokens, 1),
            block=(self.padded_dim, 1, 1),
            extents=(self.num_tokens, self.num_heads, self.dim, self.budget, self.num_units),
            early=True,
        )

    def _launch(self, grid: tuple[int, int, int], tiles: int) -> Launch:
        rows, kv = TILE_ROWS * tiles, self.num_kv_heads
        shared_bytes = (
            2 * (PART_POSITIONS + rows) * self.padded_dim  # K or V of a part, queries
            + 2 * rows * PART_POSITIONS  # weights
            + 4 * rows * (THREADS // 32 + 3)  # scores and scales
            + 4 * PART_POSITIONS  # where positions lie
        )
        return Launch(
            items=1,
            grid=grid,
            block=(THREADS, 1, 1),
            shared_bytes=shared_bytes,
            extents=(self.num_tokens, self.num_heads, kv, self.dim, self.budget, self._heads),
            early=True,
        )
