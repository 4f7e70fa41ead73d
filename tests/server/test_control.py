"""Health, status, models, metrics, loading; tokens; the published document."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from strata_cli.engine.experts.residency_counts import ResidencyCounts
from strata_cli.models import DEMO_MODEL_PATH
from strata_cli.server.access import AccessRules
from strata_cli.server.app import create_app
from strata_cli.server.asking import SamplingDefaults
from strata_cli.server.idling import unload_when_idle
from strata_cli.server.protocol import Counters, Status
from strata_cli.server.queue import RequestQueue
from strata_cli.server.texts import ModelTexts
from tests.server.asgi import ask, call, get, post
from tests.server.fake_engine import FakeEngine, new_app, new_service, tokenizer

WORLD = tokenizer().encode(" world", parse_special=False)


@pytest.mark.parametrize(
    ("state", "status", "word"),
    [
        ("ready", 200, "ok"),
        ("stopped", 200, "ok"),
        ("starting", 503, "loading"),
        ("dead", 503, "error"),
    ],
)
def test_health_says_whether_a_request_would_be_answered(
    state: Any, status: int, word: str
) -> None:
    engine = FakeEngine()
    engine.state = state
    answer = get(new_app(engine), "/health")
    assert (answer.status, answer.json["status"]) == (status, word)
    assert answer.json["max_context"] == 64


def test_status_says_which_sampling_a_request_gets() -> None:
    app = new_app(FakeEngine(), defaults=SamplingDefaults(temperature=0.5, top_k=3))
    answer = get(app, "/status").json
    assert answer["sampling"] == {
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 1.0,
        "min_p": 0.0,
        "seed": None,
    }
    assert answer["queue"]["parallel"] == 2
    assert answer["engine"]["facts"]["name"] == "small"


def test_models_list_the_one_that_is_served() -> None:
    app = new_app(FakeEngine())
    (card,) = get(app, "/v1/models").json["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("small", "model", 64)
    assert get(app, "/v1/models/small").json == card
    missing = get(app, "/v1/models/some/other")
    assert (missing.status, missing.error["code"]) == (404, "model_not_found")


def test_any_name_of_a_model_is_answered() -> None:
    answer = ask(new_app(FakeEngine(WORLD)), "/v1/completions", prompt="a", model="gpt-4")
    assert (answer.status, answer.json["model"]) == (200, "small")


def test_unloading_and_loading() -> None:
    engine = FakeEngine(WORLD)
    app = new_app(engine)
    assert ask(app, "/v1/unload").json == {"model": "small", "loaded": False}
    assert engine.state == "stopped"
    assert ask(app, "/v1/load", model="small").json == {"model": "small", "loaded": True}
    assert ask(app, "/v1/load", model="other").status == 404


@pytest.mark.parametrize("body", [b"", b" \r\n"])
def test_an_empty_body_is_an_empty_object_where_no_field_is_needed(body: bytes) -> None:
    engine = FakeEngine(WORLD)
    app = new_app(engine)
    document = get(app, "/openapi.json").json
    for path, state in (("/v1/unload", "stopped"), ("/v1/load", "ready")):
        answer = asyncio.run(call(app, "POST", path, body))
        assert (answer.status, engine.state) == (200, state)
        assert document["paths"][path]["post"]["requestBody"]["required"] is False


def test_loading_may_leave_memory_to_others() -> None:
    engine = FakeEngine(WORLD)
    app = new_app(engine)
    assert ask(app, "/v1/load", vram_reserve_mib=9000).json["loaded"] is True
    assert engine.reserved_mib == 9000
    for wrong in (-1, "9000", 2**31):
        answer = ask(app, "/v1/load", vram_reserve_mib=wrong)
        assert (answer.status, answer.error["param"]) == (400, "vram_reserve_mib")
    ignored = ask(app, "/v1/unload", vram_reserve_mib=5)
    assert ignored.status == 200


def test_a_model_in_use_is_not_unloaded() -> None:
    async def run() -> None:
        engine = FakeEngine(WORLD)
        engine.waits = asyncio.Event()
        app = new_app(engine)
        task = asyncio.create_task(post(app, "/v1/completions", {"prompt": "hello"}))
        while not engine.asked:
            await asyncio.sleep(0)
        answer = await post(app, "/v1/unload", {})
        assert (answer.status, answer.error["code"]) == (409, "model_busy")
        engine.waits.set()
        assert (await task).status == 200

    asyncio.run(run())


def is_ready(engine: FakeEngine) -> bool:
    return engine.state == "ready"


def test_a_model_that_nobody_uses_is_unloaded_and_one_in_use_is_not() -> None:
    async def run() -> None:
        engine = FakeEngine(WORLD)
        engine.waits = asyncio.Event()
        service = new_service(engine)
        app = create_app(service)
        idling = asyncio.create_task(unload_when_idle(service.engine, service.queue, 0.01))
        task = asyncio.create_task(post(app, "/v1/completions", {"prompt": "hello"}))
        while not engine.asked:
            await asyncio.sleep(0)
        assert service.queue.idle_s == 0
        assert is_ready(engine)
        engine.waits.set()
        assert (await task).status == 200
        while is_ready(engine):
            await asyncio.sleep(0)
        assert (await post(app, "/v1/load", {})).json["loaded"] is True
        while is_ready(engine):
            await asyncio.sleep(0)
        idling.cancel()

    asyncio.run(run())
    asyncio.run(unload_when_idle(new_service(FakeEngine()).engine, RequestQueue(1, 1), 0))


def test_a_request_loads_what_was_never_loaded() -> None:
    class Lazy(FakeEngine):
        async def start(self) -> None:
            self.facts = FakeEngine().facts
            await super().start()

    engine = Lazy(WORLD)
    engine.facts = None
    app = new_app(engine)
    assert get(app, "/v1/models").json["data"][0]["max_model_len"] is None
    assert ask(app, "/v1/completions", prompt="a").status == 200
    assert get(app, "/v1/models").json["data"][0]["max_model_len"] == 64


def test_metrics_count_routes_and_states() -> None:
    app = new_app(FakeEngine(WORLD))
    ask(app, "/v1/completions", prompt="a")
    ask(app, "/v1/completions", prompt=5)
    get(app, "/some/path")
    page = get(app, "/metrics")
    lines = page.body.decode().splitlines()
    assert page.headers["content-type"].startswith("text/plain")
    assert 'strata_http_requests_total{route="/v1/completions",status="200"} 1.0' in lines
    assert 'strata_http_requests_total{route="/v1/completions",status="400"} 1.0' in lines
    assert 'strata_http_requests_total{route="other",status="404"} 1.0' in lines
    assert "strata_engine_up 0.0" in lines
    assert "strata_queue_refused_total 0.0" in lines


def test_metrics_have_what_the_engine_counts() -> None:
    class Counting(FakeEngine):
        async def status(self) -> Status:
            experts = ResidencyCounts(routed=9, hits=7, pcie=2, cpu=0, dropped=0, swaps=1)
            counters = Counters(canonical_reads=5, step_ms=1.5, experts=experts)
            return Status(
                waiting=1, reading=2, generating=3, counters=counters, memory_bytes=1 << 20
            )

    lines = get(new_app(Counting()), "/metrics").body.decode().splitlines()
    assert "strata_engine_up 1.0" in lines
    assert "strata_engine_generating 3.0" in lines
    assert "strata_engine_canonical_reads_total 5.0" in lines
    assert "strata_engine_step_ms_total 1.5" in lines
    assert "strata_experts_hits_total 7.0" in lines
    assert "strata_engine_memory_bytes 1.048576e+06" in lines
    totals = {line.split()[0] for line in lines if line.startswith("strata_engine_")}
    of_status = set(Counters.__struct_fields__) - {"experts"}
    assert {f"strata_engine_{name}_total" for name in of_status} <= totals


def test_tokens_and_back() -> None:
    app = new_app(FakeEngine())
    ids = tokenizer().encode("hello <|im_end|> €", parse_special=True)
    answer = ask(app, "/tokenize", prompt="hello <|im_end|> €", return_token_strs=True).json
    assert (answer["tokens"], answer["count"], answer["max_model_len"]) == (ids, len(ids), 64)
    assert answer["token_strs"][0] == "hello"
    assert ask(app, "/detokenize", tokens=ids).json == {"prompt": "hello <|im_end|> €"}
    assert ask(app, "/detokenize", tokens=[267]).status == 400


def test_clients_learn_the_special_tokens_and_the_template() -> None:
    texts = ModelTexts.open(DEMO_MODEL_PATH)
    answer = get(new_app(FakeEngine(), texts=texts), "/tokenizer_info").json
    assert (answer["eos_token"], answer["pad_token"]) == ("<|im_end|>", "<|endoftext|>")
    assert answer["model_max_length"] == 64
    assert "<|im_start|>" in answer["chat_template"]


def test_the_tokens_of_a_chat_are_those_that_it_is_read_as() -> None:
    engine = FakeEngine(WORLD)
    app = new_app(engine)
    messages = [{"role": "user", "content": "hello"}]
    answer = ask(app, "/tokenize", messages=messages).json
    assert ask(app, "/v1/chat/completions", messages=messages, max_tokens=1).status == 200
    assert tuple(answer["tokens"]) == engine.asked[0].prompt


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"prompt": "a", "messages": []},
        {"messages": []},
        {"prompt": "a", "chat_template_kwargs": {}},
        {"messages": [{"role": "user", "content": "a"}], "add_special_tokens": True},
    ],
)
def test_what_cannot_be_tokens_is_refused(fields: dict[str, Any]) -> None:
    assert ask(new_app(FakeEngine()), "/tokenize", **fields).status == 400


def test_other_routes_and_methods_are_answered_in_json() -> None:
    app = new_app(FakeEngine())
    assert get(app, "/nothing").error["type"] == "not_found_error"
    answer = get(app, "/v1/completions")
    assert (answer.status, answer.headers["allow"]) == (405, "POST")


def test_the_document_asks_for_a_key_where_the_server_does() -> None:
    app = new_app(FakeEngine(), rules=AccessRules(listen="127.0.0.1", api_key="sesame"))
    document = get(app, "/openapi.json").json
    for path, methods in document["paths"].items():
        ((method, described),) = methods.items()
        status = asyncio.run(call(app, method.upper(), path)).status
        assert ("401" in described["responses"]) is (status == 401)
        assert (described.get("security") == []) is (status != 401)


def test_the_document_describes_every_route_and_its_fields() -> None:
    answer = get(new_app(FakeEngine()), "/openapi.json")
    document = answer.json
    assert document["openapi"] == "3.1.0"
    fields = document["components"]["schemas"]["CompletionRequest"]["properties"]
    assert fields["n"]["anyOf"][0] == {"type": "integer", "minimum": 1, "maximum": 64}
    for route in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/v1/load"):
        content = document["paths"][route]["post"]["requestBody"]["content"]
        name = content["application/json"]["schema"]["$ref"].rpartition("/")[2]
        assert name in document["components"]["schemas"]
