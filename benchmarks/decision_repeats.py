"""One decision over and over, every way there is: how many distinct values it has.

    PYTHONPATH=. python benchmarks/decision_repeats.py [--bin FOLDER] [--times N] [--restarts N]

Asked N times over `/v1/systemone`, `/v1/decisions` and `/v1/decide` and by anyjev's own VLLMBackend
over `/v1/completions`, four clients at a time, among chats, completions and other questions. The
server is started several times, and its engine unloaded under each. Besides, asked by `strata
decide` alone and by `strata decide --jsonl` among other rows, read one by one and side by side.
FOLDER is the bin of an environment with anyjev and transformers, which need not share ours. The
embedded model, on the host. Prints how often each way was taken, and fails where two values differ
in any bit.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from benchmarks.arguments import run_benchmark
from benchmarks.decision_clients import OPTIONS, SECTION, STATE
from strata_cli.engine.model.gguf import open_gguf
from strata_cli.engine.model.vocabulary import TokenType, read_vocabulary
from strata_cli.models import DEMO_MODEL_PATH
from tests.server.running import Running, serving

CLIENTS = 4
ROWS, EVERY = 96, 3  # of a bulk run; each third row is the decision's

ANYJEV = """
import json, sys
import anyjev
from anyjev.backends.vllm import VLLMBackend
url, tokenizer, times, state, section, options = json.loads(sys.argv[1])
question = anyjev.Question.choice(section, options)
found = []
for start in range(0, times, 10):  # a decider keeps what states without content say
    backend = VLLMBackend(url, "strata-demo", tokenizer, workers=4)
    decider = anyjev.Decider(backend, prior="content_free", canonical_order=True)
    for _ in range(min(10, times - start)):
        (decision,) = decider.decide(state, [question])
        found.append([decision.distribution[option] for option in options])
print(json.dumps(found))
"""

Values = tuple[float, ...]
Found = Counter[tuple[str, Values]]
"""How often a way had these probabilities, in the order of OPTIONS."""


def write_tokenizer(folder: Path) -> None:
    """The model's tokenizer as transformers reads one."""
    with open_gguf(DEMO_MODEL_PATH) as file:
        vocabulary = read_vocabulary(file.metadata)
        template = file.metadata["tokenizer.chat_template"]
    bpe = Tokenizer(models.BPE(vocab=vocabulary.ids, merges=vocabulary.merges))
    split = pre_tokenizers.Split(Regex(vocabulary.split_pattern), behavior="isolated")
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([split, plain])
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(
        [
            AddedToken(text, special=True, normalized=False)
            for text, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
            if kind == TokenType.CONTROL
        ]
    )
    bpe.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def decided(*arguments: str) -> str:
    """What `strata decide` prints about the question."""
    listed = [flag for option in OPTIONS for flag in ("--option", option)]
    command = [sys.executable, "-m", "strata_cli", "decide", "-q", SECTION, *listed]
    command += ["--device", "host", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def alone() -> Values:
    (one,) = json.loads(decided(STATE, "--json"))["questions"].values()
    return tuple(one["distribution"].values())


def in_bulk(folder: Path, batch: int) -> list[Values]:
    """Of the rows that have the state, each third one."""
    rows, out = folder / "rows.jsonl", folder / f"out{batch}.jsonl"
    states = [STATE if n % EVERY == 0 else f"{n} letters were sent." for n in range(ROWS)]
    rows.write_text("".join(json.dumps({"state": state}) + "\n" for state in states))
    decided("--jsonl", str(rows), "--out", str(out), "--batch", str(batch))
    lines = [json.loads(line) for line in out.read_text().splitlines()[::EVERY]]
    questions = [one for line in lines for one in line["questions"].values()]
    return [tuple(one["distribution"].values()) for one in questions]


def over_systemone(server: Running, number: int) -> Values:
    one = {"type": "choice", "instructions": SECTION, "criteria": dict.fromkeys(OPTIONS)}
    asked = {str(number): one}
    if number % 5 == 0:
        asked["other"] = {"type": "noul", "instructions": f"Is it number {number}?"}
    body = server.post("/v1/systemone", state=STATE, questions=asked)
    return tuple(body["answers"][str(number)]["probabilities"].values())


def over_decisions(server: Running, _number: int) -> Values:
    values = [{"value": option} for option in OPTIONS]
    one = {"type": "choice", "instructions": SECTION, "choices": values}
    body = server.post("/v1/decisions", model="m", input=STATE, questions=[one])
    return tuple(item["probability"] for item in body["answers"][0]["probabilities"])


def over_decide(server: Running, _number: int) -> Values:
    body = server.post("/v1/decide", state=STATE, question=SECTION, options=OPTIONS)
    return tuple(body["probs"].values())


ROUTES: dict[str, Callable[[Running, int], Values]] = {
    "/v1/systemone": over_systemone,
    "/v1/decisions": over_decisions,
    "/v1/decide": over_decide,
}


def traffic(server: Running, number: int) -> None:
    """Something else: a chat, a completion, or a question about another state."""
    if number % 3 == 0:
        messages = [{"role": "user", "content": f"Tell me about {number} foxes."}]
        server.post("/v1/chat/completions", messages=messages, max_tokens=8)
    elif number % 3 == 1:
        server.post("/v1/completions", prompt=f"{number} foxes", max_tokens=8)
    else:
        state = f"{STATE[: number % 400]} {number}"
        server.post("/v1/decide", state=state, question=SECTION, options=OPTIONS[::-1])


@contextmanager
def anyjev_client(
    program: str, server: Running, tokenizer: Path, times: int
) -> Iterator[subprocess.Popen[str]]:
    given = [server.url, str(tokenizer), times, STATE, SECTION, OPTIONS]
    command = [program, "-c", ANYJEV, json.dumps(given)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def ask(server: Running, program: str, tokenizer: Path, times: int) -> Found:
    """So many decisions over each route and by anyjev, among other traffic."""
    found: Found = Counter()

    def one(number: int) -> tuple[str, Values]:
        if number % 4 == 0:
            traffic(server, number)
        way = list(ROUTES)[number % len(ROUTES)]
        return way, ROUTES[way](server, number)

    with (
        anyjev_client(program, server, tokenizer, times) as client,
        ThreadPoolExecutor(CLIENTS - 1) as pool,
    ):
        half = len(ROUTES) * times // 2
        found.update(pool.map(one, range(half)))
        server.post("/v1/unload")
        found.update(pool.map(one, range(half, len(ROUTES) * times)))
        said, errors = client.communicate()
        if client.returncode:
            raise RuntimeError(f"anyjev ended with {client.returncode}:\n{errors[-2000:]}")
        found.update(("anyjev's VLLMBackend", tuple(values)) for values in json.loads(said))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--bin", type=Path)
    parser.add_argument("--times", type=int, default=1000)
    parser.add_argument("--restarts", type=int, default=3)
    arguments = parser.parse_args()
    path = None if arguments.bin is None else str(arguments.bin)
    program = shutil.which("python", path=path)
    assert program is not None, f"no python in {path}"
    each = -(-arguments.times // (arguments.restarts * (len(ROUTES) + 1)))
    found: Found = Counter()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tokenizer(folder)
        found.update([("alone", alone())])
        for batch in (1, 8):
            found.update((f"in bulk, {batch} at a time", one) for one in in_bulk(folder, batch))
        for _ in range(arguments.restarts):
            with serving("--parallel", "2") as server:
                found += ask(server, program, folder, each)
        found.update([("alone", alone())])
    ways: Counter[str] = Counter()
    for (way, _), count in found.items():
        ways[way] += count
    for way, count in ways.items():
        print(f"{way}: {count:,}")
    distinct = {values for _, values in found}
    seconds = time.perf_counter() - started
    print(
        f"{ways.total():,} decisions, {arguments.restarts} starts of the server, "
        f"{seconds:.0f} s: {len(distinct)} distinct value"
        f"{'s' * (len(distinct) > 1)}"
    )
    return 0 if len(distinct) == 1 else 1


if __name__ == "__main__":
    run_benchmark(main)
