"""The rows of one pass, and the sequences that they belong to."""

from __future__ import annotations

from dataclasses import dataclass

from strata_cli.engine.device.base import Tensor
from strata_cli.engine.forward.branch import BranchRoom
from strata_cli.engine.forward.state import GdnState, SequenceState
from strata_cli.engine.kernels.segments import Segments


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive rows of a batch that belong to one sequence.

    Attributes:
        state: of the sequence.
        start, stop: rows.
        room: None: the sequence goes on by these rows. Else they are a branch, which leaves its
            running state as it was; only the rows of K/V behind its position are used up.
    """

    state: SequenceState
    start: int
    stop: int
    room: BranchRoom | None = None

    def gdn(self, index: int) -> GdnState:
        """The recurrent state of a layer that the rows go through; a branch's is ready to use."""
        state = self.state.layers[index]
        assert isinstance(state, GdnState)
        return state if self.room is None else self.room.gdn_from(state)

    def history(self) -> Tensor:
        """The n-gram history that the rows go through; a branch's is ready to use."""
        state = self.state.ngram
        assert state is not None
        return state.history if self.room is None else self.room.history_from(state)

    def ngram_columns(self) -> Tensor:
        """The n-gram convolution's columns that the rows go through, like history()."""
        state = self.state.ngram
        assert state is not None
        return state.conv if self.room is None else self.room.columns_from(state)


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one pass. Their ids and positions already lie in the workspace.

    Attributes:
        num_tokens: rows.
        segments: cover all rows, in order; each sequence once, or as many branches of it as one
            likes. Branches work on one room and on the same rows of K/V, one after the other.
        is_recorded: the pass goes into a graph. Then a second stream may work beside it.
        table: in which kernels find all segments at once, int64 [L + 1, S, SEGMENT_WORDS]; None:
            they come one after the other.
    """

    num_tokens: int
    segments: tuple[Segment, ...]
    is_recorded: bool = False
    table: Tensor | None = None

    @property
    def last_position(self) -> int:
        """The furthest that any segment will have come; where it begins is its sequence's."""
        return max(s.state.position + s.stop - s.start for s in self.segments)

    @property
    def states(self) -> tuple[SequenceState, ...]:
        """Of all sequences, each once."""
        return tuple({id(segment.state): segment.state for segment in self.segments}.values())

    @property
    def cut(self) -> tuple[tuple[int, bool, int, int], ...]:
        """Each segment's rows, whether they are a branch, which of the states, and its position."""
        number = {id(state): at for at, state in enumerate(self.states)}
        return tuple(
            (s.stop - s.start, s.room is not None, number[id(s.state)], s.state.position)
            for s in self.segments
        )

    def together(self, index: int) -> Segments | None:
        """All segments as a layer sees them, -1: the n-gram embedding; None: one by one."""
        if self.table is None:
            return None
        index %= self.table.shape[0]
        own = self.table.rows(index, index + 1)
        counts = tuple(segment.stop - segment.start for segment in self.segments)
        are_steps = counts == (1,) * len(counts) and not any(s.room for s in self.segments)
        return Segments(own.reshape(*own.shape[1:]), counts, are_steps)


def rows_of(tensor: Tensor, part: slice) -> Tensor:
    """A segment's rows."""
    return tensor.rows(part.start, part.stop)
