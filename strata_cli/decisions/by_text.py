"""Questions whose options are read by their own text: one prompt, and a path for each option.

Options are listed once, sorted where the level is L0 or more. There, their probabilities are
divided by those behind states without content, as AnyJev does for labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from anyjev.calibrate import apply_contextual, content_free_prior
from anyjev.calibrate.contextual import DEFAULT_PROBES
from anyjev.readout import PromptSpec, render_chat
from numpy.typing import NDArray

from strata_cli.decisions.paths import PathScores, path_prompt
from strata_cli.decisions.questions import Question
from strata_cli.decisions.reads import Backend


class TextAnswer(NamedTuple):
    """What was found about a question's options, in the order they were listed in.

    Attributes:
        options: in that order.
        probabilities: [K]; they sum to 1.
        diagnostics: how they came about, JSON values only.
    """

    options: tuple[str, ...]
    probabilities: NDArray[np.float64]
    diagnostics: dict[str, Any]


class TextReader:
    """Scores options by their text. Owned by its backend's thread.

    Args:
        backend: reads.
        sorts: list options sorted rather than as the caller does.
        has_prior: divide by what states without content say.
    """

    def __init__(self, backend: Backend, *, sorts: bool, has_prior: bool) -> None:
        self._backend = backend
        self._sorts = sorts
        self._has_prior = has_prior
        self._priors: dict[str, NDArray[np.float64]] = {}

    def prompt(self, state: str, question: Question) -> str:
        """The rendered prompt of a question."""
        return self._render(state, question, self._listing(question))

    def answer(self, state: str, question: Question) -> TextAnswer:
        """Read a question's prompt and the paths of its options.

        Raises:
            InputError: they do not fit the context.
        """
        options = self._listing(question)
        found = self._read(state, question, options)
        raw, prior = found.probabilities, None
        if self._has_prior:
            prior = self._prior(question, options)
        probabilities = raw if prior is None else apply_contextual(raw, prior)
        diagnostics: dict[str, Any] = {
            "readout": "text",
            "raw_probs": dict(zip(options, map(float, raw), strict=True)),
            "answer_mass": found.mass,
            "permutations": 1,
            "option_tokens": dict(zip(options, found.num_tokens, strict=True)),
            "with_end": found.with_end,
        }
        if self._sorts:
            diagnostics["prior_method"] = "none" if prior is None else "content_free"
            diagnostics["prior_strength"] = 0.0 if prior is None else 1.0
        return TextAnswer(options, probabilities, diagnostics)

    def _prior(self, question: Question, options: tuple[str, ...]) -> NDArray[np.float64]:
        if question.key not in self._priors:
            probes = [self._read(probe, question, options) for probe in DEFAULT_PROBES]
            found = np.stack([probe.probabilities for probe in probes])
            self._priors[question.key] = content_free_prior(found)
        return self._priors[question.key]

    def _read(self, state: str, question: Question, options: Sequence[str]) -> PathScores:
        return self._backend.score_paths(self._render(state, question, options), options)

    def _render(self, state: str, question: Question, options: Sequence[str]) -> str:
        system, user = path_prompt(state or "(empty)", question.text, options)
        return str(render_chat(self._backend.tokenizer, PromptSpec(system, user)))

    def _listing(self, question: Question) -> tuple[str, ...]:
        return tuple(sorted(question.options)) if self._sorts else question.options
