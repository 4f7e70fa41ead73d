"""Parts of layers that are launched again as they were, with other weights and another state.

To choose, check and pack the launches of a short pass takes the host longer than the GPU takes to
run them. But layers are alike: what was launched for one is launched for the next, and in the next
pass of as many tokens, with other tensors in the same places. So the calls of a part are noted
once, and repeated from then on (Stream.repeat).

That is done only where all that a part's launches depend on is the same, and every tensor of its
calls is known: as one of its operands, which a repetition replaces, or as scratch, which stays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Hashable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.device.base import (
    Call,
    Kernel,
    KernelArgument,
    Launch,
    Pattern,
    Stream,
    Tensor,
)
from strata_cli.engine.forward.on_stream import ModelOnStream
from strata_cli.engine.forward.workspace import Workspace

MOST_PATTERNS = 1_024  # that are kept, of about 5 kB each
ALIGNMENT_BYTES = 256  # more than any choice of a launch looks at


class Operands(NamedTuple):
    """Weights that a part of a layer works with.

    Attributes:
        addresses: where their tensors begin, [n].
        kind: all else about them: equal kinds have the same launches, at other addresses.
    """

    addresses: NDArray[np.int64]
    kind: Hashable

    @classmethod
    def of(cls, *values: object) -> Operands:
        """Of weights and plain values, however nested."""
        leaves = [*_leaves(values)]
        addresses = [leaf.address for leaf in leaves if isinstance(leaf, Tensor)]
        same_as = tuple(addresses.index(address) for address in addresses)
        kinds = tuple(_kind(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        return cls(np.array(addresses, np.int64), (kinds, same_as))


def _leaves(value: Any) -> Iterator[Hashable]:
    """Tensors and plain values in a fixed order; a container begins with what it is."""
    if isinstance(value, Tensor):
        yield value
    elif is_dataclass(value):
        yield type(value).__name__
        for field in fields(value):
            yield from _leaves(getattr(value, field.name))
    elif isinstance(value, tuple):
        yield len(value)
        for each in value:
            yield from _leaves(each)
    else:
        yield value


def _kind(tensor: Tensor) -> Hashable:
    return tensor.shape, tensor.dtype, tensor.address % ALIGNMENT_BYTES


class NotingStream:
    """Passes everything on to a stream, and notes the launches.

    Args:
        stream: makes them.
        workspace: of the model.
        known: where other tensors may begin.

    Attributes:
        calls: of launches so far.
        is_whole: whether nothing but launches was asked of the stream, with tensors that lie in the
            workspace or are known.
    """

    def __init__(self, stream: Stream, workspace: Workspace, known: Container[int]) -> None:
        self._stream = stream
        self._workspace = workspace
        self._known = known
        self.shared_bytes = stream.shared_bytes
        self.num_multiprocessors = stream.num_multiprocessors
        self.capability = stream.capability
        self.calls: list[Call] = []
        self.is_whole = True

    def __getattr__(self, name: str) -> Any:
        self.is_whole = False
        return getattr(self._stream, name)

    def launch(self, kernel: Kernel, launch: Launch, *args: KernelArgument) -> None:
        """See Stream."""
        self._stream.launch(kernel, launch, *args)
        values = tuple(self._value(each) if isinstance(each, Tensor) else each for each in args)
        self.calls.append(Call(kernel, launch, values))

    def _value(self, tensor: Tensor) -> int:
        address = tensor.address
        if not self._workspace.holds(tensor) and address not in self._known:
            self.is_whole = False
        return address


class Known(NamedTuple):
    """A part of one layer.

    Attributes:
        addresses: of its weights.
        kind: the same number for all that are alike.
    """

    addresses: NDArray[np.int64]
    kind: int


class Patterns:
    """What was noted of one model on one stream.

    It lives as long as the model's workspace, whose addresses are in it, and holds on to no memory
    of a device. An interrupt leaves nothing half noted.

    Attributes:
        kept: patterns by all that their launches depend on; None: they cannot be repeated.
    """

    def __init__(self) -> None:
        self.kept: dict[Hashable, Pattern | None] = {}
        self._seen: set[Hashable] = set()
        self._parts: dict[Hashable, Known] = {}
        self._num_alike: Counter[int] = Counter()

    def part(
        self, name: Hashable, find_all: Callable[[], Iterable[tuple[Hashable, Operands]]]
    ) -> Known:
        """A part of one layer by its name.

        Args:
            name: of it.
            find_all: names and weights of all parts of all layers; called once.
        """
        if not self._parts:
            numbers: dict[Hashable, int] = {}
            parts = {
                each: Known(addresses, numbers.setdefault(kind, len(numbers)))
                for each, (addresses, kind) in find_all()
            }
            self._num_alike = Counter(known.kind for known in parts.values())
            self._parts = parts
        return self._parts[name]

    def enqueue(
        self,
        part: Known,
        key: Hashable,
        others: NDArray[np.int64],
        model: ModelOnStream,
        launch: Callable[[Stream], None],
    ) -> None:
        """Enqueue a part's launches: as they were noted, or by launching them.

        Args:
            part: of the layer.
            key: all else that they depend on, but for addresses.
            others: where tensors outside of weights and workspace begin, [n]; 0: none.
            model: whose part it is.
            launch: enqueues the launches on the stream that it is given.
        """
        whole = (part.kind, key)
        addresses = np.concatenate((part.addresses, others))
        pattern = self.kept.get(whole)
        if pattern is not None:
            model.stream.repeat(pattern, addresses)
        elif whole in self.kept or not self._comes_again(part, whole):
            launch(model.stream)
        else:
            self._keep(whole, _noted(addresses, model, launch))

    def _comes_again(self, part: Known, whole: Hashable) -> bool:
        """Whether launches are worth a note: other layers have them, or they were here before."""
        if self._num_alike[part.kind] > 1 or whole in self._seen:
            return True
        if len(self._seen) >= MOST_PATTERNS:
            self._seen.clear()
        self._seen.add(whole)
        return False

    def _keep(self, whole: Hashable, pattern: Pattern | None) -> None:
        if len(self.kept) >= MOST_PATTERNS:
            self.kept.clear()
        self.kept[whole] = pattern


def _noted(
    addresses: NDArray[np.int64], model: ModelOnStream, launch: Callable[[Stream], None]
) -> Pattern | None:
    """Launch, and note what is launched; None where that cannot be repeated."""
    noting = NotingStream(model.stream, model.workspace, {*addresses.tolist()})
    launch(cast(Stream, noting))
    return model.stream.pattern(noting.calls, addresses) if noting.is_whole else None
