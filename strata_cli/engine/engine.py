"""Engine and Sequence: the one public door to a loaded model."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.cancelling import NEVER, Cancellation
from strata_cli.engine.compiling import compile_ahead
from strata_cli.engine.decode.residency import Residency
from strata_cli.engine.decode.sharing import ShareRules, Sharing
from strata_cli.engine.decode.step import Decoder
from strata_cli.engine.device import RESERVE_BYTES, open_device
from strata_cli.engine.device.base import Device, Stream
from strata_cli.engine.device.timing import Spans
from strata_cli.engine.experts.adapting import AdaptRules
from strata_cli.engine.experts.cache import LEAST_SLOTS
from strata_cli.engine.experts.placing import ExpertHome
from strata_cli.engine.experts.residency_counts import ResidencyCounts
from strata_cli.engine.experts.stager import StagerSize
from strata_cli.engine.experts.store import DEFAULT_STAGER
from strata_cli.engine.experts.window_pool import WindowPool, pool_threads
from strata_cli.engine.forward.branch import BranchRoom, new_branch_room
from strata_cli.engine.forward.caching import CacheWishes
from strata_cli.engine.forward.layers import Forward
from strata_cli.engine.forward.loading import Loaded, Notice, Progress, load_weights
from strata_cli.engine.forward.parking import ParkedRows, park, unpark
from strata_cli.engine.forward.places import Places, Planned
from strata_cli.engine.forward.planning import DEFAULT_HOMES, Homes, Plan, Wishes, plan_model
from strata_cli.engine.forward.rows import RowPort
from strata_cli.engine.forward.state import SequenceState, Snapshot, StateHash, new_state
from strata_cli.engine.forward.workspace import Workspace
from strata_cli.engine.kernels.jit import is_cold, why_uncached
from strata_cli.engine.learning import ProfileLearner
from strata_cli.engine.model.chat_template import ChatTemplate
from strata_cli.engine.model.shards import model_stem
from strata_cli.engine.model.spec import ModelSpec
from strata_cli.engine.model.tensors import load_model_file
from strata_cli.engine.model.tokenizer import Tokenizer
from strata_cli.engine.prefill.branches import Branch, read_branches
from strata_cli.engine.prefill.chunks import Wanted, prefill
from strata_cli.engine.prefill.dump import ResidualDump
from strata_cli.engine.prefill.mixed import Piece, TakeRows, read_mixed
from strata_cli.engine.prefill.prompt_stream import Setting, StreamRules
from strata_cli.engine.prefill.streamer import PromptStreamer
from strata_cli.engine.prefill.watching import Watch
from strata_cli.engine.profiling import find_profile, measure_profile
from strata_cli.engine.trace import NO_TRACE, Trace
from strata_cli.errors import InputError, ShapeError, StateError

logger = logging.getLogger(__name__)

DEFAULT_STREAMING = StreamRules()
DEFAULT_ADAPT = AdaptRules()
SAVE_EVERY_S = 600.0
AUTO_CONTEXT_TOKENS = 32_768
COLD_NOTICE = "compiling kernels for this processor; later starts find them in the cache"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What shapes an engine.

    Attributes:
        model: GGUF file, or any of its shards.
        device: "auto", "host" or "cuda:N".
        threads: host threads that compute, 0 = every core this process may use.
        max_context: tokens a sequence may hold, 0 = the model's own, at most 32,768.
        num_sequences: that will be there at once: memory is kept for so many.
        prefill: prompt chunk in tokens, 0 = 512, on a GPU up to 4,096 where memory allows.
        vram_bytes: hard cap on device memory of a GPU, 0 = what is free, less the reserve.
        vram_reserve_bytes: what is then left to others.
        homes: where experts and the n-gram table are wanted.
        expert_cache: experts that are held in slots of device memory, where not all are; None: as
            many as fit. A number makes a cache also where all would fit, and on the host.
        least_slots: of those that no prompt may borrow.
        fetch_slots: of device memory for experts that a step misses: copied there whole, before
            its products read them; 0: those read over the link; None: some, on a GPU.
        ahead_slots: for experts that the next layer of a step will probably miss, which come while
            the link has nothing else to do, at most 16; 0: nothing comes ahead of its routing;
            None: some, where a step fetches any.
        pinned_bytes: most bytes of experts that are copied into page-locked host memory where not
            all are on the device; the others are read from the file whenever they are needed, and
            stay in the system's page cache as far as it has room. None: all are copied.
        stager: of those others.
        expert_profile: file that says which experts are used most, measured and made if it is not
            there; None: on a GPU one that is kept for each model, on the host nothing is known.
        profile_save: file for the profile with what this run adds to it; None: it is not kept.
        profile_save_every_s: seconds between two saves, 0: only when the engine is closed.
        adapt: when cached experts change places between device and host memory, as steps need.
        tail_skip: rank, from 0, from which on steps leave out experts that are not in the cache,
            unless they are canonical; 0: they leave out none.
        link_share: share, 0..1, of the others that the device reads over its link; threads of the
            host compute the rest, unless steps are canonical. None: so that both end together.
        pool_threads: that do so; 0: automatic.
        streaming: how prompts come by the other experts.
        will_chat: start the chat template's process now, so that the first chat need not wait.
        compile_ahead: on a first start on the host, compile all kernels before the first read.
        trace: told of what the engine does.
        prefill_dump_r: file for the residuals of every 64th prompt position; None: nowhere.
    """

    model: Path
    device: str = "auto"
    threads: int = 0
    max_context: int = 0
    num_sequences: int = 1
    prefill: int = 0
    vram_bytes: int = 0
    vram_reserve_bytes: int = RESERVE_BYTES
    homes: Homes = DEFAULT_HOMES
    expert_cache: int | None = None
    least_slots: int = LEAST_SLOTS
    fetch_slots: int | None = None
    ahead_slots: int | None = None
    pinned_bytes: int | None = None
    stager: StagerSize = DEFAULT_STAGER
    expert_profile: Path | None = None
    profile_save: Path | None = None
    profile_save_every_s: float = SAVE_EVERY_S
    adapt: AdaptRules = DEFAULT_ADAPT
    tail_skip: int = 0
    link_share: float | None = 1.0
    pool_threads: int = 0
    streaming: StreamRules = DEFAULT_STREAMING
    will_chat: bool = False
    compile_ahead: bool = True
    trace: Trace = NO_TRACE
    prefill_dump_r: Path | None = None


class Engine:
    """A model on a device. Use from one thread; close() gives all memory back.

    Attributes:
        spec: the model's dimensions.
        tokenizer: text to ids and back.
        chat_template: the model's own, or None.
        model_name: what the file calls itself, or the file's name.
        context_tokens: tokens a sequence may hold.
    """

    def __init__(
        self,
        *,
        spec: ModelSpec,
        model_name: str,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate | None,
        device: Device,
        stream: Stream,
        forward: Forward,
        port: RowPort,
        watch: Watch,
        streamer: PromptStreamer | None,
        residency: Residency | None,
        learner: ProfileLearner | None,
        context_tokens: int,
        resources: ExitStack,
    ) -> None:
        self.spec = spec
        self.model_name = model_name
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.context_tokens = context_tokens
        self._device = device
        self._stream = stream
        self._forward = forward
        self._port = port
        self._watch = watch
        self._streamer = streamer
        self._residency = residency
        self._learner = learner
        self._decoder = Decoder(forward, port, residency)
        resources.callback(self._decoder.close)
        self._resources = resources
        self._is_closed = False
        self._room: BranchRoom | None = None
        self._canonical_depth = 0

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
            model = resources.enter_context(load_model_file(options.model))
            device = resources.enter_context(_open_device(options))
            is_cold_host = options.compile_ahead and device.name == "host" and is_cold()
            if is_cold_host:
                _announce_compiling(notice)
            tokenizer = Tokenizer.from_metadata(model.metadata)
            chat_template = ChatTemplate.from_metadata(model.metadata)
            if chat_template is not None:
                resources.callback(chat_template.close)
                if options.will_chat:
                    chat_template.start()
            stream = device.stream("compute")
            context_tokens = context_of(model.spec, options.max_context)
            plan = plan_model(model, device, stream, wishes_of(options, context_tokens))
            sizes = plan.sizes
            if planned is not None:
                planned(Places.of(model, device, plan))
            known = find_profile(
                model,
                options.expert_profile if plan.cache or options.profile_save else None,
                keeps_own=plan.cache is not None and device.has_own_memory,
            )
            loaded = load_weights(
                model,
                device,
                stream,
                plan,
                ranking=known.profile.ranking(),
                stager=options.stager,
                progress=progress,
                notice=notice,
            )
            resources.callback(loaded.close)
            workspace = Workspace(model.spec, device, sizes.chunk_tokens, sizes.logit_rows)
            resources.callback(workspace.close)
            port = RowPort(device, stream, workspace)
            resources.callback(port.close)
            resources.callback(stream.close)
            forward = Forward(model.spec, loaded.weights, workspace, stream, loaded.fetcher)
            if is_cold_host:
                compile_ahead(forward, device, options.model, compiling)
            watch = _watch(options, device)
            resources.callback(watch.close)
            streamer = None
            if loaded.store is not None and plan.cache is not None:
                setting = Setting(device, stream, loaded.store, options.trace)
                scores, own_slots = known.profile.scores, plan.cache.ring_slots
                streamer = PromptStreamer(setting, options.streaming, scores, own_slots)
                resources.callback(streamer.close)
                # Again, and thus before the ring: kernels that run know its slots by address alone.
                resources.callback(stream.close)
                logger.info("experts: %s", streamer.describe(sizes.chunk_tokens))
            name = model.spec.name or model_stem(options.model)
            logger.info("%s on %s: %s", name, device.name, sizes.describe())
            options.trace.event(
                "run.begin",
                model=name,
                device=device.name,
                num_layers=model.spec.num_layers,
                num_experts=model.spec.num_experts,
                chunk_tokens=sizes.chunk_tokens,
                num_resident=_num_resident(model.spec, plan, loaded),
            )
            profile = known.profile
            if streamer is not None and known.target is not None:
                profile = measure_profile(known, tokenizer, forward, port, streamer, context_tokens)
            learner, residency = None, None
            if options.profile_save is not None:
                every_s = options.profile_save_every_s
                learner = ProfileLearner(options.profile_save, profile, every_s)
                resources.callback(learner.close)
            sharing = _share(options, device, forward, loaded, resources)
            if loaded.store is not None or learner is not None:
                residency = Residency(
                    device,
                    forward,
                    loaded.store,
                    options.adapt,
                    sharing=sharing,
                    trace=options.trace,
                    learn=None if learner is None else learner.add_pairs,
                )
                resources.callback(residency.close)
                resources.callback(stream.close)  # which writes into it
                resources.callback(residency.abandon)  # so that the device waits for nobody
            return cls(
                spec=model.spec,
                model_name=name,
                tokenizer=tokenizer,
                chat_template=chat_template,
                device=device,
                stream=stream,
                forward=forward,
                port=port,
                watch=watch,
                streamer=streamer,
                residency=residency,
                learner=learner,
                context_tokens=context_tokens,
                resources=resources.pop_all(),
            )

    @property
    def device_name(self) -> str:
        """Where the model runs: "host" or "cuda:N"."""
        return self._device.name

    @property
    def chunk_tokens(self) -> int:
        """Most prompt tokens read in one pass."""
        return self._forward.workspace.num_tokens

    @property
    def residency_counts(self) -> ResidencyCounts | None:
        """What became of the experts that steps wanted so far; None where all stay put."""
        return None if self._residency is None else self._residency.counts

    @property
    def is_canonical(self) -> bool:
        """Whether reads are canonical now: see canonical()."""
        return self._canonical_depth > 0

    @contextmanager
    def canonical(self) -> Iterator[None]:
        """Inside the block every read is canonical: its bits depend on its tokens alone.

        What adapts to use is afterwards as if the block had not been. May be nested.
        """
        with ExitStack() as still:
            if not self.is_canonical and self._residency is not None:
                still.enter_context(self._residency.paused())
            if not self.is_canonical and self._forward.fetcher is not None:
                still.enter_context(self._forward.fetcher.unlearning())
            if not self.is_canonical and self._streamer is not None:
                still.enter_context(self._streamer.unlearning())
            depth = self._canonical_depth
            try:
                self._canonical_depth = depth + 1
                yield
            finally:
                self._canonical_depth = depth

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
            StateError: an earlier call of a sequence was interrupted halfway.
            Cancelled: somebody asked for the end.
        """
        pieces = [part.checked_piece() for part in parts]
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
            branches += sequence._checked_branches(suffixes)
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

    def check(self, ids: list[int], position: int = 0) -> None:
        """Refuse tokens that cannot be read from a position on.

        Raises:
            InputError: there are none, one is outside the vocabulary, or they do not fit.
        """
        vocab, context = self.spec.vocab_size, self.context_tokens
        if not ids:
            raise InputError("nothing to read: the prompt has no tokens", hint="give some text")
        for index, token_id in enumerate(ids):
            if not 0 <= token_id < vocab:
                raise InputError(
                    f"token id {token_id} (number {index + 1} of {len(ids)}) is outside the "
                    f"vocabulary of {vocab}",
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

    def close(self) -> None:
        """Gives all memory back. Safe to call twice; its sequences can only be closed then."""
        self._is_closed = True
        self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Sequence:
    """One conversation or prompt: tokens read so far and all state that follows from them.

    Every method but close() raises StateError once it, or its engine, is closed.
    """

    def __init__(self, engine: Engine, state: SequenceState) -> None:
        self._engine = engine
        self._state = state
        self._is_closed = False

    @property
    def position(self) -> int:
        """Tokens read; the position of the next one."""
        return self._state.position

    @property
    def ids(self) -> tuple[int, ...]:
        """The tokens read."""
        return tuple(self._state.ids)

    @property
    def pass_tokens(self) -> int:
        """Tokens of a pass over a prompt if every pass brings experts anew, else 1: any will do."""
        engine = self._engine
        is_streamed = engine._streamer is not None and engine._streamer.ring_slots(
            engine.chunk_tokens
        )
        return engine.chunk_tokens if is_streamed else 1

    @property
    def cached_ids(self) -> tuple[int, ...]:
        """The tokens whose K/V is there: those read, and after a rewind those behind them."""
        return tuple(self._state.cached_ids)

    @property
    def is_consistent(self) -> bool:
        """False after a call that was interrupted halfway, until restore() or reset()."""
        return self._state.is_consistent

    @property
    def is_exact(self) -> bool:
        """Whether canonical reads may go on from here: all of it was computed as theirs are."""
        return self._state.is_exact

    @property
    def exact_rows(self) -> int:
        """How many of the first cached_ids have K/V that canonical reads may go on from."""
        return self._state.exact_rows

    def prefill(
        self,
        ids: list[int],
        *,
        logits: Wanted = "last",
        progress: Progress | None = None,
        cancellation: Cancellation = NEVER,
    ) -> NDArray[np.float32]:
        """Read tokens in chunks; the cuts do not change a bit of the result.

        Args:
            ids: at least one token id.
            logits: which rows' logits to return.
            progress: called with (tokens read, tokens in all) after each chunk.
            cancellation: ends it between two chunks, or while a chunk waits for its experts.

        Returns:
            "last": [V]; "all": [len(ids), V]; "none": [0].

        Raises:
            InputError: no tokens, an id outside the vocabulary, or more than the context holds.
            StateError: an earlier call was interrupted halfway.
            Cancelled: the chunks before are read; see is_consistent.
        """
        self._check(ids)
        engine = self._engine
        with engine._watch.prompt(self.position, len(ids)):
            rows = prefill(
                engine._forward,
                engine._port,
                self._state,
                ids,
                wanted=logits,
                is_exact=engine._is_exact,
                progress=progress,
                watch=engine._watch,
                streamer=engine._streamer,
                cancellation=cancellation,
            )
        engine._learn_prompt()
        return rows

    def step(self, token_id: int) -> NDArray[np.float32]:
        """Read one token and return its logits [V]; equal to prefill([token_id]) in every bit.

        Raises:
            InputError: the id is outside the vocabulary, or the context is full.
            StateError: an earlier call was interrupted halfway.
        """
        self._check([token_id])
        (row,) = self._engine._step([Piece(self._state, [token_id])])
        return row

    def score(
        self,
        suffixes: list[list[int]],
        *,
        logits: Literal["last", "all"] = "last",
        cancellation: Cancellation = NEVER,
    ) -> list[NDArray[np.float32]]:
        """Read each suffix as if the sequence went on by it alone; the sequence stays as it is.

        Many suffixes share a pass. Snapshots of later positions can no longer be restored.

        Args:
            suffixes: each at least one token.
            logits: which rows' logits to return.
            cancellation: ends it between two passes, or while one waits for its experts.

        Returns:
            For each suffix "last": the logits [V] of its last token; "all": [its tokens, V]; equal
            in every bit to those that prefill(suffix) returns.

        Raises:
            InputError: a suffix is empty, has an id outside the vocabulary or does not fit the
                context; names the suffix.
            StateError: an earlier call was interrupted halfway.
            Cancelled: somebody asked for the end.
        """
        (rows,) = self._engine.score_together(
            [(self, suffixes)], logits=logits, cancellation=cancellation
        )
        return rows

    def snapshot(self) -> Snapshot:
        """The state at this position, for restore(). K/V is positional and is not copied.

        Raises:
            StateError: an earlier call was interrupted halfway.
        """
        self._require_open()
        self._state.require_consistent()
        return self._state.snapshot()

    def restore(self, snapshot: Snapshot) -> None:
        """Rewind to a snapshot of this sequence; mends one that was interrupted halfway.

        Raises:
            StateError: other tokens were read over the snapshot's positions since.
        """
        self._require_open()
        if not self._state.can_restore(snapshot):
            raise StateError(
                f"the snapshot at position {snapshot.position} is no longer a prefix of what "
                "this sequence has read",
                hint="read the tokens again, or snapshot before branching",
            )
        self._state.restore(snapshot)

    def can_restore(self, snapshot: Snapshot) -> bool:
        """Whether restore() would take this snapshot of the sequence."""
        return self._state.can_restore(snapshot)

    def park(self, num_tokens: int | None = None) -> ParkedRows:
        """Copy K/V to host memory, for restore_parked(); also when interrupted halfway.

        Args:
            num_tokens: of so many of the first cached_ids; None: of all.
        """
        self._require_open()
        return park(self._state, num_tokens)

    def restore_parked(self, rows: ParkedRows, snapshot: Snapshot) -> None:
        """Become what was parked, as it was at a snapshot of it; like restore() otherwise."""
        self._require_open()
        unpark(self._state, rows)
        self.restore(snapshot)

    def reset(self) -> None:
        """Back to position 0; mends a sequence that was interrupted halfway."""
        self._require_open()
        self._state.reset()

    def state_hash(self) -> StateHash:
        """Fingerprint of everything the next token depends on.

        Raises:
            StateError: an earlier call was interrupted halfway.
        """
        self._require_open()
        self._state.require_consistent()
        return self._state.hash()

    def close(self) -> None:
        """Gives the sequence's memory back. Safe to call twice."""
        self._is_closed = True
        self._engine._decoder.forget(self._state)
        self._state.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _checked_branches(self, suffixes: list[list[int]]) -> list[Branch]:
        self._require_open()
        for number, suffix in enumerate(suffixes, 1):
            if not suffix:
                raise InputError(f"suffix {number} has no tokens", hint="give it some text")
            try:
                self._check(suffix)
            except InputError as error:
                raise InputError(f"suffix {number}: {error.message}", hint=error.hint) from None
        return [Branch(self._state, suffix) for suffix in suffixes]

    def _require_open(self) -> None:
        self._engine.require_open()
        if self._is_closed:
            raise StateError("the sequence is closed", hint="make a new one: Engine.sequence()")

    def _check(self, ids: list[int]) -> None:
        self._require_open()
        self._engine.check(ids, self.position)


class Part(NamedTuple):
    """What one sequence reads of a pass that it shares.

    Attributes:
        sequence: reads it.
        ids: at least one token.
        wants_logits: of the last token.
        take_rows: called with the logits of all tokens, [n, V] at a time, within the pass; None:
            nobody wants them.
    """

    sequence: Sequence
    ids: list[int]
    wants_logits: bool = True
    take_rows: TakeRows | None = None

    def checked_piece(self) -> Piece:
        """For the pass. Raises as Engine.read_together does."""
        self.sequence._check(self.ids)
        return Piece(self.sequence._state, self.ids, self.wants_logits, self.take_rows)


def _share(
    options: EngineOptions, device: Device, forward: Forward, loaded: Loaded, resources: ExitStack
) -> Sharing | None:
    """What shares misses out, if that is wanted and there may be any."""
    store, top_k = loaded.store, forward.spec.num_experts_per_tok
    rules = ShareRules(options.tail_skip, options.link_share)
    leaves_out = 0 < rules.tail_skip < top_k
    if store is None or not (leaves_out or rules.has_pool):
        return None
    if store.cache.num_slots == store.num_layers * store.num_experts:
        return None
    if not store.is_pinned.all():
        return None
    pool = None
    if rules.has_pool:
        num_threads = options.pool_threads or pool_threads()
        pool = WindowPool(device, store.layouts, store.host_addresses, top_k, num_threads)
        resources.callback(pool.close)
    return Sharing(device, forward, store, rules, pool)


def _announce_compiling(notice: Notice | None) -> None:
    problem = why_uncached()
    if problem:
        logger.warning("compiling kernels at every start, they cannot be kept: %s", problem)
    elif notice is not None:
        notice(COLD_NOTICE)


def _open_device(options: EngineOptions) -> Device:
    return open_device(
        options.device,
        threads=options.threads,
        vram_bytes=options.vram_bytes,
        vram_reserve_bytes=options.vram_reserve_bytes,
    )


def wishes_of(options: EngineOptions, context_tokens: int) -> Wishes:
    """What a model is loaded for, with a context of so many tokens."""
    homes = options.homes
    if options.expert_cache is not None and homes.experts is ExpertHome.AUTO:
        homes = replace(homes, experts=ExpertHome.CACHED)
    cache = CacheWishes(
        num_slots=options.expert_cache,
        least_slots=options.least_slots,
        kept_slots=options.streaming.kept_slots,
        pinned_bytes=options.pinned_bytes,
        ring=options.streaming.ring,
        fetch_slots=options.fetch_slots,
        ahead_slots=options.ahead_slots,
    )
    return Wishes(context_tokens, options.prefill, homes, cache, options.num_sequences)


def _num_resident(spec: ModelSpec, plan: Plan, loaded: Loaded) -> int:
    """Experts, of all layers together, in the memory that kernels read at full speed."""
    if loaded.store is not None:
        return int(loaded.store.cache.is_resident.sum())
    is_mapped = plan.placement.experts is ExpertHome.MAPPED
    return 0 if is_mapped else spec.num_layers * spec.num_experts


def _watch(options: EngineOptions, device: Device) -> Watch:
    path = options.prefill_dump_r
    dump = None if path is None else ResidualDump(path, device)
    return Watch(Spans(device, options.trace), dump)


def context_of(spec: ModelSpec, wanted: int) -> int:
    """Tokens of a context: as wanted, 0 = automatic.

    Raises:
        InputError: that is more than the model has.
    """
    if wanted > spec.context_tokens:
        raise InputError(
            f"--max-context {wanted} is more than the model's {spec.context_tokens} tokens",
            hint=f"at most --max-context {spec.context_tokens}",
        )
    return wanted or min(spec.context_tokens, AUTO_CONTEXT_TOKENS)
