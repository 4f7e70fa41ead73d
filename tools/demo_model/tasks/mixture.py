"""Which prompts are drawn how often, and how that shifts while training goes on."""

from random import Random

from tools.demo_model.tables import Tables
from tools.demo_model.tasks.drawing import Draw, Example, is_sound
from tools.demo_model.tasks.lookups import (
    draw_catalog,
    draw_find,
    draw_given,
    draw_mention,
    draw_pairs,
    draw_rating,
)
from tools.demo_model.tasks.packages import (
    draw_debtag_claim,
    draw_debtags,
    draw_section,
    draw_section_claim,
    draw_synopsis,
)
from tools.demo_model.tasks.passages import draw_heading, draw_invented, draw_next, draw_topic
from tools.demo_model.tasks.words import (
    draw_category,
    draw_definition,
    draw_kind_claim,
    draw_kinds,
    draw_relation,
    draw_valence,
)

LOOKUPS: tuple[tuple[Draw, float], ...] = (
    (draw_find, 3),
    (draw_pairs, 3),
    (draw_mention, 2),
    (draw_rating, 1),
    (draw_given, 2),
    (draw_catalog, 3),
)
NATURAL: tuple[tuple[Draw, float], ...] = (
    (draw_section, 16),
    (draw_section_claim, 4),
    (draw_debtags, 12),
    (draw_debtag_claim, 12),
    (draw_category, 12),
    (draw_definition, 9),
    (draw_kinds, 13),
    (draw_kind_claim, 5),
    (draw_relation, 4),
    (draw_synopsis, 4),
    (draw_heading, 4),
    (draw_next, 3),
    (draw_topic, 2),
    (draw_invented, 1),
    (draw_valence, 15),
)


def lookup_share(progress: float) -> float:
    """Return the share of look-ups at `progress` (0..1): they teach letters first, then recede."""
    return 0.7 if progress < 0.10 else 0.35 if progress < 0.30 else 0.12


def draw_example(tables: Tables, rng: Random, progress: float) -> Example:
    """Draw one decision prompt of the mixture at `progress`."""
    table = LOOKUPS if rng.random() < lookup_share(progress) else NATURAL
    draws, weights = zip(*table, strict=True)
    while True:
        example: Example | None = rng.choices(draws, weights)[0](tables, rng)
        if example is not None and is_sound(example):
            return example
