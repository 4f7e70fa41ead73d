"""Plans of real model files agree with what the engine then does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from strata_cli.engine.device.paper import DescribedGpu
from strata_cli.engine.device.sizes import gib
from strata_cli.engine.engine import Engine, EngineOptions
from strata_cli.engine.model.tensors import load_model_file
from strata_cli.errors import InputError, OutOfMemory
from strata_cli.launch.fits import FileFacts, FitWishes
from strata_cli.models import DEMO_MODEL_PATH

MIB = 1 << 20


def described(free_bytes: int) -> DescribedGpu:
    return DescribedGpu(
        name="cuda:0",
        free_bytes=free_bytes,
        total_bytes=1 << 30,
        shared_bytes=101_376,
        num_multiprocessors=46,
        capability=(8, 9),
    )


def test_the_embedded_model_fits_in_ways_that_its_device_allows() -> None:
    with load_model_file(DEMO_MODEL_PATH) as model:
        facts = FileFacts(model, None)
        assert facts.files == (DEMO_MODEL_PATH,)
        assert facts.name == "strata-demo"
        assert facts.num_experts == model.spec.num_layers * model.spec.num_experts
        large = facts.fit(FitWishes(), described(1 << 30))
        assert not large.is_streamed
        assert large.num_resident == facts.num_experts
        assert large.locked_bytes == 0
        small = facts.fit(FitWishes(expert_cache=40), described(1 << 30))
        assert small.is_streamed
        assert small.num_resident == 40
        assert small.pinned_bytes == small.experts_bytes == large.experts_bytes
        assert small.resident_bytes >= 40 * small.experts_bytes // facts.num_experts
        with pytest.raises(OutOfMemory, match="does not fit on cuda:0"):
            facts.fit(FitWishes(), described(8 * MIB))
        with pytest.raises(InputError, match="more than the model"):
            facts.fit(FitWishes(context_tokens=facts.context_tokens + 1), described(1 << 30))


def test_a_hostile_name_is_made_harmless() -> None:
    with load_model_file(DEMO_MODEL_PATH) as model:
        model.spec = replace(model.spec, name="a\x1b[2J\nExecStart=/bin/evil\\" + "x" * 100)
        name = FileFacts(model, None).name
    assert name.isprintable()
    assert "\\" not in name
    assert len(name) == 81


def test_the_host_gets_what_the_engine_would_make_there() -> None:
    with load_model_file(DEMO_MODEL_PATH) as model:
        fit = FileFacts(model, None).fit(FitWishes(context_tokens=512, chunk_tokens=64), None)
    options = EngineOptions(
        model=Path(DEMO_MODEL_PATH),
        device="host",
        max_context=512,
        prefill=64,
        compile_ahead=False,
    )
    with Engine.open(options) as engine:
        assert engine.context_tokens == fit.context_tokens == 512
    assert fit.chunk_tokens == 64
    assert gib(fit.locked_bytes) == "0 bytes"
