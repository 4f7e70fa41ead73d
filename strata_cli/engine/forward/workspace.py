"""Scratch memory of one forward pass, sized once for the largest batch.

A pass works through parts, one after the other. What a part hands to no other lies over the same
memory as that of all others: a full model's chunk of 8,192 tokens takes 2.3 GiB instead of 5.5.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
from numpy.typing import DTypeLike

from strata_cli.engine.device.base import Buffer, Device, Tensor
from strata_cli.engine.kernels.attention_plan import attend_scratch_floats
from strata_cli.engine.kernels.choice import SOME_TOKENS
from strata_cli.engine.kernels.segments import SEGMENT_WORDS
from strata_cli.engine.kernels.splitting import EXTRA_PLACES
from strata_cli.engine.kernels.stream_read import inject_parts
from strata_cli.engine.model.spec import ModelSpec

ALIGNMENT_BYTES = 256
USUAL_FLOATS = 1 << 22  # of scratch whose size changes speed only
MOST_TAKEN = 4_096  # windows of scratch tensors that are kept
MOST_SEGMENTS = 512  # that a pass takes together
OF_EACH_LAYER = ("routed", "segments")  # scratch of which every layer has a part of its own
ROUTED_ROWS = 32  # most tokens of a pass that leaves behind what all its layers were routed to


class Part(Enum):
    """A stretch of launches that begins with nothing of its own and leaves nothing of it behind."""

    READ = "a read of the residual streams, which are normed already"
    GDN = "a gated delta net"
    ATTENTION = "attention"
    EXPERTS = "experts, routed and shared"
    NGRAM = "the n-gram embedding"
    HEAD = "the head"


@dataclass(frozen=True, slots=True)
class Scratch:
    """What a pass needs.

    Attributes:
        name: for take().
        rows: tokens, pairs or logit rows.
        row_shape, dtype: of a row.
        part: the one that alone uses it; None: it lives on from part to part.
    """

    name: str
    rows: int
    row_shape: tuple[int, ...]
    dtype: DTypeLike = np.float32
    part: Part | None = None

    @property
    def nbytes(self) -> int:
        """Of all rows, and of what is left free behind them."""
        nbytes = self.rows * math.prod(self.row_shape) * np.dtype(self.dtype).itemsize
        return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


_OF_PART: dict[Part, tuple[str, ...]] = {
    Part.READ: (
        "low",
        "stream_gate",
    ),
    Part.GDN: (
        "qkv",
        "conv",
        "z",
        "alpha",
        "beta",
        "delta",
        "gated",
    ),
    Part.ATTENTION: (
        "q_gate",
        "q",
        "k_raw",
        "k",
        "v",
        "index_q_raw",
        "index_q",
        "index_k",
        "block_scores",
        "attend_sums",
        "attended",
        "branch_keys",
        "branch_values",
        "branch_pooled",
    ),
    Part.EXPERTS: (
        "router",
        "expert_gate",
        "expert_up",
        "expert_out",
        "shared_gate",
        "shared_up",
        "shared_out",
        "shared_logit",
    ),
    Part.NGRAM: (
        "ngram_embedding",
        "ngram_key",
        "ngram_value",
        "ngram_gated",
    ),
    Part.HEAD: ("logits",),
}
_PART_OF = {name: part for part, names in _OF_PART.items() for name in names}


def scratch_plan(spec: ModelSpec, num_tokens: int, logit_rows: int) -> list[Scratch]:
    """Every scratch tensor for a batch of num_tokens and logit_rows rows of logits."""
    streams, hidden = spec.num_streams, spec.hidden_size
    wide = streams * hidden
    values = spec.gdn_num_value_heads * spec.gdn_head_dim
    channels = 2 * spec.gdn_num_key_heads * spec.gdn_head_dim + values
    heads, kv = spec.num_heads, spec.num_kv_heads
    pairs = num_tokens * spec.num_experts_per_tok
    width = max(spec.moe_intermediate_size)
    blocks = max((spec.indexer_budget_tokens // r for r in spec.index_ratio if r), default=1)
    embedding = 0 if spec.ngram is None else spec.ngram.num_heads * spec.ngram.row_width
    widest = max(wide, values, heads * spec.head_dim, embedding)  # of what is multiplied
    t, i32 = num_tokens, np.int32
    plan = [
        Scratch("ids", t, (), i32),
        Scratch("positions", t, (), i32),
        Scratch("x", t, (streams, hidden)),
        # Of no part: written ahead of its read, by launches that still look at their own part's.
        Scratch("normed", t, (wide,)),
        Scratch("rounded", t, (widest,), np.float16),
        Scratch("low", t, (spec.stream_rank,)),
        Scratch("stream_gate", t, (wide,)),
        Scratch("y", t, (hidden,)),
        Scratch("inject", t, (streams,)),
        Scratch("inject_parts", min(t, SOME_TOKENS), (inject_parts(wide), streams)),
        Scratch("out", t, (hidden,)),
        Scratch("qkv", t, (channels,)),
        Scratch("conv", t, (channels,)),
        Scratch("z", t, (values,)),
        Scratch("alpha", t, (spec.gdn_num_value_heads,)),
        Scratch("beta", t, (spec.gdn_num_value_heads,)),
        Scratch("delta", t, (values,)),
        Scratch("gated", t, (values,)),
        Scratch("q_gate", t, (heads, 2 * spec.head_dim)),
        Scratch("q", t, (heads, spec.head_dim)),
        Scratch("k_raw", t, (kv, spec.head_dim)),
        Scratch("k", t, (kv, spec.head_dim)),
        Scratch("v", t, (kv * spec.head_dim,)),
        Scratch("index_q_raw", t, (spec.indexer_num_heads, spec.indexer_head_dim)),
        Scratch("index_q", t, (spec.indexer_num_heads, spec.indexer_head_dim)),
        Scratch("index_k", t, (spec.indexer_head_dim,)),
        Scratch("selected", t, (blocks,), i32),
        Scratch("num_selected", t, (), i32),
        Scratch("block_scores", _score_floats(spec), ()),
        Scratch("attend_sums", _attend_floats(spec, num_tokens), ()),
        Scratch("attended", t, (heads * spec.head_dim,)),
        Scratch("branch_keys", t, (kv * spec.head_dim,), np.float16),
        Scratch("branch_values", t, (kv * spec.head_dim,), np.float16),
        Scratch("branch_pooled", t, (spec.indexer_head_dim,)),
        Scratch("segments", (spec.num_layers + 1) * most_segments(t), (SEGMENT_WORDS,), np.int64),
        Scratch("router", t, (spec.num_experts,)),
        Scratch("expert_ids", t, (spec.num_experts_per_tok,), i32),
        Scratch("routed", spec.num_layers, (min(t, ROUTED_ROWS), spec.num_experts_per_tok), i32),
        Scratch("expert_ranks", t, (spec.num_experts_per_tok,), i32),
        Scratch("expert_weights", t, (spec.num_experts_per_tok,)),
        Scratch("expert_start", spec.num_experts + EXTRA_PLACES + 1, (), i32),
        Scratch("row_of", pairs, (), i32),
        Scratch("pair_of", t, (spec.num_experts_per_tok,), i32),
        Scratch("expert_gate", pairs, (width,)),
        Scratch("expert_up", pairs, (width,)),
        Scratch("expert_out", pairs, (hidden,)),
        Scratch("shared_gate", t, (spec.shared_intermediate_size,)),
        Scratch("shared_up", t, (spec.shared_intermediate_size,)),
        Scratch("shared_out", t, (hidden,)),
        Scratch("shared_logit", t, (1,)),
        Scratch("logits", logit_rows, (spec.vocab_size,)),
    ]
    if spec.ngram is not None:
        num_heads = spec.ngram.num_heads
        plan += [
            Scratch("ngram_rows", t, (num_heads,), np.int64),
            Scratch("ngram_embedding", t, (num_heads * spec.ngram.row_width,)),
            Scratch("ngram_key", t, (wide,)),
            Scratch("ngram_value", t, (hidden,)),
            Scratch("ngram_gated", t, (wide,)),
        ]
    return [replace(scratch, part=_PART_OF.get(scratch.name)) for scratch in plan]


def most_segments(num_tokens: int) -> int:
    """Segments that a pass of at most so many tokens may take together."""
    return min(num_tokens, MOST_SEGMENTS)


def lay_out(plan: Sequence[Scratch]) -> tuple[list[int], int]:
    """Where each scratch tensor begins, and the end of all: parts lie over each other."""
    shared = sum(scratch.nbytes for scratch in plan if scratch.part is None)
    ends: dict[Part | None, int] = {None: 0, **dict.fromkeys(Part, shared)}
    offsets = []
    for scratch in plan:
        offsets.append(ends[scratch.part])
        ends[scratch.part] += scratch.nbytes
    return offsets, max(ends.values())


def _score_floats(spec: ModelSpec) -> int:
    """Scores of all index blocks, for one token at least."""
    blocks = [spec.context_tokens // ratio for ratio in spec.index_ratio if ratio]
    return max(USUAL_FLOATS, *blocks) if blocks else 1


def _attend_floats(spec: ModelSpec, num_tokens: int) -> int:
    """Sums of few tokens' units of attention, for one token at least."""

    def floats(tokens: int) -> int:
        ratios = {
            ratio
            for ratio, is_recurrent in zip(spec.index_ratio, spec.is_recurrent, strict=True)
            if not is_recurrent
        }
        budgets = {ratio: spec.indexer_budget_tokens // ratio if ratio else 1 for ratio in ratios}
        shape = (tokens, spec.num_heads, spec.head_dim, spec.context_tokens)
        return max((attend_scratch_floats(*shape, budgets[r], r) for r in ratios), default=1)

    return max(floats(1), min(floats(num_tokens), USUAL_FLOATS))


class Workspace:
    """One device buffer cut into the scratch tensors of the plan.

    Args:
        spec: the model's dimensions.
        device: where the buffer is allocated.
        num_tokens: largest batch.
        logit_rows: most rows of logits computed at a time.

    Raises:
        OutOfMemory: the buffer does not fit.
    """

    def __init__(self, spec: ModelSpec, device: Device, num_tokens: int, logit_rows: int) -> None:
        self.num_tokens = num_tokens
        self.logit_rows = logit_rows
        plan = scratch_plan(spec, num_tokens, logit_rows)
        offsets, end = lay_out(plan)
        self._buffer: Buffer = device.allocate(max(end, 1))
        pairs = num_tokens * spec.num_experts_per_tok
        self._numbers = device.resident(np.arange(pairs, dtype=np.int32).view(np.uint8))
        self._tensors = {
            scratch.name: Tensor.over(
                self._buffer, (scratch.rows, *scratch.row_shape), scratch.dtype, offset
            )
            for scratch, offset in zip(plan, offsets, strict=True)
        }
        self._by_layer = [
            (whole.offset_bytes, whole.offset_bytes + whole.nbytes)
            for whole in map(self.take_all, OF_EACH_LAYER)
        ]
        self._taken: dict[tuple[str, int | tuple[int, ...]], Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Device memory held."""
        return self._buffer.nbytes

    @property
    def routed_rows(self) -> int:
        """Most tokens of a pass that leaves behind what all its layers were routed to."""
        return self._tensors["routed"].shape[1]

    def numbers(self, count: int) -> Tensor:
        """0, 1, … count-1 as int32, for products whose rows are already in order."""
        return Tensor.over(self._numbers, (count,), np.int32)

    @property
    def most_segments(self) -> int:
        """That a pass may take together."""
        return most_segments(self.num_tokens)

    def segments(self, count: int) -> Tensor:
        """The table of so many segments, int64 [L + 1, count, SEGMENT_WORDS]."""
        layers = self._tensors["segments"].shape[0] // self.most_segments
        return self.take_shaped("segments", layers, count, SEGMENT_WORDS)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in memory of the workspace that is the same for every layer."""
        if tensor.buffer is self._buffer:
            at = tensor.offset_bytes
            return not any(first <= at < end for first, end in self._by_layer)
        return tensor.buffer is self._numbers

    def take(self, name: str, rows: int) -> Tensor:
        """The first rows of a scratch tensor; contents undefined where its part begins."""
        taken = self._taken.get((name, rows))
        return (
            self._keep((name, rows), self._tensors[name].rows(0, rows)) if taken is None else taken
        )

    def take_all(self, name: str) -> Tensor:
        """A scratch tensor as large as it is, contents undefined."""
        return self._tensors[name]

    def take_shaped(self, name: str, *shape: int) -> Tensor:
        """The first elements of a scratch tensor under another shape (for narrower layers)."""
        taken = self._taken.get((name, shape))
        if taken is None:
            whole = self._tensors[name]
            assert math.prod(shape) <= whole.size, f"{name} {shape} exceeds {whole.shape}"
            own = Tensor.over(self._buffer, shape, whole.dtype, whole.offset_bytes)
            taken = self._keep((name, shape), own)
        return taken

    def _keep(self, key: tuple[str, int | tuple[int, ...]], window: Tensor) -> Tensor:
        if len(self._taken) >= MOST_TAKEN:
            self._taken.clear()
        self._taken[key] = window
        return window

    def close(self) -> None:
        """Gives the memory back. Safe to call twice."""
        self._numbers.close()
        self._buffer.close()
