"""What `strata launch` finds on a machine, and whether its plan is what the engine then does.

    PYTHONPATH=. python benchmarks/launch_probe.py [MODEL] --out FOLDER [--vram-bytes BYTES]

Writes machine.json (every fact), plan.txt and plan.json, and truth.json: the plan's numbers beside
those of an engine opened with its settings. Packages of the server may be missing.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.arguments import run_benchmark
from strata_cli.commands.launch_report import checks_as_text, plan_as_json, plan_as_text
from strata_cli.config import StrataConfig, field_names
from strata_cli.engine.device.gpu_survey import survey_gpus
from strata_cli.engine.engine import Engine
from strata_cli.engine.from_settings import engine_options
from strata_cli.engine.model.tensors import load_model_file
from strata_cli.launch.checking import check_machine
from strata_cli.launch.fits import FileFacts
from strata_cli.launch.machine import Machine
from strata_cli.launch.planning import LaunchPlan, LaunchWishes, plan_launch
from strata_cli.launch.probing import probe_machine
from strata_cli.models import DEMO_MODEL_PATH


def plain(value: Any) -> Any:
    """What JSON can say, with the names of fields."""
    if is_dataclass(value) and not isinstance(value, type):
        return {spec.name: plain(getattr(value, spec.name)) for spec in fields(value)}
    if hasattr(value, "_asdict"):
        return {name: plain(entry) for name, entry in value._asdict().items()}
    if isinstance(value, tuple | frozenset):
        return [plain(entry) for entry in (value if isinstance(value, tuple) else sorted(value))]
    return value


def look(model: Path) -> tuple[Machine, float]:
    start = time.perf_counter()
    machine = probe_machine(model, "127.0.0.1", 0)
    return machine, time.perf_counter() - start


def plan_for(machine: Machine, model: Path, given: dict[str, Any]) -> LaunchPlan:
    able = replace(machine, software=machine.software._replace(missing=()))
    with load_model_file(model) as file:
        wishes = LaunchWishes(given=given, origin_of={})
        return plan_launch(able, FileFacts(file, model), wishes, frozenset(field_names()))


def truth(plan: LaunchPlan, given: dict[str, Any]) -> dict[str, Any]:
    """The plan's numbers and the engine's."""
    values = {choice.name: choice.value for choice in plan.choices} | given
    config = replace(StrataConfig(), **values)
    before = free_bytes()
    start = time.perf_counter()
    with Engine.open(engine_options(config)) as engine, engine.sequence() as sequence:
        load_s = time.perf_counter() - start
        sequence.prefill(engine.tokenizer.encode("A chess engine", parse_special=False))
        after = free_bytes()
        context_tokens, device = engine.context_tokens, engine.device_name
    vram = next((tier for tier in plan.tiers if tier.name == "VRAM"), None)
    planned = 0 if vram is None else vram.free_bytes - vram.left_bytes
    return {
        "device": [plan.value("device"), device],
        "context_tokens": [plan.fit.context_tokens, context_tokens],
        "device_bytes": [planned, before - after],
        "load_s": [plan.load_s, load_s],
        "free_bytes": [before, after],
    }


def free_bytes() -> int:
    gpus = survey_gpus().gpus
    return gpus[0].free_bytes if gpus else 0


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", type=Path, default=DEMO_MODEL_PATH)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vram-bytes", type=int, default=0)
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    given: dict[str, Any] = {"vram_bytes": options.vram_bytes} if options.vram_bytes else {}
    machine, seconds = look(options.model)
    facts = {"seconds": seconds, **plain(machine)}
    (options.out / "machine.json").write_text(json.dumps(facts, indent=1))
    print(checks_as_text(check_machine(machine)), f"\n({seconds:.1f} s)\n")
    plan = plan_for(machine, options.model, given)
    text = plan_as_text(plan)
    print(text)
    (options.out / "plan.txt").write_text(text)
    report = plan_as_json(plan, Path("strata.toml"), ())
    (options.out / "plan.json").write_text(json.dumps(report, indent=1))
    found = truth(plan, given)
    print(json.dumps(found, indent=1))
    (options.out / "truth.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    run_benchmark(main)
