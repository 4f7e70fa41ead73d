"""What a model will need of a device: bytes and kernels, found by running it on paper."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from strata_cli.engine.device.arena import Arena
from strata_cli.engine.device.base import Device, Home, Kernel, Stream, Tensor, empty
from strata_cli.engine.device.paper import PaperDevice
from strata_cli.engine.experts.blobs import blob_layouts
from strata_cli.engine.experts.placing import ExpertHome, Stores
from strata_cli.engine.experts.resident import ExpertMatrices, blob_experts
from strata_cli.engine.forward.batch import Batch, Segment
from strata_cli.engine.forward.feeding import (
    ExpertGroup,
    PairRows,
    RankedExperts,
    ResidentFeed,
    Split,
)
from strata_cli.engine.forward.fetching import Fetcher, FetchSizes
from strata_cli.engine.forward.layers import Forward
from strata_cli.engine.forward.placing import Placement, place_weights
from strata_cli.engine.forward.state import SequenceState, new_state
from strata_cli.engine.forward.workspace import Workspace
from strata_cli.engine.kernels.splitting import SlotRange
from strata_cli.engine.kernels.weight import WeightLayout
from strata_cli.engine.model.spec import ModelSpec
from strata_cli.engine.model.tensors import ModelFile

LOGIT_ROWS = 128  # most rows of logits computed at a time
SUFFIX_TOKENS = 64  # more than few, too few to fill a GPU


class Sizes(NamedTuple):
    """What memory is allocated for.

    Attributes:
        context_tokens: most tokens of a sequence.
        chunk_tokens: most tokens of a pass.
        num_sequences: that are there at once.
    """

    context_tokens: int
    chunk_tokens: int
    num_sequences: int = 1

    @property
    def logit_rows(self) -> int:
        """Most rows of logits of one product."""
        return min(LOGIT_ROWS, self.chunk_tokens)

    def describe(self) -> str:
        """In words."""
        sequences = f"{self.num_sequences} sequences of " if self.num_sequences > 1 else ""
        return f"{sequences}{self.context_tokens} tokens, chunks of {self.chunk_tokens}"


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes of memory.

    Attributes:
        weights: of the device, for weights; without experts that are cached.
        mapped: of page-locked host memory, for weights.
        workspace: of the device, for a pass.
        state: of the device, for one sequence.
        num_sequences: that are there at once.
    """

    weights: int
    mapped: int
    workspace: int
    state: int
    num_sequences: int = 1

    @property
    def device(self) -> int:
        """All that the device must have."""
        return self.weights + self.workspace + self.num_sequences * self.state


class Outline:
    """A model of given sizes and placement, on paper. Allocates and reads nothing.

    Attributes:
        sizes: of context and chunk.
        needs: the bytes it will take.
    """

    def __init__(
        self, model: ModelFile, device: Device, stream: Stream, sizes: Sizes, placement: Placement
    ) -> None:
        self._spec = model.spec
        self.sizes = sizes
        self._paper = PaperDevice(device, stream)
        arenas = [Arena(self._paper.uncounted(home)) for home in (Home.DEVICE, Home.PINNED)]
        self._layouts = blob_layouts(model) if placement.experts is ExpertHome.CACHED else ()
        self._cached = _cached_experts(model, self._paper, placement)
        self._weights = place_weights(
            model, Stores(*arenas), placement, sizes.context_tokens, self._cached
        )
        self.needs = Needs(
            weights=arenas[0].used_bytes,
            mapped=arenas[1].used_bytes,
            workspace=_workspace_bytes(self._spec, self._paper, sizes),
            state=_state_bytes(self._spec, self._paper, sizes),
            num_sequences=sizes.num_sequences,
        )

    def kernels(self) -> Iterator[Kernel]:
        """What passes of one token, of a chunk and of sizes between launch, early and late."""
        sizes, stream = self.sizes, self._paper.stream("outline")
        workspace = Workspace(self._spec, self._paper, sizes.chunk_tokens, sizes.logit_rows)
        state = new_state(self._spec, self._paper, stream, sizes.context_tokens)
        forward = Forward(self._spec, self._weights, workspace, stream, self._fetcher(stream))
        for num_tokens in _pass_sizes(sizes):
            segments = (Segment(state, 0, num_tokens),)
            for is_recorded in (False, True):
                forward.run(Batch(num_tokens, segments, is_recorded))
            forward.head(0, min(num_tokens, sizes.logit_rows))
        if self._cached is not None:
            num_pairs = sizes.chunk_tokens * self._spec.num_experts_per_tok
            feed = _PaperFeed(self._cached, self._paper, num_pairs)
            batch = Batch(sizes.chunk_tokens, (Segment(state, 0, sizes.chunk_tokens),))
            forward.run(batch, feed=feed)
            share = empty(self._paper, (1,), np.int32)
            split = Split(SlotRange(0, 1), share, self._spec.num_experts_per_tok)
            one = ResidentFeed(self._cached, self._spec.num_experts_per_tok, split)
            forward.run(Batch(1, (Segment(state, 0, 1),)), feed=one)
        if sizes.chunk_tokens > 1:
            batch = self._two_segments(state)
            forward.run(replace(batch, table=workspace.segments(2)))
            steps = Batch(2, (Segment(state, 0, 1), Segment(state, 1, 2)), is_recorded=True)
            forward.run(replace(steps, table=workspace.segments(2)))
        # A few tokens behind many share the work of attention in another way.
        num_tokens = min(SUFFIX_TOKENS, sizes.chunk_tokens)
        state.ids.extend([0] * (sizes.context_tokens - num_tokens))
        forward.run(Batch(num_tokens, (Segment(state, 0, num_tokens),)))
        yield from self._paper.kernels

    def _two_segments(self, state: SequenceState) -> Batch:
        """A pass as large as they come, over two sequences."""
        num, half = self.sizes.chunk_tokens, self.sizes.chunk_tokens // 2
        return Batch(num, (Segment(state, 0, half), Segment(state, half, num)))

    def _fetcher(self, stream: Stream) -> Fetcher | None:
        if self._cached is None:
            return None
        addresses = self._cached[0].gate.blobs
        layers = empty(self._paper, (len(self._cached), addresses.size), np.int64)
        sizes = FetchSizes(1, 1)
        return Fetcher(self._paper, stream, self._layouts, layers, SlotRange(0, 0), sizes)


class _PaperFeed:
    """Groups of all the sizes that may come, for the kernels that they choose."""

    def __init__(
        self, layers: Sequence[ExpertMatrices], paper: PaperDevice, num_pairs: int
    ) -> None:
        self._layers = layers
        self._num_experts = layers[0].gate.blobs.shape[0]
        self._rank_of = empty(paper, (self._num_experts,), np.int32)
        self._num_pairs = num_pairs
        self._seen: set[tuple[WeightLayout, ...]] = set()

    def experts(self, layer: int) -> RankedExperts:
        """See ExpertFeed."""
        return RankedExperts(self._layers[layer], self._rank_of)

    def publish(self, layer: int, expert_start: Tensor, rows: PairRows) -> None:
        """Nobody needs to know."""

    def groups(self, layer: int) -> Iterator[ExpertGroup]:
        """See ExpertFeed; but the groups overlap, and come once for layers that are alike."""
        experts = self._layers[layer]
        layouts = (experts.gate.layout, experts.up.layout, experts.down.layout)
        if layouts in self._seen:
            return
        self._seen.add(layouts)
        for ranks in _doublings(self._num_experts):
            for pairs in _doublings(self._num_pairs):
                yield ExpertGroup(range(ranks), range(pairs))


def _doublings(most: int) -> list[int]:
    return [*(1 << n for n in range(most.bit_length()) if 1 << n < most), most]


def _cached_experts(
    model: ModelFile, paper: PaperDevice, placement: Placement
) -> tuple[ExpertMatrices, ...] | None:
    if placement.experts is not ExpertHome.CACHED:
        return None
    spec = model.spec
    addresses = empty(paper, (spec.num_layers, spec.num_experts), np.int64)
    return blob_experts(blob_layouts(model), addresses)


def _pass_sizes(sizes: Sizes) -> list[int]:
    """One token, powers of two, halfway between, whole chunks: kernels are chosen by size."""
    chunk_tokens, steps = sizes.chunk_tokens, _doublings(sizes.num_sequences)
    powers = [part << exponent for exponent in range(4, 15) for part in (2, 3)]
    counts = {*steps, 2, 16, *powers}  # one token, and very few, have functions of their own
    return [*sorted(count for count in counts if count < chunk_tokens), chunk_tokens]


def _workspace_bytes(spec: ModelSpec, paper: PaperDevice, sizes: Sizes) -> int:
    before = paper.device_bytes
    Workspace(spec, paper, sizes.chunk_tokens, sizes.logit_rows)
    return paper.device_bytes - before


def _state_bytes(spec: ModelSpec, paper: PaperDevice, sizes: Sizes) -> int:
    before = paper.device_bytes
    new_state(spec, paper, paper.stream("outline"), sizes.context_tokens)
    return paper.device_bytes - before
