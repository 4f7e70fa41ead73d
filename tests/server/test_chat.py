"""/v1/chat/completions: messages, thinking, continued turns, log-probabilities, streams."""

from __future__ import annotations

from typing import Any

import pytest

from strata_cli.engine.model.chat_template import ChatTemplate
from strata_cli.server.texts import ModelTexts
from tests.server.asgi import Answer, ask
from tests.server.fake_engine import FakeEngine, new_app, tokenizer

USER = {"role": "user", "content": "hello"}
WORLD = tokenizer().encode(" world", parse_special=False)
THINK = tokenizer().special_ids["<think>"]
CLOSE = tokenizer().special_ids["</think>"]
HM = tokenizer().encode("hm", parse_special=False)
LINE = tokenizer().encode("\n", parse_special=False)


def chat(engine: FakeEngine, *messages: Any, **fields: Any) -> Answer:
    body = {"messages": list(messages) or [USER], **fields}
    return ask(new_app(engine), "/v1/chat/completions", **body)


def message(engine: FakeEngine, *messages: Any, **fields: Any) -> Any:
    answer = chat(engine, *messages, **fields)
    assert answer.status == 200, answer.body
    return answer.json["choices"][0]["message"]


def prompt_of(engine: FakeEngine) -> str:
    return tokenizer().decode(engine.asked[-1].prompt)


def test_a_chat_is_read_as_the_template_writes_it() -> None:
    engine = FakeEngine(WORLD, ends=263)
    body = chat(engine, {"role": "system", "content": "Be kind."}, USER).json
    assert prompt_of(engine) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert engine.asked[0].max_tokens == 64 - len(engine.asked[0].prompt)
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": " world", "refusal": None}
    assert (choice["finish_reason"], choice["logprobs"]) == ("stop", None)
    assert body["object"] == "chat.completion"
    assert body["usage"]["completion_tokens"] == len(WORLD) + 1


def test_what_a_user_types_is_no_control_token() -> None:
    engine = FakeEngine(WORLD)
    message(engine, {"role": "user", "content": "<|im_end|>"}, max_tokens=1)
    assert sum(tokenizer().is_control(item) for item in engine.asked[0].prompt) == 3


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
        ([], ""),
        (None, ""),
    ],
)
def test_a_content_of_parts_is_one_text(content: Any, text: str) -> None:
    engine = FakeEngine(WORLD)
    message(engine, {"role": "developer", "content": content}, USER, max_tokens=1)
    assert prompt_of(engine).startswith(f"<|im_start|>system\n{text}<|im_end|>")


@pytest.mark.parametrize(
    ("bad", "param"),
    [
        ({"content": "a"}, "messages[0].role"),
        ({"role": "", "content": "a"}, "messages[0].role"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": ["a"]}, "messages[0].content[0]"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
            "messages[0].content[0]",
        ),
        ("text", "messages[0]"),
    ],
)
def test_a_wrong_message_is_named(bad: Any, param: str) -> None:
    answer = chat(FakeEngine(WORLD), bad)
    assert (answer.status, answer.error["param"]) == (400, param)


def test_a_last_turn_of_the_assistant_is_gone_on_with() -> None:
    engine = FakeEngine(WORLD)
    begun = {"role": "assistant", "content": "hello wor"}
    message(engine, USER, begun, max_tokens=1)
    assert prompt_of(engine).endswith("<|im_start|>assistant\nhello wor")
    message(engine, USER, {"role": "assistant", "content": ""}, max_tokens=1)
    assert prompt_of(engine).endswith("hello<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("fields", "thinks"),
    [
        ({}, False),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "high"}, True),
        ({"chat_template_kwargs": {"enable_thinking": True}}, True),
        ({"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low"}, False),
    ],
)
def test_thinking_is_off_unless_asked_for(fields: dict[str, Any], thinks: bool) -> None:
    engine = FakeEngine(WORLD)
    message(engine, max_tokens=1, **fields)
    assert prompt_of(engine).endswith("<think>\n") is thinks


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reply", [[*HM, CLOSE, *LINE, *LINE, *WORLD], [*HM, CLOSE, *WORLD]])
def test_a_thought_comes_apart_from_the_answer(reply: list[int], stream: bool) -> None:
    engine = FakeEngine(reply, ends=263)
    fields = {"reasoning_effort": "low", "logprobs": True, "stream": stream}
    answer = chat(engine, stop="hm", **fields)
    if stream:
        deltas = [event["choices"][0]["delta"] for event in answer.events]
        content = "".join(delta.get("content", "") for delta in deltas)
        reasoning = "".join(delta.get("reasoning_content", "") for delta in deltas)
    else:
        item = answer.json["choices"][0]
        content, reasoning = item["message"]["content"], item["message"]["reasoning_content"]
        tokens = [entry["token"] for entry in item["logprobs"]["content"]]
        assert "h" not in tokens
        assert "</think>" not in tokens
        details = answer.json["usage"]["completion_tokens_details"]
        assert details == {"reasoning_tokens": len(HM) + 1}
    assert (reasoning, content) == ("hm", " world")


def test_a_model_may_open_its_thought_itself_and_never_close_it() -> None:
    template = ChatTemplate("{{ messages[0].content }}{% if enable_thinking %}!{% endif %}")
    texts = ModelTexts("small", tokenizer(), template)
    fields = {"messages": [USER], "reasoning_effort": "low"}
    app = new_app(FakeEngine([THINK, *HM]), texts=texts)
    answer = ask(app, "/v1/chat/completions", **fields).json["choices"][0]
    assert answer["message"]["reasoning_content"] == "hm"
    assert answer["message"]["content"] == ""
    app = new_app(FakeEngine(WORLD), texts=texts)
    answer = ask(app, "/v1/chat/completions", **fields).json["choices"][0]
    assert answer["message"]["content"] == " world"
    assert "reasoning_content" not in answer["message"]
    template.close()


def test_an_effort_that_has_no_effect_is_refused_by_name() -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    app = new_app(FakeEngine(WORLD), texts=ModelTexts("small", tokenizer(), template))
    fields = {"messages": [USER], "max_tokens": 1}
    answer = ask(app, "/v1/chat/completions", **fields, reasoning_effort="high")
    assert (answer.status, answer.error["param"]) == (400, "reasoning_effort")
    assert "reasoning_effort" in answer.error["message"]
    assert ask(app, "/v1/chat/completions", **fields, reasoning_effort="none").status == 200
    template.close()


def test_variables_that_the_template_does_not_have_are_named() -> None:
    template = ChatTemplate("{{ messages[0].content }}{{ style }}")
    app = new_app(FakeEngine(WORLD), texts=ModelTexts("small", tokenizer(), template))
    variables = {"style": "x", "enable_thinking": False, "a b": 1}
    fields = {"messages": [USER], "max_tokens": 1}
    answer = ask(app, "/v1/chat/completions", **fields, chat_template_kwargs=variables, user="me")
    assert answer.status == 200
    named = "user, chat_template_kwargs.enable_thinking, ?"
    assert answer.headers["x-strata-ignored"] == named
    answer = ask(app, "/v1/chat/completions", **fields, chat_template_kwargs={"style": "x"})
    assert "x-strata-ignored" not in answer.headers
    template.close()


def test_a_model_without_a_template_takes_no_chat() -> None:
    app = new_app(FakeEngine(WORLD), texts=ModelTexts("small", tokenizer(), None))
    answer = ask(app, "/v1/chat/completions", messages=[USER])
    assert answer.status == 400
    assert "/v1/completions" in answer.error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 0}, "top_logprobs"),
        ({"logprobs": 5}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 257}, "top_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "assistant", "content": ""}]}, "messages"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], param: str) -> None:
    answer = chat(FakeEngine(WORLD), **fields)
    assert (answer.status, answer.error["param"]) == (400, param)


def test_logprobs_name_every_token_with_its_bytes() -> None:
    engine = FakeEngine(tokenizer().encode("é", parse_special=False), ends=263)
    answer = chat(engine, logprobs=True, top_logprobs=1)
    content = answer.json["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["bytes:\\xc3", "bytes:\\xa9", "<|im_end|>"]
    assert [entry["bytes"] for entry in content[:2]] == [[0xC3], [0xA9]]
    assert content[0]["logprob"] == -0.25
    assert content[0]["top_logprobs"] == [{"token": "a", "logprob": -1.0, "bytes": [97]}]


@pytest.mark.parametrize("top", [None, 0])
def test_allowed_tokens_are_reported_whatever_is_asked_for(top: int | None) -> None:
    fields = {"logprobs": True, "top_logprobs": top, "allowed_token_ids": [40, 41]}
    answer = chat(FakeEngine([40]), max_completion_tokens=1, **fields)
    (entry,) = answer.json["choices"][0]["logprobs"]["content"]
    assert [item["token"] for item in entry["top_logprobs"]] == ["(", ")"]
    assert answer.json["strata"]["canonical"] is True


def test_a_stream_begins_with_the_role_and_ends_with_the_reason() -> None:
    fields = {"stream": True, "logprobs": True, "n": 2}
    events = chat(FakeEngine(WORLD, ends=263), **fields).events
    for index in range(2):
        parts = [e["choices"][0] for e in events if e["choices"][0]["index"] == index]
        assert parts[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(part["delta"].get("content", "") for part in parts) == " world"
        assert (parts[-1]["delta"], parts[-1]["finish_reason"]) == ({}, "stop")
        entries = [e for part in parts if part["logprobs"] for e in part["logprobs"]["content"]]
        assert len(entries) == len(WORLD) + 1
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert "timings" in events[-1]
    assert "usage" not in events[-1]


def test_the_usage_of_a_stream_comes_last_on_request() -> None:
    fields = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = chat(FakeEngine(WORLD), **fields, max_tokens=2).events
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 2
