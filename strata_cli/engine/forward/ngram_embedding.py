"""The hashed n-gram embedding as launches."""

from __future__ import annotations

from strata_cli.engine.device.base import Tensor
from strata_cli.engine.forward.batch import Batch, rows_of
from strata_cli.engine.forward.on_stream import ModelOnStream
from strata_cli.engine.forward.weights import NgramWeights
from strata_cli.engine.kernels import ngram
from strata_cli.engine.kernels.matmul import matmul
from strata_cli.engine.kernels.state_segments import ngram_conv_segments, ngram_rows_segments


def add_ngrams(model: ModelOnStream, weights: NgramWeights, batch: Batch, x: Tensor) -> None:
    """Enqueue the embedding of the n-grams that end at each row, added to streams x [T, S, D]."""
    take, num, stream = model.workspace.take, batch.num_tokens, model.stream
    spec, eps = weights.spec, model.spec.rms_eps
    ids, rows = take("ids", num), take("ngram_rows", num)
    together = batch.together(-1)
    hashes = (weights.multipliers, weights.offsets, weights.sizes, spec.eos_token_id)
    if together is not None:
        ngram_rows_segments(stream, ids, together, *hashes, rows)
    for segment in () if together is not None else batch.segments:
        part = slice(segment.start, segment.stop)
        ngram.ngram_rows(
            stream, rows_of(ids, part), segment.history(), *hashes, rows_of(rows, part)
        )
    embedding, key = take("ngram_embedding", num), take("ngram_key", num)
    value, gated = take("ngram_value", num), take("ngram_gated", num)
    ngram.gather_rows(stream, rows, weights.table, embedding)
    rounded = model.rounded(embedding)
    matmul(stream, embedding, weights.key, key, rounded)
    matmul(stream, embedding, weights.value, value, rounded)
    ngram.ngram_gate(stream, key, value, x, weights.norm_key, weights.norm_query, eps, gated)
    if together is not None:
        conv = (weights.conv, spec.max_n, eps)
        ngram_conv_segments(stream, gated, weights.norm_conv, together, *conv, x)
    for segment in () if together is not None else batch.segments:
        part = slice(segment.start, segment.stop)
        ngram.ngram_conv(
            stream,
            rows_of(gated, part),
            weights.norm_conv,
            segment.ngram_columns(),
            weights.conv,
            spec.max_n,
            eps,
            rows_of(x, part),
        )
