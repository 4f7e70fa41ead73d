"""The prompts of a question: one for each order that its options are read in, as AnyJev words them.

AnyJev renders them one by one. Two of them tell what all share, which is read meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import anyjev
from anyjev.calibrate import cyclic_shifts
from anyjev.readout import build_prompt, render_chat_parts

from strata_cli.decisions.prompts import PromptTokenizer
from strata_cli.engine.model.prefixes import common_tokens


class Orders(NamedTuple):
    """A question in all orders of one level.

    Attributes:
        spec: AnyJev's form of it, sorted where the level asks for that.
        labels: of the options' places, or of yes and no.
        orders: which option is shown at each place.
    """

    spec: anyjev.Question
    labels: list[str]
    orders: list[list[int]]

    @classmethod
    def of(cls, spec: anyjev.Question, labels: list[str], *, is_raw: bool) -> Orders:
        """As AnyJev takes them: all rotations, both phrasings of yes and no, levels as they are."""
        if is_raw or spec.kind == "score":
            return cls(spec, labels, [list(range(spec.k))])
        return cls(spec, labels, cyclic_shifts(spec.k))

    def prompt(self, tokenizer: PromptTokenizer, state: str, order: Sequence[int]) -> str:
        """The rendered prompt of an order."""
        prompt = build_prompt(state, self.spec, order, labels=self.labels)
        return "".join(render_chat_parts(tokenizer, prompt))

    def parting(self, tokenizer: PromptTokenizer) -> list[list[int]]:
        """The first order, and the one that parts from it first: what they share, all do.

        The first line of options tells them apart, which begins at a line and so with a token.
        """
        first, *others = self.orders
        if not others or self.spec.kind == "noul":
            return self.orders
        lines = [
            tokenizer.encode(f"{self.labels[0]}. {self.spec.options[order[0]]}\n")
            for order in self.orders
        ]
        shared = [common_tokens(lines[0], line) for line in lines[1:]]
        return [first, others[shared.index(min(shared))]]
