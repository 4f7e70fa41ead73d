"""A window's experts on the host's processor: what each thread of the pool runs, compiled.

Threads go through the layers side by side. In each they wait until its pairs are posted, share the
activation, a tile of gate and of up at a time, then the tiles of down: a thread takes the next
piece from a counter, and goes on when all pieces are done. Whoever comes late finds nothing left to
take, so a layer's mailbox is read by those alone who compute for it. Bits are the same whoever
computes what.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.kernels.atomics import (
    fetch_add,
    load_acquire,
    monotonic_ns,
    rest_briefly,
    store_release,
)
from strata_cli.engine.kernels.host_products import ROWS, product, tile_address
from strata_cli.engine.kernels.host_scratch import (
    LINE_BYTES,
    STAGE_BYTES,
    HostLayers,
    OwnScratch,
    Scratch,
)
from strata_cli.engine.kernels.jit import inline_jit, nogil_jit
from strata_cli.engine.kernels.mailbox import SPINS, Mailbox, await_number
from strata_cli.engine.kernels.matmul_items import ROW_TILE, read_only
from strata_cli.engine.kernels.pointers import address_of
from strata_cli.engine.kernels.rows import compile_small, swiglu_row

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Ints = NDArray[np.int32]
Longs = NDArray[np.int64]

GATE, UP, DOWN = 0, 1, 2
DOWN_TILES = 4  # of a piece
LINGER_NS = 1_000_000  # longer than what is done between two steps of a conversation
DONE, STOPPED = 0, 1


def serving(
    mailbox: Mailbox, layers: HostLayers, scratch: Scratch, own: OwnScratch, patience_ns: int
) -> tuple[Any, ...]:
    """What serve_windows() takes, found once: it is more work than some windows are.

    Args:
        mailbox: where windows post.
        layers: the experts.
        scratch: of the pool; its counters are zero when the first thread comes to a window.
        own: of one thread.
        patience_ns: for each wait.
    """
    tensors = (
        *(mailbox.posted, mailbox.done, mailbox.state, mailbox.counts, mailbox.experts),
        *(mailbox.rows, mailbox.x, mailbox.place, mailbox.out),
    )
    return (
        *(tensor.numpy() for tensor in tensors),
        layers.blobs,
        layers.matrices,
        scratch.counters,
        scratch.gate,
        scratch.up,
        scratch.times,
        own.start,
        own.blobs,
        own.rows,
        own.place,
        read_only(own.start),
        read_only(own.blobs),
        read_only(own.rows),
        read_only(own.numbers),
        own.back,
        own.digits.rooms,
        own.digits.made,
        patience_ns,
        scratch.latest,
        own.rests,
    )


def serve_windows(window: int, arguments: tuple[Any, ...]) -> None:
    """Compute what a window posts, with the other threads of the pool, and what the next ones do.

    Holds no lock of Python. Stays for LINGER_NS behind each window, and takes those announced
    meanwhile; returns also where the mailbox was stopped, or a wait took too long. ``own.back``
    says which window was done last: nobody needs to wait for Python.

    Args:
        window: its number.
        arguments: see serving().
    """
    _serve_windows(window, LINGER_NS, *arguments)


def announce(window: int, latest: Longs) -> None:
    """Tell threads that linger of a window, and let all see that before what follows is read."""
    _announce(window, latest)


@nogil_jit
def _announce(window: int, latest: Longs) -> None:
    fetch_add(address_of(latest), window - latest[0])


@inline_jit
def _by_expert(
    count: int,
    experts: Ints,
    rows: Ints,
    blobs: Longs,
    start: Ints,
    own_blobs: Longs,
    own_rows: Ints,
    place: Ints,
) -> int:
    """Sort a layer's pairs by expert, in the order of first pairs; gives the number of experts."""
    num, at = 0, 0
    for pair in range(count):
        is_first = True
        for other in range(pair):
            if experts[other] == experts[pair]:
                is_first = False
        if is_first:
            own_blobs[num] = blobs[experts[pair]]
            start[num] = at
            num += 1
            for other in range(pair, count):
                if experts[other] == experts[pair]:
                    own_rows[at] = rows[other]
                    place[other] = at
                    at += 1
    start[num] = at
    return num


@inline_jit
def _tiles(matrix: Longs) -> int:
    tiles: int = (matrix[ROWS] + ROW_TILE - 1) // ROW_TILE
    return tiles


@inline_jit
def _activate(
    counter: int,
    matrix: Longs,
    x: int,
    rows: Ints,
    start: Ints,
    blobs: Longs,
    gate: Floats,
    up: Floats,
    number: int,
    rooms: Bytes,
    made: Longs,
) -> int:
    """This thread's share of silu(gate) * up, in place of gate; gives the number of pieces.

    A piece is a tile of one expert's gate and up. The next one is taken before this is done, so
    that its bytes can be on their way.
    """
    tiles, width = _tiles(matrix[GATE]), matrix[GATE, ROWS]
    total, own = tiles * blobs.size, 0
    digits = number, rooms, made
    piece = fetch_add(counter, 1)
    while piece < total:
        later = fetch_add(counter, 1)
        expert, tile, then = piece // tiles, piece % tiles, 0
        if later < total:
            then = tile_address(later % tiles, matrix[GATE], blobs[later // tiles])
        pairs, blob = start[expert : expert + 2], blobs[expert : expert + 1]
        beside = tile_address(tile, matrix[UP], blob[0])
        gates, ups, operands = address_of(gate), address_of(up), (x, rows, pairs, blob)
        product(tile, tile + 1, matrix[GATE], *operands, gates, beside, *digits)
        product(tile, tile + 1, matrix[UP], *operands, ups, then, *digits)
        first = tile * ROW_TILE
        count = min(ROW_TILE, width - first)
        for pair in range(pairs[0], pairs[1]):
            at = pair * width + first
            swiglu_row(gate, at, gate, at, up, at, count)
        own += 1
        piece = later
    fetch_add(counter + LINE_BYTES, own)
    return total


@inline_jit
def _down(
    counter: int,
    matrix: Longs,
    gate: int,
    numbers: Ints,
    start: Ints,
    blobs: Longs,
    out: int,
    number: int,
    rooms: Bytes,
    made: Longs,
) -> bool:
    """This thread's share of the last product; True for the thread that ends it.

    A piece is some tiles of one expert: its rows are short.
    """
    tiles, own = _tiles(matrix), 0
    pieces = (tiles + DOWN_TILES - 1) // DOWN_TILES
    total = pieces * blobs.size
    piece = fetch_add(counter, 1)
    while piece < total:
        later = fetch_add(counter, 1)
        expert, begin, then = piece // pieces, piece % pieces * DOWN_TILES, 0
        if later < total:
            then = tile_address(later % pieces * DOWN_TILES, matrix, blobs[later // pieces])
        pairs, blob = start[expert : expert + 2], blobs[expert : expert + 1]
        end, operands = min(begin + DOWN_TILES, tiles), (gate, numbers, pairs, blob)
        product(begin, end, matrix, *operands, out, then, number, rooms, made)
        own += 1
        piece = later
    return own > 0 and fetch_add(counter + LINE_BYTES, own) + own == total


@inline_jit
def _await_other(latest: Longs, window: int, linger_ns: int) -> bool:
    """Whether another window is announced before the time is over."""
    began, looks = monotonic_ns(), 0
    while load_acquire(address_of(latest)) == window:
        looks += 1
        rest_briefly()
        if looks % SPINS == 0 and monotonic_ns() - began > linger_ns:
            return False
    return True


@inline_jit
def _next_window(status: int, window: int, linger_ns: int, latest: Longs, rests: Longs) -> int:
    """The window that is announced behind one, before the time is over; 0: the thread rests.

    Who says that it rests looks once more, and who announces looks who rests afterwards: one of
    them sees the other.
    """
    if status == STOPPED or not _await_other(latest, window, linger_ns):
        fetch_add(address_of(rests), 1)
        if status == STOPPED or load_acquire(address_of(latest)) == window:
            return 0
        rests[0] = 0
    following: int = load_acquire(address_of(latest))
    return following


@nogil_jit
def _serve_windows(
    window: int,
    linger_ns: int,
    posted: Ints,
    done: Ints,
    state: Ints,
    counts: Ints,
    experts: Ints,
    rows: Ints,
    x: Floats,
    place: Ints,
    out: Floats,
    blobs: Longs,
    matrices: Longs,
    counters: Longs,
    gate: Floats,
    up: Floats,
    times: Longs,
    start: Ints,
    own_blobs: Longs,
    own_rows: Ints,
    own_place: Ints,
    starts: Ints,
    addresses: Longs,
    tokens: Ints,
    numbers: Ints,
    back: Ints,
    rooms: Bytes,
    made: Longs,
    patience_ns: int,
    latest: Longs,
    rests: Longs,
) -> None:
    """What serve_windows() runs.

    ``starts``, ``addresses`` and ``tokens`` are start, own_blobs and own_rows once more, as the
    read-only arrays that the product is compiled for.
    """
    compile_small()
    stop, gates = address_of(state), address_of(gate)
    rests[0] = 0
    while window != 0:
        status = DONE
        for layer in range(posted.shape[0]):
            if not await_number(address_of(posted[layer]), window, stop, patience_ns):
                status = STOPPED
                break
            count = counts[layer, 0]
            if count == 0:
                continue
            began = monotonic_ns()
            num = _by_expert(
                count,
                experts[layer],
                rows[layer],
                blobs[layer],
                start,
                own_blobs,
                own_rows,
                own_place,
            )
            own_start, own = starts[: num + 1], addresses[:num]
            matrix, counter = matrices[layer], address_of(counters[layer])
            number = window * posted.shape[0] + layer
            pairs, digits = (tokens, own_start, own), (number, rooms, made)
            total = _activate(counter, matrix, address_of(x), *pairs, gate, up, *digits)
            if not await_number(counter + LINE_BYTES, total, stop, patience_ns):
                status = STOPPED
                break
            counter += STAGE_BYTES
            pairs = numbers, own_start, own
            if _down(counter, matrix[DOWN], gates, *pairs, address_of(out), *digits):
                for pair in range(count):
                    place[layer, pair] = own_place[pair]
                times[0] += monotonic_ns() - began
                times[1] += num
                store_release(address_of(done[layer]), window)
        store_release(address_of(back), window)
        window = _next_window(status, window, linger_ns, latest, rests)
