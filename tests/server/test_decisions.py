"""Decisions over HTTP with the embedded model: one value over every way, and what is refused."""

from __future__ import annotations

import string
import sys
import types
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anyjev
import openai
import orjson
import pytest
from anyjev.backends.vllm import VLLMBackend
from anyjev.tacit import ServerEngine, Tacit

from strata_cli.commands.main import run, strata
from strata_cli.decisions import questions
from strata_cli.decisions.decider import Decider
from strata_cli.decisions.rules import DecisionRules
from strata_cli.engine.engine import Engine, EngineOptions
from strata_cli.models import DEMO_MODEL_PATH
from tests.server.running import Running, serving
from tests.server.test_serve import Tokens

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

STATE = "A fast multiplayer shooter in which teams fight over flags on many maps."
SECTION = "Which section does this package belong to?"
OPTIONS = ["mail", "games", "python", "fonts"]
GAME, PACE = "Is this a game?", "How fast is it?"
LEVELS = ["slow", "brisk", "fast"]
MANY = [*string.ascii_lowercase, "a b"]  # more than letters label, and one begins another

CHOICE = {"type": "choice", "instructions": SECTION, "criteria": dict.fromkeys(OPTIONS)}
NOUL = {"type": "noul", "instructions": GAME}
SCORE = {"type": "score", "instructions": PACE, "criteria": LEVELS}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving("--parallel", "2") as running:
        yield running


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.open(EngineOptions(model=DEMO_MODEL_PATH, device="host")) as engine:
        yield engine


def systemone(server: Running, asked: dict[str, Any], state: Any = STATE) -> Any:
    return server.post("/v1/systemone", state=state, questions=asked)


def test_one_decision_has_one_value_over_every_way(
    server: Running,
    engine: Engine,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flags = [flag for option in OPTIONS for flag in ("--option", option)]
    assert run(strata, ["decide", STATE, "--device", "host", "--json", "-q", SECTION, *flags]) == 0
    (told,) = orjson.loads(capsys.readouterr().out)["questions"].values()
    auto = types.SimpleNamespace(from_pretrained=lambda _source: Tokens(engine))
    monkeypatch.setitem(sys.modules, "transformers", types.SimpleNamespace(AutoTokenizer=auto))
    question = questions.choice(SECTION, OPTIONS)
    theirs = anyjev.Decider(
        VLLMBackend(server.url, "strata-demo"), prior="content_free", canonical_order=True
    ).decide(STATE, [question.canonical()])
    openai_asked = {
        "type": "choice",
        "instructions": SECTION,
        "choices": [{"value": option} for option in OPTIONS],
    }
    decisions = server.post("/v1/decisions", model="m", input=STATE, questions=[openai_asked])
    found = {
        "cli": told["distribution"],
        "vllm": {option: theirs[question.id].distribution[option] for option in OPTIONS},
        "systemone": systemone(server, {"a": CHOICE})["answers"]["a"]["probabilities"],
        "decisions": {
            one["value"]: one["probability"] for one in decisions["answers"][0]["probabilities"]
        },
        "decide": server.post("/v1/decide", state=STATE, question=SECTION, options=OPTIONS)[
            "probs"
        ],
    }
    assert all(list(one) == OPTIONS for one in found.values())
    assert {tuple(map(float, one.values())) for one in found.values()} == {
        tuple(told["distribution"].values())
    }
    assert told["distribution"]["games"] > 0.5


def test_all_kinds_have_the_bits_of_a_decider_in_process(server: Running, engine: Engine) -> None:
    asked = [
        questions.choice(SECTION, OPTIONS, "choice"),
        questions.yes_no(GAME, "noul"),
        questions.levels(PACE, LEVELS, "score"),
        questions.choice(SECTION, MANY, "many"),
    ]
    with Decider(engine) as decider:
        here = {one.question.id: one for one in decider.decide(STATE, asked).decisions}
    many = {"type": "choice", "instructions": SECTION, "criteria": dict.fromkeys(MANY)}
    there = systemone(
        server, {"many": many, "score": SCORE, "noul": NOUL, "choice": CHOICE, "again": NOUL}
    )
    answers = there["answers"]
    assert list(answers) == ["many", "score", "noul", "choice", "again"]
    assert here["many"].diagnostics["with_end"]
    for id in ("choice", "many"):
        assert answers[id]["probabilities"] == here[id].probabilities
        assert answers[id]["choice"] == here[id].top
    assert list(answers["score"]["probabilities"].values()) == list(
        here["score"].probabilities.values()
    )
    assert answers["score"]["score"] == here["score"].answer
    assert answers["noul"]["noul"] == here["noul"].probabilities["Yes"]
    assert answers["again"] == answers["noul"]
    for id in ("choice", "noul", "score", "many"):
        assert answers[id]["x_label_mass"] == here[id].diagnostics["answer_mass"]
    assert there["model"] == "strata-demo"
    assert there["x_canonical"] is True


def test_neither_ids_nor_company_nor_traffic_nor_a_new_engine_move_a_bit(server: Running) -> None:
    first = systemone(server, {"a": CHOICE})["answers"]["a"]

    def ask(number: int) -> Any:
        asked = {f"other {number}": NOUL, f"id\n{number}": CHOICE, "s": SCORE}
        return systemone(server, asked)["answers"][f"id\n{number}"]

    def talk(number: int) -> Any:
        return server.post("/v1/completions", prompt=f"{number} foxes", max_tokens=8)["choices"]

    with ThreadPoolExecutor(5) as pool:
        others = [pool.submit(talk, number) for number in range(2)]
        found = [pool.submit(ask, number) for number in range(3)]
        assert [future.result() for future in found] == [first] * 3
        assert all(future.result() for future in others)
    assert server.post("/v1/unload")["loaded"] is False
    assert systemone(server, {"z": CHOICE})["answers"]["z"] == first


def test_tokens_of_the_input_do_not_depend_on_what_is_known(server: Running) -> None:
    counts = [systemone(server, {"a": CHOICE, "b": NOUL})["usage"] for _ in range(2)]
    assert counts[0] == counts[1]
    assert counts[0]["output_tokens"] == 0
    one, long = (
        systemone(server, {"a": NOUL}, state)["usage"]["input_tokens"]
        for state in (STATE, f"{STATE} {STATE}")
    )
    assert one < long < 2 * one < 3 * counts[0]["input_tokens"]


def test_listings_of_the_same_options_give_the_same(server: Running) -> None:
    turned = {**CHOICE, "criteria": dict.fromkeys(OPTIONS[::-1])}
    there, back = (systemone(server, {"a": asked})["answers"]["a"] for asked in (CHOICE, turned))
    assert there == back
    assert list(there["probabilities"]) == list(back["probabilities"])[::-1]


def test_names_come_back_as_they_were_and_descriptions_are_read(server: Running) -> None:
    names = ["a\nb", "a b", " ", "Ü: 1"]
    plain = systemone(server, {"a": {"type": "choice", "criteria": dict.fromkeys(names)}})
    described = {**dict.fromkeys(names), "Ü: 1": {"teams": ["shooting"]}}
    other = systemone(server, {"a": {"type": "choice", "criteria": described}})
    for body in (plain, other):
        assert list(body["answers"]["a"]["probabilities"]) == names
        assert sum(body["answers"]["a"]["probabilities"].values()) == pytest.approx(1, abs=1e-12)
    assert plain["answers"] != other["answers"]


def test_sides_and_structured_states_are_read(server: Running) -> None:
    asked = {"a": {"type": "noul", "criteria": {"true": "It is a game"}}, "b": NOUL}
    found = systemone(server, asked, {"package": STATE, "tags": [1, None]})["answers"]
    assert 0 < found["a"]["noul"] < 1
    assert set(found["a"]) <= {"type", "noul", "x_label_mass", "x_warnings"}
    words = {**NOUL, "criteria": {"true": "Yes", "false": "No"}}
    assert (
        systemone(server, {"w": words})["answers"]["w"]
        == systemone(server, {"b": NOUL})["answers"]["b"]
    )
    turns = [{"role": "user", "content": STATE}, {"role": "bot", "content": "ok"}]
    as_turns = systemone(server, {"b": NOUL}, turns)["answers"]
    assert as_turns == systemone(server, {"b": NOUL}, f"user: {STATE}\nbot: ok")["answers"]


def test_openais_client_gets_every_kind(server: Running) -> None:
    asked: Any = [
        {"type": "predicate", "name": "game", "instructions": GAME},
        {
            "type": "choice",
            "instructions": [{"type": "input_text", "text": "Is it free?"}],
            "choices": [{"value": True}, {"value": "true", "description": "so"}, {"value": False}],
        },
        {
            "type": "score",
            "name": "p",
            "instructions": PACE,
            "levels": [{"label": one} for one in LEVELS],
        },
    ]
    content: Any = [{"role": "user", "content": [{"type": "input_text", "text": STATE}]}]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        found = client.decisions.create(model="strata-demo", input=content, questions=asked)
        one: Any = [{"type": "choice", "instructions": "?", "choices": [{"value": "a"}]}]
        with pytest.raises(openai.BadRequestError) as caught:
            client.decisions.create(model="m", input=STATE, questions=one)
    assert caught.value.param == "questions[0].choices"
    answers = orjson.loads(found.to_json())["answers"]
    there = systemone(server, {"game": NOUL, "p": SCORE})["answers"]
    assert (answers[0]["name"], answers[0]["probability"]) == ("game", there["game"]["noul"])
    assert answers[1]["name"] is None
    assert [one["value"] for one in answers[1]["probabilities"]] == [True, "true", False]
    assert answers[2]["score"] == there["p"]["score"]
    assert answers[2]["confidence"] == there["p"]["confidence"]
    assert [one["label"] for one in answers[2]["probabilities"]] == LEVELS
    assert found.usage.total_tokens == found.usage.input_tokens > 0


def test_a_batch_for_anyjev_has_the_values_of_its_items(server: Running) -> None:
    items: list[dict[str, Any]] = [
        {"state": STATE, "question": SECTION, "options": OPTIONS},
        {"state": STATE, "question": GAME, "kind": "yes_no"},
        {"state": STATE, "question": PACE, "kind": "score", "options": LEVELS},
    ]
    found = server.post("/v1/decide", items=items)["decisions"]
    assert found == [server.post("/v1/decide", **item) for item in items]
    assert found[0]["answer"] == OPTIONS[found[0]["index"]] == "games"
    assert found[1]["probs"].keys() == {"Yes", "No"}
    assert server.post("/v1/decide", items=[]) == {"decisions": []}


class PromptTokens(Tokens):
    """Encodes whole prompts as well, as Tacit asks."""

    def __call__(self, text: str, add_special_tokens: bool) -> types.SimpleNamespace:
        ids = self._engine.tokenizer.encode(text, parse_special=True, add_bos=add_special_tokens)
        return types.SimpleNamespace(input_ids=ids)


def test_anyjevs_server_engine_reads_the_labels_log_probabilities(
    server: Running, engine: Engine
) -> None:
    tokens = PromptTokens(engine)
    tacit = Tacit(ServerEngine(f"{server.url}/v1", "strata-demo", tokens), tokens)
    items = [
        {"state": STATE, "question": SECTION, "options": OPTIONS},
        {"state": STATE, "question": GAME, "kind": "yes_no"},
    ]
    found = tacit.decide_batch(items)
    with Decider(engine, DecisionRules(level="raw")) as decider:
        here = decider.decide(
            STATE, [questions.choice(SECTION, OPTIONS), questions.yes_no(GAME)]
        ).decisions
    for one, other in zip(found, here, strict=True):
        assert one["probs"] == pytest.approx(other.probabilities, abs=1e-15)
    assert [one["answer"] for one in found] == [here[0].answer, "Yes"]


def post_bytes(server: Running, body: bytes, **headers: str) -> Any:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(
        f"{server.url}/v1/systemone", body, {"content-type": "application/json", **names}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, orjson.loads(reply.read())
    except urllib.error.HTTPError as error:
        return error.code, orjson.loads(error.read())


def test_bodies_compressed_with_zstd_are_read(server: Running) -> None:
    body = orjson.dumps({"state": STATE, "questions": {"a": CHOICE}})
    status, found = post_bytes(server, zstd.compress(body), content_encoding="zstd")
    assert status == 200
    assert found["answers"] == systemone(server, {"a": CHOICE})["answers"]
    bomb = zstd.compress(b" " * (40 << 20))
    status, found = post_bytes(server, bomb, content_encoding="zstd")
    assert (status, found["error"]["type"]) == (413, "request_too_large")
    assert post_bytes(server, body, content_encoding="zstd")[0] == 422
    assert post_bytes(server, body, content_encoding="gzip")[0] == 415


def test_models_are_listed_for_both_kinds_of_clients(server: Running) -> None:
    body = server.get("/v1/models")
    assert body["object"] == "list"
    assert [one["id"] for one in body["data"]] == ["strata-demo"]
    assert [one["name"] for one in body["models"]] == ["strata-demo", "jev-latest"]
    assert server.get("/v1/models/jev-latest")["id"] == "strata-demo"
