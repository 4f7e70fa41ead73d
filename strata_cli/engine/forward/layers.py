"""The model as launches: embed, layers, head. One recipe for prompts, steps and mixed batches.

Every launch reads token ids and positions from device memory, so a recorded pass can be replayed
for the next token. Source of the equations: the qwen4exp architecture (hyper-connections, gated
delta net, indexed sparse attention, hashed n-gram embedding, mixture of experts).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.device.base import Tensor
from strata_cli.engine.device.timing import NO_SPANS, Spans
from strata_cli.engine.forward.batch import Batch
from strata_cli.engine.forward.feeding import ExpertFeed
from strata_cli.engine.forward.hyper_connections import read_streams
from strata_cli.engine.forward.layer_parts import EXPERTS, MIXER, NGRAMS, LayerPart, LayerPass
from strata_cli.engine.forward.on_stream import ModelOnStream
from strata_cli.engine.forward.patterns import Operands, Patterns
from strata_cli.engine.forward.state import AttentionState
from strata_cli.engine.forward.weights import LayerWeights
from strata_cli.engine.kernels.attention_plan import PART_POSITIONS
from strata_cli.engine.kernels.embed import embed_streams
from strata_cli.engine.kernels.matmul import matmul
from strata_cli.engine.kernels.shapes import blocks

MOST_REPEATED_TOKENS = 512  # of a pass; longer ones wait for the GPU, not for the host


@dataclass(frozen=True, slots=True)
class Forward(ModelOnStream):
    """Enqueues passes through all layers of a model, in order.

    Attributes:
        patterns: of layers' launches, as short passes made them.
    """

    patterns: Patterns = field(default_factory=Patterns, init=False, repr=False, compare=False)

    def run(self, batch: Batch, spans: Spans = NO_SPANS, feed: ExpertFeed | None = None) -> None:
        """Enqueue all layers; the residual streams of every row end up in workspace x.

        Args:
            batch: the rows.
            spans: told of each layer; not while the stream is captured.
            feed: brings the routed experts; None: they are where the weights say.
        """
        take, num = self.workspace.take, batch.num_tokens
        x = take("x", num)
        embed_streams(self.stream, take("ids", num), self.weights.embed, x)
        states = batch.states
        start = spans.mark(self.stream)
        for index, layer in enumerate(self.weights.layers):
            for state in states:
                state.arrive(index)
            self.layer(index, layer, batch, x, feed)
            stop = spans.mark(self.stream)
            spans.span("layer.run", start, stop, layer=index)
            start = stop

    def layer(
        self,
        index: int,
        layer: LayerWeights,
        batch: Batch,
        x: Tensor,
        feed: ExpertFeed | None = None,
    ) -> None:
        """Enqueue one layer, updating the residual streams x [T, S, D] in place."""
        own = LayerPass(index, batch, x, feed)
        parts = (MIXER, EXPERTS) if layer.ngram is None else (NGRAMS, MIXER, EXPERTS)
        for part in parts:
            if self._is_repeated(part, own):
                self._repeat(part, own)
            else:
                part.enqueue(self, own)

    def head(self, start: int, stop: int) -> Tensor:
        """Enqueue the final read and the head for rows start..stop of the last pass.

        Returns:
            logits [stop - start, V] in the workspace; at most workspace.logit_rows rows.
        """
        x = self.workspace.take("x", stop).rows(start, stop)
        y = read_streams(self, self.weights.final_read, x, is_normed=False)
        logits = self.workspace.take("logits", stop - start)
        matmul(self.stream, y.values, self.weights.head, logits, y.rounded)
        return logits

    def _is_repeated(self, part: LayerPart, own: LayerPass) -> bool:
        """Whether a pass is short, and a part of it finds experts, or sequences, in one place.

        Not on the host, where what is launched takes much longer than to launch it.
        """
        batch, num = own.batch, own.batch.num_tokens
        is_short = 1 < num <= MOST_REPEATED_TOKENS
        if not is_short or batch.is_recorded or not self.stream.shared_bytes:
            return False
        if part.is_fed:
            return own.feed is None and self.fetcher is None
        is_one = len(batch.segments) == 1 and batch.segments[0].room is None
        return is_one or batch.table is not None

    def _repeat(self, part: LayerPart, own: LayerPass) -> None:
        """Enqueue a part of a layer, in the way that it was before where that is known."""
        known = self.patterns.part((part.name, own.layer), self._all_operands)
        key, others = (self._of_experts if part.is_fed else self._of_sequences)(own)
        self.patterns.enqueue(
            known,
            (own.batch.num_tokens, key),
            others,
            self,
            lambda stream: part.enqueue(replace(self, stream=stream), own),
        )

    def _of_experts(self, own: LayerPass) -> tuple[Hashable, NDArray[np.int64]]:
        """What the launches of experts depend on besides weights and tokens, and addresses."""
        num, ids = own.batch.num_tokens, 0
        if num <= self.workspace.routed_rows:
            ids = self.expert_ids(own.layer, num).address
        return None, np.array([ids], np.int64)

    def _of_sequences(self, own: LayerPass) -> tuple[Hashable, NDArray[np.int64]]:
        """The same of parts that work with the sequences' states.

        Only attention depends on positions: of a sequence alone, on how many parts they have.
        """
        layer, batch = own.layer, own.batch
        state, table = batch.segments[0].state, batch.table
        is_attention = isinstance(state.layers[layer], AttentionState)
        if table is None:
            reach = blocks(batch.last_position, PART_POSITIONS) if is_attention else 0
            of_state = state.addresses()
            return (state.context_tokens, reach), np.concatenate((of_state[layer], of_state[-1]))
        tables = [table.rows(at, at + 1).address for at in (layer, self.num_layers)]
        parts = [each.addresses()[at] for each in batch.states for at in (layer, -1)]
        contexts = tuple(each.context_tokens for each in batch.states)
        cut = batch.cut if is_attention else tuple(each[:2] for each in batch.cut)
        return (contexts, cut), np.concatenate((*parts, tables))

    @property
    def num_layers(self) -> int:
        """Of the trunk."""
        return len(self.weights.layers)

    def _all_operands(self) -> Iterator[tuple[Hashable, Operands]]:
        """Of every part that a layer may have, by the part's name and the layer."""
        for index in range(self.num_layers):
            for part in (NGRAMS, MIXER, EXPERTS):
                yield (part.name, index), part.operands(self, index)
