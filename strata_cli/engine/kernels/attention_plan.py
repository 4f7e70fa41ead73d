"""How thread blocks of a GPU share a call of attention. Nothing here changes a bit of its result.

Many tokens: a thread block takes all positions of a tile of tokens, with the query heads that share
a key head. Where tiles are too few to fill the GPU, it takes one unit of a tile's positions; of few
tokens, one part of one token's. A second launch then joins the units or parts in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from strata_cli.engine.device.base import Launch, Tensor
from strata_cli.engine.kernels.shapes import blocks
from strata_cli.errors import ShapeError

PART_POSITIONS = 64  # added up before they join those before
UNIT_PARTS = 16
FEW_TOKENS = 16  # at most so many go by parts, whatever the context
FEW_PARTS = 1024  # or tokens that have at most so many parts together
ENOUGH_BLOCKS = 132  # fill a large GPU
TILE_ROWS = 16  # (token, query head) pairs that a warp takes
MOST_TOKENS = 32  # of a tile
PART_THREADS = 256  # of a block that takes one part
MOST_PARTS = 16  # that a block takes one after the other
JOIN_THREADS = 64


class Tile(NamedTuple):
    """A thread block: warps, and how K and V of the cache's parts lie in its shared memory.

    Attributes:
        warps: of 16 rows each.
        stages: 2, the copies of a part overlap the products of the one before; 1; or 0, K and V
            take turns in one place.
    """

    warps: int
    stages: int

    def shared_bytes(self, padded_dim: int) -> int:
        """Of a block with heads so wide."""
        buffers = 2 * self.stages or 1
        rows = buffers * PART_POSITIONS + TILE_ROWS * self.warps
        words = (MOST_TOKENS + 1) * 2 * UNIT_PARTS + UNIT_PARTS + 1
        return -(-(2 * padded_dim * rows + 4 * words) // 16) * 16


TILES = (Tile(8, 2), Tile(4, 1), Tile(2, 0))  # the first that fits a GPU


@cache
def _padded(dim: int) -> int:
    return next(n for n in (32, 64, 128, 256) if n >= dim)


@cache
def _tile_of(padded_dim: int, shared_bytes: int) -> Tile:
    sizes = [tile for tile in TILES if tile.shared_bytes(padded_dim) <= shared_bytes]
    return sizes[0] if sizes else TILES[-1]


def part_shared_bytes(padded_dim: int, stages: int) -> int:
    """Shared memory of a block that takes one part."""
    tiles = 2 * padded_dim * ((stages + 1) * PART_POSITIONS + TILE_ROWS)
    weights = 2 * TILE_ROWS * PART_POSITIONS
    warps = PART_THREADS // 32
    words = warps * TILE_ROWS + 3 * MOST_PARTS + warps + 1
    return -(-(tiles + weights + 4 * words) // 16) * 16


def most_parts(context: int, budget: int, ratio: int) -> int:
    """Parts that a token's positions can touch."""
    if ratio == 0:
        return blocks(context, PART_POSITIONS)
    per_block = 1 if PART_POSITIONS % ratio == 0 else blocks(ratio - 1, PART_POSITIONS) + 1
    return min(blocks(context, PART_POSITIONS), (budget + 1) * per_block)


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
    parts = most_parts(context, budget, ratio)
    return min(num_tokens, FEW_TOKENS) * _floats_by_parts(parts, num_heads, dim)


def _floats_by_parts(parts: int, num_heads: int, dim: int) -> int:
    """Of one token: sums, two numbers for each of them, a number for each part, and the count."""
    return parts * (num_heads * (dim + 2) + 1) + 1


class Step(NamedTuple):
    """Launches for some of the tokens: first .. last of the call."""

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class AttendPlan:
    """The launches of one call.

    Attributes:
        num_heads, num_kv_heads, dim, budget, ratio: extents of attend's arguments.
        context: positions of the cache.
        num_tokens: of the call.
        shared_bytes: that a thread block may use.
        scratch_floats: there are.
    """

    num_tokens: int
    num_heads: int
    num_kv_heads: int
    dim: int
    context: int
    budget: int
    ratio: int
    shared_bytes: int
    scratch_floats: int

    @classmethod
    def of(
        cls, q: Tensor, keys: Tensor, budget: int, ratio: int, shared_bytes: int, sums: Tensor
    ) -> AttendPlan:
        """The plan for queries [T, H, dim] over a cache [context, KV * dim].

        Raises:
            ShapeError: the heads are wider than a thread block can hold.
        """
        (num_tokens, num_heads, dim), (context, width) = q.shape, keys.shape
        if dim > 256:
            raise ShapeError(f"attend: heads of {dim} columns, at most 256 fit")
        kv = width // dim
        return cls(num_tokens, num_heads, kv, dim, context, budget, ratio, shared_bytes, sums.size)

    @property
    def padded_dim(self) -> int:
        """Columns of a head as tiles hold them."""
        return _padded(self.dim)

    @property
    def tile(self) -> Tile:
        """Of a thread block of many tokens."""
        return _tile_of(self.padded_dim, self.shared_bytes)

    @property
    def part_stages(self) -> int:
        """1 where K and V of a part fit side by side, else 0."""
        return int(part_shared_bytes(self.padded_dim, 1) <= self.shared_bytes)

    @property
    def is_by_parts(self) -> bool:
        """Whether tokens are few, and the scratch holds the sums of one; or their parts are few."""
        if self.num_tokens <= FEW_TOKENS:
            return self._tokens_by_parts > 0
        is_short = self.num_tokens * self._most_parts <= FEW_PARTS
        return is_short and self._tokens_by_parts >= self.num_tokens

    @property
    def is_by_units(self) -> bool:
        """Whether tiles leave much of the GPU idle, and the scratch holds the sums of one."""
        is_long = self._num_units > 1 and self._tokens_by_units >= self._tile_tokens
        return is_long and self._groups(self._tile_heads) * self._num_tiles < ENOUGH_BLOCKS

    def steps(self) -> list[Step]:
        """Tokens that fit the scratch together."""
        at_once = self.num_tokens
        if self.is_by_parts:
            at_once = self._tokens_by_parts
        elif self.is_by_units:
            at_once = self._tokens_by_units // self._tile_tokens * self._tile_tokens
        firsts = range(0, self.num_tokens, at_once)
        return [Step(first, min(first + at_once, self.num_tokens)) for first in firsts]

    def whole(self, items: int, grain: int) -> Launch:
        """All positions of each token; items and grain are the host's."""
        return self._tiles(self.num_tokens, units=1, items=items, grain=grain)

    def units(self, step: Step) -> Launch:
        """One unit of a tile per thread block."""
        return self._tiles(step.last - step.first, self._num_units, items=1, grain=1)

    def num_tile_blocks(self, counts: Sequence[int]) -> int:
        """Thread blocks that take whole tiles of segments of so many tokens."""
        tiles = sum(blocks(count, self._tile_tokens) for count in counts)
        return self._groups(self._tile_heads) * tiles

    def segments(self, counts: Sequence[int]) -> Launch:
        """All positions of each token, segments of so many tokens side by side."""
        return Launch(
            items=1,
            grid=(
                self._groups(self._tile_heads),
                blocks(max(counts), self._tile_tokens),
                len(counts),
            ),
            block=(32 * self.tile.warps, 1, 1),
            shared_bytes=self.tile.shared_bytes(self.padded_dim),
            extents=(*self._extents(self._tile_heads), self._tile_tokens),
            early=True,
        )

    def parts(self, step: Step) -> Launch:
        """Few parts of a token per thread block."""
        tokens, heads = step.last - step.first, min(self._group, TILE_ROWS)
        groups, parts = self._groups(heads), self._most_parts
        wanted = blocks(2 * ENOUGH_BLOCKS, groups * tokens)
        per_token = min(parts, max(wanted, blocks(parts, MOST_PARTS)))
        return Launch(
            items=1,
            grid=(per_token, groups, tokens),
            block=(PART_THREADS, 1, 1),
            shared_bytes=part_shared_bytes(self.padded_dim, self.part_stages),
            extents=(tokens, *self._extents(heads), parts),
            early=True,
        )

    def join(self, step: Step) -> Launch:
        """All parts or units of each token and head."""
        tokens = step.last - step.first
        pieces = self._most_parts if self.is_by_parts else self._num_units
        return Launch(
            items=1,
            grid=(self.num_heads, blocks(self.dim, JOIN_THREADS), tokens),
            block=(JOIN_THREADS, 1, 1),
            extents=(tokens, self.num_heads, self.dim, pieces),
            early=True,
        )

    def _tiles(self, tokens: int, units: int, items: int, grain: int) -> Launch:
        per_tile = self._tile_tokens
        return Launch(
            items=items,
            grain=grain,
            grid=(self._groups(self._tile_heads), blocks(tokens, per_tile), units),
            block=(32 * self.tile.warps, 1, 1),
            shared_bytes=self.tile.shared_bytes(self.padded_dim),
            extents=(tokens, *self._extents(self._tile_heads), per_tile),
            early=True,
        )

    def _extents(self, heads: int) -> tuple[int, ...]:
        return (self.num_heads, self.num_kv_heads, self.dim, self.budget, heads)

    @property
    def _group(self) -> int:
        """Query heads that share a key head."""
        return self.num_heads // self.num_kv_heads

    def _groups(self, heads: int) -> int:
        return self.num_kv_heads * blocks(self._group, heads)

    @property
    def _tile_heads(self) -> int:
        return min(self._group, TILE_ROWS * self.tile.warps)

    @property
    def _tile_tokens(self) -> int:
        return min(TILE_ROWS * self.tile.warps // self._tile_heads, MOST_TOKENS)

    @property
    def _num_tiles(self) -> int:
        return blocks(self.num_tokens, self._tile_tokens)

    @property
    def _num_units(self) -> int:
        return blocks(self.context, PART_POSITIONS * UNIT_PARTS)

    @property
    def _most_parts(self) -> int:
        return most_parts(self.context, self.budget, self.ratio)

    @property
    def _tokens_by_parts(self) -> int:
        """Tokens whose parts the scratch holds."""
        return self.scratch_floats // _floats_by_parts(self._most_parts, self.num_heads, self.dim)

    @property
    def _tokens_by_units(self) -> int:
        """Tokens whose units the scratch holds."""
        return self.scratch_floats // (self._num_units * self.num_heads * (self.dim + 2))
