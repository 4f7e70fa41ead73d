"""What a sequence remembers: K/V, index keys, recurrent, convolution and n-gram state.

K/V and index keys are positional (a row per position), so rewinding them costs nothing. The rest is
a running state and is copied when a snapshot is taken.

A state is exact while every pass that made it was: computed as a canonical read would, so that its
bits depend on its tokens alone. What follows from an inexact state is inexact.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.device.base import Device, Stream, Tensor, empty
from strata_cli.engine.device.transfer import download, upload
from strata_cli.engine.forward.snapshots import Group, Lease, SnapshotRoom
from strata_cli.engine.kernels.cache_rows import cache_type
from strata_cli.engine.kernels.hash import FNV_OFFSET, fnv1a64
from strata_cli.engine.model.ngram_spec import NgramSpec
from strata_cli.engine.model.spec import ModelSpec
from strata_cli.errors import StateError

# Recurrent layers whose state is put back together, then all others. A layer works for ten times as
# long as its state takes over the link, so a group is there before the one ahead of it is done.
GROUP_LAYERS = (1, 4, 16)


@dataclass(frozen=True, slots=True)
class GdnState:
    """conv [K-1, 2kd+vd]: the last columns before the convolution; matrix [nv, dim_k, dim_v]."""

    conv: Tensor
    matrix: Tensor


@dataclass(frozen=True, slots=True)
class AttentionState:
    """keys, values [context, kv*dim]; index_keys [context, idim], raw; pooled [blocks, idim].

    Keys and values are of the device's cache_type, the others float32.
    """

    keys: Tensor
    values: Tensor
    index_keys: Tensor
    pooled: Tensor


@dataclass(frozen=True, slots=True)
class NgramState:
    """history [max_n-1] int32, most recent last; conv [(K-1)*dilation, S*D]."""

    history: Tensor
    conv: Tensor


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A sequence's running state at a position, in host memory.

    Attributes:
        ids: every token read so far; restoring needs the live K/V to hold the same ones.
        running: copies of the running-state tensors, in SequenceState.running order.
        is_exact: whether these copies are; the live K/V must be exact too where they are restored.
        lease: of the memory that they are in; None: they have memory of their own.
    """

    ids: tuple[int, ...]
    running: tuple[NDArray[Any], ...]
    is_exact: bool = True
    lease: Lease | None = field(default=None, repr=False, compare=False)

    @property
    def position(self) -> int:
        """Tokens read when it was taken."""
        return len(self.ids)

    @property
    def nbytes(self) -> int:
        """Host memory of the copies."""
        return sum(part.nbytes for part in self.running)


@dataclass(frozen=True, slots=True)
class StateHash:
    """FNV-1a 64 of each component at length position; equal prefixes give equal hashes.

    Attributes:
        position: tokens read (L).
        gdn: recurrent matrices and convolution columns of all gated-delta-net layers.
        ple: convolution columns of the n-gram embedding.
        tail: raw index keys of the incomplete last block of every indexed layer.
        pooled: pooled index keys of the complete blocks in [0, L).
        kv: keys and values of positions [0, L).
        ple_prev: the token ids that the next n-grams look back on.
    """

    position: int
    gdn: int
    ple: int
    tail: int
    pooled: int
    kv: int
    ple_prev: int

    def line(self) -> str:
        """One printable line: STATE_HASH L=… gdn=… (16 hex digits each)."""
        parts = ("gdn", "ple", "tail", "pooled", "kv", "ple_prev")
        values = " ".join(f"{name}={getattr(self, name):016x}" for name in parts)
        return f"STATE_HASH L={self.position} {values}"

    def as_dict(self) -> dict[str, int | str]:
        """JSON form: position as a number, hashes as hex strings (they need 64 bits)."""
        parts = ("gdn", "ple", "tail", "pooled", "kv", "ple_prev")
        return {"position": self.position} | {name: f"{getattr(self, name):016x}" for name in parts}


@dataclass(slots=True)
class SequenceState:
    """Device memory of one sequence. Written by the compute stream's work only.

    Attributes:
        device, stream: where the memory lives, and the stream all its work is enqueued on.
        layers: per trunk layer, its GdnState or AttentionState.
        ngram: the n-gram embedding's state, or None.
        context_tokens: positions that fit.
        ratio: tokens per index block of each layer, 0 for dense attention.
        eos_token_id: fills the n-gram history before the first token.
        ids: tokens read so far; its length is the position of the next token.
        cached_ids: tokens whose K/V rows are valid; ids is a prefix of it after a rewind.
        exact_rows: of these rows, how many of the first ones exact passes have written.
        is_exact: whether all that the next token depends on is exact.
        is_consistent: False while a pass is half enqueued; an interrupted one leaves it False.
    """

    device: Device
    stream: Stream
    layers: tuple[GdnState | AttentionState, ...]
    ngram: NgramState | None
    context_tokens: int
    ratio: tuple[int, ...]
    eos_token_id: int
    ids: list[int] = field(default_factory=list)
    cached_ids: list[int] = field(default_factory=list)
    exact_rows: int = 0
    is_exact: bool = True
    is_consistent: bool = True
    _room: SnapshotRoom = field(init=False, repr=False)
    _addresses: NDArray[np.int64] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        """Have a place for snapshots."""
        self._room = SnapshotRoom(self.device, self.stream)

    @property
    def position(self) -> int:
        """Tokens read; the position of the next one."""
        return len(self.ids)

    def running(self) -> Iterator[Tensor]:
        """The tensors that are not positional, in a fixed order."""
        if self.ngram is not None:
            yield self.ngram.history
            yield self.ngram.conv
        for layer in self.layers:
            if isinstance(layer, GdnState):
                yield layer.conv
                yield layer.matrix

    def _groups(self) -> list[Group]:
        """The same, as a pass needs them."""
        recurrent = [i for i, layer in enumerate(self.layers) if isinstance(layer, GdnState)]
        starts = [start for start in accumulate(GROUP_LAYERS, initial=0) if start < len(recurrent)]
        ends = [*starts[1:], len(recurrent)]
        groups = [
            Group(recurrent[start], 2 * (end - start))
            for start, end in zip(starts, ends, strict=True)
        ]
        if self.ngram is not None and groups:
            groups[0] = Group(0, groups[0].num_tensors + 2)
        return groups

    def addresses(self) -> NDArray[np.int64]:
        """Where each layer's tensors lie, and last the n-gram embedding's: [L + 1, 4].

        Of a running state its two, of a cache its four in the order of AttentionState; else 0.
        """
        if self._addresses is None:
            found = np.zeros((len(self.layers) + 1, 4), np.int64)
            for index, layer in enumerate(self.layers):
                tensors = (
                    (layer.conv, layer.matrix)
                    if isinstance(layer, GdnState)
                    else (layer.keys, layer.values, layer.index_keys, layer.pooled)
                )
                found[index, : len(tensors)] = [tensor.address for tensor in tensors]
            if self.ngram is not None:
                found[-1, :2] = self.ngram.history.address, self.ngram.conv.address
            self._addresses = found
        return self._addresses

    def require_consistent(self) -> None:
        """Refuse to go on after a pass that was cut off halfway.

        Raises:
            StateError: reset the sequence or restore a snapshot first.
        """
        if not self.is_consistent:
            raise StateError(
                f"the pass after position {self.position} was interrupted halfway",
                hint="reset the sequence or restore a snapshot",
            )

    def begin_pass(self, *, layer_by_layer: bool = False) -> None:
        """Before the enqueueing of a pass: K/V rows from the position on no longer count.

        Args:
            layer_by_layer: the pass is one of Forward.run(), which calls arrive() before each
                layer; else all of the running state is there at once.

        Raises:
            StateError: an earlier pass was interrupted halfway.
        """
        self.require_consistent()
        self.is_consistent = False
        self._drop_rows_behind()
        if not layer_by_layer:
            self._room.settle()

    def arrive(self, layer: int) -> None:
        """Before a layer is enqueued: its running state is there, if restore() brings it."""
        self._room.wait_for(layer)

    def begin_branches(self) -> None:
        """Before branches are enqueued: they use up the K/V rows from the position on, only those.

        They call arrive() before each layer, as Forward.run() does.

        Raises:
            StateError: an earlier pass was interrupted halfway.
        """
        self.require_consistent()
        self._drop_rows_behind()

    def end_pass(self, ids: list[int], *, is_exact: bool = True) -> None:
        """After all of a pass was enqueued: count its tokens as read.

        Args:
            ids: its tokens.
            is_exact: whether all of them were computed as a canonical read would.
        """
        self.cached_ids.extend(ids)
        self.ids.extend(ids)
        self.is_exact = self.is_exact and is_exact
        if self.is_exact:
            self.exact_rows = self.position
        self.is_consistent = True

    def _drop_rows_behind(self) -> None:
        del self.cached_ids[self.position :]
        self.exact_rows = min(self.exact_rows, self.position)

    def reset(self) -> None:
        """Back to position 0. Interrupted, it leaves a state to be reset again."""
        self.is_consistent = False
        self._room.settle()
        for tensor in self.running():
            self.stream.fill(tensor, 0)
        if self.ngram is not None:
            history = np.full(self.ngram.history.shape, self.eos_token_id, dtype=np.int32)
            upload(self.device, self.stream, self.ngram.history, history)
        self.ids = []
        self.cached_ids = []
        self.exact_rows = 0
        self.is_exact = True
        self.is_consistent = True

    def snapshot(self, *, waits: bool = True) -> Snapshot:
        """Copy the running state to host memory.

        Args:
            waits: for the stream; else the copies are still under way.
        """
        self._room.settle()
        parts, lease = self._room.copy([*self.running()], waits=waits)
        return Snapshot(tuple(self.ids), parts, self.is_exact, lease)

    def can_restore(self, snapshot: Snapshot) -> bool:
        """True while the live K/V rows are those of the snapshot's tokens."""
        return tuple(self.cached_ids[: snapshot.position]) == snapshot.ids

    def restore(self, snapshot: Snapshot) -> None:
        """Put the running state back and rewind; like reset when interrupted.

        The copies may still be under way where a device copies beside kernels: whoever enqueues
        what uses the running state calls begin_pass() or begin_branches() first.
        """
        self.is_consistent = False
        self._room.settle()
        tensors = [*self.running()]
        self._room.put_back(tensors, snapshot.running, snapshot.lease, self._groups())
        self.ids = list(snapshot.ids)
        self.is_exact = snapshot.is_exact and snapshot.position <= self.exact_rows
        self.is_consistent = True

    def hash(self) -> StateHash:
        """Fingerprint of everything the next token depends on. Waits for the stream."""
        self._room.settle()
        gdn, tail, pooled, kv = [], [], [], []
        for layer, ratio in zip(self.layers, self.ratio, strict=True):
            if isinstance(layer, GdnState):
                gdn += [layer.matrix, layer.conv]
                continue
            kv += [layer.keys.rows(0, self.position), layer.values.rows(0, self.position)]
            if ratio:
                complete = self.position // ratio
                pooled.append(layer.pooled.rows(0, complete))
                tail.append(layer.index_keys.rows(complete * ratio, self.position))
        ngram = [] if self.ngram is None else [self.ngram.conv]
        history = [] if self.ngram is None else [self.ngram.history]
        return StateHash(
            self.position,
            *(_hash(self, parts) for parts in (gdn, ngram, tail, pooled, kv, history)),
        )

    def close(self) -> None:
        """Gives the device memory back. Safe to call twice."""
        self._room.close()  # first: what it puts back is written into that memory
        for layer in self.layers:
            tensors = (
                (layer.conv, layer.matrix)
                if isinstance(layer, GdnState)
                else (layer.keys, layer.values, layer.index_keys, layer.pooled)
            )
            for tensor in tensors:
                tensor.buffer.close()
        if self.ngram is not None:
            self.ngram.history.buffer.close()
            self.ngram.conv.buffer.close()


def new_state(
    spec: ModelSpec, device: Device, stream: Stream, context_tokens: int
) -> SequenceState:
    """Device memory for one sequence of at most context_tokens, at position 0.

    Raises:
        OutOfMemory: it does not fit.
    """
    layers = tuple(
        new_gdn_state(spec, device)
        if is_recurrent
        else _attention_state(spec, device, stream, context_tokens, ratio)
        for is_recurrent, ratio in zip(spec.is_recurrent, spec.index_ratio, strict=True)
    )
    ngram = None if spec.ngram is None else new_ngram_state(spec, spec.ngram, device)
    eos = 0 if spec.ngram is None else spec.ngram.eos_token_id
    state = SequenceState(device, stream, layers, ngram, context_tokens, spec.index_ratio, eos)
    state.reset()
    return state


def new_gdn_state(spec: ModelSpec, device: Device) -> GdnState:
    """Device memory for one layer's recurrent state, contents undefined."""
    dim, num_values = spec.gdn_head_dim, spec.gdn_num_value_heads
    channels = (2 * spec.gdn_num_key_heads + num_values) * dim
    conv = empty(device, (spec.gdn_conv_kernel - 1, channels))
    return GdnState(conv, empty(device, (num_values, dim, dim)))


def _attention_state(
    spec: ModelSpec, device: Device, stream: Stream, context_tokens: int, ratio: int
) -> AttentionState:
    width, dtype = spec.num_kv_heads * spec.head_dim, cache_type(stream)
    blocks = context_tokens // ratio if ratio else 0
    return AttentionState(
        keys=empty(device, (context_tokens, width), dtype),
        values=empty(device, (context_tokens, width), dtype),
        index_keys=empty(device, (context_tokens if ratio else 0, spec.indexer_head_dim)),
        pooled=empty(device, (blocks, spec.indexer_head_dim)),
    )


def new_ngram_state(spec: ModelSpec, ngram: NgramSpec, device: Device) -> NgramState:
    """Device memory for the n-gram embedding's state, contents undefined."""
    columns = (ngram.conv_kernel - 1) * ngram.max_n
    return NgramState(
        history=empty(device, (ngram.max_n - 1,), np.int32),
        conv=empty(device, (columns, spec.num_streams * spec.hidden_size)),
    )


def _hash(state: SequenceState, tensors: list[Tensor]) -> int:
    digest = FNV_OFFSET
    for tensor in tensors:
        digest = fnv1a64(download(state.device, state.stream, tensor), digest)
    return digest
