"""The trace and the residual dump of real prompts, and that neither changes a bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from strata_cli.engine.device.transfer import download
from strata_cli.engine.engine import Engine, EngineOptions
from strata_cli.engine.prefill.dump import EVERY_TOKENS
from strata_cli.engine.trace import EVENTS, NO_TRACE, OUTSIDE, Event, Trace
from strata_cli.errors import InputError, StrataError
from tests.engine.readings import CONTEXT, TEXT, Reading, assert_same, read_in_parts

CLOCK_NS = 20_000_000  # by how much a busy machine may put a device's clock off


def watched(
    model: Path,
    device_name: str,
    *,
    prefill: int = 0,
    trace: Trace = NO_TRACE,
    dump: Path | None = None,
) -> Engine:
    return Engine.open(
        EngineOptions(
            model=model,
            device=device_name,
            threads=2,
            prefill=prefill,
            max_context=CONTEXT,
            trace=trace,
            prefill_dump_r=dump,
        )
    )


def test_a_traced_prompt_has_its_chunks_and_layers_and_the_same_bits(
    model: Path, device_name: str, whole: Reading
) -> None:
    events: list[Event] = []
    with watched(model, device_name, prefill=100, trace=Trace(events.append)) as engine:
        assert_same(read_in_parts(engine, [TEXT[:120], TEXT[120:]]), whole)
        num_layers = engine.spec.num_layers
    for event in events:
        assert set(event) == {"v", "t_ns", "ev", "chunk", *EVENTS[event["ev"]]}
    of = {ev: [event for event in events if event["ev"] == ev] for ev in EVENTS}
    assert [event["ev"] for event in events if event["chunk"] == OUTSIDE] == [
        "run.begin", *2 * ["prompt.begin", "prompt.end"]
    ]  # fmt: skip
    assert [event["position"] for event in of["prompt.begin"]] == [0, 120]
    chunks = [(event["chunk"], event["position"], event["tokens"]) for event in of["chunk.begin"]]
    assert chunks == [(0, 0, 100), (1, 100, 20), (2, 120, 100), (3, 220, 40)]
    layers = sorted((event["chunk"], event["layer"]) for event in of["layer.run"])
    assert layers == [(chunk, layer) for chunk in range(4) for layer in range(num_layers)]
    ends = [event["t_ns"] + event["dur_us"] * 1e3 + CLOCK_NS for event in of["prompt.end"]]
    assert all(event["t_ns"] < ends[event["chunk"] // 2] for event in of["layer.run"])


def test_steps_are_recorded_and_replayed_with_a_trace(model: Path, device_name: str) -> None:
    events: list[Event] = []
    with watched(model, device_name, trace=Trace(events.append)) as engine:
        with engine.sequence() as sequence:
            sequence.prefill(TEXT[:5])
            traced = [sequence.step(token_id) for token_id in TEXT[5:8]]
        with engine.sequence() as sequence:
            assert np.array_equal(traced[-1], sequence.prefill(TEXT[:8]))


@pytest.mark.parametrize("prefill", [256, 37, 64])
def test_the_dump_has_the_residual_of_every_64th_position_whatever_the_chunks(
    model: Path, device_name: str, tmp_path: Path, prefill: int
) -> None:
    path = tmp_path / "r"
    with watched(model, device_name, prefill=prefill, dump=path) as engine:
        assert not path.exists()
        with engine.sequence() as sequence:
            sequence.prefill(TEXT)
        width = engine.spec.num_streams * engine.spec.hidden_size
    record = np.dtype([("position", "<i8"), ("residual", "<f4", (width,))])
    records = np.frombuffer(path.read_bytes(), record)
    assert records["position"].tolist() == list(range(0, len(TEXT), EVERY_TOKENS))
    assert np.isfinite(records["residual"]).all()
    one = tmp_path / "one"
    with watched(model, device_name, prefill=len(TEXT), dump=one) as engine:
        with engine.sequence() as sequence:
            sequence.prefill(TEXT)
        workspace, stream = engine._forward.workspace, engine._stream
        x = download(engine._device, stream, workspace.take("x", len(TEXT)))
    assert one.read_bytes() == path.read_bytes()
    assert np.array_equal(records["residual"], x[::EVERY_TOKENS].reshape(-1, width))


def test_the_dump_grows_with_further_prompts_and_is_replaced_by_the_next_engine(
    model: Path, device_name: str, tmp_path: Path
) -> None:
    path = tmp_path / "r"
    path.write_bytes(b"before")
    sizes = []
    for _ in range(2):
        with watched(model, device_name, dump=path) as engine, engine.sequence() as sequence:
            for part in (TEXT[:60], TEXT[60:70], TEXT[70:]):
                sequence.prefill(part)
                sizes.append(path.stat().st_size)
    assert sizes[:3] == sizes[3:]
    assert sizes[0] * 2 == sizes[1]
    assert sizes[0] * 5 == sizes[2]


def test_a_dump_that_cannot_be_written_is_an_error(
    model: Path, device_name: str, tmp_path: Path
) -> None:
    for path, error, problem in (
        (tmp_path, InputError, "cannot write the residual dump to"),
        (Path("/dev/full"), StrataError, "No space left"),
    ):
        with (
            watched(model, device_name, dump=path) as engine,
            engine.sequence() as sequence,
            pytest.raises(error, match=problem),
        ):
            sequence.prefill(TEXT[:5])
