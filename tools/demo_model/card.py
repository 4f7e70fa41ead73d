"""Writes the measured tables of docs/model-card.md from the files in `results`.

    python -m tools.demo_model.card [--check]

A table stands between `<!-- table: NAME -->` and `<!-- end -->`; everything else is written by
hand. With --check nothing is changed, and the command fails when a table is out of date.
"""

import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.demo_model.evaluation.sampling import PLANS
from tools.demo_model.sources import SOURCES

ROOT = Path(__file__).resolve().parent.parent.parent
RESULTS = ROOT / "tools" / "demo_model" / "results"
CARD = ROOT / "docs" / "model-card.md"
TABLE = re.compile(r"(<!-- table: ([a-z]+) -->\n)(?:(?!<!-- ).)*(<!-- end -->)", re.S)

LEAST_BYTES = 1000  # of a source that say something about it
# What a task asks, and the share of right answers that guessing gives.
TASKS = {
    "section4": ("Debian section of a package, 4 of 10 sections", "1/4"),
    "section10": ("Debian section of a package, 10 sections", "1/10"),
    "wordnet4": ("category of a noun, 4 of 12 categories", "1/4"),
    "wordnet10": ("category of a noun, 10 of 12 categories", "1/10"),
    "debtags4": ("a debtag of a package, 4 of its facet's", "1/4"),
    "unseen_use4": ("the same for a facet that training left out", "1/4"),
    "hypernym4": ("what a word is a kind of, 4 options", "1/4"),
    "section_yes_no": ("does a package belong to a section", "1/2"),
    "debtags_yes_no": ("does a package have a debtag, balanced", "1/2"),
    "kind_yes_no": ("is one thing a kind of another", "1/2"),
    "definition4": ("word and definition, 4 options", "1/4"),
    "relation4": ("synonym, opposite, whole or field, 4 options", "1/4"),
    "synopsis4": ("short line of a description, 4 options", "1/4"),
    "heading4": ("heading of a passage, 4 options", "1/4"),
    "next4": ("next sentence of a passage, 4 options", "1/4"),
    "topic4": ("work that a passage is from, 4 options", "1/4"),
    "invented4": ("made-up label that the state explains, 4 options", "1/4"),
    "valence": ("feeling of a single word, 5 levels", "1/5"),
    "lookup4": ("which of 4 words is in the state", "1/4"),
    "lookup10": ("which of 10", "1/10"),
    "lookup26": ("which of 26", "1/26"),
    "catalog10": ("entry of a catalog by its short line, 10 entries, about 300 tokens", "1/4"),
    "catalog80": ("the same with 80 entries, about 1,650 tokens", "1/4"),
}


@dataclass(frozen=True, slots=True)
class Figures:
    """The contents of the result files."""

    engine: dict[str, Any]
    dense: dict[str, Any]
    linear: dict[str, Any]
    training: dict[str, Any]
    earlier: dict[str, Any]

    @classmethod
    def load(cls, folder: Path) -> "Figures":
        """Read every file of `folder`."""
        names = ("engine", "dense", "linear", "training", "earlier")
        return cls(*(json.loads((folder / f"{name}.json").read_text("utf-8")) for name in names))


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Render a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def share(value: float | None) -> str:
    """Write a share with three decimals, a dash where there is none."""
    return "-" if value is None else f"{value:.3f}"


def accuracy_table(figures: Figures) -> str:
    """Accuracy of every task beside chance, linear baseline, training and earlier weights.

    Where `earlier.json` knows weights that were replaced since (`replaced`: task -> accuracy), they
    get a column of their own.
    """
    rows = []
    replaced = figures.earlier.get("replaced")
    for name, (text, chance) in TASKS.items():
        found = figures.engine["tasks"][name]
        linear = figures.linear["tasks"].get(name, {}).get("accuracy")
        trained = figures.training["accuracy"].get(name)
        count = figures.training["prompts"].get(name)
        raw, averaged = found["raw"], found.get("averaged", {})
        rows.append(
            [
                text,
                f"{share(raw['accuracy'])} ± {share(raw['half_width'])}",
                share(averaged.get("accuracy")),
                str(found["prompts"]),
                chance,
                share(linear),
                "-" if trained is None else f"{share(trained)} ({count})",
                share(figures.earlier["tasks"].get(name, [None])[0]),
                *([share(replaced[name])] if replaced else []),
            ]
        )
    header = (
        "Task", "Raw", "Averaged", "Prompts", "Chance", "Linear", "In training (prompts)",
        "Earlier", *(["Replaced"] if replaced else []),
    )  # fmt: skip
    return table(header, rows)


def confidence_table(figures: Figures) -> str:
    """Order flips, calibration and coverage of the tasks that were read in all rotations."""
    rows = []
    for name, (text, _) in TASKS.items():
        found = figures.engine["tasks"][name]
        if not PLANS[name].valid:
            continue
        raw, averaged = found["raw"], found["averaged"]
        rows.append(
            [
                text,
                f"{share(raw['flips'])} / {share(averaged.get('flips'))}",
                f"{raw['temperature']:.2f}",
                f"{share(raw['ece'])} → {share(raw['ece_cooled'])}",
                f"{share(averaged['ece'])} → {share(averaged['ece_cooled'])}",
                share(raw["ece_least"]),
                f"{raw['coverage']:.2f} ({share(raw['risk'])})",
                f"{averaged['coverage']:.2f} ({share(averaged['risk'])})",
            ]
        )
    header = (
        "Task", "Flips raw / averaged", "Temperature", "ECE raw", "ECE averaged", "By chance",
        "Coverage raw (risk)", "Coverage averaged (risk)",
    )  # fmt: skip
    return table(header, rows)


def texts_table(figures: Figures) -> str:
    """Sources of running text: licence, size, bits per byte of their held-out part."""
    labels = {source.name: (f"`{source.package}`", source.licence) for source in SOURCES}
    labels["debian"] = ("descriptions of Debian 12 packages", "each package's own")
    measured = figures.engine["texts"]["by_source"]
    rows = []
    for name in sorted(measured, key=lambda name: -measured[name]["trained_bytes"]):
        package, licence = labels[name]
        one = measured[name]
        size = f"{one['trained_bytes'] / 1e6:.1f}"
        rate = f"{one['bits_per_byte']:.2f}" if one["bytes"] >= LEAST_BYTES else "-"
        rows.append([package, licence, size, rate, f"{one['bytes']:,}"])
    total = sum(one["trained_bytes"] for one in measured.values()) / 1e6
    count = sum(one["bytes"] for one in measured.values())
    mean = f"**{figures.engine['texts']['bits_per_byte']:.3f}**"
    rows.append(["all, weighted by size", "", f"{total:.1f}", mean, f"{count:,}"])
    return table(("Source", "Licence", "MB", "Bits per byte", "Bytes read"), rows)


def positions_table(figures: Figures) -> str:
    """Bits per byte by position, with the indexer's choice and with dense attention."""
    chosen, dense = (part["positions"] for part in (figures.engine, figures.dense))
    rows = [
        [span.replace("-", " to "), f"{rate:.3f}", f"{dense['bits_per_byte'][span]:.3f}"]
        for span, rate in chosen["bits_per_byte"].items()
    ]
    return table(("Positions", "Attention to 512 chosen tokens", "Attention to all"), rows)


def routing_table(figures: Figures) -> str:
    """Least and greatest share of an expert, and how many experts do the work."""
    parts = [figures.engine["routing"][name]["shares"] for name in ("texts", "decisions")]
    rows = []
    for layer, shares in enumerate(zip(*parts, strict=True)):
        row = [str(layer)]
        for own in shares:
            row += [f"{min(own):.3f} to {max(own):.3f}", f"{effective(own):.1f}"]
        rows.append(row)
    header = ("Layer", "Text: share", "effective", "Decisions: share", "effective")
    return table(header, rows)


def effective(shares: Sequence[float]) -> float:
    """Return the number of equally used experts with the same entropy."""
    return math.exp(-sum(own * math.log(own) for own in shares if own))


def claims_table(figures: Figures) -> str:
    """Yes/no questions about debtags: how often Yes is said, and was right in training."""
    trained = figures.linear["claims_in_training"]
    asked = figures.engine["tasks"]["debtags_yes_no"]["questions"]
    rows = [
        [
            text,
            share(found["accuracy"]),
            share(found["yes"]),
            share(found["centred"]),
            share(found["ranked"]),
            share(trained[text]["yes"]),
        ]
        for text, found in asked.items()
    ]
    total = sum(found["prompts"] for found in asked.values())
    means = [
        sum(found[key] * found["prompts"] for found in asked.values()) / total
        for key in ("accuracy", "yes", "centred", "ranked")
    ]
    rows.append(["all", *map(share, means), ""])
    header = ("Question", "Accuracy", "Yes said", "Centred", "Ranked", "Yes in training")
    return table(header, rows)


TABLES: dict[str, Callable[[Figures], str]] = {
    "accuracy": accuracy_table,
    "confidence": confidence_table,
    "texts": texts_table,
    "positions": positions_table,
    "routing": routing_table,
    "claims": claims_table,
}


def filled(card: str, figures: Figures) -> str:
    """Return the card with every table as the figures have it.

    Raises:
        KeyError: the card asks for a table that there is not.
    """
    return TABLE.sub(lambda match: f"{match[1]}{TABLES[match[2]](figures)}\n{match[3]}", card)


def main(args: list[str]) -> int:
    """Write the tables, or with --check report stale ones; returns the exit code."""
    card = CARD.read_text("utf-8")
    wanted = filled(card, Figures.load(RESULTS))
    if args == ["--check"]:
        if card != wanted:
            print("docs/model-card.md: run python -m tools.demo_model.card", file=sys.stderr)
        return int(card != wanted)
    CARD.write_text(wanted, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
