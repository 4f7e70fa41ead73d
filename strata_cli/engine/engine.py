"""Engine and Sequence: the one public door to a loaded model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import islice
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.cancelling import NEVER, Cancellation
from strata_cli.engine.decode.step import Decoder
from strata_cli.engine.experts.residency_counts import ResidencyCounts
from strata_cli.engine.forward.branch import BranchRoom, new_branch_room
from strata_cli.engine.forward.loading import Notice, Progress
from strata_cli.engine.forward.places import Planned
from strata_cli.engine.forward.state import SequenceState, new_state
from strata_cli.engine.one_thread import OneThread
from strata_cli.engine.opening import Listeners, Parts, open_parts
from strata_cli.engine.options import EngineOptions
from strata_cli.engine.prefill.branches import Branch, read_branches
from strata_cli.engine.prefill.chunks import Wanted, prefill
from strata_cli.engine.prefill.mixed import Piece, read_mixed
from strata_cli.engine.sequence import Part, Sequence, checked_pieces
from strata_cli.errors import InputError, ShapeError, StateError

__all__ = ["Engine", "EngineOptions", "Part", "Sequence"]


class Engine:
    """A model on a device. Use from one thread at a time; close() gives all memory back.

    Attributes:
        spec: the model's dimensions.
        tokenizer: text to ids and back.
        chat_template: the model's own, or None.
        model_name: what the file calls itself, or the file's name.
        context_tokens: tokens a sequence may hold.
    """

    def __init__(self, parts: Parts, resources: ExitStack) -> None:
        self.spec = parts.spec
        self.model_name = parts.model_name
        self.tokenizer = parts.tokenizer
        self.chat_template = parts.chat_template
        self.context_tokens = parts.context_tokens
        self._device = parts.device
        self._stream = parts.stream
        self._forward = parts.forward
        self._port = parts.port
        self._watch = parts.watch
        self._streamer = parts.streamer
        self._residency = parts.residency
        self._learner = parts.learner
        self._decoder = Decoder(parts.forward, parts.port, parts.residency)
        resources.callback(self._decoder.close)
        self._resources = resources
        self._is_closed = False
        self._one_thread = OneThread()
        self._room: BranchRoom | None = None
        self._canonical_blocks: set[object] = set()  # one inside the other

    @classmethod
    def open(
        cls,
        options: EngineOptions,
        progress: Progress | None = None,
        notice: Notice | None = None,
        compiling: Progress | None = None,
        planned: Planned | None = None,
    ) -> Self:
        """Load a model; on a first start on the host, compile its kernels.

        Args:
            options: what to load, where, and how large.
            progress: called with (bytes done, bytes in all) while weights load.
            notice: called with a sentence when something unusual will take time.
            compiling: called with (kernels done, kernels in all) while kernels compile.
            planned: called with what goes where, before weights load; what it raises ends that.

        Raises:
            ModelError: the file is missing, damaged or unsupported.
            ConfigError: the device is not there.
            OutOfMemory: the model does not fit.
        """
        with ExitStack() as resources:
            listeners = Listeners(progress, notice, compiling, planned)
            parts = open_parts(options, resources, listeners)
            return cls(parts, resources.pop_all())

    @property
    def device_name(self) -> str:
        """Where the model runs: "host" or "cuda:N"."""
        return self._device.name

    @property
    def chunk_tokens(self) -> int:
        """Most prompt tokens read in one pass."""
        return self._forward.workspace.num_tokens

    @property
    def pass_tokens(self) -> int:
        """Tokens of a pass over a prompt if every pass brings experts anew, else 1: any will do."""
        is_streamed = self._streamer is not None and self._streamer.ring_slots(self.chunk_tokens)
        return self.chunk_tokens if is_streamed else 1

    @property
    def residency_counts(self) -> ResidencyCounts | None:
        """What became of the experts that steps wanted so far; None where all stay put."""
        return None if self._residency is None else self._residency.counts

    @property
    def is_canonical(self) -> bool:
        """Whether reads are canonical now: see canonical()."""
        return bool(self._canonical_blocks)

    def alone(self) -> AbstractContextManager[None]:
        """Around a request: another thread's is refused meanwhile. See OneThread.using()."""
        return self._one_thread.using()

    @contextmanager
    def canonical(self) -> Iterator[None]:
        """Inside the block every read is canonical: its bits depend on its tokens alone.

        What adapts to use is afterwards as if the block had not been. May be nested.

        Raises:
            StateError: another thread is in such a block, or in one of alone().
        """
        block = object()
        with self.alone(), nullcontext() if self._canonical_blocks else self._unlearning():
            try:
                self._canonical_blocks.add(block)
                yield
            finally:
                self._canonical_blocks.discard(block)

    @contextmanager
    def _unlearning(self) -> Iterator[None]:
        """Around passes that leave no mark on what adapts."""
        residency, fetcher, streamer = self._residency, self._forward.fetcher, self._streamer
        with (
            nullcontext() if residency is None else residency.paused(),
            nullcontext() if fetcher is None else fetcher.unlearning(),
            nullcontext() if streamer is None else streamer.unlearning(),
        ):
            yield

    @property
    def _deviates(self) -> bool:
        """Whether a plain pass may compute something as a canonical one would not."""
        return self._streamer is not None and self._streamer.deviates

    @property
    def _is_exact(self) -> bool:
        """Whether passes are now computed as canonical ones are."""
        return self.is_canonical or not self._deviates

    @property
    def _is_exact_step(self) -> bool:
        """The same of steps, which may leave experts out."""
        if self._residency is not None and self._residency.deviates and not self.is_canonical:
            return False
        return self._is_exact

    def sequence(self) -> Sequence:
        """A new, empty sequence.

        Raises:
            OutOfMemory: its K/V and state do not fit.
            StateError: the engine is closed.
        """
        self.require_open()
        state = new_state(self.spec, self._device, self._stream, self.context_tokens)
        return Sequence(self, state)

    def read_together(
        self, parts: Iterable[Part], *, cancellation: Cancellation = NEVER
    ) -> list[NDArray[np.float32] | None]:
        """Read a part of each of several sequences in one pass; each as if it were read alone.

        Args:
            parts: each sequence once; at most chunk_tokens in all.
            cancellation: ends the wait for experts; all the sequences count as interrupted then.

        Returns:
            For each part the logits [V] of its last token, None where they are not wanted.

        Raises:
            InputError: a part has no tokens, an id outside the vocabulary, or does not fit.
            StateError: an earlier call of a sequence was interrupted halfway, or it is there
                twice, or of another engine.
            Cancelled: somebody asked for the end.
        """
        pieces = checked_pieces(self, parts)
        if all(piece.is_step for piece in pieces):
            return [*self._step(pieces)]
        num_tokens = sum(len(piece.ids) for piece in pieces)
        if num_tokens > self.chunk_tokens:
            raise ShapeError(f"{num_tokens} tokens do not fit a pass of {self.chunk_tokens}")
        with self._watch.prompt(pieces[0].state.position, num_tokens):
            rows = read_mixed(
                self._forward,
                self._port,
                pieces,
                is_exact=self._is_exact,
                watch=self._watch,
                streamer=self._streamer,
                cancellation=cancellation,
            )
        self._learn_prompt()
        return rows

    def score_together(
        self,
        groups: Iterable[tuple[Sequence, list[list[int]]]],
        *,
        logits: Literal["last", "all"] = "last",
        cancellation: Cancellation = NEVER,
    ) -> list[list[NDArray[np.float32]]]:
        """Read suffixes of several sequences; see Sequence.score, which this is for each of them.

        Args:
            groups: sequences, and suffixes of each.
            logits: see Sequence.score.
            cancellation: see Sequence.score.

        Returns:
            For each group what Sequence.score returns.

        Raises:
            InputError, StateError, Cancelled: see Sequence.score.
        """
        sizes, branches = [], list[Branch]()
        for sequence, suffixes in groups:
            sizes.append(len(suffixes))
            branches += sequence._checked_branches(self, suffixes)
        if not branches:
            return [[] for _ in sizes]
        num_tokens = sum(len(branch.ids) for branch in branches)
        with self._watch.prompt(branches[0].state.position, num_tokens):
            rows = read_branches(
                self._forward,
                self._port,
                self._branch_room(),
                branches,
                wanted=logits,
                is_exact=self._is_exact,
                watch=self._watch,
                streamer=self._streamer,
                cancellation=cancellation,
            )
        self._learn_prompt()
        rest = iter(rows)
        return [list(islice(rest, size)) for size in sizes]

    def _prefill(
        self,
        state: SequenceState,
        ids: list[int],
        *,
        wanted: Wanted,
        progress: Progress | None,
        cancellation: Cancellation,
        meanwhile: Callable[[], None] | None,
    ) -> NDArray[np.float32]:
        with self._watch.prompt(state.position, len(ids)):
            rows = prefill(
                self._forward,
                self._port,
                state,
                ids,
                wanted=wanted,
                is_exact=self._is_exact,
                progress=progress,
                watch=self._watch,
                streamer=self._streamer,
                cancellation=cancellation,
                meanwhile=meanwhile,
            )
        self._learn_prompt()
        return rows

    def _step(self, pieces: list[Piece]) -> Iterator[NDArray[np.float32]]:
        is_streamed = False
        if self._streamer is not None:
            self._streamer.settle()
            is_streamed = self._streamer.is_needed_for_steps
        most = self._decoder.most_rows
        for start in range(0, len(pieces), most):
            together = pieces[start : start + most]
            if is_streamed:
                yield from self._step_streamed(together)
                continue
            states = [piece.state for piece in together]
            ids = [piece.ids[0] for piece in together]
            yield from self._decoder.step(states, ids, is_exact=self._is_exact_step)

    def _step_streamed(self, pieces: list[Piece]) -> Iterator[NDArray[np.float32]]:
        """A step of experts that are in no memory that a recorded pass could find them in."""
        residency, streamer = self._residency, self._streamer
        assert residency is not None
        assert streamer is not None
        residency.begin(len(pieces))
        rows = read_mixed(
            self._forward,
            self._port,
            pieces,
            is_exact=self._is_exact,
            streamer=streamer,
        )
        if streamer.use is not None:
            residency.end_streamed(len(pieces), streamer.use)
            residency.launched()
        self._learn_prompt()
        for row in rows:
            assert row is not None
            yield row

    def check(self, ids: list[int], position: int = 0, known: int = 0) -> None:
        """Refuse tokens that cannot be read from a position on.

        Args:
            ids: the tokens.
            position: where they would be read.
            known: so many of the first ones were read before, and are not looked at.

        Raises:
            InputError: there are none, one is outside the vocabulary, or they do not fit.
        """
        vocab, context = self.spec.vocab_size, self.context_tokens
        if not ids:
            raise InputError("nothing to read: the prompt has no tokens", hint="give some text")
        new = ids[known:] if known else ids
        if new and (min(new) < 0 or max(new) >= vocab):  # looked at one by one only to name it
            number, token_id = next(
                (number, token_id)
                for number, token_id in enumerate(ids, 1)
                if not 0 <= token_id < vocab
            )
            raise InputError(
                f"token id {token_id} (number {number} of {len(ids)}) is outside the vocabulary of "
                f"{vocab}",
                hint=f"ids go from 0 to {vocab - 1}",
            )
        if position + len(ids) > context:
            most = self.spec.context_tokens
            more = f", or raise --max-context, to {most} at most" if context < most else ""
            raise InputError(
                f"{position + len(ids)} tokens do not fit the context of {context}",
                hint=f"shorten the prompt{more}",
            )

    def _learn_prompt(self) -> None:
        """Add the use of the streamed pass that is just over to the profile, if one is learned."""
        if self._learner is None or self._streamer is None or self.is_canonical:
            return
        if self._streamer.use is not None:
            self._learner.add_use(self._streamer.use)

    def _forget(self, state: SequenceState) -> None:
        """No pass of this state will come any more."""
        self._decoder.forget(state)

    def _branch_room(self) -> BranchRoom:
        """Room for branches, made when they are first wanted."""
        if self._room is None:
            self._room = new_branch_room(self.spec, self._device, self._stream)
            self._resources.callback(self._room.close)
        return self._room

    def require_open(self) -> None:
        """Refuse to work after close().

        Raises:
            StateError: the engine is closed.
        """
        if self._is_closed:
            raise StateError("the engine is closed", hint="open the model again")
        if self._residency is not None:
            self._residency.abandon()  # a window that was interrupted twice: nobody waits for it

    def close(self) -> None:
        """Gives all memory back. Safe to call twice; its sequences can only be closed then."""
        self._is_closed = True
        self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
