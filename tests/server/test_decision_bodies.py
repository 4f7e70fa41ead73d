"""What the three formats of decisions refuse, how they say so, and what a gone client stops."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
from typing import Any

import msgspec
import orjson
import pytest

from strata_cli.errors import OutOfMemory
from strata_cli.server import anyjev_decide, deciders, decision_backend
from strata_cli.server.access import AccessRules
from strata_cli.server.decision_forms import distance_confidence, peak_confidence
from strata_cli.server.protocol import Score, Scores, Timings
from tests.server.asgi import JSON, Answer, ask, call, post
from tests.server.fake_engine import FakeEngine, new_app

NOUL = {"type": "noul", "instructions": "Is it so?"}
CHOICE = {"type": "choice", "criteria": {"left": None, "right": None}}
PREDICATE = {"type": "predicate", "instructions": "It is so."}
IMAGE = {"type": "input_image", "image_url": "data:"}


class ScoringEngine(FakeEngine):
    """Gives every token asked for a log-probability that follows from its id alone.

    Attributes:
        scored: every request that came.
        is_stopped: a request was cancelled.
    """

    def __init__(self) -> None:
        super().__init__()
        assert self.facts is not None
        self.facts = msgspec.structs.replace(self.facts, context_tokens=4096)
        self.scored: list[Score] = []
        self.is_stopped = False

    async def score(self, request: Score) -> Scores:
        self.scored.append(request)
        try:
            if self.waits is not None:
                await self.waits.wait()
        except asyncio.CancelledError:
            self.is_stopped = True
            raise
        if self.failure is not None:
            raise self.failure
        return Scores(
            request_id=request.request_id,
            rows=tuple(tuple(-1.0 - token / 100 for token in ids) for ids in request.ids),
            prompt_tokens=1,
            read_tokens=1,
            timings=Timings(wait_ms=0, prompt_ms=0, generate_ms=0),
        )


def many(count: int) -> dict[str, None]:
    return {f"option {number}": None for number in range(count)}


def about(question: Any) -> dict[str, Any]:
    return {"state": "x", "questions": {"a": question}}


@pytest.mark.parametrize(
    ("body", "loc"),
    [
        ({"questions": {"a": NOUL}}, "state"),
        ({"state": None, "questions": {"a": NOUL}}, "state"),
        ({"state": " ", "questions": {"a": NOUL}}, "state"),
        ({"input": "x", "questions": [PREDICATE]}, "state"),
        ({"state": "x", "questions": {}}, "questions"),
        ({"state": "x", "questions": [NOUL]}, "questions"),
        ({"state": "x", "questions": {"": NOUL}}, "questions"),
        ({"state": "x", "questions": {"a": NOUL}, "images": ["y"]}, "images"),
        (about({}), "questions a type"),
        (about({"type": "box"}), "questions a type"),
        (about({"type": "noul"}), "questions a noul instructions"),
        (about({**NOUL, "instructions": 3}), "questions a noul instructions"),
        (about({**NOUL, "criteria": {"maybe": "y"}}), "questions a noul criteria"),
        (about({"type": "choice"}), "questions a choice criteria"),
        (about({"type": "choice", "criteria": {}}), "questions a choice criteria"),
        (about({"type": "choice", "criteria": many(256)}), "questions a choice criteria"),
        (about({"type": "score", "criteria": {"0": "low"}}), "questions a score criteria"),
        (about({"type": "score", "criteria": ["low", "low "]}), "questions a score criteria"),
        (about({"type": "score", "criteria": ["low", None]}), "questions a score criteria 1"),
        (about({"type": "score", "criteria": ["l"] * 11}), "questions a score criteria"),
    ],
)
def test_system_one_is_told_the_place(body: dict[str, Any], loc: str) -> None:
    answer = ask(new_app(FakeEngine()), "/v1/systemone", **body)
    assert answer.status == 422
    (detail,) = answer.json["detail"]
    assert detail["loc"] == ["body", *loc.split()]
    assert detail["msg"] in answer.error["message"]
    assert detail["type"]


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"{", "json_invalid"),
        (b'{"state": NaN, "questions": {}}', "json_invalid"),
        (b"[]", "dict_type"),
        (b'{"state": "x", "questions": {"a": 1, "a": 2}}', "duplicate_key"),
        (b'{"state": ' + b"[" * 3000, "json_invalid"),
    ],
)
def test_system_one_refuses_what_is_no_plain_json(data: bytes, word: str) -> None:
    app = new_app(FakeEngine())
    answer = asyncio.run(call(app, "POST", "/v1/systemone", data, headers=JSON))
    assert (answer.status, answer.json["detail"][0]["type"]) == (422, word)


@pytest.mark.parametrize(("values", "margin"), [((0.25, 0.5), math.log(2)), ((1.0, 0.0), None)])
def test_a_margin_without_end_is_null(values: tuple[float, ...], margin: float | None) -> None:
    found = anyjev_decide._margin(values)
    assert found == (None if margin is None else pytest.approx(margin))
    assert msgspec.json.decode(msgspec.json.encode({"margin": found})) == {"margin": found}


def test_images_are_refused() -> None:
    app = new_app(FakeEngine())
    headers = {"content-type": "multipart/form-data; boundary=x"}
    answer = asyncio.run(call(app, "POST", "/v1/systemone", b"--x--", headers=headers))
    assert answer.status == 422
    assert "images" in answer.error["message"]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"input": None}, "input"),
        ({"input": " "}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": [IMAGE]}]}, "input[0].content[0]"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].type"),
        ({"questions": []}, "questions"),
        ({"questions": [PREDICATE] * 401}, "questions"),
        ({"questions": [{"type": "noul", "instructions": "x"}]}, "questions[0]"),
        ({"questions": [{"type": "predicate"}]}, "questions[0]"),
        ({"questions": [{**PREDICATE, "instructions": " "}]}, "questions[0].instructions"),
        ({"safety_identifier": "x" * 129}, "safety_identifier"),
        ({"state": "x"}, "state"),
        ({"questions": {"a": NOUL}}, "questions"),
        (
            {"questions": [{"id": "a", "type": "yes_no", "question": "?"}]},
            "questions[0].instructions",
        ),
    ],
)
def test_openai_is_told_the_field(changes: dict[str, Any], param: str) -> None:
    body = {"model": "m", "input": "x", "questions": [PREDICATE], **changes}
    answer = ask(new_app(FakeEngine()), "/v1/decisions", **body)
    assert answer.status == 400
    assert str(answer.error["param"]).startswith(param)
    assert answer.json.keys() == {"error"}


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ([{"value": "a"}], "choices"),
        ([{"value": "a"}] * 2, "choices"),
        ([{"value": 3}, {"value": 4}], "choices[0].value"),
        ([{"value": str(number)} for number in range(256)], "choices"),
    ],
)
def test_openais_choices_are_bounded_and_distinct(values: list[Any], field: str) -> None:
    question = {"type": "choice", "instructions": "?", "choices": values}
    answer = ask(new_app(FakeEngine()), "/v1/decisions", model="m", input="x", questions=[question])
    assert (answer.status, answer.error["param"]) == (400, f"questions[0].{field}")


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({}, "question"),
        ({"question": "?", "options": ["a", "b"]}, "the state is empty"),
        ({"state": "x", "question": "?"}, "options"),
        ({"state": "x", "question": "?", "options": ["a"]}, "2 are the least"),
        ({"state": "x", "question": "?", "options": ["a", "a"]}, "are the same"),
        ({"state": "x", "question": "?", "options": list(map(str, range(27)))}, "options"),
        (
            {"state": "x", "question": "?", "kind": "score", "options": list("abcdefghijk")},
            "11 levels",
        ),
        ({"state": "x", "question": "?", "kind": "guess"}, "kind"),
        ({"state": "x", "questions": {"a": {"question": "?"}}}, "/v1/systemone"),
        ({"items": [{"state": "x", "question": "?", "kind": "noul"}, {}]}, "items[1]"),
        ({"items": {}}, "items"),
    ],
)
def test_anyjev_is_told_in_words(body: dict[str, Any], text: str) -> None:
    answer = ask(new_app(FakeEngine()), "/v1/decide", **body)
    assert answer.status == 400
    assert answer.json.keys() == {"error"}
    assert text in answer.json["error"]


def test_a_model_without_the_labels_says_so_to_each() -> None:
    app = new_app(ScoringEngine())
    systemone = ask(app, "/v1/systemone", **about(NOUL))
    openai = ask(app, "/v1/decisions", model="m", input="x", questions=[PREDICATE])
    anyjev = ask(app, "/v1/decide", state="x", question="?", kind="yes_no")
    assert (systemone.status, openai.status, anyjev.status) == (422, 400, 400)
    for message in (
        systemone.json["detail"][0]["msg"],
        openai.error["message"],
        anyjev.json["error"],
    ):
        assert "'Yes' is not a single token" in message


def test_a_state_longer_than_the_context_says_both_numbers() -> None:
    app = new_app(FakeEngine())
    systemone = ask(app, "/v1/systemone", state="x" * 99, questions={"a": CHOICE})
    assert systemone.status == 413
    assert systemone.json["detail"]["error_type"] == "tokens_exceeded"
    assert "the context of 64 tokens" in systemone.json["detail"]["message"]
    asked = {"type": "choice", "instructions": "?", "choices": [{"value": "a"}, {"value": "b"}]}
    openai = ask(app, "/v1/decisions", model="m", input="x" * 99, questions=[asked])
    assert (openai.status, openai.error["code"]) == (400, "context_length_exceeded")


def test_one_option_is_answered_without_the_engine() -> None:
    engine = ScoringEngine()
    asked = {
        "a": {"type": "choice", "criteria": {"only": "one"}},
        "b": {"type": "score", "criteria": ["low"]},
    }
    body = ask(new_app(engine), "/v1/systemone", state="x", questions=asked).json
    assert not engine.scored
    assert body["answers"]["a"]["probabilities"] == {"only": 1.0}
    assert body["answers"]["a"]["confidence"] == body["answers"]["b"]["confidence"] == 1.0
    assert body["answers"]["b"]["score"] == 0.0
    assert body["usage"] == {"input_tokens": 0, "output_tokens": 0}


def test_every_read_is_canonical_and_ids_are_in_none() -> None:
    engine = ScoringEngine()
    app = new_app(engine)
    found = ask(app, "/v1/systemone", state="x", questions={"an id": CHOICE}).json["answers"]
    first, engine.scored = engine.scored, []
    again = ask(app, "/v1/systemone", state="x", questions={"a name": CHOICE}).json["answers"]
    assert found["an id"] == again["a name"]
    assert all(score.canonical for score in first)
    assert engine.scored == first[:1]  # the prior is known by now


def test_an_engine_without_memory_is_503_for_each() -> None:
    engine = ScoringEngine()
    engine.failure = OutOfMemory("no memory", hint="wait")
    app = new_app(engine)
    systemone = ask(app, "/v1/systemone", state="x", questions={"a": CHOICE})
    assert (systemone.status, systemone.headers["retry-after"]) == (503, "1")
    assert systemone.json["detail"]["error_type"] == "server_error"
    anyjev = ask(app, "/v1/decide", state="x", question="?", options=["a", "b"])
    assert (anyjev.status, anyjev.json) == (503, {"error": "no memory; try: wait"})
    engine.failure = None
    assert ask(app, "/v1/systemone", state="x", questions={"a": CHOICE}).status == 200


@pytest.mark.parametrize("path", ["/v1/systemone", "/v1/decide"])
def test_a_client_that_goes_stops_its_decision(path: str) -> None:
    async def body() -> None:
        engine = ScoringEngine()
        engine.waits = asyncio.Event()
        app = new_app(engine)
        more = {"question": "?", "options": ["a", "b"]} if path == "/v1/decide" else {}
        value = {"state": "x", "questions": {"a": CHOICE}, **more}

        def leaves(_answer: Answer) -> bool:
            return bool(engine.scored)

        answer = await post(app, path, value, leaves=leaves)
        assert answer.status == 499
        for _ in range(1000):
            await asyncio.sleep(0)
        assert engine.is_stopped
        assert len(engine.scored) == 1
        engine.waits.set()
        assert (await post(app, path, value)).status == 200

    asyncio.run(body())


def test_confidences_are_those_of_the_helper() -> None:
    table = [
        ([0.1, 0.1, 0.8], 0.7, 0.55),
        ([0.0, 0.95, 0.05], 0.925, 0.925),
        ([0.5, 0.0, 0.5], 0.25, 0.0),
        ([0.05, 0.05, 0.1, 0.3, 0.5], 0.375, 0.292),
        ([0.3, 0.7], 0.4, 0.4),
        ([1.0], 1.0, 1.0),
    ]
    for values, peak, distance in table:
        assert peak_confidence(values) == pytest.approx(peak, abs=5e-4)
        assert distance_confidence(values) == pytest.approx(distance, abs=5e-4)


def test_the_document_describes_the_routes() -> None:
    app = new_app(FakeEngine())
    document = orjson.loads(asyncio.run(call(app, "GET", "/openapi.json")).body)
    for path in ("/v1/systemone", "/v1/decisions", "/v1/decide"):
        assert "post" in document["paths"][path]
    kinds = document["components"]["schemas"]["SystemOneRequest"]["properties"]["questions"]
    assert kinds["additionalProperties"]["discriminator"]["propertyName"] == "type"


def test_a_missing_key_is_told_in_system_ones_form_too() -> None:
    app = new_app(FakeEngine(), rules=AccessRules(listen="127.0.0.1", api_key="k" * 20))
    answer = ask(app, "/v1/systemone", **about(NOUL))
    assert answer.status == 401
    assert answer.json["detail"]["error_type"] == "authentication_error"
    assert answer.error["message"] == answer.json["detail"]["message"]
    assert "detail" not in ask(app, "/v1/decisions").json


HOLDS = """
import sys
import strata_cli.server.serving
held = {name for name in sys.modules if name.split(".")[0] in ("numba", "llvmlite", "cuda")}
assert not held | ({"strata_cli.engine.engine"} & set(sys.modules)), held
"""


def test_the_servers_process_decides_without_an_engine() -> None:
    subprocess.run([sys.executable, "-c", HOLDS], check=True)


def test_long_questions_are_read_once_for_all_their_orders() -> None:
    engine = ScoringEngine()
    long = "Which way? " * 60
    asked = {
        "a": {**CHOICE, "instructions": long},
        "b": {**CHOICE, "instructions": f"{long}really"},
        "c": CHOICE,
    }
    answer = ask(new_app(engine), "/v1/systemone", state="x" * 600, questions=asked)
    assert answer.status == 200
    ends = [max(map(len, score.suffixes), default=0) for score in engine.scored]
    assert max(ends) < 600, ends
    beginnings = [score.prefix for score in engine.scored if score.prefix[600:]]
    held = next(prefix for prefix in beginnings)
    assert all(prefix[: len(held)] == held for prefix in beginnings[:3])


def test_ends_of_a_huge_request_are_asked_for_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"a": {"type": "choice", "criteria": many(20)}}
    engine = ScoringEngine()
    whole = ask(new_app(engine), "/v1/systemone", state="x", questions=asked).json
    parts = ScoringEngine()
    monkeypatch.setattr(decision_backend, "MOST_TOKENS", 700)
    assert ask(new_app(parts), "/v1/systemone", state="x", questions=asked).json == whole
    assert len(parts.scored) > 5 * len(engine.scored) > 0


def test_very_many_questions_are_answered_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {str(number): {**CHOICE, "instructions": f"No. {number}?"} for number in range(5)}
    whole, parts = ScoringEngine(), ScoringEngine()
    body = ask(new_app(whole), "/v1/systemone", state="x", questions=asked).json
    monkeypatch.setattr(deciders, "MOST_CHARACTERS", 50)
    other = ask(new_app(parts), "/v1/systemone", state="x", questions=asked).json
    assert other["answers"] == body["answers"]
    assert len(parts.scored) > len(whole.scored)
    answer = ask(
        new_app(whole),
        "/v1/systemone",
        state="x",
        questions=dict.fromkeys(map(str, range(401)), CHOICE),
    )
    assert answer.status == 422


def test_parts_of_text_and_json_become_one_state() -> None:
    engine = ScoringEngine()
    asked = {"type": "choice", "instructions": "?", "choices": [{"value": "a"}, {"value": "b"}]}
    content = [
        {"type": "input_text", "text": "seen"},
        {"type": "input_json", "data": {"é": [1]}},
    ]
    said = [{"type": "refusal", "refusal": "no"}]
    turns = [{"role": "user", "content": content}, {"role": "assistant", "content": said}]
    app = new_app(engine)
    assert ask(app, "/v1/decisions", model="m", input=turns, questions=[asked]).status == 200
    text = 'user: seen\n{\n  "é": [\n    1\n  ]\n}\nassistant: no'
    prefix, engine.scored = engine.scored[0].prefix, []
    assert ask(app, "/v1/decide", state=text, question="?", options=["a", "b"]).status == 200
    assert engine.scored[0].prefix == prefix
