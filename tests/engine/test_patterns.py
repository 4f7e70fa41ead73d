"""Which parts of layers count as alike, and what of them is repeated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from strata_cli.engine.device.base import Call, Home, Kernel, KernelArgument, Launch, Stream, Tensor
from strata_cli.engine.device.paper import PaperBuffer
from strata_cli.engine.engine import Engine
from strata_cli.engine.forward.batch import Batch, Segment
from strata_cli.engine.forward.layer_parts import EXPERTS, MIXER, NGRAMS, LayerPass
from strata_cli.engine.forward.layers import Forward
from strata_cli.engine.forward.on_stream import ModelOnStream
from strata_cli.engine.forward.patterns import Operands, Patterns
from strata_cli.engine.forward.state import SequenceState, new_state
from strata_cli.engine.forward.weights import ReadWeights
from strata_cli.engine.kernels.weight import Weight
from strata_cli.engine.model.quants import QuantType

WORK = Kernel("work", lambda *_: None, lambda *_: None)
WEIGHTS = PaperBuffer(Home.DEVICE, 1 << 20, 1 << 40)
SCRATCH = PaperBuffer(Home.DEVICE, 1 << 20, 2 << 40)


def floats(at: int, *shape: int, buffer: PaperBuffer = WEIGHTS) -> Tensor:
    return Tensor.over(buffer, shape, np.float32, at)


def weight(at: int, rows: int = 4) -> Weight:
    return Weight(floats(at, rows, 64), QuantType.F32, rows, 64)


READ = ReadWeights(norm=floats(0, 64), down=weight(1024), up=weight(2048), inject=None)


def test_parts_are_alike_wherever_their_weights_lie() -> None:
    moved = ReadWeights(floats(256, 64), weight(1024 * 9), weight(1024 * 7), None)
    one, other = Operands.of("read", READ, 4), Operands.of("read", moved, 4)
    assert one.kind == other.kind
    assert (other.addresses - WEIGHTS.address).tolist() == [256, 9216, 7168]


@pytest.mark.parametrize(
    "other",
    [
        replace(READ, norm=floats(0, 32)),  # another shape
        replace(READ, norm=Tensor.over(WEIGHTS, (64,), np.int32)),  # another type
        replace(READ, down=Weight(floats(1024, 4 * 34), QuantType.Q8_0, 16, 32)),
        replace(READ, down=weight(1024 + 16)),  # other alignment
        replace(READ, up=weight(1024)),  # the same place as another
        replace(READ, inject=weight(4096)),
        (READ, 4),
    ],
)
def test_parts_that_differ_otherwise_are_not_alike(other: object) -> None:
    assert Operands.of("read", READ).kind != Operands.of("read", other).kind


class FakeStream:
    """Keeps what it was asked: names of calls, with the addresses of a repetition."""

    shared_bytes, num_multiprocessors, capability = 1 << 16, 132, (9, 0)

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def launch(self, _kernel: Kernel, _launch: Launch, *_args: KernelArgument) -> None:
        self.asked.append("launch")

    def copy(self, _dst: Tensor, _src: Tensor) -> None:
        self.asked.append("copy")

    def pattern(self, calls: Sequence[Call], _addresses: NDArray[np.int64]) -> int:
        return len(calls)

    def repeat(self, pattern: int, addresses: NDArray[np.int64]) -> None:
        self.asked.append((pattern, addresses.tolist()))


class Reader:
    """Parts "a" and "b" of two layers that are alike, and "c" of one."""

    def __init__(self, make: Callable[[Stream], None]) -> None:
        self.stream, self.patterns = FakeStream(), Patterns()
        workspace = SimpleNamespace(holds=lambda tensor: tensor.buffer is SCRATCH)
        model = SimpleNamespace(stream=self.stream, workspace=workspace)
        self._model, self._make = cast(ModelOnStream, model), make

    def read(self, name: str, key: int = 0, state: int = 7) -> list[Any]:
        """What the stream is asked for a part."""
        parts = {"a": weight(1024), "b": weight(2048), "c": weight(1024, rows=8)}
        known = self.patterns.part(name, lambda: ((n, Operands.of(w)) for n, w in parts.items()))
        self.stream.asked = []
        self.patterns.enqueue(known, key, np.array([state, 0]), self._model, self._make)
        return self.stream.asked


def launch_two(stream: Stream) -> None:
    stream.launch(WORK, Launch(items=1), floats(1024, 4), floats(0, 2, buffer=SCRATCH), 5, 0.5)
    stream.launch(WORK, Launch(items=1), floats(64, 2, buffer=SCRATCH))


def test_a_part_is_launched_once_for_all_that_are_alike() -> None:
    reader, at = Reader(launch_two), WEIGHTS.address
    assert reader.read("a") == ["launch"] * 2
    assert reader.read("b") == [(2, [at + 2048, 7, 0])]
    assert reader.read("a", state=9) == [(2, [at + 1024, 9, 0])]
    assert reader.read("b", key=1) == ["launch"] * 2


def test_what_one_layer_has_alone_is_noted_when_it_comes_again() -> None:
    reader = Reader(launch_two)
    assert reader.read("c") == reader.read("c") == ["launch"] * 2
    assert reader.read("c") == [(2, [WEIGHTS.address + 1024, 7, 0])]


def test_launches_with_a_tensor_that_nobody_named_are_not_repeated() -> None:
    reader = Reader(lambda stream: stream.launch(WORK, Launch(items=1), floats(1028, 4)))
    for name in "aba":
        assert reader.read(name) == ["launch"]


def test_launches_with_anything_between_them_are_not_repeated() -> None:
    def launch_and_copy(stream: Stream) -> None:
        launch_two(stream)
        stream.copy(floats(0, 2, buffer=SCRATCH), floats(64, 2, buffer=SCRATCH))

    reader = Reader(launch_and_copy)
    for name in "aba":
        assert reader.read(name) == ["launch", "launch", "copy"]


def test_an_interrupted_note_is_none() -> None:
    def launch_half(stream: Stream) -> None:
        launch_two(stream)
        raise KeyboardInterrupt

    reader = Reader(launch_half)
    with pytest.raises(KeyboardInterrupt):
        reader.read("a")
    assert not reader.patterns.kept


def with_stream(forward: Forward, **others: object) -> Forward:
    """As on a GPU."""
    stream = cast(Stream, SimpleNamespace(shared_bytes=1 << 16))
    return replace(forward, stream=stream, **cast(Any, others))


def test_only_short_passes_with_all_they_need_in_one_place_are_repeated(engine: Engine) -> None:
    forward = with_stream(engine._forward)
    x, room, table = floats(0, 9), engine._branch_room(), floats(0, 1)
    feed = cast(Any, SimpleNamespace())
    with engine.sequence() as sequence:
        state = sequence._state
        alone = Batch(9, (Segment(state, 0, 9),))
        branch = Batch(9, (Segment(state, 0, 9, room),))
        several = Batch(9, (Segment(state, 0, 4), Segment(state, 4, 9)))
        own, fed = (LayerPass(0, alone, x, each) for each in (None, feed))
        assert all(forward._is_repeated(part, own) for part in (NGRAMS, MIXER, EXPERTS))
        assert [forward._is_repeated(part, fed) for part in (MIXER, EXPERTS)] == [True, False]
        fetching = with_stream(engine._forward, fetcher=feed)
        assert [fetching._is_repeated(part, own) for part in (MIXER, EXPERTS)] == [True, False]
        for batch in (branch, several):
            passes = [own._replace(batch=each) for each in (batch, replace(batch, table=table))]
            assert [forward._is_repeated(MIXER, each) for each in passes] == [False, True]
            assert all(forward._is_repeated(EXPERTS, each) for each in passes)
        for other in (replace(alone, is_recorded=True), Batch(1, (Segment(state, 0, 1),))):
            assert not forward._is_repeated(MIXER, own._replace(batch=other))
            assert not forward._is_repeated(EXPERTS, own._replace(batch=other))


def test_parts_of_sequences_with_another_context_are_not_alike(engine: Engine) -> None:
    forward = engine._forward
    states = [new_state(engine.spec, engine._device, engine._stream, n) for n in (32, 64)]

    def key(layer: int, segments: list[SequenceState]) -> object:
        cut = tuple(Segment(state, 4 * at, 4 * at + 4) for at, state in enumerate(segments))
        table = None
        if len(cut) > 1:
            table = floats(0, forward.num_layers + 1, len(cut), 12)
        return forward._of_sequences(LayerPass(layer, Batch(4 * len(cut), cut, table=table), x))[0]

    x = floats(0, 4)
    for layer in range(forward.num_layers):
        assert key(layer, states[:1]) != key(layer, states[1:])
        assert key(layer, states) != key(layer, states[::-1])
        assert key(layer, states) == key(layer, states)
    for state in states:
        state.close()


def test_layers_with_other_blocks_of_the_index_are_not_alike(engine: Engine) -> None:
    forward, layer = engine._forward, engine.spec.is_recurrent.index(False)
    ratio = [2 * each for each in engine.spec.index_ratio]
    other = replace(forward, spec=replace(engine.spec, index_ratio=tuple(ratio)))
    assert ratio[layer]
    assert MIXER.operands(forward, layer).kind != MIXER.operands(other, layer).kind
