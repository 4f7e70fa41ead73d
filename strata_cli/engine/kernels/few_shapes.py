"""How matrices fit the blocks of matmul_few.cu: tiles, rows in slots, teams of warps, blocks.

Nothing here decides bits. The layout of shared memory is stated in few_block.cuh.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from strata_cli.engine.kernels.gpu import Gpu
from strata_cli.engine.kernels.products import Matrix, code_book, slice_cols
from strata_cli.engine.kernels.shapes import blocks
from strata_cli.engine.model.quants import BLOCK, QuantType
from strata_cli.errors import DeviceError

FEW_COLUMNS = 8  # activation rows that a block takes at a time
MOST_SLOTS = 24
BOOK_BYTES = 16 << 10  # a code book, several times over
WIDE_BOOK_BYTES = 32 << 10  # one of f16
WIDE_BOOKS = (QuantType.IQ3_XXS, QuantType.IQ3_S)
LINE_BYTES = 128
BANKS = 32
SLOT_BYTES = 16 + 4 * 17  # of a slot: its gates, what it holds
SUMS_BYTES = 12 << 10  # of the sums of tiles that a block adds up at once
LIGHT_TILE_BYTES = 24 << 10
FLOAT_TILE_BYTES = 44 << 10
HEAVY_TILE_BYTES = 60 << 10  # by half where that fills idle multiprocessors
PAIR_BLOCK_BYTES = 112 << 10  # two of these fit a multiprocessor
WIDE_BLOCK_BYTES = 192 << 10  # of the usual one of a multiprocessor: never two, and much on its way
RESERVED_BYTES = 1 << 10
USUAL_WARPS = 20  # that multiply in a block; measured
PAIR_WARPS = 12  # the same of two blocks of a multiprocessor


class Way(NamedTuple):
    """What may be chosen for speed alone; zeros stand for the usual.

    Attributes:
        rows: weight rows of a tile, 8 or 16.
        warps: most that multiply in a block, up to 20.
        resident: blocks of a multiprocessor.
        shared_bytes: what a block should take.
        slots: most stages of a team that are in shared memory or on their way.
        defines: macros, for experiments.
    """

    rows: int = 0
    warps: int = 0
    resident: int = 0
    shared_bytes: int = 0
    slots: int = MOST_SLOTS
    defines: tuple[str, ...] = ()


class Kind(NamedTuple):
    """Matrices of a launch that are compiled for alike."""

    qtype: QuantType
    lane: int
    align: int

    @property
    def template(self) -> str:
        """Arguments of Kind in few_work.cuh."""
        return f"{self.qtype.name}, {self.lane}, {self.align}"


class Cut(NamedTuple):
    """How the rows of a kind go into slots; fields as in matmul_few.cu."""

    slice_weights: int
    slices: int
    part_slices: int
    tile_rows: int
    span_shift: int
    chunks: int
    slot_chunks: int


def _main(matrices: tuple[Matrix, ...]) -> Matrix:
    """The one of most bytes."""
    return max(matrices, key=lambda m: m.rows * m.bytes_of(m.cols))


def _is_float(matrices: tuple[Matrix, ...]) -> bool:
    return BLOCK[_main(matrices).qtype].weights == 1


def _halves(
    matrices: tuple[Matrix, ...], rows: int, tokens: int, segments: int, multiprocessors: int
) -> bool:
    """Whether tiles are cut in half.

    Where that leaves most multiprocessors idle and a tile is heavy; and for one token, whose slices
    of half a tile are multiplied together, where multiprocessors then have more even shares.
    """
    main = _main(matrices)
    tiles = blocks(main.rows, rows)
    if tiles <= multiprocessors // 2 and rows * main.bytes_of(main.cols) > HEAVY_TILE_BYTES:
        return True
    if tokens * segments > 1 or _num_slices(main) == 1 or _together(main, rows // 2, rows, 1) == 1:
        return False
    most, most_of_halves = (
        blocks(blocks(main.rows, each), multiprocessors) * each for each in (rows, rows // 2)
    )
    return 10 * most_of_halves <= 9 * most


def _tile_rows(matrices: tuple[Matrix, ...], rows: int, *, halves: bool) -> dict[Kind, int]:
    """Rows of a tile by kind: as many as weigh no more than a tile of the main kind, or little."""
    main = _main(matrices)
    tile_bytes = rows * main.bytes_of(main.cols)
    if halves:
        tile_bytes //= 2
    most = max(tile_bytes, LIGHT_TILE_BYTES)
    if _is_float(matrices):
        most = max(FLOAT_TILE_BYTES, main.bytes_of(main.cols))
    return {
        kind_of(m): next(
            n
            for n in (rows, rows // 2, rows // 4, rows // 8, 1)
            if n * m.bytes_of(m.cols) <= most or n == 1
        )
        for m in matrices
    }


def _num_tiles(matrices: tuple[Matrix, ...], rows: int, *, halves: bool) -> int:
    tile_rows = _tile_rows(matrices, rows, halves=halves)
    return sum(blocks(m.rows, tile_rows[kind_of(m)]) for m in matrices)


@dataclass(frozen=True, slots=True)
class Shape:
    """A choice that fits: rows of a tile, columns, teams, their warps and slots, cuts by kind.

    Attributes:
        sums: tiles of a team whose sums there is room for.
    """

    rows: int
    columns: int
    team_warps: int
    teams: int
    parts: int
    slots: int
    sums: int
    cuts: tuple[Cut, ...]
    shared_bytes: int

    @property
    def slot_chunks(self) -> int:
        """16 bytes of a slot, which any kind's stages fit."""
        return max(cut.slot_chunks for cut in self.cuts)


def kind_of(matrix: Matrix) -> Kind:
    """What a matrix is compiled for."""
    return Kind(matrix.qtype, matrix.lane, matrix.align)


def kinds_of(matrices: tuple[Matrix, ...]) -> tuple[Kind, ...]:
    """Each kind once, in the order of the matrices."""
    return tuple(dict.fromkeys(kind_of(matrix) for matrix in matrices))


def _num_slices(matrix: Matrix) -> int:
    return blocks(matrix.cols, slice_cols(matrix.qtype, matrix.cols))


@cache
def _conflicts(row_bytes: int, pitch: int, span_shift: int, lane_bytes: int) -> int:
    """Most of 32 lanes that read from one bank, lanes (g, t) at row g and t * lane_bytes."""
    counts = [0] * BANKS
    seen = set()
    for g in range(8):
        span = g >> span_shift
        start = span * pitch + (g - (span << span_shift)) * row_bytes
        for t in range(4):
            word = (start + t * lane_bytes) // 4
            if word not in seen:
                counts[word % BANKS] += 1
            seen.add(word)
    return max(counts)


def cut_rows(matrix: Matrix, rows: int, parts: int = 1, streams: int = 0) -> Cut:
    """Spans of as many rows as cost no more bank conflicts than rows apart, or one a stream."""
    qtype, cols = matrix.qtype, matrix.cols
    slice_weights, slices = slice_cols(qtype, cols), _num_slices(matrix)
    part_slices = blocks(slices, parts)
    row_bytes, lane_bytes = matrix.bytes_of(cols), matrix.bytes_of(max(matrix.lane, 32))
    part_bytes = min(part_slices * matrix.bytes_of(slice_weights), row_bytes)
    is_filled = BLOCK[qtype].weights == 1 and cols % 32 != 0
    best: Cut | None = None
    shifts: Sequence[int] = range(rows.bit_length()) if parts == 1 and not is_filled else (0,)
    if streams:
        shifts = (max(rows // streams, 1).bit_length() - 1,)
    for shift in shifts:
        span_bytes = ((1 << shift) - 1) * row_bytes + part_bytes + LINE_BYTES * is_filled
        longest = LINE_BYTES - matrix.align + span_bytes
        chunks = blocks(longest, LINE_BYTES) * LINE_BYTES // 16 | 1
        spans = blocks(rows, 1 << shift)
        cut = Cut(slice_weights, slices, part_slices, rows, shift, chunks, spans * chunks)
        if best is None:
            best = cut
            least = _conflicts(row_bytes, 16 * chunks, shift, lane_bytes)
        elif _conflicts(row_bytes, 16 * chunks, shift, lane_bytes) <= least:
            best = cut
    assert best is not None
    return best


def book_bytes(qtype: QuantType) -> int:
    """Of a type's code book in shared memory."""
    if not code_book(qtype):
        return 0
    return WIDE_BOOK_BYTES if qtype in WIDE_BOOKS else BOOK_BYTES


def _together(matrix: Matrix, tile_rows: int, rows: int, columns: int) -> int:
    """Slices that a warp multiplies together: of few rows, where lanes would have none."""
    is_even = matrix.cols % slice_cols(matrix.qtype, matrix.cols) == 0
    return 8 // tile_rows if rows == 8 and columns == 1 and is_even else 1


def has_together(matrices: tuple[Matrix, ...], shape: Shape) -> bool:
    """Whether a warp multiplies several slices of any matrix together."""
    tile_rows = [cut.tile_rows for cut in shape.cuts]  # by kind
    kinds = kinds_of(matrices)
    return any(
        _together(m, tile_rows[kinds.index(kind_of(m))], shape.rows, shape.columns) > 1
        for m in matrices
    )


def _tile_sum_bytes(matrices: tuple[Matrix, ...], rows: int, columns: int) -> int:
    return max(map(_num_slices, matrices)) * rows * columns * 4


def _sums(tile_sum_bytes: int, tiles: int, teams: int) -> int:
    """Tiles of a team whose sums are kept: all of its share, or an even number of halves."""
    own_tiles = blocks(tiles, teams)
    room = max(2, SUMS_BYTES // (teams * tile_sum_bytes))
    return own_tiles if own_tiles <= room else room // 2 * 2


def _fixed_bytes(matrices: tuple[Matrix, ...], columns: int) -> int:
    """Shared memory beside slots and partial sums: code book, planes of x."""
    kinds = kinds_of(matrices)
    has_rest = any(kind.qtype is QuantType.F32 for kind in kinds)
    planes = len({kind.lane for kind in kinds}) + has_rest
    book = max(book_bytes(kind.qtype) for kind in kinds)
    return book + planes * blocks(matrices[0].cols, 32) * 64 * columns


def _shapes(
    matrices: tuple[Matrix, ...],
    rows: int,
    warps: int,
    columns: int,
    tiles: int,
    streams: int,
    *,
    halves: bool,
    is_last: bool,
) -> Iterator[Shape]:
    """From the one that keeps most warps busy to the smallest, each with the fewest slots.

    Where a block has several stages, of its so many tiles, one is on its way while one is used;
    not so in the very last, which takes least.
    """
    main = _main(matrices)
    slices, tile_rows = _num_slices(main), _tile_rows(matrices, rows, halves=halves)
    tile_sum_bytes = _tile_sum_bytes(matrices, rows, columns)
    for parts in range(1, max(map(_num_slices, matrices)) + 1):
        cuts = tuple(
            max(
                (
                    cut_rows(m, tile_rows[kind], parts, streams)
                    for m in matrices
                    if kind_of(m) == kind
                ),
                key=lambda cut: cut.slot_chunks,
            )
            for kind in kinds_of(matrices)
        )
        part_slices = blocks(slices, parts)
        jobs = blocks(part_slices, _together(main, tile_rows[kind_of(main)], rows, columns))
        team_warps = blocks(jobs, blocks(jobs, warps))
        for teams in range(max(1, min(tiles, warps // team_warps)), 0, -1):
            sums = _sums(tile_sum_bytes, tiles, teams)
            fixed = _fixed_bytes(matrices, columns) + teams * sums * tile_sum_bytes
            slot = 16 * max(cut.slot_chunks for cut in cuts) + SLOT_BYTES
            slots = 1 if teams > 1 else min(parts * tiles, 2)
            nbytes = fixed + teams * slots * slot
            yield Shape(rows, columns, team_warps, teams, parts, slots, sums, cuts, nbytes)
    if is_last:
        fixed += (min(tiles, 2) - sums) * tile_sum_bytes
        yield Shape(rows, columns, team_warps, 1, parts, 1, min(tiles, 2), cuts, fixed + slot)


def _with_slots(shape: Shape, budget: int, stages: int) -> Shape:
    """The shape with as many slots as the budget and the stages of a team leave room for."""
    nbytes = shape.teams * (16 * shape.slot_chunks + SLOT_BYTES)
    more = (budget - shape.shared_bytes) // nbytes
    slots = max(shape.slots, min(shape.slots + more, stages))
    grown = shape.shared_bytes + (slots - shape.slots) * nbytes
    return replace(shape, slots=slots, shared_bytes=grown)


def _spread(shape: Shape, resident: int, limit: int) -> Shape:
    """The shape with so much shared memory that no multiprocessor holds more than its share.

    Blocks are handed out while the launch ahead still runs: where more of them fit, those that end
    first get too many, and others none.
    """
    if shape.shared_bytes <= limit // (3 if resident == 1 else 7):
        return shape  # so small that little is lost, and the next launch finds room
    least = min(limit // (resident + 1) + RESERVED_BYTES, limit)
    return replace(shape, shared_bytes=max(shape.shared_bytes, least))


def _few_rows(matrices: tuple[Matrix, ...], segments: int, multiprocessors: int) -> int:
    """Weight rows of a tile: sixteen where their bytes are few and tiles many."""
    main = _main(matrices)
    tiles = sum(blocks(m.rows, 16) for m in matrices) * segments
    is_light = 16 * main.bytes_of(main.cols) <= LIGHT_TILE_BYTES
    return 16 if is_light and tiles >= 2 * multiprocessors else 8


def choose_shape(
    matrices: tuple[Matrix, ...],
    tokens: int,
    segments: int,
    gpu: Gpu,
    experts: int,
    way: Way,
    streams: int = 0,
) -> tuple[Shape, int]:
    """The shape, and blocks per segment; arguments as of ``few_plan``.

    Raises:
        DeviceError: nothing fits the shared memory.
    """
    limit, multiprocessors = gpu.shared_bytes, max(1, gpu.num_multiprocessors)
    rows = way.rows or _few_rows(matrices, segments, multiprocessors)
    halves = _halves(matrices, rows, tokens, segments, multiprocessors)
    tiles = _num_tiles(matrices, rows, halves=halves)
    # Short rows of experts, which are not known before the launches ahead are done, are over before
    # one block has them all on their way.
    is_short = experts > 0 and max(map(_num_slices, matrices)) == 1
    is_pair = is_short and tiles * segments > multiprocessors and not _is_float(matrices)
    resident = way.resident or (2 if is_pair else 1)
    warps = way.warps or (USUAL_WARPS if resident == 1 else PAIR_WARPS)
    budget = way.shared_bytes or (WIDE_BLOCK_BYTES if resident == 1 else PAIR_BLOCK_BYTES)
    num_blocks = min(tiles, max(1, multiprocessors * resident // segments))
    for most in dict.fromkeys((min(budget, limit), min(PAIR_BLOCK_BYTES, limit), limit)):
        for columns in (min(FEW_COLUMNS, tokens), 4, 2, 1):
            if columns > tokens:
                continue
            is_last = most == limit and columns == 1
            own_tiles = blocks(tiles, num_blocks)
            fitting = {"halves": halves, "is_last": is_last}
            shapes = _shapes(matrices, rows, warps, columns, own_tiles, streams, **fitting)
            for shape in shapes:
                if shape.shared_bytes + RESERVED_BYTES <= most and shape.slots <= way.slots:
                    stages = min(way.slots, blocks(own_tiles, shape.teams) * shape.parts)
                    grown = _with_slots(shape, most - RESERVED_BYTES, stages)
                    return _spread(grown, resident, limit), num_blocks
            if most < limit:
                break  # rather more shared memory than fewer columns
    main = matrices[0]
    raise DeviceError(
        f"{main.qtype.name} product with {main.cols} columns does not fit a block's {limit} bytes "
        "of shared memory"
    )
