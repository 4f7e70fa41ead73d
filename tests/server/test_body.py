"""Bodies: JSON, of limited size, in limited time; every field checked."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_cli.server.limits import Limits
from strata_cli.server.schemas import REFUSED
from tests.server.asgi import JSON, Answer, ask, call, post
from tests.server.fake_engine import FakeEngine, new_app

SMALL = Limits(max_body_bytes=1000, body_timeout_s=0.05, max_prompts=3, max_messages=2)
USER = {"role": "user", "content": "hello"}


def send(body: bytes | list[bytes], *, hangs: bool = False, **headers: str) -> Answer:
    app = new_app(FakeEngine([1]), limits=SMALL)
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return asyncio.run(
        call(app, "POST", "/v1/completions", body, headers={**JSON, **names}, hangs=hangs)
    )


def test_a_body_that_says_it_is_too_large_is_not_read() -> None:
    answer = send(b"", content_length="1001", hangs=True)
    assert answer.status == 413
    assert answer.error["type"] == "request_too_large"
    assert answer.headers["connection"] == "close"


def test_a_body_that_grows_too_large_is_not_read_on() -> None:
    assert send([b" " * 600, b" " * 600, b"never read"]).status == 413


def test_half_a_body_is_waited_for_and_then_given_up() -> None:
    answer = send(b'{"prompt": ', hangs=True)
    assert answer.status == 408
    assert answer.headers["x-should-retry"] == "false"


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b'{"prompt": NaN}', b"\xff\xfe", b"[" * 900, b'{"prompt": "\xed\xa0\x80"}', b"1 2"],
)
def test_what_is_no_json_is_a_bad_request(body: bytes) -> None:
    answer = send(body)
    assert (answer.status, answer.error["code"]) == (400, "invalid_json")


NEEDED = {
    "/v1/completions": "prompt",
    "/v1/chat/completions": "messages",
    "/v1/systemone": "state and questions",
    "/v1/decisions": "model, input and questions",
    "/v1/decide": "question and state, or items",
    "/tokenize": "prompt or messages",
    "/detokenize": "tokens",
}


@pytest.mark.parametrize("body", [b"", b"\n", b"[]"])
@pytest.mark.parametrize("path", NEEDED)
def test_a_body_without_fields_is_told_which_are_needed(path: str, body: bytes) -> None:
    answer = asyncio.run(call(new_app(FakeEngine()), "POST", path, body, headers=JSON))
    assert answer.status == (422 if path == "/v1/systemone" else 400)
    assert f"be a JSON object with {NEEDED[path]}" in str(answer.json["error"])


@pytest.mark.parametrize("path", ["completions", "chat/completions", "decide", "decisions"])
def test_a_key_that_is_there_twice_is_a_bad_request(path: str) -> None:
    body = b'{"state": "x", "more": [{"a": 1, "a": 1}]}'
    answer = asyncio.run(call(new_app(FakeEngine()), "POST", f"/v1/{path}", body, headers=JSON))
    assert answer.status == 400
    assert "the key 'a' is there twice" in str(answer.json["error"])


@pytest.mark.parametrize("body", [b"[]", b"null", b'"text"', b"17"])
def test_what_is_no_object_is_a_bad_request(body: bytes) -> None:
    assert send(body).status == 400


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, None),
        ({"prompt": 5}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [[1, -1]]}, "prompt[0][1]"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": ["a"] * 4}, "prompt"),
        ({"prompt": "a", "max_tokens": "5"}, "max_tokens"),
        ({"prompt": "a", "max_tokens": -2}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 64}, "max_tokens"),
        ({"prompt": "a", "temperature": -0.1}, "temperature"),
        ({"prompt": "a", "top_p": 1.5}, "top_p"),
        ({"prompt": "a", "n": 0}, "n"),
        ({"prompt": "a", "n": 65}, "n"),
        ({"prompt": "a", "best_of": 2}, "best_of"),
        ({"prompt": "a", "logprobs": 257}, "logprobs"),
        ({"prompt": "a", "logprobs": True}, "logprobs"),
        ({"prompt": "a", "stop": ""}, "stop"),
        ({"prompt": "a", "stop": ["x"] * 17}, "stop"),
        ({"prompt": "a", "stream": 1}, "stream"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": "a", "allowed_token_ids": []}, "allowed_token_ids"),
        ({"prompt": "a", "logprob_token_ids": [1]}, "logprob_token_ids"),
        ({"prompt": "a", "seed": 1.5}, "seed"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], param: str | None) -> None:
    answer = ask(new_app(FakeEngine([1]), limits=SMALL), "/v1/completions", **fields)
    assert answer.status == 400
    assert answer.error["type"] == "invalid_request_error"
    assert answer.error["param"] == param


@pytest.mark.parametrize(
    "fields", [{"prompt": [267]}, {"prompt": "a", "allowed_token_ids": [1, 267]}]
)
def test_an_id_outside_the_vocabulary_is_a_bad_request(fields: dict[str, Any]) -> None:
    answer = ask(new_app(FakeEngine([1])), "/v1/completions", **fields)
    assert answer.status == 400
    assert "token id 267 is out of range" in answer.error["message"]


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_fields_that_would_change_the_answer_are_refused_unless_they_ask_for_nothing(
    name: str,
) -> None:
    app = new_app(FakeEngine([1]))
    answer = ask(app, "/v1/completions", prompt="a", **{name: {"some": "wish"}})
    assert (answer.status, answer.error["param"]) == (400, name)
    assert answer.error["code"] == "unsupported_parameter"
    for value in (None, *REFUSED[name].neutral):
        assert ask(app, "/v1/completions", prompt="a", **{name: value}).status == 200


def test_other_fields_are_ignored_and_named() -> None:
    app = new_app(FakeEngine([1]))
    fields = {"user": "me", "x\r\ny": 1, "prompt_cache_key": "k"}
    answer = ask(app, "/v1/completions", prompt="a", **fields)
    assert answer.status == 200
    assert answer.headers["x-strata-ignored"] == "user, ?, prompt_cache_key"


def test_a_prompt_that_does_not_fit_is_refused_with_both_numbers() -> None:
    answer = ask(new_app(FakeEngine([1])), "/v1/completions", prompt=[1] * 65)
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
    assert "65 prompt tokens and 16 tokens to generate" in answer.error["message"]
    assert "context of 64 tokens" in answer.error["message"]


def test_too_many_messages_are_refused() -> None:
    app = new_app(FakeEngine([1]), limits=SMALL)
    assert ask(app, "/v1/chat/completions", messages=[USER] * 3).status == 400


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 300)
    | st.floats(allow_nan=False)
    | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=4,
)
NAMES = ["max_tokens", "temperature", "top_k", "seed", "stop", "n", "logprobs", "echo", "stream"]
NAMES += ["allowed_token_ids", "stream_options", "strata_deterministic", "model", "top_logprobs"]


@given(
    prompt=JSON_VALUES | st.just("hello"),
    fields=st.dictionaries(st.sampled_from(NAMES), JSON_VALUES, max_size=3),
)
def test_whatever_comes_is_answered_or_refused_by_name(prompt: Any, fields: dict[str, Any]) -> None:
    service_app = _shared_app()

    async def both() -> list[Answer]:
        chat = {"messages": [{"role": "user", "content": prompt}], **fields}
        return [
            await post(service_app, "/v1/completions", {"prompt": prompt, **fields}),
            await post(service_app, "/v1/chat/completions", chat),
        ]

    for answer in asyncio.run(both()):
        assert answer.status in (200, 400)
        assert answer.status == 200 or answer.error["message"]


def _shared_app() -> Any:
    if not _SHARED:
        _SHARED.append(new_app(FakeEngine([1, 2, 3], ends=263)))
    return _SHARED[0]


_SHARED: list[Any] = []
