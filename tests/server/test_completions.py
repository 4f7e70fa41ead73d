"""/v1/completions: prompts in every form, choices, echo, log-probabilities, streams."""

from __future__ import annotations

from typing import Any

import pytest

from strata_cli.engine.decode.sampling import Sampler
from strata_cli.server.asking import SamplingDefaults
from tests.server.asgi import Answer, ask
from tests.server.fake_engine import FakeEngine, new_app, tokenizer

HELLO = tokenizer().encode("hello", parse_special=False)
WORLD = tokenizer().encode(" wörld", parse_special=False)  # the ö is two tokens


def complete(engine: FakeEngine, **fields: Any) -> Answer:
    answer = ask(new_app(engine), "/v1/completions", **{"prompt": "hello", **fields})
    assert answer.status == 200, answer.body
    return answer


def choice(engine: FakeEngine, **fields: Any) -> Any:
    (only,) = complete(engine, **fields).json["choices"]
    return only


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("hello", [HELLO]),
        (["hello", "lo"], [HELLO, tokenizer().encode("lo", parse_special=False)]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        (["hello", [7]], [HELLO, [7]]),
        ("<|im_start|>a", [[262, *tokenizer().encode("a", parse_special=False)]]),
    ],
)
def test_prompts_are_texts_or_ids_or_lists_of_either(prompt: Any, prompts: list[list[int]]) -> None:
    engine = FakeEngine(WORLD)
    body = complete(engine, prompt=prompt).json
    assert [list(job.prompt) for job in engine.asked] == prompts
    assert [item["index"] for item in body["choices"]] == list(range(len(prompts)))
    assert {item["text"] for item in body["choices"]} == {" wörld"}
    assert body["usage"]["prompt_tokens"] == sum(map(len, prompts))
    assert body["usage"]["completion_tokens"] == len(WORLD) * len(prompts)
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == len(prompts)
    assert (body["object"], body["model"]) == ("text_completion", "small")


def test_choices_of_one_prompt_count_their_seeds_up() -> None:
    engine = FakeEngine(WORLD)
    body = complete(engine, prompt=["hello", "lo"], n=2, seed=-1, temperature=0.5).json
    assert [job.sampling.seed for job in engine.asked] == [2**64 - 1, 0, 2**64 - 1, 0]
    assert len({tuple(job.prompt) for job in engine.asked}) == 2
    assert [item["index"] for item in body["choices"]] == [0, 1, 2, 3]
    assert body["usage"]["prompt_tokens"] == len(HELLO) + 2
    assert body["strata"]["seed"] == 2**64 - 1


def test_a_request_without_a_seed_says_which_one_it_got() -> None:
    engine = FakeEngine(WORLD)
    seeds = [complete(engine).json["strata"]["seed"] for _ in range(2)]
    assert [job.sampling.seed for job in engine.asked] == seeds
    assert seeds[0] != seeds[1]


def test_sampling_fields_reach_the_engine_and_defaults_fill_in() -> None:
    engine = FakeEngine(WORLD)
    fields: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3}
    fields |= {"presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.5}
    complete(engine, **fields, penalty_last_n=7, ignore_eos=True, stop_token_ids=[4, 4])
    assert engine.asked[0].sampling == Sampler(**fields, penalty_last_n=7)
    assert (engine.asked[0].ignore_eos, engine.asked[0].stop_ids) == (True, (4,))
    app = new_app(engine, defaults=SamplingDefaults(temperature=0.3, top_k=9, seed=8))
    assert ask(app, "/v1/completions", prompt="hello", top_k=2).status == 200
    assert engine.asked[1].sampling == Sampler(temperature=0.3, top_k=2, seed=8)


@pytest.mark.parametrize(
    ("wanted", "max_tokens", "finish"), [(None, 16, "length"), (2, 2, "length"), (-1, 63, "stop")]
)
def test_the_answer_is_as_long_as_asked(wanted: int | None, max_tokens: int, finish: str) -> None:
    engine = FakeEngine(WORLD[:1] * 20, ends=263)
    item = choice(engine, max_tokens=wanted)
    assert engine.asked[0].max_tokens == max_tokens
    assert item["finish_reason"] == finish
    assert item["text"] == tokenizer().decode(WORLD[:1]) * min(20, max_tokens)


def test_values_of_any_logprobs_are_the_engines_and_the_chosen_token_is_among_them() -> None:
    logprobs = choice(FakeEngine(WORLD), logprobs=2)["logprobs"]
    assert logprobs["tokens"] == [" ", "w", "bytes:\\xc3", "bytes:\\xb6", "r", "l", "d"]
    assert logprobs["token_logprobs"] == [-0.25] * 7
    assert logprobs["top_logprobs"][1] == {"w": -0.25, "a": -1.0, "b": -2.0}
    assert logprobs["text_offset"] == [0, 1, 2, 2, 3, 4, 5]


def test_no_logprobs_are_null_and_zero_logprobs_are_the_chosen_ones_alone() -> None:
    assert choice(FakeEngine(WORLD))["logprobs"] is None
    logprobs = choice(FakeEngine(WORLD), logprobs=0)["logprobs"]
    assert logprobs["token_logprobs"] == [-0.25] * 7
    assert logprobs["top_logprobs"] == [{}] * 7


@pytest.mark.parametrize("top", [0, 1, 256])
def test_allowed_tokens_are_reported_all_and_alone(top: int) -> None:
    engine = FakeEngine([40])
    logprobs = choice(engine, logprobs=top, allowed_token_ids=[41, 40, 41], max_tokens=1)[
        "logprobs"
    ]
    assert engine.asked[0].allowed_ids == (41, 40)
    (table,) = logprobs["top_logprobs"]
    assert set(table) == {"(", ")"}
    assert table[")"] == -2.0


def test_named_tokens_are_reported_besides_the_likeliest() -> None:
    engine = FakeEngine([40])
    logprobs = choice(engine, logprobs=2, logprob_token_ids=[70], max_tokens=1)["logprobs"]
    assert logprobs["top_logprobs"] == [{"(": -0.25, "a": -1.0, "b": -2.0, "F": -2.0}]


def test_tokens_may_be_written_as_ids() -> None:
    logprobs = choice(
        FakeEngine(WORLD[2:3]), logprobs=1, return_tokens_as_token_ids=True, max_tokens=1
    )["logprobs"]
    token = f"token_id:{WORLD[2]}"
    assert logprobs["tokens"] == [token]
    assert logprobs["top_logprobs"] == [{token: -0.25, "token_id:97": -1.0}]


def test_a_token_that_ends_the_answer_has_logprobs_and_no_text() -> None:
    item = choice(FakeEngine([], ends=263), logprobs=1, max_tokens=1)
    assert (item["text"], item["finish_reason"]) == ("", "stop")
    assert item["logprobs"]["tokens"] == ["<|im_end|>"]
    assert item["logprobs"]["text_offset"] == [0]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 2])
def test_echo_puts_the_prompt_in_front_with_its_logprobs(max_tokens: int, stream: bool) -> None:
    engine = FakeEngine(WORLD)
    fields = {"echo": True, "logprobs": 1, "max_tokens": max_tokens, "prompt": "helló"}
    if stream:
        events = complete(engine, **fields, stream=True).events
        parts = [event["choices"][0] for event in events]
        text = "".join(part["text"] for part in parts)
        logprobs = {
            name: [item for part in parts for item in part["logprobs"][name]]
            for name in parts[0]["logprobs"]
        }
    else:
        item = choice(engine, **fields)
        text, logprobs = item["text"], item["logprobs"]
    assert engine.asked[0].prompt_logprobs == 1
    assert text == "helló" + " w"[:max_tokens]
    num = 3 + max_tokens
    assert logprobs["tokens"] == ["hell", "bytes:\\xc3", "bytes:\\xb3", " ", "w"][:num]
    assert logprobs["token_logprobs"] == [None, -0.5, -0.5, -0.25, -0.25][:num]
    assert logprobs["text_offset"] == [0, 4, 4, 5, 6][:num]
    assert logprobs["top_logprobs"][:2] == [None, {"bytes:\\xc3": -0.5, "a": -1.0}]


def test_more_logprobs_of_prompts_than_fit_an_answer_are_refused() -> None:
    fields = {"echo": True, "max_tokens": 0, "logprobs": 256, "n": 2}
    engine = FakeEngine(WORLD)
    most = (1 << 18) // 257 // 2 // 50
    many = [[1] * 50] * (most + 1)
    answer = ask(new_app(engine), "/v1/completions", **fields, prompt=many)
    assert (answer.status, answer.error["param"]) == (400, "logprobs")
    assert f"{(most + 1) * 100} prompt tokens with 256 logprobs" in answer.error["message"]
    assert not engine.asked
    ask(new_app(engine), "/v1/completions", **fields, prompt=many[1:])
    assert engine.asked


def test_echo_without_logprobs_asks_for_none() -> None:
    engine = FakeEngine(WORLD)
    item = choice(engine, echo=True, max_tokens=1)
    assert (item["text"], item["logprobs"]) == ("hello ", None)
    assert engine.asked[0].prompt_logprobs is None


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_answer_and_stops_the_engine(stream: bool, keeps: bool) -> None:
    engine = FakeEngine(WORLD)
    fields = {"stop": ["ld", "rl"], "logprobs": 0, "include_stop_str_in_output": keeps}
    answer = complete(engine, **fields, stream=stream)
    items = [event["choices"][0] for event in answer.events] if stream else answer.json["choices"]
    assert "".join(item["text"] for item in items) == (" wörl" if keeps else " wö")
    assert items[-1]["finish_reason"] == "stop"
    tokens = [token for item in items for token in item["logprobs"]["tokens"]]
    assert tokens == [" ", "w", "bytes:\\xc3", "bytes:\\xb6", *("rl" if keeps else "")]
    assert engine.stopped == engine.asked


def test_a_stop_string_with_the_last_token_stops_nothing() -> None:
    engine = FakeEngine(WORLD)
    item = choice(engine, stop="w", max_tokens=2)
    assert (item["text"], item["finish_reason"]) == (" ", "stop")
    assert engine.stopped == []


@pytest.mark.parametrize(
    ("value", "canonical"),
    [(True, True), (False, False), (None, None), ("yes", None), (1, None), ({}, None)],
)
def test_canonical_reads_are_forced_by_booleans_alone(value: Any, canonical: bool | None) -> None:
    engine = FakeEngine(WORLD)
    complete(engine, strata_deterministic=value)
    assert engine.asked[0].canonical is canonical


def test_an_answer_says_whether_it_was_canonical() -> None:
    assert complete(FakeEngine(WORLD), logprobs=1, max_tokens=1).json["strata"]["canonical"] is True
    assert (
        complete(FakeEngine(WORLD), logprobs=1, max_tokens=2).json["strata"]["canonical"] is False
    )
    stopped = complete(FakeEngine(WORLD), stop="w", strata_deterministic=True).json
    assert stopped["strata"]["canonical"] is True


def test_a_stream_has_the_text_of_the_whole_and_its_usage_on_request() -> None:
    whole = complete(FakeEngine(WORLD), n=2, seed=1).json
    fields = {"n": 2, "seed": 1, "stream": True}
    events = complete(FakeEngine(WORLD), **fields, stream_options={"include_usage": True}).events
    *chunks, last = events
    for index in range(2):
        parts = [e["choices"][0] for e in chunks if e["choices"][0]["index"] == index]
        assert "".join(part["text"] for part in parts) == whole["choices"][index]["text"]
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == ["length"]
    assert all(chunk["usage"] is None for chunk in chunks)
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    assert [("timings" in chunk) for chunk in chunks[-2:]] == [False, True]
    assert {event["id"] for event in events} == {events[0]["id"]}
    plain = complete(FakeEngine(WORLD), **fields).events
    assert all(len(event["choices"]) == 1 and "usage" not in event for event in plain)


def test_every_answer_has_timings() -> None:
    assert complete(FakeEngine(WORLD)).json["timings"] == {
        "cache_n": 1,
        "prompt_n": len(HELLO) - 1,
        "prompt_ms": 2.0,
        "predicted_n": 7,
        "predicted_ms": 3.0,
    }
