"""Prompts one after another: each resumes from the longest prefix that was already read.

What is reused changes no bit: see prompt_cache. One sequence lives on the device; its checkpoints,
and conversations that made room for others, are kept in host memory.
"""

from __future__ import annotations

from collections.abc import Sequence as Ids
from contextlib import AbstractContextManager
from typing import Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.cancelling import NEVER, Cancellation
from strata_cli.engine.conversations import Conversation, ConversationCache, Parked
from strata_cli.engine.engine import Engine
from strata_cli.engine.forward.loading import Progress
from strata_cli.engine.model.prefixes import common_tokens
from strata_cli.engine.prompt_cache import (
    CacheRules,
    Checkpoint,
    PromptCache,
    Want,
)
from strata_cli.engine.prompt_reading import PromptReading

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
        conversations: of several sessions of the engine together; None: the session has its own.

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
        self,
        engine: Engine,
        rules: CacheRules = DEFAULT_RULES,
        *,
        canonical: bool = False,
        conversations: ConversationCache | None = None,
    ) -> None:
        self.engine = engine
        self.sequence = engine.sequence()
        self.cache = PromptCache(rules)
        self.conversations = conversations or ConversationCache(rules.conversation_cache_mib << 20)
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
        with self._manner():
            reading = self.begin(ids, reuse=reuse)
            self._read_all(reading, progress, cancellation)
        assert reading.logits is not None
        return PromptRead(reading.logits, reading.start)

    def begin(
        self,
        ids: list[int],
        *,
        reuse: bool = True,
        wants_logits: bool = True,
        keeps_end: bool = True,
    ) -> PromptReading:
        """Rewind the live sequence to what it knows of a prompt, for somebody to read the rest.

        What a canonical read may go on from is decided here; it must be read accordingly. What the
        reader reads is not in read_tokens.

        Args:
            ids: the whole prompt, at least one token; it may be empty where no logits are wanted.
            reuse: False reads all of it anew.
            wants_logits: of the prompt's end.
            keeps_end: see PromptReading.

        Raises:
            InputError: see Engine.check; nothing has changed then.
        """
        want = self._want(ids, logits=wants_logits)
        common = common_tokens(self.sequence.cached_ids, want.ids)
        if ids or wants_logits:
            self.engine.check(ids, known=common)
        # A prefix that is read for its own sake ends where its prompts part.
        parting = common if wants_logits else 0
        kept = self._go_to(want, common, reuse=reuse)
        logits = None
        if wants_logits and self.sequence.position == len(ids):
            assert kept is not None
            assert kept.logits is not None
            logits = kept.logits.copy()
        return PromptReading(
            self.sequence,
            self.cache,
            ids,
            wants_logits=wants_logits,
            logits=logits,
            parting=parting,
            keeps_end=keeps_end,
        )

    def known_tokens(self, ids: list[int], *, wants_logits: bool = True) -> int:
        """How many of a prompt's first tokens begin() would not leave to read. Changes nothing."""
        want = self._want(ids, logits=wants_logits)
        kept, parked = self._kept(want), self.conversations.find(want)
        common = common_tokens(self.sequence.cached_ids, want.ids)
        known = [self._live_position(want, common)]
        if kept is not None:
            known.append(kept.position)
        if parked is not None:
            known.append(parked.checkpoint.position)
        return max(known)

    def score_suffixes(
        self,
        prefix_ids: list[int],
        suffixes: list[list[int]],
        *,
        logits: Literal["last", "all"] = "last",
        reuse: bool = True,
        cancellation: Cancellation = NEVER,
    ) -> list[NDArray[np.float32]]:
        """The logits after the prefix and each suffix; the prefix is read once at most.

        The live sequence holds the prefix, and nothing else, afterwards.

        Args:
            prefix_ids: may be empty.
            suffixes: each at least one token.
            logits: which of a suffix's rows; see Sequence.score.
            reuse: False reads the prefix anew.
            cancellation: see Sequence.prefill and Sequence.score.

        Raises:
            InputError: prefix or suffixes cannot be read, or do not fit the context together.
            Cancelled: what was read so far may be reused.
        """
        self.read_prefix(prefix_ids, reuse=reuse, cancellation=cancellation)
        with self._manner():
            rows = self.sequence.score(suffixes, logits=logits, cancellation=cancellation)
        self.read_tokens += sum(map(len, suffixes))
        return rows

    def read_prefix(
        self,
        ids: list[int],
        *,
        reuse: bool = True,
        keeps: bool = True,
        cancellation: Cancellation = NEVER,
    ) -> None:
        """Read what prompts to come begin with; the live sequence holds it, and nothing else.

        Args:
            ids: may be empty.
            reuse: False reads it anew.
            keeps: leave a checkpoint, to come back to it. False does not wait for the device, and
                only what goes on from here at once knows the prefix.
            cancellation: see Sequence.prefill.

        Raises:
            InputError: see Engine.check; nothing has changed then.
            Cancelled: what was read so far may be reused.
        """
        with self._manner():
            reading = self.begin(ids, reuse=reuse, wants_logits=False, keeps_end=keeps)
            self._read_all(reading, None, cancellation)

    def kept_tokens(self, ids: list[int], *, wants_logits: bool = True) -> int:
        """How many of a prompt's first tokens another session could adopt. Changes nothing."""
        kept = self._kept(self._want(ids, logits=wants_logits))
        return 0 if kept is None else kept.position

    def adopt(self, other: Session, ids: list[int], *, wants_logits: bool = True) -> None:
        """Know what another session of the engine knows of a prompt, if it has a checkpoint of it.

        Copies state and K/V, by way of the host. The other session may be in use: its sequence may
        have gone on from there, and goes on.

        Args:
            other: not this one.
            ids: the prompt.
            wants_logits: see begin().
        """
        kept = other._kept(other._want(ids, logits=wants_logits))
        if kept is None:
            return
        rows = other.sequence.park(kept.position)
        self._park_live(ids)
        self.sequence.restore_parked(rows, kept.snapshot)
        self.cache.keep_prefixes(rows.ids)
        self.cache.add(kept)

    def _kept(self, want: Want) -> Checkpoint | None:
        """The longest checkpoint of a prompt, as far as its K/V is still there."""
        kept = self.cache.find(want, self.sequence.exact_rows)
        is_there = kept is not None and self.sequence.can_restore(kept.snapshot)
        return kept if is_there else None

    def close(self) -> None:
        """Gives the sequence's memory back. Safe to call twice."""
        self.sequence.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _manner(self) -> AbstractContextManager[None]:
        return self.engine.canonical() if self._is_canonical else self.engine.alone()

    def _want(self, ids: list[int], *, logits: bool) -> Want:
        """A canonical read goes on from exact states alone, others from any."""
        return Want(tuple(ids), logits=logits, exact=self.engine.is_canonical)

    def _go_to(self, want: Want, common: int, *, reuse: bool) -> Checkpoint | None:
        """Rewind the live sequence to the longest known prefix of the ids.

        Args:
            want: the prompt.
            common: tokens that it begins with in common with those whose K/V is there.
            reuse: whether to go on from any.

        Returns:
            The checkpoint that it went to; None: it began anew, or was there.
        """
        self.cache.keep_prefixes(self.sequence.cached_ids)
        kept, parked = None, None
        if reuse:
            kept = self.cache.find(want, self.sequence.exact_rows, common)
            parked = self.conversations.find(want)
        live_at = self._live_position(want, common) if reuse else 0
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

    def _live_position(self, want: Want, common: int) -> int:
        """Where the live sequence is, if that is a position to go on from, else 0; see _go_to()."""
        sequence = self.sequence
        is_fit = sequence.is_consistent and (sequence.is_exact or not want.exact)
        is_far = want.logits and sequence.position == len(want.ids)
        # The tokens that it has read are a prefix of those whose K/V is there.
        if is_far or not is_fit or sequence.position > common:
            return 0
        return sequence.position

    def _rewind(self, kept: Checkpoint) -> None:
        self.cache.touch(kept)
        sequence = self.sequence
        # Both are prefixes of the tokens whose K/V is there.
        is_there = sequence.is_consistent and sequence.position == kept.position
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
        if not self.conversations.budget_bytes:
            return
        sequence, live = self.sequence, self.sequence.cached_ids
        if len(live) - common_tokens(live, ids) < self._rules.least_parked_tokens:
            return
        checkpoints = self.cache.checkpoints
        is_known = any(
            kept.ids == sequence.ids and kept.snapshot.is_exact >= sequence.is_exact
            for kept in checkpoints
        )
        if sequence.is_consistent and sequence.position and not is_known:
            checkpoints = (*checkpoints, Checkpoint(sequence.snapshot()))
        nbytes = sequence.parked_bytes + sum(kept.nbytes for kept in checkpoints)
        if checkpoints and nbytes <= self.conversations.budget_bytes:
            self.conversations.park(Conversation(sequence.park(), checkpoints))

    def _read_all(
        self, reading: PromptReading, progress: Progress | None, cancellation: Cancellation
    ) -> None:
        total = reading.left_tokens
        while not reading.is_over:
            ids, wants_logits = reading.next()
            logits = self.sequence.prefill(
                ids,
                logits="last" if wants_logits else "none",
                progress=_shifted(progress, total - reading.left_tokens, total),
                cancellation=cancellation,
                meanwhile=reading.copy_end,
            )
            self.read_tokens += len(ids)
            reading.add(logits if wants_logits else None)


def _shifted(progress: Progress | None, done: int, total: int) -> Progress | None:
    """Progress of a part, told as progress of the whole."""
    if progress is None:
        return None
    return lambda part_done, _part_total: progress(done + part_done, total)
