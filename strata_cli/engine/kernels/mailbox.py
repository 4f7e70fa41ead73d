"""How a recorded window hands pairs to the host's processor and gets their rows back.

T tokens, E experts, k experts per token, P = T * k pairs, D hidden size, L layers. The mailbox is
pinned memory that device and host both write. A layer's pairs are posted by writing the window's
number behind them, and their rows are done when the host has written it too; numbers never come
twice. Whoever waits gives up when the mailbox is stopped, or after a while.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Self

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.device.base import Device, Kernel, Launch, Stream, Tensor, empty
from strata_cli.engine.kernels.atomics import (
    give_way,
    load_acquire,
    monotonic_ns,
    rest_briefly,
    store_release,
)
from strata_cli.engine.kernels.jit import inline_jit, nogil_jit
from strata_cli.engine.kernels.pointers import address_of
from strata_cli.engine.kernels.shapes import blocks, expect, expect_rank, grain
from strata_cli.engine.kernels.splitting import SHARES

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]
I32 = np.int32

LINE = 16  # int32 of a flag: a cache line, so that flags do not disturb each other
STOP, FAILED = (
    0,
    1,
)  # in the mailbox's state: stopped, and the number of the layer that gave up, + 1
THREADS = 128
POST_THREADS = 512
SPINS = 64  # looks at a flag before one at the clock
# So long a thread waits before others may have the processor, who then keep it for milliseconds:
# longer than a layer takes.
POLITE_NS = 1_000_000


class Mailbox:
    """The memory. A context manager.

    Args:
        device: that posts.
        num_layers: L.
        num_tokens: T, most of a window.
        top_k: k.
        hidden_size: D.

    Attributes:
        posted, done: number of the latest window, int32 [L, LINE], the first of each line.
        state: int32 [LINE]; see STOP and FAILED.
        counts: pairs of each layer, int32 [L, LINE], the first of each line.
        experts, rows: expert and token of each of its pairs, int32 [L, P].
        x: activations of the layer that was posted last, float32 [T, D].
        place: row of ``out`` of each pair, int32 [L, P].
        out: of the layer that was done last, float32 [P, D].
        orders: window's number and link share of the next window, pinned int32 [2].
        current: the same on the device, where a pass has copied them to.
    """

    def __init__(
        self, device: Device, num_layers: int, num_tokens: int, top_k: int, hidden_size: int
    ) -> None:
        pairs = num_tokens * top_k
        shapes: dict[str, tuple[tuple[int, ...], type]] = {
            "posted": ((num_layers, LINE), np.int32),
            "done": ((num_layers, LINE), np.int32),
            "state": ((LINE,), np.int32),
            "counts": ((num_layers, LINE), np.int32),
            "orders": ((2,), np.int32),
            "experts": ((num_layers, pairs), np.int32),
            "rows": ((num_layers, pairs), np.int32),
            "place": ((num_layers, pairs), np.int32),
            "x": ((num_tokens, hidden_size), np.float32),
            "out": ((pairs, hidden_size), np.float32),
        }
        offsets, end = {}, 0
        for name, (shape, dtype) in shapes.items():
            offsets[name] = end
            nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
            end += blocks(nbytes, 4 * LINE) * 4 * LINE
        with ExitStack() as resources:
            memory = resources.enter_context(device.allocate_pinned(end))
            whole = Tensor.over(memory, (end,), np.uint8)
            whole.numpy()[:] = 0
            tensors = {
                name: Tensor.over(memory, shape, dtype, offsets[name])
                for name, (shape, dtype) in shapes.items()
            }
            self.posted, self.done, self.state = (tensors[n] for n in ("posted", "done", "state"))
            self.counts, self.orders = tensors["counts"], tensors["orders"]
            self.experts, self.rows, self.place = (tensors[n] for n in ("experts", "rows", "place"))
            self.x, self.out = tensors["x"], tensors["out"]
            self.orders.numpy()[:] = (0, SHARES)
            self.current = empty(device, (2,), np.int32)
            resources.callback(self.current.buffer.close)
            self._resources = resources.pop_all()

    def close(self) -> None:
        """Give the memory back. Safe to call twice."""
        self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def post_pairs(
    stream: Stream,
    layer: int,
    ids: Tensor,
    pair_of: Tensor,
    expert_start: Tensor,
    x: Tensor,
    mailbox: Mailbox,
) -> None:
    """Hand the host's pairs of a layer over: those at place E of ``split_pairs``.

    Args:
        stream: enqueues here.
        layer: which one.
        ids: experts of each token, int32 [T, k].
        pair_of: where each pair was sorted to, int32 [T, k].
        expert_start: first pair at each place, int32 [E + 3].
        x: activations, float32 [T, D].
        mailbox: of at least as many tokens.

    Raises:
        ShapeError: an argument has another shape or type.
    """
    expect_rank("post_pairs ids", ids, 2)
    expect_rank("post_pairs expert_start", expert_start, 1)
    (num_tokens, top_k), num_experts = ids.shape, expert_start.size - 3
    size = mailbox.x.shape[1]
    expect("post_pairs ids", ids, ids.shape, I32)
    expect("post_pairs pair_of", pair_of, ids.shape, I32)
    expect("post_pairs expert_start", expert_start, (num_experts + 3,), I32)
    expect("post_pairs x", x, (num_tokens, size))
    launch = Launch(
        items=1,
        block=(POST_THREADS, 1, 1),
        extents=(ids.size, top_k, num_experts, num_tokens * size),
        early=True,
    )
    stream.launch(
        POST_PAIRS,
        launch,
        *(ids, pair_of, expert_start, x, mailbox.current),
        *(_line(mailbox.counts, layer), _line(mailbox.experts, layer), _line(mailbox.rows, layer)),
        *(mailbox.x.rows(0, num_tokens), _line(mailbox.posted, layer)),
    )


def take_rows(
    stream: Stream,
    layer: int,
    expert_start: Tensor,
    mailbox: Mailbox,
    patience_ns: int,
    expert_out: Tensor,
) -> None:
    """Wait for the rows of the host's pairs and put them where they belong; clear those left out.

    Where the host gives up, or takes longer than the patience, the state of the mailbox says so,
    and the rows are not to be used.

    Args:
        stream: enqueues here.
        layer: which one.
        expert_start: first pair at each place, int32 [E + 3].
        mailbox: that the pairs were posted to.
        patience_ns: for a layer; at least 1.
        expert_out: float32 [P, D], overwritten at places E and E + 1.

    Raises:
        ShapeError: an argument has another shape or type.
    """
    expect_rank("take_rows expert_start", expert_start, 1)
    expect_rank("take_rows expert_out", expert_out, 2)
    pairs, size = expert_out.shape
    num_experts = expert_start.size - 3
    expect("take_rows expert_start", expert_start, (num_experts + 3,), I32)
    expect("take_rows expert_out", expert_out, (pairs, mailbox.x.shape[1]))
    waits = Launch(items=1, block=(32, 1, 1), extents=(num_experts,), early=True)
    done, state = _line(mailbox.done, layer), mailbox.state
    numbers = (patience_ns, layer)
    stream.launch(AWAIT_ROWS, waits, expert_start, mailbox.current, done, state, *numbers)
    launch = Launch(
        items=pairs,
        grain=grain(size),
        grid=(pairs, blocks(size, 4 * THREADS), 1),
        block=(THREADS, 1, 1),
        extents=(num_experts, size),
        early=True,
    )
    place = _line(mailbox.place, layer)
    stream.launch(TAKE_ROWS, launch, expert_start, place, mailbox.out, expert_out)


def _line(tensor: Tensor, layer: int) -> Tensor:
    return tensor.rows(layer, layer + 1).reshape(tensor.shape[1])


@inline_jit
def await_number(flag: int, number: int, state: int, patience_ns: int) -> bool:
    """For compiled code: wait until the int32 at an address is a number.

    Args:
        flag: address.
        number: to wait for.
        state: address of the mailbox's state.
        patience_ns: from now on.

    Returns:
        False where the mailbox was stopped, or it took too long.
    """
    start, spins = monotonic_ns(), 0
    while load_acquire(flag) != number:
        spins += 1
        rest_briefly()
        if spins % SPINS == 0:
            waited_ns = monotonic_ns() - start
            if load_acquire(state) != 0 or waited_ns > patience_ns:
                return False
            if waited_ns > POLITE_NS:
                give_way()
    return True


@nogil_jit
def _post_pairs(
    begin: int,
    end: int,
    ids: Ints,
    pair_of: Ints,
    expert_start: Ints,
    x: Floats,
    current: Ints,
    count: Ints,
    experts: Ints,
    rows: Ints,
    copy: Floats,
    posted: Ints,
) -> None:
    """One item: all pairs."""
    num_experts = expert_start.size - 3
    for _ in range(begin, end):
        first, stop = expert_start[num_experts], expert_start[num_experts + 1]
        for token in range(ids.shape[0]):
            for rank in range(ids.shape[1]):
                at = pair_of[token, rank]
                if first <= at < stop:
                    experts[at - first] = ids[token, rank]
                    rows[at - first] = token
        if stop > first:
            for token in range(x.shape[0]):
                for column in range(x.shape[1]):
                    copy[token, column] = x[token, column]
        count[0] = stop - first
        store_release(address_of(posted), current[0])


@nogil_jit
def _await_rows(
    begin: int,
    end: int,
    expert_start: Ints,
    current: Ints,
    done: Ints,
    state: Ints,
    patience_ns: int,
    layer: int,
) -> None:
    """One item: the wait."""
    num_experts = expert_start.size - 3
    for _ in range(begin, end):
        if expert_start[num_experts] == expert_start[num_experts + 1]:
            continue
        is_done = await_number(address_of(done), current[0], address_of(state), patience_ns)
        if not is_done:
            state[FAILED] = layer + 1


@nogil_jit
def _take_rows(
    begin: int, end: int, expert_start: Ints, place: Ints, out: Floats, expert_out: Floats
) -> None:
    """Items: rows."""
    num_experts = expert_start.size - 3
    first, stop = expert_start[num_experts], expert_start[num_experts + 1]
    for row in range(max(begin, first), min(end, expert_start[num_experts + 2])):
        for column in range(expert_out.shape[1]):
            expert_out[row, column] = out[place[row - first], column] if row < stop else 0.0


def _reference() -> None:
    """What these move is compared with what the host computes; see tests of the pool."""


SOURCE = "mailbox.cu"
POST_PAIRS = Kernel("post_pairs", _post_pairs, _reference, SOURCE)
AWAIT_ROWS = Kernel("await_rows", _await_rows, _reference, SOURCE)
TAKE_ROWS = Kernel("take_rows", _take_rows, _reference, SOURCE)
