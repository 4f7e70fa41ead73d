"""Real clients of decisions against `strata serve`: their values are those of `strata decide`.

    PYTHONPATH=. python benchmarks/decision_clients.py [--bin FOLDER] [--max-context N] [NAME ...]

Names: jevcompat, typesafe, nimble, openai, litellm; without one, all of them. FOLDER is the bin of
an environment with jevcompat, typesafe-sdk[zstd], bespokelabs-nimble, openai and litellm, which
need not share ours. The embedded model is served; its context of 2,048 tokens is raised, since
jevcompat asks for 255 described options, which have 5,242 tokens. Prints versions and what was
found.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.arguments import run_benchmark
from benchmarks.decision_cost import with_context
from tests.server.running import Running, serving

STATE = "A fast multiplayer shooter in which teams fight over flags on many maps. " * 16
SECTION, GAME, PACE = "Which section is it?", "Is this a game?", "How fast is it?"
OPTIONS, LEVELS = ["mail", "games", "python", "fonts"], ["slow", "brisk", "fast"]
TIMEOUT_S = 600

COMMON = """
import importlib.metadata, json, sys
url, given = sys.argv[1], json.loads(sys.argv[2])
state, section, game, pace = (given[key] for key in ("state", "section", "game", "pace"))
options, levels = given["options"], given["levels"]
"""

TYPESAFE = """
from typesafe_sdk import Choice, Noul, Score, TypeSafeClient
with TypeSafeClient(api_key="none", base_url=url, timeout=120) as client:
    found = client.system_one(state, {
        "c": Choice(instructions=section, criteria=dict.fromkeys(options)),
        "n": Noul(instructions=game), "s": Score(instructions=pace, criteria=levels)})
    names = [one.name for one in client.models.list().models]
assert "jev-latest" in names, names
a = found.answers
print(json.dumps({"choice": a["c"].probabilities, "noul": a["n"].noul,
    "score": [a["s"].score, a["s"].probabilities, a["s"].confidence]}))
"""

NIMBLE = """
from bespokelabs.nimble import Choice, Nimble, Noul, Score
with Nimble(base_url=url, api_key="none") as client:
    found = client.system_one(state=state, questions={
        "c": Choice(instructions=section, criteria=dict.fromkeys(options)),
        "n": Noul(instructions=game), "s": Score(instructions=pace, criteria=levels)})
    client.models()
a = found.answers
print(json.dumps({"choice": a["c"].probabilities, "noul": a["n"].noul,
    "score": [a["s"].score, a["s"].probabilities, a["s"].confidence]}))
"""

OPENAI = """
import openai
client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
found = client.decisions.create(model="strata-demo", input=state, questions=[
    {"type": "choice", "instructions": section, "choices": [{"value": o} for o in options]},
    {"type": "predicate", "name": "n", "instructions": game},
    {"type": "score", "instructions": pace, "levels": [{"label": one} for one in levels]}])
c, n, s = json.loads(found.to_json())["answers"]
assert n["name"] == "n"
assert found.usage.total_tokens == found.usage.input_tokens > 0
print(json.dumps({"choice": {one["value"]: one["probability"] for one in c["probabilities"]},
    "noul": n["probability"],
    "score": [s["score"], {str(one["value"]): one["probability"] for one in s["probabilities"]},
              s["confidence"]]}))
"""

LITELLM = """
import litellm
litellm.suppress_debug_info = True
found = litellm.systemone(model="hosted_vllm/strata-demo", api_base=url, api_key="none",
    state=state, questions={
        "c": {"type": "choice", "instructions": section, "criteria": dict.fromkeys(options)},
        "n": {"type": "noul", "instructions": game},
        "s": {"type": "score", "instructions": pace, "criteria": levels}})
a = found.model_dump()["answers"]
other = litellm.decisions(model="openai/strata-demo", api_base=url + "/v1", api_key="none",
    input=state, questions=[{"type": "predicate", "name": "n", "instructions": game}])
assert other.model_dump()["answers"][0]["probability"] == a["n"]["noul"]
print(json.dumps({"choice": a["c"]["probabilities"], "noul": a["n"]["noul"],
    "score": [a["s"]["score"], a["s"]["probabilities"], a["s"]["confidence"]]}))
"""

CODE = {
    "typesafe": ("typesafe-sdk", TYPESAFE),
    "nimble": ("bespokelabs-nimble", NIMBLE),
    "openai": ("openai", OPENAI),
    "litellm": ("litellm", LITELLM),
}
GIVEN = {
    "state": STATE,
    "section": SECTION,
    "game": GAME,
    "pace": PACE,
    "options": OPTIONS,
    "levels": LEVELS,
}


def jevcompat(server: Running, program: Callable[[str], str]) -> str:
    """The conformance suite; fails where one of its MUST does."""
    lines = run([program("jevcompat"), "test", server.url]).strip().splitlines()
    return "\n".join(lines[:2] + lines[-1:])


def values(name: str, server: Running, program: Callable[[str], str]) -> Any:
    """What a client was answered."""
    package, code = CODE[name]
    version = f"print('{package}', importlib.metadata.version('{package}'))\n"
    text = run([program("python"), "-c", COMMON + version + code, server.url, json.dumps(GIVEN)])
    said, found = text.strip().splitlines()[-2:]
    print(f"{said}: ", end="")
    return json.loads(found)


def decided(model: Path) -> dict[str, Any]:
    """What `strata decide` says about the same."""
    questions = {
        "c": {"question": SECTION, "options": OPTIONS},
        "n": {"question": GAME, "yes_no": True},
        "s": {"question": PACE, "levels": LEVELS},
    }
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(questions, file)
        file.flush()
        command = [sys.executable, "-m", "strata_cli", "decide", STATE, "--json"]
        command += ["--questions", file.name, "--device", "host", "--model", str(model)]
        found = json.loads(run(command))["questions"]
    return {
        "choice": found["c"]["distribution"],
        "noul": found["n"]["probability"],
        "score": [found["s"]["value"], list(found["s"]["distribution"].values())],
    }


def run(command: list[str]) -> str:
    command = ["env", "LITELLM_LOCAL_MODEL_COST_MAP=True", *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        said = f"{done.stdout[-4000:]}\n{done.stderr[-2000:]}"
        raise RuntimeError(f"{command[2]} ended with {done.returncode}:\n{said}")
    return done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bin", type=Path)
    parser.add_argument("--max-context", type=int, default=8192)
    parser.add_argument("names", nargs="*", metavar="NAME")
    arguments = parser.parse_args()

    def program(name: str) -> str:
        found = shutil.which(name, path=None if arguments.bin is None else str(arguments.bin))
        assert found is not None, f"{name} is not installed; give --bin"
        return found

    with tempfile.TemporaryDirectory() as folder:
        model = with_context(Path(folder), arguments.max_context)
        expected = decided(model)
        context = ("--max-context", str(arguments.max_context))
        with serving("--model", str(model), *context, "--parallel", "2") as server:
            for name in arguments.names or [*CODE, "jevcompat"]:
                if name == "jevcompat":
                    print(jevcompat(server, program))
                    continue
                found = values(name, server, program)
                score, levels, confidence = found["score"]
                same = {**found, "score": [score, list(levels.values())]}
                assert same == expected, (same, expected)
                print(f"equal to strata decide in every bit; confidence {confidence:.3f}")
    return 0


if __name__ == "__main__":
    run_benchmark(main)
