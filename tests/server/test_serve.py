"""`strata serve` with the embedded model: its numbers, real clients, and how it ends."""

from __future__ import annotations

import os
import signal
import socket
import sys
import types
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anyjev
import numpy as np
import openai
import orjson
import pytest
from anyjev.backends.vllm import VLLMBackend

from strata_cli.commands.main import run, strata
from strata_cli.decisions.backend import EngineBackend
from strata_cli.engine.engine import Engine, EngineOptions
from strata_cli.engine.model.chat_prompt import encode_chat
from strata_cli.engine.reading import ReadRequest, read
from strata_cli.models import DEMO_MODEL_PATH
from tests.server.running import Running, serving

PROMPT = "The quick brown fox"
STATE = "A fast multiplayer shooter in which teams fight over flags on many maps."
OPTIONS = ["mail", "games", "python", "fonts"]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving("--parallel", "4") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.open(EngineOptions(model=DEMO_MODEL_PATH, device="host")) as engine:
        yield engine


def read_json(capsys: pytest.CaptureFixture[str], *args: str) -> Any:
    assert run(strata, ["read", "--device", "host", "--json", *args]) == 0
    return orjson.loads(capsys.readouterr().out)


def test_numbers_equal_those_of_strata_read_to_the_last_digit(
    server: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = [70, 4000, 8191]
    flags = ["--top", "20", "--allowed-token-ids", ",".join(map(str, ids))]
    read = read_json(capsys, PROMPT, "--raw", *flags)
    fields = {"prompt": PROMPT, "max_tokens": 1, "return_tokens_as_token_ids": True}
    body = server.post("/v1/completions", **fields, logprobs=20, logprob_token_ids=ids)
    (table,) = body["choices"][0]["logprobs"]["top_logprobs"]
    expected = {
        f"token_id:{e['id']}": e["logprob"] for e in (*read["top_logprobs"], *read["allowed"])
    }
    assert table == expected
    assert body["strata"]["canonical"] is True


def test_a_chat_equals_one_that_is_read_in_process(server: Running, engine: Engine) -> None:
    messages = [{"role": "user", "content": PROMPT}]
    assert engine.chat_template is not None
    prompt = encode_chat(engine.chat_template, engine.tokenizer, messages, enable_thinking=False)
    with engine.sequence() as sequence:
        expected = read(engine, sequence, ReadRequest(ids=prompt.ids, top=5, max_tokens=12))
    fields = {"messages": messages, "max_tokens": 12, "logprobs": True, "top_logprobs": 5}
    choice = server.post("/v1/chat/completions", **fields)["choices"][0]
    top = choice["logprobs"]["content"][0]["top_logprobs"]
    assert [(bytes(entry["bytes"]), entry["logprob"]) for entry in top] == [
        (engine.tokenizer.token_bytes(item.token_id), item.logprob) for item in expected.top
    ]
    text = engine.tokenizer.decode(expected.generated_ids, skip_control=True)
    assert choice["message"]["content"] == text
    assert choice["finish_reason"] == expected.finish_reason


def test_one_decision_has_the_same_bits_whatever_runs_between_and_beside(server: Running) -> None:
    def decide() -> Any:
        fields = {"prompt": PROMPT, "max_tokens": 1, "allowed_token_ids": [70, 71, 72]}
        return server.post("/v1/completions", **fields, logprobs=3)["choices"]

    def talk(number: int) -> Any:
        messages = [{"role": "user", "content": f"Tell me about {number} foxes"}]
        return server.post("/v1/chat/completions", messages=messages, max_tokens=6)["choices"]

    first = decide()
    with ThreadPoolExecutor(8) as pool:
        chats = [pool.submit(talk, number) for number in range(4)]
        decisions = [pool.submit(decide) for _ in range(8)]
        assert [future.result() for future in decisions] == [first] * 8
        assert all(future.result()[0]["message"]["content"] for future in chats)
    assert decide() == first


def test_openais_client_chats_and_streams(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "hello"}]
    fields: Any = {"model": "strata-demo", "messages": messages, "max_tokens": 8, "seed": 1}
    whole = client.chat.completions.create(**fields, logprobs=True, top_logprobs=2)
    answer = whole.choices[0]
    assert answer.logprobs is not None
    assert answer.logprobs.content is not None
    assert whole.usage is not None
    assert whole.usage.completion_tokens == len(answer.logprobs.content)
    text, usage = "", None
    options: Any = {"include_usage": True}
    for chunk in client.chat.completions.create(**fields, stream=True, stream_options=options):
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = chunk.usage or usage
    assert text == answer.message.content
    assert usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert [model.id for model in client.models.list()] == ["strata-demo"]


def test_openais_client_gets_json_and_calls(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Which animal barks?"}]
    schema = {
        "type": "object",
        "properties": {"animal": {"enum": ["dog", "cat"]}, "legs": {"enum": [2, 4]}},
        "required": ["animal", "legs"],
        "additionalProperties": False,
    }
    fields: Any = {"model": "strata-demo", "messages": messages, "max_tokens": 100}
    form: Any = {"type": "json_schema", "json_schema": {"name": "animal", "schema": schema}}
    whole = client.chat.completions.create(**fields, response_format=form)
    value = orjson.loads(whole.choices[0].message.content or "")
    assert value["animal"] in ("dog", "cat")
    assert value["legs"] in (2, 4)
    tools: Any = [{"type": "function", "function": {"name": "show", "parameters": schema}}]
    asked: Any = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    choice = client.chat.completions.create(**fields, **asked).choices[0]
    assert choice.finish_reason == "tool_calls"
    calls: Any = choice.message.tool_calls
    assert [call.function.name for call in calls] == ["show"]
    arguments = calls[0].function.arguments
    assert orjson.loads(arguments).keys() == {"animal", "legs"}
    streamed = [
        call.function.arguments
        for chunk in client.chat.completions.create(**fields, **asked, stream=True)
        for call in chunk.choices[0].delta.tool_calls or ()
        if call.function
    ]
    assert streamed == [arguments]
    result: Any = {"role": "tool", "tool_call_id": calls[0].id, "content": "ok"}
    fields["messages"] = [*messages, choice.message, result]
    assert client.chat.completions.create(**fields, tools=tools).choices[0].finish_reason


def test_openais_client_completes_and_sees_errors(client: openai.OpenAI) -> None:
    fields: Any = {"model": "strata-demo", "prompt": [PROMPT, "Hello"], "max_tokens": 4}
    whole = client.completions.create(**fields, logprobs=1, n=2, temperature=0)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert whole.choices[0].text == whole.choices[1].text
    parts = dict.fromkeys(range(4), "")
    for chunk in client.completions.create(**fields, n=2, stream=True):
        for choice in chunk.choices:
            parts[choice.index] += choice.text
    assert list(parts.values()) == [choice.text for choice in whole.choices]
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="m", prompt="a", max_tokens=5000)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


class Tokens:
    """What AnyJev asks of a transformers tokenizer, answered by the engine's."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        assert engine.chat_template is not None
        self.chat_template = engine.chat_template.source

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return self._engine.tokenizer.encode(text, parse_special=False, add_bos=add_special_tokens)

    def decode(self, ids: Sequence[int]) -> str:
        return self._engine.tokenizer.decode(ids)

    def convert_ids_to_tokens(self, token_id: int) -> str:
        return self._engine.tokenizer.token_text(token_id)

    def apply_chat_template(self, messages: Any, *, tokenize: bool, **more: Any) -> str:
        assert not tokenize
        assert self._engine.chat_template is not None
        return self._engine.chat_template.render(messages, **more)


def test_anyjevs_vllm_backend_decides_as_in_process_bit_for_bit(
    server: Running, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    auto = types.SimpleNamespace(from_pretrained=lambda _source: Tokens(engine))
    monkeypatch.setitem(sys.modules, "transformers", types.SimpleNamespace(AutoTokenizer=auto))
    questions = [
        anyjev.Question.choice("Which section does this package belong to?", OPTIONS),
        anyjev.Question.noul("Is this a game?"),
    ]
    remote = VLLMBackend(server.url, "strata-demo")
    with EngineBackend(engine) as local:
        for level in ("raw", "L0"):
            there, here = (
                anyjev.Decider(backend, level=level, prior="content_free")
                .decide(STATE, questions)
                .to_dict()
                for backend in (remote, local)
            )
            assert there == here
            assert next(iter(there["questions"].values()))["answer"] == "games"


def test_a_client_that_goes_frees_the_engine(server: Running) -> None:
    body = orjson.dumps({"prompt": PROMPT, "max_tokens": 2000, "ignore_eos": True, "stream": True})
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    host, _, port = server.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + body)
        assert connection.recv(1)
    assert server.post("/v1/completions", prompt=PROMPT, max_tokens=1)["choices"]
    now = server.get("/status")
    assert now["queue"]["running"] == 0
    assert now["queue"]["parallel"] == now["engine"]["facts"]["parallel"]


def test_ctrl_c_ends_it_with_0_and_no_traceback() -> None:
    with serving("--lazy-load") as running:
        assert running.get("/health")["loaded"] is False
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(30) == 0
    assert not any("Traceback" in line for line in running.lines)


def test_a_wide_bind_without_a_key_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(strata, ["serve", "--host", "0.0.0.0", "--port", "0"]) == 2
    assert "there is no key" in capsys.readouterr().err


def test_a_model_that_cannot_be_loaded_ends_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(strata, ["serve", "--model", "absent.gguf", "--port", "0"]) == 2
    assert "absent.gguf" in capsys.readouterr().err
    assert run(strata, ["serve", "--device", "cuda:77", "--port", "0"]) != 0
    assert capsys.readouterr().err.startswith("strata: error: ")


def test_a_taken_port_is_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert run(strata, ["serve", "--port", str(port)]) == 1
    assert f"port {port} of 127.0.0.1 is taken" in capsys.readouterr().err


def test_logprobs_are_never_positive_and_finite(server: Running) -> None:
    fields = {
        "prompt": PROMPT,
        "max_tokens": 3,
        "logprobs": 256,
        "return_tokens_as_token_ids": True,
    }
    tables = server.post("/v1/completions", **fields)["choices"][0]["logprobs"]["top_logprobs"]
    for table in tables:
        assert len(table) == 256
        values = np.array(list(table.values()))
        assert np.all(np.isfinite(values))
        assert np.all(values <= 0)


def test_an_engine_that_dies_in_a_stream_is_told_and_started_again(server: Running) -> None:
    starts = server.get("/status")["engine"]["starts"]
    body = orjson.dumps({"prompt": PROMPT, "max_tokens": 2000, "ignore_eos": True, "stream": True})
    request = urllib.request.Request(
        f"{server.url}/v1/completions", body, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as stream:
        assert stream.readline().startswith(b"data: {")
        os.kill(worker_of(server), signal.SIGKILL)
        *_, last, end = stream.read().strip().split(b"\n\n")
    assert b'"error"' in last
    assert end == b"data: [DONE]"
    assert server.post("/v1/completions", prompt=PROMPT, max_tokens=1)["choices"]
    assert server.get("/status")["engine"]["starts"] == starts + 1


def worker_of(server: Running) -> int:
    """The process of the engine: the one child that has more than one thread."""
    pid = server.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    (worker,) = [int(child) for child in children if len(os.listdir(f"/proc/{child}/task")) > 2]
    return worker
