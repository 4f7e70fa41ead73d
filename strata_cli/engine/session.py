"""Prompts one after another: each resumes from the longest prefix that was already read.

What is reused changes no bit: see prompt_cache. One sequence lives on the device; its checkpoints,
and conversations that made room for others, are kept in host memory.
"""

from __future__ import annotations

from collections.abc import Sequence as Ids
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.cancelling import NEVER, Cancellation
from strata_cli.engine.conversations import Conversation, ConversationCache, Parked
from strata_cli.engine.engine import Engine
from strata_cli.engine.forward.loading import Progress
from strata_cli.engine.prefill.chunks import Wanted
from strata_cli.engine.prompt_cache import (
    CacheRules,
    Checkpoint,
    PromptCache,
    Want,
    common_tokens,
    is_prefix,
)

DEFAULT_RULES = CacheRules()


class PromptRead(NamedTuple):
    """The logits [V] after a prompt, and how many of its tokens were not read again."""

    logits: NDArray[np.float32]
    reused_tokens: int


class Session:
    """One live sequence of an engine, and what is kept for prompts to come.

    Owned by the engine's thread. After an interrupted call it goes on from what is still whole.

    Args:
        engine: reads.
        rules: what is kept.
        canonical: make every read canonical; else those inside Engine.canonical() are.

    Attributes:
        engine: see above.
        sequence: the live one; answers may be generated on it, but nothing may be restored.
        cache: the checkpoints of the live sequence.
        conversations: those that made room.
        read_tokens: prompt tokens read so far; what was reused is not in it.

    Raises:
        OutOfMemory: the sequence does not fit.
    """

    def __init__(
        self, engine: Engine, rules: CacheRules = DEFAULT_RULES, *, canonical: bool = False
    ) -> None:
        self.engine = engine
        self.sequence = engine.sequence()
        self.cache = PromptCache(rules)
        self.conversations = ConversationCache(rules.conversation_cache_mib << 20)
        self.read_tokens = 0
        self._rules = rules
        self._is_canonical = canonical

    def read(
        self,
        ids: list[int],
        *,
        reuse: bool = True,
        progress: Progress | None = None,
        cancellation: Cancellation = NEVER,
    ) -> PromptRead:
        """Read a prompt; the live sequence holds it, and nothing else, afterwards.

        Args:
            ids: the whole prompt, at least one token.
            reuse: False reads all of it anew; it may still be reused later.
            progress: called with (tokens read, tokens to read) after each chunk.
            cancellation: see Sequence.prefill.

        Raises:
            InputError: see Engine.check; nothing has changed then.
            Cancelled: what was read so far may be reused.
        """
        self.engine.check(ids)
        parting = common_tokens(self.sequence.cached_ids, ids)
        with self._manner():
            kept = self._go_to(self._want(ids, logits=True), reuse=reuse)
            start = self.sequence.position
            if start == len(ids):
                assert kept is not None
                assert kept.logits is not None
                return PromptRead(kept.logits.copy(), start)
            logits = self._read_on(ids, parting, "last", progress, cancellation)
            return PromptRead(logits, start)

    def score_suffixes(
        self,
        prefix_ids: list[int],
        suffixes: list[list[int]],
        *,
        reuse: bool = True,
        cancellation: Cancellation = NEVER,
    ) -> list[NDArray[np.float32]]:
        """The logits [V] after the prefix and each suffix; the prefix is read once at most.

        The live sequence holds the prefix, and nothing else, afterwards.

        Args:
            prefix_ids: may be empty.
            suffixes: each at least one token.
            reuse: False reads the prefix anew.
            cancellation: see Sequence.prefill and Sequence.score.

        Raises:
            InputError: prefix or suffixes cannot be read, or do not fit the context together.
            Cancelled: what was read so far may be reused.
        """
        self.read_prefix(prefix_ids, reuse=reuse, cancellation=cancellation)
        with self._manner():
            rows = self.sequence.score(suffixes, cancellation=cancellation)
        self.read_tokens += sum(map(len, suffixes))
        return rows

    def read_prefix(
        self, ids: list[int], *, reuse: bool = True, cancellation: Cancellation = NEVER
    ) -> None:
        """Read what prompts to come begin with; the live sequence holds it, and nothing else.

        Args:
            ids: may be empty.
            reuse: False reads it anew.
            cancellation: see Sequence.prefill.

        Raises:
            InputError: see Engine.check; nothing has changed then.
            Cancelled: what was read so far may be reused.
        """
        if ids:
            self.engine.check(ids)
        with self._manner():
            self._go_to(self._want(ids, logits=False), reuse=reuse)
            if self.sequence.position < len(ids):
                self._read_on(ids, 0, "none", None, cancellation)

    def close(self) -> None:
        """Gives the sequence's memory back. Safe to call twice."""
        self.sequence.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _manner(self) -> AbstractContextManager[None]:
        return self.engine.canonical() if self._is_canonical else nullcontext()

    def _want(self, ids: list[int], *, logits: bool) -> Want:
        """A canonical read goes on from exact states alone, others from any."""
        return Want(ids, logits=logits, exact=self.engine.is_canonical)

    def _go_to(self, want: Want, *, reuse: bool) -> Checkpoint | None:
        """Rewind the live sequence to the longest known prefix of the ids.

        Returns:
            The checkpoint that it went to; None: it began anew, or was there.
        """
        self.cache.keep_prefixes(self.sequence.cached_ids)
        kept, parked = None, None
        if reuse:
            kept = self.cache.find(want, self.sequence.exact_rows)
            parked = self.conversations.find(want)
        live_at = self._live_position(want) if reuse else 0
        kept_at = kept.position if kept is not None else 0
        if parked is not None and parked.checkpoint.position > max(live_at, kept_at):
            self.conversations.take(parked.conversation)  # before others push it out
            self._park_live(want.ids)
            self._unpark(parked)
            return parked.checkpoint
        self._park_live(want.ids)
        if kept is not None and kept_at >= live_at:
            self._rewind(kept)
            return kept
        if not live_at:
            self.sequence.reset()
        return None

    def _live_position(self, want: Want) -> int:
        """Where the live sequence is, if that is a position to go on from, else 0."""
        sequence = self.sequence
        is_fit = sequence.is_consistent and (sequence.is_exact or not want.exact)
        is_far = want.logits and sequence.position == len(want.ids)
        if is_far or not is_fit or not is_prefix(sequence.ids, want.ids):
            return 0
        return sequence.position

    def _rewind(self, kept: Checkpoint) -> None:
        self.cache.touch(kept)
        sequence = self.sequence
        is_there = sequence.is_consistent and sequence.ids == kept.ids
        if not is_there or sequence.is_exact < kept.is_exact(sequence.exact_rows):
            sequence.restore(kept.snapshot)

    def _unpark(self, parked: Parked) -> None:
        conversation, checkpoint = parked
        self.sequence.restore_parked(conversation.rows, checkpoint.snapshot)
        self.cache.keep_prefixes(conversation.rows.ids)
        for other in conversation.checkpoints:
            self.cache.add(other)
        self.cache.add(checkpoint)  # the one in use last

    def _park_live(self, ids: Ids[int]) -> None:
        """Keep the live conversation, if a prompt takes enough of it away."""
        sequence, live = self.sequence, self.sequence.cached_ids
        lost = len(live) - common_tokens(live, ids)
        if not self.conversations.budget_bytes or lost < self._rules.least_parked_tokens:
            return
        checkpoints = self.cache.checkpoints
        is_known = any(
            kept.ids == sequence.ids and kept.snapshot.is_exact >= sequence.is_exact
            for kept in checkpoints
        )
        if sequence.is_consistent and sequence.position and not is_known:
            checkpoints = (*checkpoints, Checkpoint(sequence.snapshot()))
        if checkpoints:
            self.conversations.park(Conversation(sequence.park(), checkpoints))

    def _read_on(
        self,
        ids: list[int],
        parting: int,
        wanted: Wanted,
        progress: Progress | None,
        cancellation: Cancellation,
    ) -> NDArray[np.float32]:
        """Read the rest of the ids, leaving checkpoints on the grid, at the parting and the end."""
        sequence, cache, start = self.sequence, self.cache, self.sequence.position
        cache.keep_prefixes(ids)
        logits = np.empty(0, dtype=np.float32)
        for stop in [*cache.cuts(start, len(ids), parting), len(ids)]:
            position, is_end = sequence.position, stop == len(ids)
            logits = sequence.prefill(
                ids[position:stop],
                logits=wanted if is_end else "none",
                progress=_shifted(progress, position - start, len(ids) - start),
                cancellation=cancellation,
            )
            self.read_tokens += stop - position
            if self._rules.prompt_cache:
                end = logits.copy() if logits.size else None
                cache.add(Checkpoint(sequence.snapshot(), end))
        return logits


def _shifted(progress: Progress | None, done: int, total: int) -> Progress | None:
    """Progress of a part, told as progress of the whole."""
    if progress is None:
        return None
    return lambda part_done, _part_total: progress(done + part_done, total)
