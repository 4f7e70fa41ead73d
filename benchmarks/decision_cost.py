"""What a decision costs beside one read of its prompt.

    PYTHONPATH=. python benchmarks/decision_cost.py [--tokens N] [--options K] [--words N]
        [--runs N] [--device NAME] [--model PATH] [--slots N] [--max-context N] [--json]

A state of about N tokens and a question of K options, 26 at most, each of so many words: L0 reads
the state once and K orders of the options behind it. Taken in turns with one fresh read of one
order; the ratio is the median of the ratios of neighbours, and beside it stands that of the tokens
read. The first decision about a question also reads its K orders behind three states without
content; it is told by itself. The embedded model's context is raised beyond what it was trained
for where the state needs it: what is timed does not depend on what the weights know. Before
anything is timed, the decision is compared with one that reads everything anew, bit by bit.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.arguments import run_benchmark
from benchmarks.figures import seconds
from strata_cli.decisions import questions
from strata_cli.decisions.decider import Decider
from strata_cli.decisions.rules import DecisionRules
from strata_cli.engine.engine import Engine, EngineOptions
from strata_cli.models import DEMO_MODEL_PATH

TEXT = "A small tool lists the packages of a system, and the functions return what they found. "
SECTIONS = (
    "admin cli comm database debug devel doc editors electronics embedded fonts games gnome "
    "graphics hamradio httpd kde kernel mail math net news oldlibs otherosfs perl php python "
    "raku ruby science shells sound text utils video web x11 cad dns ftp gis git gui irc lib pdf "
    "rss sql ssh tex usb vcs xml"
)
CONTEXT_KEY = b"qwen4exp.context_length"
ANEW = DecisionRules(reuse=False)


def with_context(folder: Path, context_tokens: int) -> Path:
    """The embedded model with another context."""
    data = bytearray(DEMO_MODEL_PATH.read_bytes())
    start = data.index(CONTEXT_KEY) + len(CONTEXT_KEY) + 4
    assert int.from_bytes(data[start : start + 4], "little") == 2048
    data[start : start + 4] = context_tokens.to_bytes(4, "little")
    path = folder / f"context-{context_tokens}.gguf"
    path.write_bytes(data)
    return path


def options_of(count: int, num_words: int, length: Callable[[str], int]) -> list[str]:
    """Options of so many words, from those that a model knows best: the shortest in its tokens."""
    words = sorted(SECTIONS.split(), key=length)[: max(count, num_words)]
    return [" ".join(words[(i + j) % len(words)] for j in range(num_words)) for i in range(count)]


def commit() -> str | None:
    """Of the tree; None where it is no checkout, or git is missing."""
    if shutil.which("git") is None:
        return None
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or None


def measure(engine: Engine, arguments: argparse.Namespace) -> dict[str, object]:
    per_text = len(engine.tokenizer.encode(TEXT * 10, parse_special=False)) / 10
    state = TEXT * round(arguments.tokens / per_text)
    names = options_of(
        arguments.options,
        arguments.words,
        lambda word: len(engine.tokenizer.encode(f" {word}", parse_special=False)),
    )
    asked = [questions.choice("Which section does this package belong to?", names)]
    with (
        Decider(engine) as decider,
        Decider(engine, DecisionRules(level="raw", reuse=False)) as raw,
        Decider(engine, ANEW) as anew,
    ):
        short = TEXT * 3
        first = seconds(lambda: decider.decide(short, asked))
        if decider.decide(short, asked).as_dict() != anew.decide(short, asked).as_dict():
            raise SystemExit("a decision differs from one that reads everything anew")
        later = seconds(lambda: decider.decide(short + "!", asked))
        fresh, shared = [], []
        for run in range(arguments.runs + 1):  # the first warms up
            other = f"{run} {state}"
            one = seconds(partial(raw.decide, other, asked))
            every = seconds(partial(decider.decide, other, asked))
            if run:
                fresh.append(one)
                shared.append(every)
        one_tokens = raw.decide(f"x {state}", asked).tokens
        all_tokens = decider.decide(f"x {state}", asked).tokens
    return {
        "prompt_tokens": one_tokens.read_tokens,
        "read_tokens": all_tokens.read_tokens,
        "fresh_ms": round(statistics.median(fresh) * 1e3, 1),
        "decision_ms": round(statistics.median(shared) * 1e3, 1),
        "ratio": round(statistics.median(b / a for a, b in zip(fresh, shared, strict=True)), 3),
        "ratio_of_tokens": round(all_tokens.read_tokens / one_tokens.read_tokens, 3),
        "first_question_ms": round((first - later) * 1e3, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--options", type=int, default=20)
    parser.add_argument("--words", type=int, default=1)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--device", default="host")
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--slots", type=int, help="of the expert cache")
    parser.add_argument("--max-context", type=int, default=8192)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = arguments.model or with_context(Path(folder), arguments.max_context)
        options = EngineOptions(
            model=path,
            device=arguments.device,
            max_context=arguments.max_context,
            expert_cache=arguments.slots,
            will_chat=True,
        )
        with Engine.open(options) as engine:
            about = {
                "commit": commit(),
                "model": engine.model_name,
                "device": engine.device_name,
                "options": arguments.options,
                "words_of_an_option": arguments.words,
                "runs": arguments.runs,
            }
            found = {**about, **measure(engine, arguments)}
    if arguments.json:
        print(json.dumps(found))
    else:
        print("\n".join(f"{name}: {value}" for name, value in found.items()))


if __name__ == "__main__":
    run_benchmark(main)
