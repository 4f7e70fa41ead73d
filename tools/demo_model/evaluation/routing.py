"""How often each expert is chosen, layer by layer.

No public call of the engine tells its routing, so this looks behind the door: it runs the layers
of a pass one by one and fetches the chosen experts after each.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.device.transfer import download
from strata_cli.engine.engine import Engine
from strata_cli.engine.forward.batch import Batch
from strata_cli.engine.forward.rows import advancing, single
from strata_cli.engine.kernels.embed import embed_streams
from tools.demo_model.evaluation.decisions import turn_ids
from tools.demo_model.evaluation.texts import windows
from tools.demo_model.feed import sourced_texts
from tools.demo_model.tables import Tables
from tools.demo_model.tasks.drawing import Example

PASS_TOKENS = 512  # of a document, and the most of a pass


def routed_experts(engine: Engine, ids: list[int]) -> list[NDArray[np.int32]]:
    """Return every layer's chosen experts, [T, K] each, best first, of one fresh read."""
    forward = engine._forward
    chosen = []
    with _one_pass(engine, ids) as batch:
        take = forward.workspace.take
        x = take("x", len(ids))
        embed_streams(forward.stream, take("ids", len(ids)), forward.weights.embed, x)
        for number, layer in enumerate(forward.weights.layers):
            forward.layer(number, layer, batch, x)
            experts = forward.expert_ids(number, len(ids))  # few rows keep every layer's
            chosen.append(download(engine._device, forward.stream, experts))
    return chosen


@contextmanager
def _one_pass(engine: Engine, ids: list[int]) -> Iterator[Batch]:
    """Stage the tokens of a new sequence as one pass."""
    port = engine._port
    with engine.sequence() as sequence, advancing(sequence._state, ids):
        port.stage(ids, range(len(ids)))
        port.enqueue_inputs(len(ids))
        port.mark_inputs()
        yield single(sequence._state, len(ids))


def expert_shares(engine: Engine, reads: Sequence[list[int]]) -> NDArray[np.float64]:
    """Return the share of every expert among all choices of a layer, [layers, experts]."""
    counts = np.zeros((engine.spec.num_layers, engine.spec.num_experts), dtype=np.int64)
    for ids in reads:
        for layer, experts in enumerate(routed_experts(engine, ids)):
            counts[layer] += np.bincount(experts.ravel(), minlength=counts.shape[1])
    shares: NDArray[np.float64] = counts / counts.sum(axis=1, keepdims=True)
    return shares


def measure_routing(
    engine: Engine, tables: Tables, prompts: Sequence[Example], documents: int
) -> dict[str, Any]:
    """Return the expert shares over the starts of held-out documents, and over decision prompts."""
    texts = islice(sourced_texts(tables, 0, 1, Random(2)), documents)
    running = [next(windows(engine, text, PASS_TOKENS)) for _, text in texts]
    asked = [turn_ids(engine, one.state, one.turns[0])[:PASS_TOKENS] for one in prompts]
    return {
        name: {
            "tokens": sum(map(len, reads)),
            "shares": np.round(expert_shares(engine, reads), 4).tolist(),
        }
        for name, reads in (("texts", running), ("decisions", asked))
    }
