"""Room for the running state of branches: continuations of a sequence that are read and forgotten.

A branch goes layer by layer like everything else, and what it leaves in a layer's running state is
read by nobody. So one layer's room serves all layers and all branches of a stream, one after the
other, however many there are. A branch's K/V lies in its sequence's own rows behind the position:
a layer stores and attends branch by branch, in stream order.
"""

from __future__ import annotations

from dataclasses import dataclass

from strata_cli.engine.device.base import Device, Stream, Tensor
from strata_cli.engine.forward.state import GdnState, NgramState, new_gdn_state, new_ngram_state
from strata_cli.engine.model.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class BranchRoom:
    """A copy of one layer's running state at a time; contents are those of the last copy.

    Attributes:
        stream: that branches run on, and copies are enqueued on.
        gdn: None in a model without recurrent layers.
        ngram: None in a model without an n-gram embedding.
    """

    stream: Stream
    gdn: GdnState | None
    ngram: NgramState | None

    def gdn_from(self, state: GdnState) -> GdnState:
        """Enqueue a copy of a layer's recurrent state; returns the copy."""
        assert self.gdn is not None
        self.stream.copy_many([(self.gdn.conv, state.conv), (self.gdn.matrix, state.matrix)])
        return self.gdn

    def history_from(self, state: NgramState) -> Tensor:
        """Enqueue a copy of the n-gram history; returns the copy."""
        assert self.ngram is not None
        self.stream.copy(self.ngram.history, state.history)
        return self.ngram.history

    def columns_from(self, state: NgramState) -> Tensor:
        """Enqueue a copy of the n-gram convolution's columns; returns the copy."""
        assert self.ngram is not None
        self.stream.copy(self.ngram.conv, state.conv)
        return self.ngram.conv

    def close(self) -> None:
        """Gives the device memory back. Safe to call twice."""
        if self.gdn is not None:
            self.gdn.conv.buffer.close()
            self.gdn.matrix.buffer.close()
        if self.ngram is not None:
            self.ngram.history.buffer.close()
            self.ngram.conv.buffer.close()


def new_branch_room(spec: ModelSpec, device: Device, stream: Stream) -> BranchRoom:
    """Device memory for branches of any sequence of the model.

    Raises:
        OutOfMemory: it does not fit.
    """
    gdn = new_gdn_state(spec, device) if any(spec.is_recurrent) else None
    ngram = None if spec.ngram is None else new_ngram_state(spec, spec.ngram, device)
    return BranchRoom(stream, gdn, ngram)
