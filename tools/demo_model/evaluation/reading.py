"""Reads next-token log-probabilities of prompts through the engine, shared beginnings once."""

from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.engine import Engine
from strata_cli.engine.forward.state import Snapshot
from strata_cli.engine.kernels.head import log_softmax_row

Ids = Sequence[int]
Progress = Callable[[int], object]  # told how much was read since the last call


def shared_tokens(prompts: Sequence[Ids]) -> list[int]:
    """Return the longest common beginning of prompts that leaves each at least one token."""
    first = prompts[0]
    count = min(len(prompt) for prompt in prompts) - 1
    for prompt in prompts[1:]:
        count = next((at for at in range(count) if prompt[at] != first[at]), count)
    return list(first[:count])


class PromptReader:
    """One sequence that goes back to what prompts share; a shared read equals a fresh one.

    A context manager. `tokens` counts what was really read.
    """

    def __init__(self, engine: Engine) -> None:
        self._sequence = engine.sequence()
        self._snapshots: list[Snapshot] = [
            self._sequence.snapshot()
        ]  # each a beginning of the next
        self.tokens = 0

    def read_groups(self, groups: Sequence[Sequence[Ids]]) -> Iterator[list[NDArray[np.float32]]]:
        """Yield, for every group of prompts, each prompt's next-token log-probabilities [V].

        What all prompts share is read once; what the prompts of a group share, once per group.
        """
        prompts = [prompt for group in groups for prompt in group]
        everything = shared_tokens(prompts) if prompts else []
        for group in groups:
            self._keep(everything)
            if len(group) > 1:
                self._keep(shared_tokens(group))
            yield [self._read(prompt) for prompt in group]

    def _keep(self, beginning: Ids) -> None:
        """Read `beginning`, or what of it is not remembered, and remember the state behind it."""
        if self._continue(beginning) is not None:
            self._snapshots.append(self._sequence.snapshot())

    def _read(self, prompt: Ids) -> NDArray[np.float32]:
        logits = self._continue(prompt)
        assert logits is not None, "a prompt goes on behind what is remembered"
        return log_softmax_row(logits)

    def _continue(self, ids: Ids) -> NDArray[np.float32] | None:
        """Go back to the last remembered beginning of `ids`, then read the rest, if any."""
        while tuple(ids[: self._snapshots[-1].position]) != self._snapshots[-1].ids:
            self._snapshots.pop()
        self._sequence.restore(self._snapshots[-1])
        rest = list(ids[self._sequence.position :])
        self.tokens += len(rest)
        return self._sequence.prefill(rest) if rest else None

    def close(self) -> None:
        """Give the sequence's memory back."""
        self._sequence.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()
