"""Which checkpoints of a sequence are kept, and which prompt may resume from which.

A checkpoint is the running state at a position. Any position is a valid one to resume from: an
output depends on its token's own inputs and position alone, so a resumed read repeats the
operations of a fresh one. Checkpoints are kept on a grid of positions all the same, because each
one is large (118 MB of a full-size model): the grid bounds their number, and prompts that share a
beginning meet in its positions wherever they part. Where one did part from the one before it, a
third may too: there is one more.

Plain reads may leave an inexact state, see forward/state.py; canonical reads resume from exact ones
alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from strata_cli.config import StrataConfig
from strata_cli.engine.forward.state import Snapshot
from strata_cli.engine.model.prefixes import common_tokens
from strata_cli.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRules:
    """What a session keeps. No result depends on it.

    Attributes:
        prompt_cache: most checkpoints, the root among them; 0: none.
        prompt_cache_bytes: most host memory of theirs; 0: no bound.
        prompt_cache_every: distance of the grid's positions in tokens; 0: no grid.
        prompt_cache_root: the position whose checkpoint stays while it is valid, in prompts that
            reach it; in others the first one behind it. 0: no root.
        conversation_cache_mib: host memory for conversations that made room for others, in MiB.
        least_parked_tokens: fewer tokens are read again rather than parked, or than kept where one
            prompt leaves another.
    """

    prompt_cache: int = 6
    prompt_cache_bytes: int = 1 << 30
    prompt_cache_every: int = 16_384
    prompt_cache_root: int = 2048
    conversation_cache_mib: int = 0
    least_parked_tokens: int = 512

    def __post_init__(self) -> None:
        """Refuse numbers that nothing can be kept by.

        Raises:
            ConfigError: one is negative.
        """
        for name, value in asdict(self).items():
            if value < 0:
                raise ConfigError(
                    f"{name} must not be negative, got {value}", hint="leave it out for the default"
                )

    @classmethod
    def of(cls, config: StrataConfig) -> Self:
        """As the settings say."""
        return cls(
            prompt_cache=config.prompt_cache,
            prompt_cache_bytes=config.prompt_cache_mib << 20,
            prompt_cache_every=config.prompt_cache_every,
            prompt_cache_root=config.prompt_cache_root,
            conversation_cache_mib=config.conversation_cache_mib,
        )


class Want(NamedTuple):
    """What a prompt that is to be read asks of a checkpoint.

    Attributes:
        ids: of the prompt; a checkpoint holds a prefix of them.
        logits: whether logits are wanted: then a token must be left to read, or they must be known.
        exact: whether only an exact state will do.
    """

    ids: Sequence[int]
    logits: bool = True
    exact: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """A position that reading can resume from.

    Attributes:
        snapshot: the running state there.
        logits: [V] of the last token, at the end of a prompt; None elsewhere.
    """

    snapshot: Snapshot
    logits: NDArray[np.float32] | None = None

    @property
    def ids(self) -> tuple[int, ...]:
        """The tokens before it."""
        return self.snapshot.ids

    @property
    def position(self) -> int:
        """How many they are."""
        return self.snapshot.position

    @property
    def nbytes(self) -> int:
        """Host memory held."""
        return self.snapshot.nbytes + (0 if self.logits is None else self.logits.nbytes)

    def is_exact(self, exact_rows: int) -> bool:
        """Whether the state is exact where so many of the first K/V rows are."""
        return self.snapshot.is_exact and self.position <= exact_rows

    def serves(self, want: Want, exact_rows: int) -> bool:
        """Whether a prompt can be read from here on, where so many K/V rows are exact."""
        return self.is_enough(want, exact_rows) and is_prefix(self.ids, want.ids)

    def is_enough(self, want: Want, exact_rows: int) -> bool:
        """The same of a prompt that is known to begin with these tokens."""
        is_known = self.position < len(want.ids) or not want.logits or self.logits is not None
        return is_known and (not want.exact or self.is_exact(exact_rows))


@dataclass(slots=True)
class PromptCache:
    """The checkpoints of one live sequence, least recently used first.

    All of them are prefixes of one prompt, and thus of each other: whoever adds one has had those
    forgotten before that are not of the same prompt. Long ids are compared as seldom as can be.

    Attributes:
        rules: how many, how large.
        root: the pinned one among them, or None.
    """

    rules: CacheRules
    root: Checkpoint | None = None
    _checkpoints: list[Checkpoint] = field(default_factory=list)

    @property
    def checkpoints(self) -> tuple[Checkpoint, ...]:
        """All of them, least recently used first."""
        return tuple(self._checkpoints)

    @property
    def nbytes(self) -> int:
        """Host memory held."""
        return sum(checkpoint.nbytes for checkpoint in self._checkpoints)

    def cuts(self, start: int, stop: int, parting: int = 0, pass_tokens: int = 1) -> list[int]:
        """Positions in start < position < stop at which a read should leave a checkpoint.

        Args:
            start: what is read begins here.
            stop: it ends here.
            parting: up to there the prompt before began alike, so others may too.
            pass_tokens: of the passes that read it, where one more is expensive: the grid and the
                root then wait for the end of a pass. Only the parting is worth one of its own.
        """
        rules = self.rules
        if not rules.prompt_cache:
            return []
        bounds = [start, stop]
        if start + rules.least_parked_tokens <= parting < stop:
            bounds.insert(1, parting)
        cuts = set(bounds[1:-1])
        for begin, end in pairwise(bounds):
            for position in self._regular(begin, end):
                pass_end = begin - (begin - position) // pass_tokens * pass_tokens
                if pass_end < end:
                    cuts.add(pass_end)
        return sorted(cuts)

    def _regular(self, start: int, stop: int) -> Iterator[int]:
        """Positions of the grid and of a root that is missing, start < position < stop."""
        every, root = self.rules.prompt_cache_every, self.rules.prompt_cache_root
        if every:
            yield from range((start // every + 1) * every, stop, every)
        if self.root is None and start < root < stop:
            yield root

    def add(self, checkpoint: Checkpoint) -> None:
        """Keep one in place of the least recently used, the root excepted.

        One that does not fit beside the root is not kept. The first one at or behind the root's
        position becomes the root. Of two at the same position the later one stays, unless the
        earlier one has logits more and is as exact.
        """
        same = next((kept for kept in self._checkpoints if kept.ids == checkpoint.ids), None)
        is_no_less = same is not None and same.snapshot.is_exact >= checkpoint.snapshot.is_exact
        if same is not None and checkpoint.logits is None and is_no_less:
            self.touch(same)
            return
        if same is not None:
            self._forget([same])
        if self.root is None and 0 < self.rules.prompt_cache_root <= checkpoint.position:
            self.root = checkpoint
        self._checkpoints.append(checkpoint)
        while not self._fits():
            candidates = [kept for kept in self._checkpoints if kept is not self.root]
            self._forget(candidates[:1] or self._checkpoints[:1])

    def find(self, want: Want, exact_rows: int, common: int | None = None) -> Checkpoint | None:
        """The longest prefix of a prompt. Changes no order: see touch().

        Args:
            want: the prompt.
            exact_rows: of the live sequence.
            common: tokens that the prompt has in common with what all checkpoints are prefixes of;
                None: nobody has compared them.
        """
        common = self._common_tokens(want.ids) if common is None else common
        serving = (
            kept
            for kept in self._checkpoints
            if kept.position <= common and kept.is_enough(want, exact_rows)
        )
        return max(serving, key=_position, default=None)

    def touch(self, checkpoint: Checkpoint) -> None:
        """Count one of them as used now."""
        self._checkpoints.remove(checkpoint)
        self._checkpoints.append(checkpoint)

    def keep_prefixes(self, live: Sequence[int]) -> None:
        """Forget every checkpoint whose tokens are no prefix of the live ones."""
        common = self._common_tokens(live)
        self._forget(kept for kept in self._checkpoints if kept.position > common)

    def _common_tokens(self, ids: Sequence[int]) -> int:
        """How many the longest of them begins with: the others are prefixes of it."""
        longest = max(self._checkpoints, key=_position, default=None)
        return 0 if longest is None else common_tokens(longest.ids, ids)

    def _fits(self) -> bool:
        rules = self.rules
        if len(self._checkpoints) > rules.prompt_cache:
            return False
        return not rules.prompt_cache_bytes or self.nbytes <= rules.prompt_cache_bytes

    def _forget(self, checkpoints: Iterable[Checkpoint]) -> None:
        gone = list(checkpoints)
        self._checkpoints = [kept for kept in self._checkpoints if kept not in gone]
        if self.root in gone:
            self.root = None


def _position(checkpoint: Checkpoint) -> int:
    return checkpoint.position


def is_prefix(prefix: Sequence[int], ids: Sequence[int]) -> bool:
    """Whether the ids begin with the prefix."""
    part = ids[: len(prefix)]
    return part == prefix if type(part) is type(prefix) else tuple(part) == tuple(prefix)
