"""Conversations that made room for others: what they need to go on, in host memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from strata_cli.engine.forward.parking import ParkedRows
from strata_cli.engine.prompt_cache import Checkpoint, Want, is_prefix


@dataclass(frozen=True, slots=True, eq=False)
class Conversation:
    """A sequence's rows, and the checkpoints from which it can go on.

    Attributes:
        rows: K/V of all its tokens.
        checkpoints: of positions in it, at least one.
    """

    rows: ParkedRows
    checkpoints: tuple[Checkpoint, ...]

    @property
    def nbytes(self) -> int:
        """Host memory held."""
        return self.rows.nbytes + sum(checkpoint.nbytes for checkpoint in self.checkpoints)


class Parked(NamedTuple):
    """Where a prompt can resume: a checkpoint of a conversation."""

    conversation: Conversation
    checkpoint: Checkpoint


class ConversationCache:
    """Conversations within a budget, least recently parked first.

    Args:
        budget_bytes: most host memory; 0 keeps none.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._conversations: list[Conversation] = []

    @property
    def conversations(self) -> tuple[Conversation, ...]:
        """All of them, least recently parked first."""
        return tuple(self._conversations)

    @property
    def nbytes(self) -> int:
        """Host memory held."""
        return sum(conversation.nbytes for conversation in self._conversations)

    def find(self, want: Want) -> Parked | None:
        """The longest prefix of a prompt among all checkpoints."""
        found = [
            Parked(conversation, checkpoint)
            for conversation in self._conversations
            for checkpoint in conversation.checkpoints
            if checkpoint.serves(want, conversation.rows.exact_rows)
        ]
        return max(found, key=lambda parked: parked.checkpoint.position, default=None)

    def take(self, conversation: Conversation) -> None:
        """Forget one that becomes live."""
        self._conversations.remove(conversation)

    def park(self, conversation: Conversation) -> None:
        """Keep one, in place of its own earlier states and then of the least recently parked.

        One that is larger than the budget is not kept.
        """
        if conversation.nbytes > self.budget_bytes:
            return
        ids = conversation.rows.ids
        others = [kept for kept in self._conversations if not is_prefix(kept.rows.ids, ids)]
        self._conversations = [*others, conversation]
        while self.nbytes > self.budget_bytes:
            del self._conversations[0]
