"""Measures linear classifiers on the evaluation prompts of the demo model, for comparison.

    python -m tools.demo_model.baseline DATA_FOLDER tools/demo_model/results/linear.json

Each is a logistic regression on TF-IDF of words and pairs of words (of letters for single words),
trained on the training split of one label set, with the states worded as in the prompts. It is
given the options of a prompt and picks the likeliest. Needs scikit-learn.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import click
import numpy as np
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.multiclass import OneVsRestClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MultiLabelBinarizer

from tools.demo_model.evaluation.sampling import Task, sample_tasks
from tools.demo_model.labels import (
    CATEGORY_LABELS,
    FACETS,
    HELD_OUT_FACET,
    SECTION_LABELS,
    TESTED_CATEGORIES,
    TESTED_SECTIONS,
    TESTED_TAGS,
    VALENCE_LEVELS,
    tag_label,
    valence_level,
)
from tools.demo_model.tables import Tables, load_tables
from tools.demo_model.tasks.mixture import draw_example
from tools.demo_model.tasks.packages import MIN_TAGGED, package_state
from tools.demo_model.tasks.words import word_state

TASKS = (
    "section4", "section10", "wordnet4", "wordnet10", "debtags4", "debtags_yes_no", "unseen_use4",
    "valence",
)  # fmt: skip
CLAIM_DRAWS = 60_000  # prompts of the mixture drawn to see how often Yes is right in training
CHOICES = {question: facet for facet, (question, _) in FACETS.items()} | {
    HELD_OUT_FACET[1]: HELD_OUT_FACET[0]
}
CLAIMS = {FACETS[tag.split("::")[0]][1].format(tag_label(tag)): tag for tag in TESTED_TAGS}


def features(analyzer: str, longest: int) -> Any:
    """Return TF-IDF of n-grams up to `longest` words or letters."""
    return TfidfVectorizer(analyzer=analyzer, ngram_range=(1, longest), sublinear_tf=True)


def regression() -> Any:
    """Return a logistic regression that counts every class equally."""
    return LogisticRegression(C=10, class_weight="balanced", max_iter=300)


class LabelModel:
    """Knows one label of each text; labels are worded as the options."""

    def __init__(self, texts: list[str], labels: list[str], vectors: Any) -> None:
        self.pipeline = make_pipeline(vectors, regression()).fit(texts, labels)
        self.size = len(texts)

    def scores(self, text: str) -> dict[str, float]:
        """Return the probability of every label."""
        return dict(
            zip(self.pipeline.classes_, self.pipeline.predict_proba([text])[0], strict=True)
        )


class FacetModel:
    """Knows the debtags of one facet, each by itself; a package may have several."""

    def __init__(self, tables: Tables, facet: str) -> None:
        packages = tables.by_facet[facet]
        tags = {tag for tag, having in tables.by_tag.items() if len(having) >= MIN_TAGGED}
        owned = [
            [tag for tag in package.tags if tag in tags and tag.startswith(facet + "::")]
            for package in packages
        ]
        binarizer = MultiLabelBinarizer().fit(owned)
        self.labels = [tag_label(tag) for tag in binarizer.classes_]
        self.size = len(packages)
        model = OneVsRestClassifier(
            LogisticRegression(C=10, class_weight="balanced", solver="liblinear")
        )
        texts = [package_state(package) for package in packages]
        self.pipeline = make_pipeline(features("word", 2), model)
        self.pipeline.fit(texts, binarizer.transform(owned))

    def scores(self, text: str) -> dict[str, float]:
        """Return the probability of every tag's label."""
        return dict(zip(self.labels, self.pipeline.predict_proba([text])[0], strict=True))


def section_model(train: Tables) -> LabelModel:
    """Train on the packages of the tested sections."""
    packages = [package for name in TESTED_SECTIONS for package in train.by_section[name]]
    labels = [SECTION_LABELS[package.section][0] for package in packages]
    return LabelModel([package_state(p) for p in packages], labels, features("word", 2))


def category_model(train: Tables) -> LabelModel:
    """Train on the senses of the tested categories."""
    senses = [synset for name in TESTED_CATEGORIES for synset in train.by_category[name]]
    labels = [CATEGORY_LABELS[synset.category][0] for synset in senses]
    return LabelModel([word_state(synset) for synset in senses], labels, features("word", 2))


def valence_model(train: Tables) -> LabelModel:
    """Train on rated words, by their letters."""
    labels = [VALENCE_LEVELS[valence_level(word.rating)] for word in train.valence]
    return LabelModel([word.word for word in train.valence], labels, features("char_wb", 5))


def picked(scores: Mapping[str, float], options: Sequence[str]) -> int:
    """Return the likeliest option's number; an option that training hardly knew has no chance."""
    return int(np.argmax([scores.get(option, 0.0) for option in options]))


def judge_choices(task: Task, model: LabelModel) -> dict[str, Any]:
    """Measure a task whose options are the labels of one model."""
    turns = [(example.state, example.turns[0]) for example in task.test]
    hits = [picked(model.scores(state), turn.options) == turn.answer for state, turn in turns]
    return {"accuracy": round(float(np.mean(hits)), 4), "texts": model.size}


def judge_facets(task: Task, train: Tables) -> dict[str, Any]:
    """Measure a task about debtags, choices and claims alike."""
    models: dict[str, FacetModel] = {}
    hits = []
    for example in task.test:
        turn = example.turns[0]
        tag = CLAIMS.get(turn.text)
        facet = tag.split("::")[0] if tag else CHOICES[turn.text]
        if facet not in models:
            models[facet] = FacetModel(train, facet)
        scores = models[facet].scores(example.state)
        if tag:
            hits.append((scores[tag_label(tag)] > 0.5) == (turn.options[turn.answer] == "Yes"))
        else:
            hits.append(picked(scores, turn.options) == turn.answer)
    size = sum(model.size for model in models.values())
    return {"accuracy": round(float(np.mean(hits)), 4), "texts": size}


def claims_in_training(train: Tables) -> dict[str, Any]:
    """Draw training prompts about debtags: how often Yes is right for each tested question."""
    rng = Random(4)
    asked: Counter[str] = Counter()
    right: Counter[str] = Counter()
    for _ in range(CLAIM_DRAWS):
        for turn in draw_example(train, rng, 1.0).turns:
            if turn.text in CLAIMS:
                asked[turn.text] += 1
                right[turn.text] += turn.options[turn.answer] == "Yes"
    return {
        text: {"asked": asked[text], "yes": round(right[text] / asked[text], 4)}
        for text in sorted(asked)
    }


@click.command()
@click.argument("data", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("output", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--claims", "only_claims", is_flag=True, help="Only count answers in training anew.")
def main(data: Path, output: Path, only_claims: bool) -> None:
    """Measure the classifiers on the prepared data in DATA; figures go to OUTPUT."""
    train, test, valid = load_tables(data, "train", "test", "valid")
    if only_claims:
        values = json.loads(output.read_text("utf-8"))
        values["claims_in_training"] = claims_in_training(train)
        output.write_text(json.dumps(values, indent=1) + "\n", "utf-8")
        return
    makers = {"section": section_model, "wordnet": category_model, "valence": valence_model}
    models: dict[str, LabelModel] = {}
    found: dict[str, Any] = {}
    for task in sample_tasks(test, valid, TASKS):
        kind = task.name.rstrip("0123456789")
        if kind in makers:
            if kind not in models:
                models[kind] = makers[kind](train)
            found[task.name] = judge_choices(task, models[kind])
        else:
            found[task.name] = judge_facets(task, train)
        print(task.name, found[task.name], flush=True)
    values = {"tasks": found, "claims_in_training": claims_in_training(train)}
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(values, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
