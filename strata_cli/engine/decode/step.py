"""One token at a time: a pass recorded once per sequence, replayed for every token."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.decode.residency import Residency
from strata_cli.engine.device.base import Graph
from strata_cli.engine.forward.layers import Forward
from strata_cli.engine.forward.rows import RowPort, advancing, single
from strata_cli.engine.forward.state import SequenceState


class Decoder:
    """Steps one sequence. Its bits equal those of reading the same token as a prompt.

    Args:
        forward: the model.
        port: staging of the forward's workspace.
        state: of the sequence.
        residency: told of each step; None: nobody asks where experts are.
    """

    def __init__(
        self,
        forward: Forward,
        port: RowPort,
        state: SequenceState,
        residency: Residency | None = None,
    ) -> None:
        self._forward = forward
        self._port = port
        self._state = state
        self._residency = residency
        self._graph: Graph | None = None

    def step(self, token_id: int, *, is_exact: bool = True) -> NDArray[np.float32]:
        """Read one token; returns its logits [V]. Blocks until they are there.

        Args:
            token_id: the token.
            is_exact: whether it is computed as a canonical read would.
        """
        state, port, residency = self._state, self._port, self._residency
        if residency is not None:
            residency.begin()
        with advancing(state, [token_id], is_exact=is_exact):
            port.stage([token_id], range(state.position, state.position + 1))
            graph = self._graph or self._record()
            self._forward.stream.replay(graph)
            port.mark_inputs()
        if residency is not None:
            residency.launched()
        row: NDArray[np.float32] = port.read_logits(1)[0]
        if residency is not None:
            residency.end(1)
        return row

    def _record(self) -> Graph:
        with self._forward.stream.capture() as graph:
            self._port.enqueue_inputs(1)
            self._forward.run(single(self._state, 1))
            if self._residency is not None:
                self._residency.enqueue_routing(1)
            self._port.enqueue_logits(self._forward.head(0, 1))
        self._graph = graph
        return graph

    def close(self) -> None:
        """Forget the recorded pass. Safe to call twice."""
        if self._graph is not None:
            self._graph.close()
            self._graph = None
