"""How decisions are shown, and which exit code they end in."""

from __future__ import annotations

from typing import Any, NamedTuple

from strata_cli.decisions.answers import Decision, DecisionSet
from strata_cli.engine.engine import Engine

SCHEMA_VERSION = 1
BAR_COLUMNS, MOST_COLUMNS = 30, 40
ABSTAINED, OTHERWISE = 3, 4
TRAFFIC = "prior batch: these numbers depend on the states decided on before, not on this one alone"


class Wanted(NamedTuple):
    """What has to hold for exit code 0: a probability, an option, or None for either."""

    threshold: float | None
    expected: str | None


def exit_code(decisions: DecisionSet, wanted: Wanted) -> int:
    """0; 3 where a likeliest option is below the threshold; 4 where it is not the expected one."""
    if decisions.abstained(wanted.threshold or 0.0):
        return ABSTAINED
    if wanted.expected is None:
        return 0
    return 0 if decisions.decisions[0].top == wanted.expected else OTHERWISE


def decisions_as_json(
    engine: Engine, decisions: DecisionSet, wanted: Wanted, load_ms: float
) -> dict[str, Any]:
    """The documented object of `strata decide --json` (docs/decide-json.md)."""
    tokens, depends_on_traffic = decisions.tokens, decisions.rules.depends_on_traffic
    return {
        "version": SCHEMA_VERSION,
        "model": engine.model_name,
        "device": engine.device_name,
        **decisions.as_dict(),
        "abstained": decisions.abstained(wanted.threshold or 0.0),
        "warnings": decisions.warnings,
        "canonical": not depends_on_traffic,
        "depends_on_traffic": depends_on_traffic,
        "prompt_tokens": tokens.prompt_tokens,
        "reused_tokens": tokens.reused_tokens,
        "read_tokens": tokens.read_tokens,
        "timings": {
            "load_ms": round(load_ms, 3),
            "decide_ms": round(decisions.seconds * 1e3, 3),
        },
    }


def decisions_as_text(decisions: DecisionSet, wanted: Wanted) -> str:
    """A block of lines for each question: a bar for each option, and the answer."""
    abstained = decisions.abstained(wanted.threshold or 0.0)
    blocks = [_block(item, item.question.id in abstained) for item in decisions.decisions]
    if decisions.rules.depends_on_traffic:
        blocks.append(TRAFFIC)
    return "\n\n".join(blocks)


def _block(decision: Decision, is_abstained: bool) -> str:
    question = decision.question
    width = min(max(map(len, question.options)), MOST_COLUMNS)
    lines = [question.text]
    for option, probability in decision.probabilities.items():
        bar = "#" * round(probability * BAR_COLUMNS)
        lines.append(f"  {_cut(option):{width}}  {probability:8.6f}  {bar}".rstrip())
    answer = "none: below the threshold" if is_abstained else _answer(decision)
    lines.append(f"  answer: {answer}  ({_how(decision)})")
    lines += [f"  warning: {warning}" for warning in decision.warnings]
    return "\n".join(lines)


def _answer(decision: Decision) -> str:
    if isinstance(decision.answer, bool):
        return "Yes" if decision.answer else "No"
    if isinstance(decision.answer, float):
        return f"{decision.answer:.4f}"
    return decision.answer


def _how(decision: Decision) -> str:
    diagnostics = decision.diagnostics
    what, mass = "options" if decision.question.by_text else "labels", diagnostics["answer_mass"]
    shown = f"{mass:.3f}" if mass >= 0.001 else f"{mass:.3g}"
    parts = [f"level {decision.level}", f"{what} hold {shown} of the mass"]
    if decision.flips is not None:
        parts.append(f"order flips {decision.flips[0]:.2f}")
    return ", ".join(parts)


def _cut(text: str) -> str:
    return text if len(text) <= MOST_COLUMNS else f"{text[: MOST_COLUMNS - 1]}…"
