"""Chat templates: the reference texts, what templates expect to find, and hostile ones stopped."""

from __future__ import annotations

import gc
import json
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from strata_cli.engine.model.chat_template import ChatTemplate
from strata_cli.engine.model.gguf import open_gguf
from strata_cli.engine.model.template_process import RenderLimits
from strata_cli.errors import InputError, ModelError
from tests.model.oracle import MODELS, ORACLE
from tests.model.vocabularies import small_metadata

HELLO = [{"role": "user", "content": "Hello"}]
TIGHT = RenderLimits(cpu_seconds=0.25, max_chars=100_000, memory_bytes=128 << 20)


def render(source: str, **variables: Any) -> str:
    with ChatTemplate(source) as template:
        return template.render(variables.pop("messages", HELLO), **variables)


@pytest.fixture
def echo() -> Iterator[ChatTemplate]:
    """Writes the contents; obeys 'loop' and 'refuse'."""
    source = (
        "{% for message in messages %}"
        "{% if message.content == 'loop' %}"
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
        "{% elif message.content == 'refuse' %}{{ raise_exception('not that') }}"
        "{% endif %}{{ message.content }}{% endfor %}"
    )
    with ChatTemplate(source, limits=TIGHT) as template:
        yield template


@pytest.mark.parametrize("model", ["tinyA-q8_0", "mixB-quant"])
def test_reference_chats_are_reproduced(model: str) -> None:
    chat = json.loads((ORACLE / f"{model[:5].rstrip('-')}-tokenizer.json").read_text())["chat"]
    with open_gguf(MODELS[model]) as file:
        template = ChatTemplate.from_metadata(file.metadata)
    assert template is not None
    with template:
        messages = chat["messages"]
        assert template.render(messages) == chat["thinking"]
        assert template.render(messages, enable_thinking=True) == chat["thinking"]
        assert template.render(messages, enable_thinking=False) == chat["no_thinking"]
        bare = template.render(messages, add_generation_prompt=False)
        assert bare == chat["no_generation_prompt"]


@pytest.mark.parametrize("changes", [{}, {"tokenizer.chat_template": ""}])
def test_a_model_without_a_template_has_none(changes: dict[str, Any]) -> None:
    assert ChatTemplate.from_metadata({**small_metadata(), **changes}) is None


def test_special_tokens_are_variables_of_the_template() -> None:
    metadata = small_metadata({"bos_token_id": 261, "eos_token_id": 263})
    metadata["tokenizer.chat_template"] = "{{ bos_token }}{{ eos_token }}{{ pad_token }}."
    template = ChatTemplate.from_metadata(metadata)
    assert template is not None
    with template:
        assert template.render(HELLO) == "<|endoftext|><|im_end|>."


def test_templates_find_what_they_expect() -> None:
    source = (
        "{%- set ns = namespace(last='') %}\n"
        "{%- for m in messages %}\n"
        "    {%- if loop.index0 == 2 %}{% break %}{% endif %}\n"
        "    {%- set ns.last = m.content | trim %}\n"
        "{%- endfor %}\n"
        "{{- ns.last }}|{{ tools | tojson }}|{{ strftime_now('%Y') | length }}|"
        "{% generation %}{{ name is defined }}{% endgeneration %}"
    )
    messages = [{"role": "user", "content": f" {i} "} for i in range(5)]
    tools = [{"type": "function", "function": {"name": "f<é>'", "n": 1}}]
    text = render(source, messages=messages, tools=tools)
    expected = '1|[{"type": "function", "function": {"name": "f<é>\'", "n": 1}}]|4|False'
    assert text == expected


def test_blocks_leave_no_blank_lines() -> None:
    assert render("a\n  {% if true %}\nb\n  {% endif %}\nc\n") == "a\nb\nc"


def test_characters_pass_through_unchanged() -> None:
    text = "\u2028\x85\n\r\t\0 é🙂\ud83d"
    assert render("{{ messages[0].content }}", messages=[{"content": text}]) == text


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{% macro f() %}{{ raise_exception('roles must alternate') }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_refusal_carries_the_words_of_the_template(source: str) -> None:
    with pytest.raises(InputError, match="does not take these messages: roles must alternate"):
        render(source)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("\n{{ messages[7].content.x }}", "line 2: UndefinedError"),
        ("{{ 'a' + messages }}", "line 1: TypeError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% include '/etc/passwd' %}", "TypeError: no loader"),
    ],
)
def test_a_failure_says_where_and_why(source: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        render(source)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("a\n{% for %}", "cannot be read: line 2"),
        ("{{ 1 | nope }}", "No filter named 'nope'"),
        ("{{ " + "(" * 5000 + ")" * 5000 + " }}", "cannot be read: .*nested too deeply"),
    ],
)
def test_a_broken_template_is_the_models_fault(source: str, message: str) -> None:
    template = ChatTemplate(source)
    template.start()
    for _ in range(2):
        with pytest.raises(ModelError, match=message) as caught:
            template.render(HELLO)
        assert caught.value.hint
    template.close()


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{{ messages | map(attribute='__class__') | list }}",
    ],
)
def test_a_template_cannot_reach_out_of_its_sandbox(source: str) -> None:
    with pytest.raises(ModelError, match="forbidden: line 1: access to attribute"):
        render(source)


HOSTILE = {
    "loop without end": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
    "{% endfor %}",
    "large range": "{% for i in range(10**9) %}{% endfor %}",
    "text without end": "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
    "hidden text": "{% set t %}{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}{% endset %}",
    "large text": "{{ 'a' * (messages | length * 10**10) }}",
    "large constant": "{{ 'a' * 10**10 }}",
    "large list": "{{ (range(99999) | list * 10000) | length }}",
    "large number": "{{ (9 + messages | length) ** (10**9) > 1 }}",
    "padding": "{{ 'a' | center(10**10) }}",
    "format": "{{ '%1000000000d' | format(1) }}",
    "batch": "{{ [1] | batch(10**10, 'x') | list }}",
    "indent": "{{ messages | tojson(indent=10**9) }}",
    "doubling": "{% set ns = namespace(s='x') %}{% for i in range(99) %}"
    "{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "many calls": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_stopped(name: str) -> None:
    began = time.process_time()
    with (
        ChatTemplate(HOSTILE[name], limits=TIGHT) as template,
        pytest.raises(ModelError, match="was stopped") as caught,
    ):
        template.render(HELLO)
    assert caught.value.hint
    assert time.process_time() - began < 1  # nothing of it runs in this process


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux bounds an address space")
def test_memory_is_bounded_below_what_the_machine_has() -> None:
    source = "{{ ('a' * (messages | length * 2**27)) | length }}"
    with ChatTemplate(source) as template:
        assert template.render(HELLO) == str(2**27)
    with (
        ChatTemplate(source, limits=TIGHT) as template,
        pytest.raises(ModelError, match="was stopped: line 1: it needs too much memory"),
    ):
        template.render(HELLO)


def test_a_process_that_only_waits_is_ended() -> None:
    limits = RenderLimits(cpu_seconds=60, wall_seconds=0.2)
    with (
        ChatTemplate(HOSTILE["loop without end"], limits=limits) as template,
        pytest.raises(ModelError, match=r"ended after 0\.2 s"),
    ):
        template.render(HELLO)


def test_a_template_too_long_is_not_tried() -> None:
    with pytest.raises(ModelError, match="1048577 characters long; at most 1048576"):
        ChatTemplate("x" * (2**20 + 1))


def test_a_template_that_is_no_text_is_refused() -> None:
    with pytest.raises(ModelError, match="must be a string, not int"):
        ChatTemplate.from_metadata({"tokenizer.chat_template": 3})


@pytest.mark.parametrize("content", [b"bytes", {1, 2}, object()])
def test_messages_that_are_not_json_are_refused(content: object) -> None:
    with pytest.raises(InputError, match="not plain JSON values"):
        render("x", messages=[{"content": content}])


def test_a_process_serves_many_renderings_and_is_replaced_after_a_bad_one(
    echo: ChatTemplate,
) -> None:
    for content in ("one", "refuse", "two", "loop", "three", "x" * 100_001, "four"):
        messages = [{"role": "user", "content": content}]
        if content == "refuse":
            with pytest.raises(InputError):
                echo.render(messages)
        elif content == "loop" or len(content) > 100_000:
            with pytest.raises(ModelError):
                echo.render(messages)
        else:
            assert echo.render(messages) == content


def test_a_process_that_died_idle_is_replaced(echo: ChatTemplate) -> None:
    assert echo.render(HELLO) == "Hello"
    assert echo._worker is not None
    echo._worker._process.kill()
    echo._worker._process.wait()
    assert echo.render(HELLO) == "Hello"


def test_starting_and_closing_twice_is_safe(echo: ChatTemplate) -> None:
    echo.start()
    echo.start()
    assert echo.render(HELLO) == "Hello"
    echo.close()
    echo.close()
    assert echo.render(HELLO) == "Hello"


def test_an_interrupted_rendering_leaves_no_answer_behind(
    echo: ChatTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    echo.render(HELLO)
    worker = echo._worker
    assert worker is not None

    def interrupt(line: str) -> dict[str, str]:
        worker._send(line)
        raise KeyboardInterrupt

    monkeypatch.setattr(worker, "ask", interrupt)
    with pytest.raises(KeyboardInterrupt):
        echo.render([{"content": "stale"}])
    assert echo.render(HELLO) == "Hello"


def test_threads_get_their_own_texts(echo: ChatTemplate) -> None:
    texts: dict[int, list[str]] = {}

    def work(number: int) -> None:
        texts[number] = [echo.render([{"content": f"{number}.{i}"}]) for i in range(20)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {number: [f"{number}.{i}" for i in range(20)] for number in range(4)}


def test_the_process_goes_with_the_template() -> None:
    template = ChatTemplate("x")
    template.start()
    assert template._worker is not None
    process = template._worker._process
    del template
    gc.collect()
    assert process.poll() is not None
