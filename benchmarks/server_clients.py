"""Real clients against `strata serve` with the embedded model: each does its thing, or this fails.

    PYTHONPATH=. python benchmarks/server_clients.py [--bin FOLDER] [--phases P] [NAME ...]

Names: curl, openai, litellm, litellm-proxy, lm-eval, schemathesis; without one, all of them. FOLDER
has the clients' own executables, the bin of an environment with openai, litellm[proxy],
lm-eval[api] and schemathesis, which need not share ours. Prints versions and what was done.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.arguments import run_benchmark

PROMPT = "The quick brown fox"
TIMEOUT_S = 600
PROXY_KEY = "sk-for-the-proxy-of-this-script-alone"  # it starts with none no more

OPENAI = """
import openai, sys
client = openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key="none", max_retries=0)
messages = [{"role": "user", "content": "hello"}]
fields = dict(model="strata-demo", messages=messages, max_tokens=8)
whole = client.chat.completions.create(**fields, logprobs=True, top_logprobs=3)
parts = client.chat.completions.create(**fields, stream=True)
text = "".join(c.delta.content or "" for p in parts for c in p.choices)
assert text == whole.choices[0].message.content, text
assert len(whole.choices[0].logprobs.content[0].top_logprobs) == 3
done = client.completions.create(model="m", prompt=["a", "b"], max_tokens=2, logprobs=2, echo=True)
assert [c.index for c in done.choices] == [0, 1]
assert done.choices[0].logprobs.token_logprobs[0] is None
print("openai", openai.__version__, "chat, stream, completions, echo:", repr(text))
"""

LITELLM = """
import importlib.metadata, litellm, sys
litellm.suppress_debug_info = True
fields = dict(model="openai/strata-demo", api_base=sys.argv[1] + "/v1", api_key="none")
messages = [{"role": "user", "content": "hello"}]
whole = litellm.completion(**fields, messages=messages, max_tokens=8, logprobs=True, top_logprobs=2)
text = ""
for part in litellm.completion(**fields, messages=messages, max_tokens=8, stream=True):
    text += part.choices[0].delta.content or ""
assert text == whole.choices[0].message.content, text
done = litellm.text_completion(
    model="text-completion-openai/strata-demo", api_base=sys.argv[1] + "/v1", api_key="none",
    prompt="The quick brown", max_tokens=2, logprobs=2)
assert done.choices[0].text
print("litellm", importlib.metadata.version("litellm"), "chat, stream, text:", repr(text))
"""

QUESTIONS = [
    ("A chess engine with a terminal interface.", ["games", "mail", "fonts"], 0),
    ("A server that delivers letters between hosts.", ["games", "mail", "fonts"], 1),
    ("Glyphs for many scripts, with hinting.", ["games", "mail", "fonts"], 2),
    ("A small library to parse command lines.", ["python", "games"], 0),
]
TASK = """\
task: strata_sections
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
output_type: multiple_choice
test_split: test
doc_to_text: "Package: {{{{text}}}}\\nSection:"
doc_to_choice: "{{{{options}}}}"
doc_to_target: answer
metric_list:
  - metric: acc
"""


class Clients:
    """Each method runs one client against the server at a URL.

    Args:
        url: of the server, without /v1.
        folder: of the clients' executables, or None for those on the PATH.
        phases: of schemathesis.
    """

    def __init__(self, url: str, folder: Path | None, phases: str) -> None:
        self.url = url
        self._phases = phases
        self._folder = folder

    def program(self, name: str) -> str:
        """The path of an executable."""
        here = None if self._folder is None else shutil.which(name, path=str(self._folder))
        found = here or shutil.which(name)
        if found is None:
            raise RuntimeError(f"{name} is not installed; give --bin")
        return found

    def curl(self) -> str:
        """A chat, a stream and a completion."""
        curl = self.program("curl")
        version = run(curl, "--version").split("\n")[0]
        chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
        whole = json.loads(run(curl, "-sS", *posted(self.url, "/v1/chat/completions", chat)))
        stream = run(
            curl, "-sSN", *posted(self.url, "/v1/chat/completions", {**chat, "stream": True})
        )
        assert stream.endswith("data: [DONE]\n\n"), stream
        text = json.loads(
            run(curl, "-sS", *posted(self.url, "/v1/completions", {"prompt": PROMPT}))
        )
        assert text["choices"][0]["text"]
        return f"{version}: {whole['choices'][0]['message']['content']!r}"

    def openai(self) -> str:
        """The openai Python client."""
        return run(self.program("python"), "-c", OPENAI, self.url)

    def litellm(self) -> str:
        """LiteLLM as a library."""
        return run(self.program("python"), "-c", LITELLM, self.url)

    def litellm_proxy(self) -> str:
        """LiteLLM as a proxy: its answer is the server's own."""
        port = free_port()
        with tempfile.TemporaryDirectory() as folder:
            config = Path(folder, "config.yaml")
            config.write_text(
                "model_list:\n- model_name: strata-demo\n  litellm_params:\n"
                f"    model: openai/strata-demo\n    api_base: {self.url}/v1\n    api_key: none\n"
                f"general_settings:\n  master_key: {PROXY_KEY}\n"
            )
            command = ["env", "LITELLM_LOCAL_MODEL_COST_MAP=True", self.program("litellm")]
            command += ["--config", str(config), "--port", str(port)]
            with ended(
                subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            ):
                wait_for(f"http://127.0.0.1:{port}/health/liveliness")
                chat = {
                    "model": "strata-demo",
                    "messages": [{"role": "user", "content": "hello"}],
                    "max_tokens": 8,
                    "logprobs": True,
                    "top_logprobs": 3,
                }
                body = post(f"http://127.0.0.1:{port}", "/v1/chat/completions", chat, PROXY_KEY)
                direct = post(self.url, "/v1/chat/completions", chat)
        assert (
            body["choices"][0]["message"]["content"] == direct["choices"][0]["message"]["content"]
        )
        entries = [answer["choices"][0]["logprobs"]["content"] for answer in (body, direct)]
        assert entries[0] == entries[1]
        version = self._version("litellm")
        return f"{version} as a proxy: {len(entries[0])} tokens, log-probabilities as without it"

    def lm_eval(self) -> str:
        """A multiple-choice task from a local file; its sums equal those of this process."""
        with tempfile.TemporaryDirectory() as folder:
            write_task(Path(folder))
            run(
                self.program("lm_eval"),
                *("--model", "local-completions", "--tasks", "strata_sections"),
                *("--include_path", folder, "--output_path", folder, "--log_samples"),
                "--model_args",
                f"model=strata-demo,base_url={self.url}/v1/completions,num_concurrent=2",
                env={"HF_HOME": folder, "HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"},
            )
            (samples,) = Path(folder).rglob("samples_*.jsonl")
            rows = [json.loads(line) for line in samples.read_text().splitlines()]
        there = {row["doc_id"]: [float(item[0]) for item in row["filtered_resps"]] for row in rows}
        here = sums_in_process()
        assert [there[index] for index in range(len(here))] == here, (there, here)
        accuracy = sum(row["acc"] for row in rows) / len(rows)
        return f"{self._version('lm_eval')}: {len(rows)} questions, accuracy {accuracy}, sums equal"

    def schemathesis(self) -> str:
        """Made-up requests from the published document: no crash, no undocumented answer."""
        output = run(
            self.program("schemathesis"),
            *("run", f"{self.url}/openapi.json", "--phases", self._phases),
            *("--max-examples", "25", "--request-timeout", "120", "--checks", "all"),
            # The document cannot say everything that is checked, such as prompts that fit.
            *("--exclude-checks", "positive_data_acceptance", "--max-response-time", "120"),
        )
        cases = re.search(r"(\d+) generated", output)
        assert post(self.url, "/v1/completions", {"prompt": PROMPT, "max_tokens": 1})["choices"]
        return f"{output.splitlines()[0]}: {cases[1] if cases else '?'} requests"

    def _version(self, package: str) -> str:
        code = f"import importlib.metadata as m; print('{package}', m.version('{package}'))"
        return run(self.program("python"), "-c", code).strip()


def write_task(folder: Path) -> None:
    """A task of lm-eval and its questions."""
    data = folder / "questions.jsonl"
    rows = [{"text": t, "options": o, "answer": a} for t, o, a in QUESTIONS]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "strata_sections.yaml").write_text(TASK.format(data=data))


def sums_in_process() -> list[list[float]]:
    """Log-probabilities of every option behind its question, token by token, added up."""
    from strata_cli.engine.engine import Engine, EngineOptions
    from strata_cli.engine.kernels.head import log_softmax_row
    from strata_cli.models import DEMO_MODEL_PATH

    result = []
    with Engine.open(EngineOptions(model=DEMO_MODEL_PATH, device="host")) as engine:
        for text, options, _ in QUESTIONS:
            context = f"Package: {text}\nSection:"
            known = len(engine.tokenizer.encode(context, parse_special=True))
            sums = []
            for option in options:
                ids = engine.tokenizer.encode(f"{context} {option}", parse_special=True)
                with engine.sequence() as sequence:
                    logits = sequence.prefill(ids, logits="all")
                places = range(known, len(ids))
                sums.append(sum(float(log_softmax_row(logits[p - 1])[ids[p]]) for p in places))
            result.append(sums)
    return result


def run(*command: str, env: dict[str, str] | None = None) -> str:
    """What a program prints; raises with its errors where it fails."""
    given = [f"{name}={value}" for name, value in (env or {}).items()]
    done = subprocess.run(
        ["env", "-u", "PYTHONPATH", *given, *command],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    return done.stdout


def posted(url: str, path: str, body: dict[str, Any]) -> list[str]:
    """Arguments of curl."""
    return ["-H", "content-type: application/json", "-d", json.dumps(body), url + path]


def post(url: str, path: str, body: dict[str, Any], key: str = "none") -> Any:
    """The JSON of an answer."""
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    request = urllib.request.Request(url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)


def free_port() -> int:
    """One that nobody has now."""
    with socket.create_server(("127.0.0.1", 0)) as opened:
        port: int = opened.getsockname()[1]
        return port


def wait_for(url: str) -> None:
    """Until something answers."""
    end = time.monotonic() + TIMEOUT_S
    while time.monotonic() < end:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError:
            time.sleep(0.5)
    raise RuntimeError(f"{url} does not answer")


@contextmanager
def ended(process: subprocess.Popen[Any]) -> Iterator[subprocess.Popen[Any]]:
    """A process that is ended with the block."""
    with process:
        try:
            yield process
        finally:
            process.terminate()
            process.wait(30)


@contextmanager
def server() -> Iterator[str]:
    """A server of the embedded model; its URL."""
    command = [sys.executable, "-m", "strata_cli", "serve", "--device", "host", "--port", "0"]
    command += ["--parallel", "2", "--max-context", "256"]  # made-up requests ask for all of it
    with ended(subprocess.Popen(command, stderr=subprocess.PIPE, text=True)) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if found := re.search(r"answers on (http://[^/]+)/v1", line):
                yield found[1]
                return
        raise RuntimeError("the server did not start")


def main() -> int:
    """Run the clients that were named."""
    names: dict[str, Callable[[Clients], str]] = {
        "curl": Clients.curl,
        "openai": Clients.openai,
        "litellm": Clients.litellm,
        "litellm-proxy": Clients.litellm_proxy,
        "lm-eval": Clients.lm_eval,
        "schemathesis": Clients.schemathesis,
    }
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[*names, []])
    parser.add_argument("--bin", type=Path)
    parser.add_argument("--phases", default="fuzzing", help="of schemathesis; or coverage,fuzzing")
    options = parser.parse_args()
    failed = 0
    with server() as url:
        clients = Clients(url, options.bin, options.phases)
        for name in options.names or names:
            try:
                print(f"ok    {names[name](clients).strip()}", flush=True)
            except (AssertionError, RuntimeError, subprocess.TimeoutExpired) as error:
                failed += 1
                print(f"FAIL  {name}: {error}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    run_benchmark(main)
