"""What `strata launch` prints: the plan and the doctor's findings, as tables and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from strata_cli.config import StrataConfig, parser_of
from strata_cli.engine.device.sizes import gib
from strata_cli.launch.checking import Check
from strata_cli.launch.planning import Choice, LaunchPlan
from strata_cli.launch.tiers import Part, Tier


def shown(choice: Choice) -> str:
    """A setting's value as it is written."""
    specs = {spec.name: spec for spec in fields(StrataConfig)}
    return parser_of(specs[choice.name]).show(choice.value)


def plan_as_text(plan: LaunchPlan) -> str:
    """Settings with their reasons, what each memory will hold, and notes."""
    rows = [("setting", "value", "why")]
    rows += [(choice.name, shown(choice), choice.reason) for choice in plan.choices]
    lines = [*_aligned(rows), ""]
    for tier in plan.tiers:
        lines += _tier_lines(tier)
    if plan.load_s is not None:
        lines += ["", f"reading the weights will take about {max(plan.load_s, 1):.0f} s"]
    lines += [f"note: {note}" for note in plan.notes]
    return "\n".join(lines)


def plan_as_json(plan: LaunchPlan, settings: Path, command: Sequence[str]) -> dict[str, Any]:
    """The same for programs; docs/launch.md describes it."""
    return {
        "settings": [
            {
                "name": choice.name,
                "value": shown(choice),
                "reason": choice.reason,
                "given": choice.is_given,
            }
            for choice in plan.choices
        ],
        "tiers": [
            {
                "name": tier.name,
                "free_bytes": tier.free_bytes or None,
                "left_bytes": tier.left_bytes if tier.free_bytes else None,
                "parts": [_part_as_json(part) for part in tier.parts],
            }
            for tier in plan.tiers
        ],
        "load_s": plan.load_s,
        "notes": list(plan.notes),
        "file": str(settings.absolute()),
        "command": list(command),
    }


def checks_as_text(checks: Sequence[Check]) -> str:
    """One line for each thing that was looked at, and what to do behind those that need it."""
    rows = [(check.state, check.name, check.value) for check in checks]
    lines = []
    for line, check in zip(_aligned(rows), checks, strict=True):
        lines.append(line)
        if check.advice:
            lines.append(f"      try: {check.advice}")
    return "\n".join(lines)


def checks_as_json(checks: Sequence[Check]) -> dict[str, Any]:
    """The same for programs; docs/launch.md describes it."""
    return {
        "ok": all(check.state != "fail" for check in checks),
        "checks": [check._asdict() for check in checks],
    }


def _part_as_json(part: Part) -> dict[str, Any]:
    return {"what": part.what, "bytes": part.nbytes, "experts": part.num_experts}


def _tier_lines(tier: Tier) -> Iterator[str]:
    free = f"  {gib(tier.free_bytes)} available" if tier.free_bytes else ""
    yield f"{tier.name}{free}"
    for part in tier.parts:
        size = gib(part.nbytes) if part.nbytes else ""
        experts = f" ({part.num_experts} experts)" if part.num_experts is not None else ""
        yield f"  {size:>12}  {part.what}{experts}"
    if tier.free_bytes:
        yield f"  {gib(tier.left_bytes):>12}  left"


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Columns side by side; the last one as long as it is."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, (*widths[:-1], 0))).rstrip() for row in rows]
