"""What L0 would be with other states without content, or with less of what they say divided out."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import anyjev
import numpy as np
from anyjev.calibrate import apply_contextual, content_free_prior, marginalize
from anyjev.calibrate.contextual import DEFAULT_PROBES
from numpy.typing import NDArray

from strata_cli.decisions.backend import EngineBackend
from strata_cli.decisions.measures import judge
from strata_cli.engine.engine import Engine
from tools.decision_quality.asking import TASKS, Labelled

MORE_PROBES = (
    *(*DEFAULT_PROBES, "[EMPTY]", "...", "?", "-", "unknown", "none", "text", "N/A.\nN/A"),
    *("Something.", "A thing.", "The state is not known.", "lorem ipsum dolor sit amet"),
    "This text is about nothing in particular.",
)
LANES, PER_QUESTION = 8, 80
PRIOR_TASKS = ("section10", "category4", "section_yes_no", "debtag_yes_no")

Floats = NDArray[np.float64]


class Read(NamedTuple):
    """Probabilities of a question's places in all orders, [orders, K].

    Attributes:
        spec: AnyJev's form of the question.
        perms: which option is at each place.
        probes: of MORE_PROBES, in order.
        states: of labelled states.
        right: places of the right options.
    """

    spec: anyjev.Question
    perms: list[list[int]]
    probes: list[Floats]
    states: list[Floats]
    right: list[int]


class Way(NamedTuple):
    """How many states without content are taken, and the power of what they say."""

    num_probes: int
    strength: float = 1.0


WAYS = {
    "nothing": Way(0),
    "what three states without content say, as L0 does": Way(len(DEFAULT_PROBES)),
    f"what {len(MORE_PROBES)} say": Way(len(MORE_PROBES)),
    "the square root of what three say": Way(len(DEFAULT_PROBES), 0.5),
}


def read_questions(engine: Engine, states: Sequence[Labelled]) -> Iterator[Read]:
    """Each question of a task, about some states and about those without content."""
    groups: dict[str, list[Labelled]] = {}
    for one in states:
        groups.setdefault(one.question.key, []).append(one)
    with EngineBackend(engine, lanes=LANES) as backend:
        decider = anyjev.Decider(backend, prior="none", shared_prefix=True, canonical_order=True)
        for group in groups.values():
            some, question = group[:PER_QUESTION], group[0].question
            texts = [*MORE_PROBES, *(one.state for one in some)]
            backend.tokenizer.protect([*texts, question.text, *question.options])
            found = decider.decide_batch(texts, question.canonical())
            tables = [one.diagnostics["p_pos_raw"] for one in found]
            yield Read(
                spec=question.canonical(),
                perms=found[0].diagnostics["perms"],
                probes=tables[: len(MORE_PROBES)],
                states=tables[len(MORE_PROBES) :],
                right=[one.right for one in some],
            )


def l0(read: Read, way: Way) -> list[Floats]:
    """The answers of L0 with a prior from the first probes, in the options' order."""
    prior = np.ones_like(read.states[0])
    if way.num_probes:
        probes = np.stack(read.probes[: way.num_probes], axis=1)
        prior = content_free_prior(probes) ** way.strength
    return [marginalize(apply_contextual(one, prior), read.perms) for one in read.states]


def prior_table(reads: Mapping[str, Sequence[Read]]) -> str:
    """A row for each way to a prior, a column for each task, all on the same states."""
    rows = [("What is divided out", *(TASKS[task].title for task in reads))]
    rows.append(("---",) * len(rows[0]))
    for name, way in WAYS.items():
        rows.append((name, *(_cell(found, way) for found in reads.values())))
    counts = [f"{sum(len(read.right) for read in found):,}" for found in reads.values()]
    rows.append(("states", *counts))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cell(reads: Sequence[Read], way: Way) -> str:
    right = [place for read in reads for place in read.right]
    answers = [answer for read in reads for answer in l0(read, way)]
    chosen = [answer[place] for answer, place in zip(answers, right, strict=True)]
    return f"{judge(answers, right).accuracy:.3f} / {-np.mean(np.log(chosen)):.3f}"
