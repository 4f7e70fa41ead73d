"""What every part of a layer works with: the model, its workspace, the stream."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from strata_cli.engine.device.base import Stream, Tensor
from strata_cli.engine.forward.fetching import Fetcher
from strata_cli.engine.forward.weights import ModelWeights
from strata_cli.engine.forward.workspace import Workspace
from strata_cli.engine.kernels.choice import FEW_TOKENS
from strata_cli.engine.kernels.matmul import round_rows
from strata_cli.engine.model.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class ModelOnStream:
    """One model on one stream. The workspace is shared by all passes: one pass at a time.

    Attributes:
        fetcher: brings experts to passes of few tokens that would read them over the link; None:
            they do that.
    """

    spec: ModelSpec
    weights: ModelWeights
    workspace: Workspace
    stream: Stream
    fetcher: Fetcher | None = None

    def routed(self, num_tokens: int) -> Tensor:
        """Experts of every layer that the last pass of so few tokens was routed to, best first.

        Returns:
            int32 [L, T, k] in the workspace; T is at most workspace.routed_rows.
        """
        shape = (len(self.weights.layers), num_tokens, self.spec.num_experts_per_tok)
        return self.workspace.take_shaped("routed", *shape)

    def expert_ids(self, index: int, num_tokens: int) -> Tensor:
        """Where a layer's routing goes, int32 [T, k]."""
        if num_tokens > self.workspace.routed_rows:
            return self.workspace.take("expert_ids", num_tokens)
        own = self.routed(num_tokens).rows(index, index + 1)
        return own.reshape(*own.shape[1:])

    def room_for_rounded(self, x: Tensor) -> Tensor | None:
        """Where x [T, K] goes as f16 for the products of many rows; None where rows are few.

        There is room for one: whatever is written there must be used up first.
        """
        if x.shape[0] <= FEW_TOKENS:
            return None
        return self.workspace.take_shaped("rounded", *x.shape)

    def rounded(self, x: Tensor) -> Tensor | None:
        """Enqueue x [T, K] as f16, into the room for it, where there is any."""
        rounded = self.room_for_rounded(x)
        if rounded is not None:
            round_rows(self.stream, x, rounded)
        return rounded

    def rounded_over(self, used: Tensor, x: Tensor, first: int) -> Tensor | None:
        """Enqueue rows of f16 over float32 rows that are used up, where rows are many.

        Args:
            used: [R, K], its rows before the end of x's used up; halves of a row take half of its
                room, so that they reach no row behind them.
            x: rows first.. of R, [n, K].
            first: row.

        Returns:
            float16 [R, K]; rows before first as earlier calls left them.
        """
        if x.shape[0] <= FEW_TOKENS:
            return None
        halves = Tensor.over(used.buffer, used.shape, np.float16, used.offset_bytes)
        round_rows(self.stream, x, halves.rows(first, first + x.shape[0]))
        return halves
