"""How thread blocks of a GPU share a call of attention. Nothing here changes a bit of its result.

Many tokens: a thread block takes all positions of two tokens and the query heads that share a key
head. Few tokens: it takes one unit of a token's positions, so that they fill the GPU, and a second
launch joins the units in order.
"""

from __future__ import annotations

from dataclasses import dataclass

from strata_cli.engine.device.base import Launch, Tensor
from strata_cli.engine.kernels.shapes import blocks
from strata_cli.errors import ShapeError

THREADS = 256  # per block
PART_POSITIONS = 64  # added up before they join those before
FEW_TOKENS = 16  # at most so many are cut into units
TOKENS_TOGETHER = 2  # share a thread block where they are not few
TILE_ROWS = 16  # (token, query head) pairs that a tensor core takes together
MOST_ROWS = 32  # that a thread block takes


def attend_scratch_floats(
    num_tokens: int, num_heads: int, dim: int, context: int, budget: int, ratio: int
) -> int:
    """Floats of scratch with which attend spreads few tokens over a whole GPU.

    Args:
        num_tokens: most tokens of a call.
        num_heads: H.
        dim: head width.
        context: positions of the cache.
        budget: blocks that a token may select.
        ratio: positions per block, 0 for dense attention.
    """
    units = _num_units(context, budget, ratio)
    return min(num_tokens, FEW_TOKENS) * units * num_heads * (dim + 2)


def _unit_parts(ratio: int) -> int:
    """Parts that are joined before they join the whole; many where any number may come."""
    return 1 if ratio else 16


def _num_units(context: int, budget: int, ratio: int) -> int:
    most = min(context, budget * ratio + ratio - 1) if ratio else context
    return blocks(most, PART_POSITIONS * _unit_parts(ratio))


@dataclass(frozen=True, slots=True)
class AttendPlan:
    """The launches of one call.

    Attributes:
        num_tokens, num_heads, num_kv_heads, dim, budget: extents of attend's arguments.
        unit_parts: parts that are joined before they join the whole.
        num_units: units that the longest list of positions can have.
        items, grain: how the host cuts the call.
    """

    num_tokens: int
    num_heads: int
    num_kv_heads: int
    dim: int
    budget: int
    unit_parts: int
    num_units: int
    items: int
    grain: int

    @classmethod
    def of(
        cls, q: Tensor, keys: Tensor, budget: int, ratio: int, items: int, grain: int
    ) -> AttendPlan:
        """The plan for queries [T, H, dim] over a cache [context, KV * dim].

        Raises:
            ShapeError: the heads are wider than a thread block can hold.
        """
        (num_tokens, num_heads, dim), (context, width) = q.shape, keys.shape
        if dim > 256:
            raise ShapeError(f"attend: heads of {dim} columns, at most 256 fit")
        units = _num_units(context, budget, ratio)
        kv, parts = width // dim, _unit_parts(ratio)
        return cls(num_tokens, num_heads, kv, dim, budget, parts, units, items, grain)

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
        """Query heads of one thread block, of those that share a key head."""
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
        """All units of each token and head; nothing on the host, which does not cut."""
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
            items=self.items,
            grain=self.grain,
            grid=grid,
            block=(THREADS, 1, 1),
            shared_bytes=shared_bytes,
            extents=(self.num_tokens, self.num_heads, kv, self.dim, self.budget, self._heads),
            early=True,
        )
