"""Where a pass finds each layer's routed experts, and in which groups it may use them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from strata_cli.engine.device.base import Tensor
from strata_cli.engine.experts.resident import ExpertMatrices
from strata_cli.engine.kernels.mailbox import Mailbox
from strata_cli.engine.kernels.splitting import SlotRange


class Split(NamedTuple):
    """How a window's pairs are shared out, where not all are computed on the device.

    Attributes:
        slots: where the device finds hits.
        link_share: of the misses that the device reads over its link, see split_pairs(); int32 [1].
        least_dropped: a miss that all tokens rank here or later is left out; at least k: none is.
        mailbox: that the host's pairs go through; None: there are none.
        patience_ns: for the host's rows of a layer.
    """

    slots: SlotRange
    link_share: Tensor
    least_dropped: int
    mailbox: Mailbox | None = None
    patience_ns: int = 0


class RankedExperts(NamedTuple):
    """A layer's experts as a pass uses them.

    Attributes:
        matrices: their address tables are by rank.
        rank_of: rank of each expert, int32 [E]; None: an expert's id is its rank.
        split: how pairs are shared out; None: the device computes all of them.
        foretells: the feed wants to know what the next layer's router makes of what this layer
            reads; see PairRows.
    """

    matrices: ExpertMatrices
    rank_of: Tensor | None
    split: Split | None = None
    foretells: bool = False


class ExpertGroup(NamedTuple):
    """Experts of neighbouring ranks, and the places of their pairs among all sorted by rank."""

    ranks: range
    pairs: range


class PairRows(NamedTuple):
    """What a layer's pairs read and write, on the device.

    Attributes:
        x: float32 [T, D].
        row_of: row of x that each pair reads, int32 [P], sorted by rank.
        out: a row for each pair, float32 [P, D].
        next_start: where the next layer's pairs would begin, as its router sees x: expert_start
            int32 [E + 1], by id. It lies in out, until that is written. None: nobody asked.
    """

    x: Tensor
    row_of: Tensor
    out: Tensor
    next_start: Tensor | None = None


class ExpertFeed(Protocol):
    """Hands one pass its experts, layer by layer. Everything is enqueued on the pass's stream."""

    def experts(self, layer: int) -> RankedExperts:
        """The layer's experts; where their bytes are may be known only when groups come."""
        ...

    def publish(self, layer: int, expert_start: Tensor, rows: PairRows) -> None:
        """The layer's pairs are sorted: expert_start int32 [E + 1], by rank. Does not block."""
        ...

    def groups(self, layer: int) -> Iterator[ExpertGroup]:
        """Every expert whose pairs the device computes, in exactly one group; ranks ascend.

        Whoever iterates enqueues a group's products before asking for the next one, and takes all
        groups: then all other rows of the output are on their way too. May block until the routing
        is known and bytes are on their way.
        """
        ...


class ResidentFeed:
    """Experts that are all where kernels read them: one group, and nothing to wait for.

    Args:
        layers: of the model; rank is id.
        num_pairs: of a layer, in the pass.
        split: how they are shared out; None: they are not.
    """

    def __init__(
        self, layers: Sequence[ExpertMatrices], num_pairs: int, split: Split | None = None
    ) -> None:
        self._layers = layers
        self._split = split
        self._pairs = range(num_pairs)

    def experts(self, layer: int) -> RankedExperts:
        """See ExpertFeed."""
        return RankedExperts(self._layers[layer], None, self._split)

    def publish(self, layer: int, expert_start: Tensor, rows: PairRows) -> None:
        """Nobody needs to know."""

    def groups(self, layer: int) -> Iterator[ExpertGroup]:
        """See ExpertFeed."""
        yield ExpertGroup(range(self._layers[layer].gate.blobs.shape[0]), self._pairs)
