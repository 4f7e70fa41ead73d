"""Only a template speaks in control tokens: what users type stays text."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from strata_cli.engine.model.chat_prompt import ChatPrompt, encode_chat
from strata_cli.engine.model.chat_template import ChatTemplate
from strata_cli.engine.model.tokenizer import Tokenizer
from strata_cli.engine.model.vocabulary import TokenType
from strata_cli.errors import InputError
from tests.model.vocabularies import SPECIALS, small_metadata

# Trims, joins pieces and looks into earlier replies, as real templates do.
SOURCE = """\
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' }}
    {%- if m.content is string %}
        {%- if m.role == 'assistant' and '</think>' in m.content %}
            {{- m.content.split('</think>')[-1].lstrip('\\n') }}
        {%- else %}
            {{- m.content }}
        {%- endif %}
    {%- else %}
        {%- for part in m.content %}{{ part.text | trim }}{% endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

PIECES = st.lists(
    st.sampled_from(["<", "|", "<|", "im_end", "|>", "<|im_", "end|>", "<|image_pad|>", " ", ">"])
    | st.text(max_size=2)
).map("".join)


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_metadata(small_metadata())


@functools.cache
def template() -> ChatTemplate:
    return ChatTemplate(SOURCE)


def prompt(messages: Sequence[dict[str, Any]], **more: Any) -> ChatPrompt:
    return encode_chat(template(), tokenizer(), messages, **more)


def controls(ids: list[int]) -> list[str]:
    return [tokenizer().token_text(i) for i in ids if tokenizer().is_control(i)]


@given(contents=st.lists(PIECES, max_size=4))
def test_the_control_tokens_are_the_templates_own(contents: list[str]) -> None:
    messages = [{"role": "user", "content": text} for text in contents]
    result = prompt(messages)
    assert controls(result.ids) == ["<|im_start|>", "<|im_end|>"] * len(contents) + ["<|im_start|>"]
    assert result.text == template().render(messages)
    assert tokenizer().decode(result.ids) == result.text


@given(parts=st.lists(PIECES, max_size=5))
@example(parts=["<", "|im_end|>"])
@example(parts=["< \n", "|im_end|>"])
@example(parts=["<|im_ ", "end|>"])
@example(parts=["<", "|", "im_end", "|>"])
def test_no_control_token_forms_across_joined_and_trimmed_texts(parts: list[str]) -> None:
    result = prompt([{"role": "user", "content": [{"text": part} for part in parts]}])
    assert controls(result.ids) == ["<|im_start|>", "<|im_end|>", "<|im_start|>"]


@given(text=st.text(st.characters(exclude_characters="<", exclude_categories=["Cs"])))
def test_text_without_control_tokens_reads_as_if_encoded_in_one(text: str) -> None:
    result = prompt([{"role": "user", "content": text}])
    assert result.ids == tokenizer().encode(result.text, parse_special=True)


def test_a_typed_image_token_is_plain_text() -> None:
    result = prompt([{"role": "user", "content": "see <|image_pad|>"}])
    assert tokenizer().special_ids["<|image_pad|>"] not in result.ids
    assert "see <|image_pad|><|im_end|>" in result.text


def test_user_defined_tokens_are_part_of_the_text() -> None:
    result = prompt([{"role": "user", "content": "<think>h</think>"}])
    assert tokenizer().special_ids["<think>"] in result.ids


def test_a_user_defined_token_that_looks_like_control_is_shielded() -> None:
    specials = {**SPECIALS, "<|image_pad|>": TokenType.USER_DEFINED}
    mistyped = Tokenizer.from_metadata(small_metadata(specials=specials))
    result = encode_chat(template(), mistyped, [{"role": "user", "content": "<|image_pad|>"}])
    assert mistyped.special_ids["<|image_pad|>"] not in result.ids


def test_the_template_still_finds_what_it_looks_for() -> None:
    reply = "<think>\nwhy <|im_end|>\n</think>\n\nhello"
    result = prompt([{"role": "assistant", "content": reply}], add_generation_prompt=False)
    assert result.text == "<|im_start|>assistant\nhello<|im_end|>\n"


def test_tools_and_their_keys_are_shielded() -> None:
    tools = [{"name": "<|im_end|>", "parameters": {"<|im_start|>": ["<|", "im_end|>"]}}]
    result = prompt([], tools=tools)
    assert controls(result.ids) == ["<|im_start|>"]
    assert '{"name": "<|im_end|>", "parameters": {"<|im_start|>": ["<|", "im_end|>"]}}' in (
        result.text
    )


def test_private_use_characters_of_the_user_survive() -> None:
    content = "\U0010fffd<|im_end|>\U0010fffc"
    result = prompt([{"role": "user", "content": content}])
    assert content in result.text
    assert tokenizer().decode(result.ids) == result.text


def test_a_control_token_of_one_character_is_shielded_everywhere() -> None:
    specials = {**SPECIALS, "€": TokenType.CONTROL}
    own = Tokenizer.from_metadata(small_metadata(specials=specials))
    result = encode_chat(template(), own, [{"role": "user", "content": "a€b"}])
    assert own.special_ids["€"] not in result.ids
    assert "a€b" in result.text


def test_a_bos_is_the_templates_business() -> None:
    own = Tokenizer.from_metadata(small_metadata({"bos_token_id": 261, "add_bos_token": True}))
    result = encode_chat(template(), own, [{"role": "user", "content": "h"}])
    assert result.ids[0] == own.special_ids["<|im_start|>"]


def nested(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ("text", "found str where an object was expected"),
        ({"content": b"x"}, "found a value of type bytes"),
        ({"content": nested(200)}, "nested more than 100 deep"),
        ({"content": nested(100_000)}, "nested more than 100 deep"),
    ],
)
def test_messages_that_are_not_json_are_refused(message: Any, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        prompt([message])


@given(PIECES)
@example("The answer is <|im_")
def test_an_unfinished_turn_is_gone_on_with(text: str) -> None:
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": text}]
    result = prompt(messages, continues=True)
    assert result.text == f"<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n{text}"
    assert controls(result.ids) == ["<|im_start|>", "<|im_end|>", "<|im_start|>"]
    assert tokenizer().decode(result.ids) == result.text


def test_an_unfinished_turn_of_parts_ends_with_its_last_part() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    result = prompt([{"role": "assistant", "content": parts}], continues=True)
    assert result.text == "<|im_start|>assistant\nonetwo"


@pytest.mark.parametrize("content", [None, [], [{"type": "image"}]])
def test_a_turn_without_text_cannot_be_gone_on_with(content: object) -> None:
    with pytest.raises(InputError, match="no text to go on with"):
        prompt([{"role": "assistant", "content": content}], continues=True)


def test_a_template_that_drops_the_end_of_a_turn_cannot_go_on_with_it() -> None:
    with (
        ChatTemplate("{{ messages[0].role }}") as silent,
        pytest.raises(InputError, match="leaves out the end"),
    ):
        encode_chat(silent, tokenizer(), [{"role": "assistant", "content": "a"}], continues=True)
