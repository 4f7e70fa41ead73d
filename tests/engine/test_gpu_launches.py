"""What a model launches on a GPU, held against the compiled functions, without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from strata_cli.engine import opening
from strata_cli.engine.device import filling
from strata_cli.engine.device.cuda import CudaDevice, CudaOptions
from strata_cli.engine.device.nvrtc import Compiler
from strata_cli.engine.engine import Engine, EngineOptions
from strata_cli.engine.experts.placing import ExpertHome
from strata_cli.engine.forward import layer_parts, layers, patterns
from strata_cli.engine.forward.patterns import Patterns
from strata_cli.engine.forward.planning import Homes
from strata_cli.engine.kernels import cache_segments
from strata_cli.engine.sequence import Part, Sequence
from strata_cli.errors import ConfigError
from tests.device.cubin_driver import CubinDriver, Launched, hopper
from tests.engine.passes import read_together
from tests.model.oracle import MODELS, load_oracle

pytestmark = pytest.mark.slow  # a first run compiles

IDS = load_oracle("tinyA-q8_0")["p300.ids"].tolist()
RECORDED = {"cuLaunchKernel", "cuLaunchKernelEx", "cuMemcpyAsync", "cuMemsetD8Async"}
PIECE_BYTES = 100_000
WAITING = {"cuEventQuery", "cuStreamQuery"}


@dataclass(frozen=True)
class Paper:
    """An engine on a GPU that computes nothing, and the driver that was asked to."""

    engine: Engine
    driver: CubinDriver


@pytest.fixture(scope="module")
def paper() -> Iterator[Paper]:
    try:
        Compiler()
    except ConfigError as error:
        pytest.skip(error.message)
    driver = CubinDriver()
    options = EngineOptions(
        model=MODELS["tinyA-q8_0"],
        device="cuda:0",
        prefill=200,
        max_context=1_000,
        homes=Homes(experts=ExpertHome.MIXED),
    )
    with pytest.MonkeyPatch.context() as patch:
        device = CudaDevice(hopper(driver), CudaOptions())
        patch.setattr(filling, "PIECE_BYTES", PIECE_BYTES)
        patch.setattr(opening, "open_device", lambda *_, **__: device)
        with Engine.open(options) as engine:
            yield Paper(engine, driver)
    assert not driver.allocated
    assert not driver.registered
    assert driver.names()[-1] == "cuDevicePrimaryCtxRelease"


def test_weights_arrive_in_whole_pieces(paper: Paper) -> None:
    """The half of the experts that is not mapped, and everything else."""
    whole = paper.engine._forward.weights.buffers[0].nbytes
    copies = [args[2] for args in paper.driver.arguments("cuMemcpyAsync")]
    pieces = copies[: -(-whole // PIECE_BYTES)]
    assert sum(pieces) == whole
    assert set(pieces[:-1]) == {PIECE_BYTES}


def test_every_launch_fits_its_function_and_was_compiled_ahead(paper: Paper) -> None:
    engine, driver = paper.engine, paper.driver
    driver.calls.clear()
    with engine.sequence() as one, engine.sequence() as two:
        for length in (1, 2, 9, 33, 64, 300):
            one.reset()
            one.prefill(IDS[:length], logits="all")
        snapshot = one.snapshot()
        one.step(5)
        one.restore(snapshot)
        read_together(engine, [(one, IDS[:40]), (two, IDS[:1])])
        assert one.state_hash().position == 340
    assert len(set(driver.launches)) > 30
    assert "cuModuleLoadData" not in driver.names()


def test_a_step_is_one_launch_of_a_recorded_graph(paper: Paper) -> None:
    engine, driver = paper.engine, paper.driver
    with engine.sequence() as sequence:
        sequence.prefill(IDS[:10])
        driver.calls.clear()
        sequence.step(1)
        names = driver.names()
        begin, end = names.index("cuStreamBeginCapture"), names.index("cuStreamEndCapture")
        assert set(names[begin + 1 : end]) <= RECORDED
        assert names.count("cuLaunchKernel") + names.count("cuLaunchKernelEx") > 100
        assert names.count("cuGraphLaunch") == 1
        for token in (2, 3):
            driver.calls.clear()
            assert np.isfinite(sequence.step(token)).all()
            asked = [name for name in driver.names() if name not in WAITING]
            assert asked == ["cuGraphLaunch", "cuEventRecord"]


@pytest.fixture
def no_patterns(paper: Paper) -> None:
    """As if nothing had been read yet."""
    paper.engine._forward.patterns.kept.clear()
    paper.engine._forward.patterns._seen.clear()


@contextmanager
def launches(paper: Paper, *sequences: Sequence) -> Iterator[list[Launched]]:
    """All that is launched inside, from where the sequences begin anew."""
    found = paper.driver.launched = list[Launched]()
    for sequence in sequences:
        sequence.reset()
    yield found
    paper.driver.launched = None


def launched(paper: Paper, sequence: Sequence, lengths: tuple[int, ...]) -> list[Launched]:
    """All that passes of such lengths launch, one behind the other."""
    with launches(paper, sequence) as found:
        for length in lengths:
            sequence.prefill(IDS[:length])
    return found


def check_repeated(read: Callable[[], list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is repeated of a reading is what it launches where nothing is."""
    repeated = read()
    monkeypatch.setattr(layers, "MOST_REPEATED_TOKENS", 0)
    assert repeated == read()


def fail_to_launch(patch: pytest.MonkeyPatch) -> None:
    """Unless all launches of layers are repeated."""
    for part in (layer_parts.NGRAMS, layer_parts.MIXER, layer_parts.EXPERTS):
        unknown = part._replace(enqueue=lambda *_: pytest.fail("launched anew"))
        patch.setattr(layers, part.name.upper(), unknown)


LENGTHS = (2, 9, 33, 33, 200, 64, 33, 9, 2, 120, 33)


@pytest.mark.usefixtures("no_patterns")
def test_what_is_repeated_is_what_would_be_launched(
    paper: Paper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layer by layer, at other positions, and in another sequence than the noted one."""
    engine = paper.engine
    with engine.sequence() as one, engine.sequence() as two:

        def read() -> list[list[Launched]]:
            return [launched(paper, sequence, LENGTHS) for sequence in (one, two, one)]

        repeated = read()
        assert None not in engine._forward.patterns.kept.values()
        monkeypatch.setattr(layers, "MOST_REPEATED_TOKENS", 0)
        assert repeated == read()


def read_several(paper: Paper, *sequences: Sequence) -> list[Launched]:
    """Two sequences in the same passes, in either order, and branches of each."""
    engine, (one, two) = paper.engine, sequences
    with launches(paper, *sequences) as found:
        for length, (first, second) in ((30, (one, two)), (31, (one, two)), (30, (two, one))):
            engine.read_together([Part(first, IDS[:length]), Part(second, IDS[length:60])])
        for sequence in sequences:
            for lengths in ((20, 40), (40, 20), (20, 40), (1, 1, 1)):
                sequence.score([IDS[:length] for length in lengths])
        engine.score_together([(one, [IDS[:20]]), (two, [IDS[:40]])])
        engine.score_together([(one, [IDS[:20], IDS[:40]]), (two, [IDS[:9]])])
        engine.score_together([(one, [IDS[:20]]), (two, [IDS[:40], IDS[:9]])])
    return found


@pytest.mark.usefixtures("no_patterns")
def test_what_is_repeated_of_several_sequences_is_what_would_be_launched(
    paper: Paper, monkeypatch: pytest.MonkeyPatch
) -> None:
    with paper.engine.sequence() as one, paper.engine.sequence() as two:
        first, again = (read_several(paper, one, two) for _ in range(2))
        third = read_several(paper, two, one)
        with monkeypatch.context() as patch:
            fail_to_launch(patch)
            assert read_several(paper, one, two) == first == again
        monkeypatch.setattr(layers, "MOST_REPEATED_TOKENS", 0)
        assert read_several(paper, one, two) == first
        assert read_several(paper, two, one) == third


@pytest.mark.usefixtures("no_patterns")
def test_experts_of_sequences_one_by_one_are_repeated_too(
    paper: Paper, monkeypatch: pytest.MonkeyPatch
) -> None:
    with paper.engine.sequence() as one, paper.engine.sequence() as two:

        def read() -> list[Launched]:
            with launches(paper, one, two) as found:
                for length in (30, 30, 31):
                    read_together(paper.engine, [(one, IDS[:length]), (two, IDS[length:60])])
            return found

        check_repeated(read, monkeypatch)


@pytest.mark.usefixtures("no_patterns")
def test_branches_are_not_taken_for_sequences_that_go_on(
    paper: Paper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They leave the state as it was; otherwise they have the same rows, alone and together."""
    with paper.engine.sequence() as one, paper.engine.sequence() as two:

        def read() -> list[Launched]:
            with launches(paper, one, two) as found:
                for _ in range(2):
                    one.prefill(IDS[:33])
                    one.score([IDS[:33]])
                for _ in range(2):
                    parts = [Part(each, [1], wants_logits=False) for each in (one, two)]
                    paper.engine.read_together(parts)
                    paper.engine.score_together([(one, [[1]]), (two, [[2]])])
            return found

        check_repeated(read, monkeypatch)


@pytest.mark.usefixtures("no_patterns")
def test_branches_that_attend_one_by_one_do_so_in_their_own_sequences(
    paper: Paper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the same lengths and positions, but not in the same sequence."""
    monkeypatch.setattr(cache_segments, "ENOUGH_BLOCKS", 1 << 30)
    monkeypatch.setattr(cache_segments, "SEGMENT_US", 0.0)
    with paper.engine.sequence() as one, paper.engine.sequence() as two:

        def read() -> list[Launched]:
            with launches(paper, one, two) as found:
                paper.engine.read_together([Part(each, IDS[:30]) for each in (one, two)])
                paper.engine.score_together([(one, [IDS[:20], IDS[:40]]), (two, [IDS[:9]])])
                paper.engine.score_together([(one, [IDS[:20]]), (two, [IDS[:40], IDS[:9]])])
            return found

        check_repeated(read, monkeypatch)


@pytest.mark.usefixtures("no_patterns")
def test_steps_that_are_recorded_are_not_repeated(
    paper: Paper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream that is captured refuses to."""
    with ExitStack() as stack:
        sequences = [stack.enter_context(paper.engine.sequence()) for _ in range(3)]
        monkeypatch.setattr(Patterns, "enqueue", lambda *_: pytest.fail("repeated"))
        for num in (2, 3):
            paper.engine.read_together([Part(each, [1]) for each in sequences[:num]])


@pytest.mark.usefixtures("no_patterns")
def test_a_pass_like_one_before_chooses_no_launch_of_its_layers(
    paper: Paper, monkeypatch: pytest.MonkeyPatch
) -> None:
    with paper.engine.sequence() as sequence:
        first = launched(paper, sequence, (33, 33))
        fail_to_launch(monkeypatch)
        assert launched(paper, sequence, (33, 33)) == first


@pytest.mark.usefixtures("no_patterns")
def test_few_patterns_are_kept_however_many_there_were(
    paper: Paper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patterns, "MOST_PATTERNS", 3)
    known = paper.engine._forward.patterns
    with paper.engine.sequence() as sequence:
        bounded = []
        for length in (2, 9, 33, 2):
            bounded += launched(paper, sequence, (length,))
            assert len(known.kept) <= 3
            assert len(known._seen) <= 3
        monkeypatch.setattr(layers, "MOST_REPEATED_TOKENS", 0)
        assert bounded == [each for n in (2, 9, 33, 2) for each in launched(paper, sequence, (n,))]


@pytest.mark.usefixtures("no_patterns")
@pytest.mark.parametrize("number", [1, 20, 77])
def test_an_interrupt_in_a_repetition_leaves_a_sequence_to_be_reset(
    paper: Paper, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    with paper.engine.sequence() as sequence:
        whole = launched(paper, sequence, (33, 33))
        left = [number]

        def interrupt(*_: object) -> None:
            left[0] -= 1
            if not left[0]:
                raise KeyboardInterrupt

        sequence.reset()
        with monkeypatch.context() as patch:
            patch.setitem(paper.driver._effects, "cuLaunchKernelEx", interrupt)
            with pytest.raises(KeyboardInterrupt):
                sequence.prefill(IDS[:33])
        assert not sequence.is_consistent
        assert launched(paper, sequence, (33, 33)) == whole
