"""The 65 reads on a small streamed model: whatever lies between two runs, no bit moves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from benchmarks.canonical_breaks import BREAKS
from benchmarks.canonical_protocol import (
    MANNERS,
    SMALL_SIZES,
    Answers,
    Protocol,
    asked_of,
    compare,
    in_order,
    last_token_stepped,
    side_by_side,
)
from benchmarks.canonical_reads import SETTINGS, SLOTS_OF, SMALL_RULES, Bench, Facts
from benchmarks.without_canonical import CHANGES, cut_out
from strata_cli.engine.engine import Engine, EngineOptions
from strata_cli.engine.experts.sizing import RingRules
from strata_cli.engine.prefill.prompt_stream import StreamRules
from strata_cli.engine.session import Session
from tools.synth.presets import PRESETS
from tools.synth.recipe import Recipe, plan_tensors
from tools.synth.writer import write_model

SPEC = PRESETS["tiny"]
FACTS = Facts(SPEC.num_layers * SPEC.num_experts, SPEC.num_experts_per_tok, SPEC.vocab_size)
STREAMED = StreamRules(ring=RingRules(stream_min=40), short_tokens=4)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("canonical") / "m.gguf"
    write_model(path, SPEC, plan_tensors(SPEC, Recipe()), seed=1, threads=1)
    return path


@pytest.fixture(scope="module")
def options(path: Path, device_name: str) -> EngineOptions:
    return EngineOptions(
        model=path,
        device=device_name,
        threads=2,
        max_context=400,
        prefill=48,
        expert_cache=FACTS.slots(SLOTS_OF),
        streaming=STREAMED,
    )


@pytest.fixture(scope="module")
def engine(options: EngineOptions) -> Iterator[Engine]:
    with Engine.open(options) as engine:
        yield engine


@pytest.fixture(scope="module")
def first(engine: Engine) -> Answers:
    with Session(engine, SMALL_RULES) as session:
        return in_order(protocol_of(session))


def protocol_of(session: Session, deterministic: bool | None = None) -> Protocol:
    asked = asked_of(SPEC.vocab_size, SMALL_SIZES)
    return Protocol(session, asked, SMALL_SIZES, deterministic)


def test_the_protocol_has_its_reads() -> None:
    asked = asked_of(SPEC.vocab_size)
    assert [sum(one.kind == kind for one in asked) for kind in ("named", "top", "rotation")] == [
        15,
        15,
        35,
    ]
    assert all(one.request().is_canonical for one in asked)
    assert asked == asked_of(SPEC.vocab_size)
    assert len({tuple(one.ids) for one in asked}) == 65


@pytest.mark.parametrize(
    ("manner", "reuses"),
    [
        ("ABC", True),
        ("CBA", True),
        ("beside chats", False),
        ("29 turns between", True),
        ("29 turns without reuse", False),
    ],
)
def test_no_manner_of_reading_moves_a_bit(
    engine: Engine, first: Answers, manner: str, reuses: bool
) -> None:
    with Session(engine, SMALL_RULES) as session:
        protocol = protocol_of(session)
        protocol.churn(len(manner))
        found = compare(manner, protocol.asked, first, MANNERS[manner](protocol))
    assert found.differing == 0, found.line()
    assert found.reads == 65
    assert (found.reused_tokens > 0) is reuses


@pytest.mark.parametrize(
    ("setting", "manner"),
    [
        ("chunks of 512", "in batches"),
        ("routed stream off", "ABC"),
        ("tail skip", "last token stepped"),
        ("all resident", "no reuse"),
    ],
)
def test_no_setting_of_a_new_engine_moves_a_bit(
    options: EngineOptions, first: Answers, setting: str, manner: str
) -> None:
    bench = Bench(options, FACTS, SMALL_SIZES, first=first, manner=manner)
    bench.setting(setting)
    (found,) = bench.found
    assert found.differing == 0, found.line()


def test_every_setting_is_another(options: EngineOptions) -> None:
    changed = [change(options, FACTS) for change in SETTINGS.values()]
    assert len({str(one) for one in [options, *changed]}) == 1 + len(SETTINGS)


def test_sums_that_depend_on_the_pass_are_found(engine: Engine, first: Answers) -> None:
    with Session(engine, SMALL_RULES) as session, BREAKS["split"].around(engine):
        protocol = protocol_of(session)
        found = compare("split", protocol.asked, first, MANNERS["in batches"](protocol))
    assert found.differing > 30, found.line()
    assert sum(found.kinds.values()) == found.differing
    assert "differ" in found.line()


def test_sums_that_are_broken_leave_recorded_steps_alone(engine: Engine, first: Answers) -> None:
    capture, few = engine._forward.stream.capture, asked_of(SPEC.vocab_size, SMALL_SIZES)[:3]
    with Session(engine, SMALL_RULES) as session, BREAKS["split"].around(engine):
        protocol = replace(protocol_of(session), asked=few)
        found = compare("split", few, Answers(first.logits[:3]), side_by_side(protocol))
    assert found.differing == 3
    assert engine._forward.stream.capture == capture


def test_a_tail_skip_that_is_left_on_is_found(options: EngineOptions) -> None:
    bench = Bench(options, FACTS, SMALL_SIZES, BREAKS["tail-skip"])
    with bench.protocol(options) as protocol:
        for run in ("first", "second"):
            bench.run(run, partial(last_token_stepped, protocol))
            protocol.churn(1)
    assert bench.found[1].differing > 0


def test_what_steps_do_for_canonical_reads_can_be_cut_out(tmp_path: Path) -> None:
    cut_out(tmp_path)
    for name in CHANGES:
        compile((tmp_path / name).read_text(encoding="utf-8"), name, "exec")
