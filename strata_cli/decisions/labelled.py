"""Which of a question's answers a label means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from strata_cli.decisions.questions import Question
from strata_cli.errors import InputError, quoted

LABEL_HINT = 'each line is one object: {"state": "...", "label": "..."}'


def right_answers(questions: Sequence[Question], fields: Mapping[str, Any]) -> list[int]:
    """The index of the right option of each question.

    Args:
        questions: at least one.
        fields: of a line; one question has its "label", several have "labels" by id.

    Raises:
        InputError: a label is missing, or is none of the answers.
    """
    if len(questions) == 1 and "labels" not in fields:
        if "label" not in fields:
            raise InputError("label is missing", hint=LABEL_HINT)
        return [option_index(questions[0], fields["label"])]
    labels = fields.get("labels")
    if not isinstance(labels, dict):
        raise InputError("labels is no object of labels by question", hint=LABEL_HINT)
    for question in questions:
        if question.id not in labels:
            raise InputError(f"the label of {quoted(question.id)} is missing", hint=LABEL_HINT)
    return [option_index(question, labels[question.id]) for question in questions]


def option_index(question: Question, label: Any) -> int:
    """The option that a label means.

    Args:
        question: see Question.
        label: an option's text; for yes or no also true or false; for levels also the level's
            number, from 0; for a scale a number on it.

    Raises:
        InputError: it is none of these.
    """
    options = question.options
    if isinstance(label, str):
        if label in options:
            return options.index(label)
        if question.kind == "noul" and label.lower() in ("yes", "no"):
            return ("yes", "no").index(label.lower())
    elif isinstance(label, bool):
        if question.kind == "noul":
            return 0 if label else 1
    elif isinstance(label, int | float) and question.kind == "score":
        index = _bin(question, label)
        if index is not None:
            return index
    shown = ", ".join(map(quoted, options[:5])) + ", …" * (len(options) > 5)
    raise InputError(f"{quoted(str(label))} is none of the answers", hint=f"answers: {shown}")


def _bin(question: Question, value: float) -> int | None:
    """The level or the bin of a number; an upper end belongs to its bin."""
    if question.spec.centers is not None:
        is_level = value == int(value) and 0 <= value < len(question.options)
        return int(value) if is_level else None
    low, high = question.spec.scale
    if not low <= value <= high:
        return None
    num_bins = len(question.options)
    return min(int((value - low) / (high - low) * num_bins), num_bins - 1)
