"""The model as launches: embed, layers, head. One recipe for prompts, steps and mixed batches.

Every launch reads token ids and positions from device memory, so a recorded pass can be replayed
for the next token. Source of the equations: the qwen4exp architecture (hyper-connections, gated
delta net, indexed sparse attention, hashed n-gram embedding, mixture of experts).
"""

from __future__ import annotations

from dataclasses import dataclass

from strata_cli.engine.device.base import Tensor
from strata_cli.engine.device.timing import NO_SPANS, Spans
from strata_cli.engine.forward.attention import attention
from strata_cli.engine.forward.batch import Batch
from strata_cli.engine.forward.delta_net import gated_delta_net
from strata_cli.engine.forward.feeding import ExpertFeed, ResidentFeed
from strata_cli.engine.forward.hyper_connections import (
    norms_itself,
    read_streams,
    write_experts,
    write_product,
)
from strata_cli.engine.forward.mixture import mix_experts
from strata_cli.engine.forward.ngram_embedding import add_ngrams
from strata_cli.engine.forward.on_stream import ModelOnStream
from strata_cli.engine.forward.weights import LayerWeights
from strata_cli.engine.kernels.embed import embed_streams
from strata_cli.engine.kernels.matmul import matmul


@dataclass(frozen=True, slots=True)
class Forward(ModelOnStream):
    """Enqueues passes through all layers of a model, in order."""

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
        start = spans.mark(self.stream)
        for index, layer in enumerate(self.weights.layers):
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
        """Enqueue one layer, updating the residual streams x [T, S, D] in place.

        Layers follow each other: each leaves x normed for the next in the workspace, unless that
        norms it itself.
        """
        if layer.ngram is not None:
            add_ngrams(self, layer.ngram, batch, x)
        y = read_streams(
            self, layer.mixer_read, x, is_normed=self._norm_ahead(index, x) is not None
        )
        if layer.gdn is not None:
            last = gated_delta_net(self, index, layer.gdn, batch, y)
        else:
            assert layer.attention is not None
            last = attention(self, index, layer.attention, batch, y)
        norm = None if norms_itself(self, layer.ffn_read, x) else layer.ffn_read.norm
        write_product(self, x, last, y.inject, norm)
        y = read_streams(self, layer.ffn_read, x, is_normed=norm is not None)
        feed = feed or self._residents(batch.num_tokens)
        combined = mix_experts(self, index, layer.moe, y, feed, is_recorded=batch.is_recorded)
        write_experts(self, x, combined, y.inject, self._norm_ahead(index + 1, x))

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

    def _norm_ahead(self, index: int, x: Tensor) -> Tensor | None:
        """The norm of a layer's first read of streams x if the layer before already does it.

        Not of the first layer, nor where a layer changes the streams before it reads them, nor
        where the read does it itself.
        """
        if not 0 < index < len(self.weights.layers):
            return None
        layer = self.weights.layers[index]
        is_ahead = layer.ngram is None and not norms_itself(self, layer.mixer_read, x)
        return layer.mixer_read.norm if is_ahead else None

    def _residents(self, num_tokens: int) -> ExpertFeed:
        experts = [layer.moe.experts for layer in self.weights.layers]
        return ResidentFeed(experts, num_tokens * self.spec.num_experts_per_tok)
