"""Text to ids and back: reference strings, whole characters, special tokens only when wanted."""

from __future__ import annotations

import functools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_cli.engine.model.gguf import open_gguf
from strata_cli.engine.model.tokenizer import StreamDecoder, Tokenizer
from strata_cli.engine.model.vocabulary import TokenType, byte_alphabet
from strata_cli.errors import InputError, ModelError
from tests.model.oracle import MODELS, ORACLE
from tests.model.vocabularies import SPECIALS, small_metadata

# Text out of what could go wrong: halves of special tokens, combining marks, spaces, line ends.
TEXTS = st.one_of(
    st.text(),
    st.lists(
        st.sampled_from(
            ["<|im_", "end|>", "<|im_end|>", "<think>", " ", "\n", "\r", "'s", "é", "🙂"]
        )
        | st.text(max_size=3)
    ).map("".join),
)


@functools.cache
def oracle_tokenizer(model: str) -> Tokenizer:
    with open_gguf(MODELS[model]) as file:
        return Tokenizer.from_metadata(file.metadata)


@functools.cache
def small() -> Tokenizer:
    return Tokenizer.from_metadata(small_metadata())


def reference(model: str) -> dict[str, Any]:
    stored: dict[str, Any] = json.loads(
        (ORACLE / f"{model[:5].rstrip('-')}-tokenizer.json").read_text()
    )
    return stored


@pytest.mark.parametrize("model", MODELS)
def test_reference_strings_give_the_reference_ids(model: str) -> None:
    cases = reference(model)["cases"]
    assert len(cases) >= 16
    for case in cases:
        assert oracle_tokenizer(model).encode(case["text"], parse_special=True) == case["ids"]


@pytest.mark.parametrize("model", MODELS)
def test_special_ids_are_the_reference_ids(model: str) -> None:
    special = reference(model)["special_ids"]
    tokenizer = oracle_tokenizer(model)
    assert tokenizer.special_ids == special
    assert tokenizer.eos_ids == {special["<|endoftext|>"], special["<|im_end|>"]}
    assert tokenizer.padding_id == special["<|endoftext|>"]


@pytest.mark.parametrize("parse_special", [True, False])
@pytest.mark.parametrize("model", ["tinyA-q8_0", "mixB-quant"])
@given(text=TEXTS)
def test_decoding_gives_back_every_text(model: str, parse_special: bool, text: str) -> None:
    tokenizer = oracle_tokenizer(model)
    assert tokenizer.decode(tokenizer.encode(text, parse_special=parse_special)) == text


@given(text=TEXTS)
def test_no_special_token_appears_unless_asked_for(text: str) -> None:
    ids = small().encode(text, parse_special=False)
    assert not set(ids) & set(small().special_ids.values())


@given(text=TEXTS)
def test_special_tokens_split_the_text_and_nothing_else_changes(text: str) -> None:
    tokenizer = small()
    pieces, expected = text.split("<|im_end|>"), []
    for index, piece in enumerate(pieces):
        expected += [tokenizer.special_ids["<|im_end|>"]] if index else []
        expected += tokenizer.encode(piece, parse_special=True)
    assert tokenizer.encode(text, parse_special=True) == expected


def test_composed_and_decomposed_characters_stay_different() -> None:
    composed, decomposed = "caf\u00e9", "cafe\u0301"
    tokenizer = oracle_tokenizer("tinyA-q8_0")
    assert tokenizer.encode(composed, parse_special=True) != tokenizer.encode(
        decomposed, parse_special=True
    )


def test_combining_marks_belong_to_the_word_in_qwen35_only() -> None:
    tokens = [*byte_alphabet(), "eÌ"]  # U+0301 is the bytes CC 81: "Ìģ" in the byte alphabet
    changes: dict[str, Any] = {"tokens": tokens, "token_type": None, "merges": ["e Ì"]}
    ids = {
        pre: Tokenizer.from_metadata(small_metadata({**changes, "pre": pre})).encode(
            "e\u0301", parse_special=False
        )
        for pre in ("qwen2", "qwen35")
    }
    assert ids == {"qwen2": [ord("e"), 0xCC, 0x81], "qwen35": [256, 0x81]}


def test_longer_special_tokens_are_cut_out_first() -> None:
    specials = {"xab": TokenType.CONTROL, "abcd": TokenType.CONTROL, "ab": TokenType.CONTROL}
    tokenizer = Tokenizer.from_metadata(small_metadata(specials=specials))
    ids = tokenizer.encode("xabcd xab ab", parse_special=True)
    names = [tokenizer.token_text(i) for i in ids]
    assert names == ["x", "abcd", " ", "xab", " ", "ab"]


def test_restored_characters_never_become_special_tokens() -> None:
    ids = small().encode("a\ue000|im_end|><|im_end|>", parse_special=True, restore={0xE000: "<"})
    assert ids[-1] == small().special_ids["<|im_end|>"]
    assert ids[:-1] == small().encode("a<|im_end|>", parse_special=False)


def test_bos_is_added_when_the_file_says_so() -> None:
    bos = small().special_ids["<|endoftext|>"]
    tokenizer = Tokenizer.from_metadata(
        small_metadata({"bos_token_id": bos, "add_bos_token": True})
    )
    assert tokenizer.encode("", parse_special=True) == [bos]
    assert tokenizer.encode("h", parse_special=True)[0] == bos
    assert tokenizer.encode("h", parse_special=True, add_bos=False) == [ord("h")]
    assert small().encode("", parse_special=True) == []


def test_named_end_tokens_end_a_reply_whatever_their_type() -> None:
    types = np.array([TokenType.NORMAL] * small().vocab_size)
    tokenizer = Tokenizer.from_metadata(small_metadata({"token_type": types, "eos_token_id": 5}))
    ends = {small().special_ids[name] for name in ("<|endoftext|>", "<|im_end|>")}
    assert tokenizer.eos_ids == ends | {5}
    assert all(tokenizer.is_control(token_id) for token_id in ends)


def test_without_token_types_special_tokens_are_known_by_their_form() -> None:
    tokenizer = Tokenizer.from_metadata(small_metadata({"token_type": None}))
    assert tokenizer.special_ids == small().special_ids
    assert tokenizer.control_texts == {name for name in SPECIALS if name.startswith("<|")}


def test_every_byte_has_a_token_that_gives_it_back() -> None:
    assert [small().token_bytes(byte) for byte in range(256)] == [
        bytes([byte_alphabet().index(char)]) for char in byte_alphabet()
    ]
    assert b"".join(map(small().token_bytes, range(256))) == bytes(range(256))


def test_unused_tokens_add_nothing_but_have_a_name() -> None:
    specials = {"[PAD263]": TokenType.UNUSED, "<0x41>": TokenType.BYTE}
    tokenizer = Tokenizer.from_metadata(small_metadata(specials=specials))
    unused = tokenizer.vocab_size - 2
    assert tokenizer.token_bytes(unused) == b""
    assert tokenizer.token_text(unused) == "[PAD263]"
    assert tokenizer.decode([ord("h"), unused, unused + 1]) == "hA"


def test_parts_of_characters_keep_names_of_their_own() -> None:
    names = [small().token_text(token_id) for token_id in range(small().vocab_size)]
    assert len(set(names)) == small().vocab_size
    assert names[0xE2] == r"bytes:\xe2"
    assert not any("\ufffd" in name for name in names)


def test_control_tokens_are_left_out_on_request() -> None:
    text = "<|im_start|>h<think>\n<|im_end|>"
    ids = small().encode(text, parse_special=True)
    assert small().decode(ids) == text
    assert small().decode(ids, skip_control=True) == "h<think>\n"
    stream = StreamDecoder(small(), skip_control=True)
    assert "".join(map(stream.push, ids)) == "h<think>\n"


@given(ids=st.lists(st.integers(0, 266)))
def test_streamed_text_equals_decoded_text(ids: list[int]) -> None:
    stream = StreamDecoder(small())
    pieces = [*map(stream.push, ids), stream.finish()]
    assert "".join(pieces) == small().decode(ids)


@given(text=TEXTS.filter(lambda text: "\ufffd" not in text))
def test_streamed_text_never_has_half_a_character(text: str) -> None:
    tokenizer, stream = (
        oracle_tokenizer("tinyA-q8_0"),
        StreamDecoder(oracle_tokenizer("tinyA-q8_0")),
    )
    pieces = [stream.push(token_id) for token_id in tokenizer.encode(text, parse_special=False)]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == text
    assert stream.finish() == ""


def test_an_unfinished_character_is_replaced_at_the_end() -> None:
    stream = StreamDecoder(small())
    assert [stream.push(token_id) for token_id in "🙂".encode()[:3]] == ["", "", ""]
    assert stream.finish() == "\ufffd"
    assert stream.push(ord("h")) == "h"


def test_a_label_of_one_token_is_resolved() -> None:
    assert small().token_text(small().single_token(" hell")) == " hell"
    assert small().single_token("<|im_end|>") == small().special_ids["<|im_end|>"]


def test_a_label_of_several_tokens_is_refused_with_their_names() -> None:
    with pytest.raises(InputError, match=r"'hello!' is 2 tokens, not one: 'hello' \(\d+\), '!' \("):
        small().single_token("hello!")
    with pytest.raises(InputError, match="0 tokens"):
        small().single_token("")


def test_the_hint_for_a_label_of_several_tokens_says_how_to_give_ids() -> None:
    with pytest.raises(InputError) as caught:
        small().single_token("hello!")
    ids = small().encode("hello!", parse_special=False)
    assert caught.value.hint.endswith(f"--allowed-token-ids {ids[0]},{ids[1]}")
    with pytest.raises(InputError) as long:
        small().single_token("hello!" * 1000)
    assert "(6000 characters) is 2000 tokens" in long.value.message
    assert "and 1992 more" in long.value.message
    assert len(str(long.value)) < 500


def test_another_spelling_is_only_offered_when_it_is_one_token() -> None:
    with pytest.raises(InputError) as caught:
        small().single_token("  hell")
    assert caught.value.hint.startswith("' hell' is one token, or give ids")
    with pytest.raises(InputError) as other:
        small().single_token("hello!")
    assert other.value.hint.startswith("choose a text that is one token")


def test_half_a_surrogate_pair_is_no_text() -> None:
    with pytest.raises(InputError, match=r"U\+D83D.*at character 2"):
        small().encode("ab\ud83d", parse_special=False)


@pytest.mark.parametrize("token_id", [-1, 267, 2**40])
def test_token_ids_out_of_range_are_refused(token_id: int) -> None:
    assert small().vocab_size == 267
    for use in (small().token_bytes, small().token_text, StreamDecoder(small()).push):
        with pytest.raises(InputError, match=f"{token_id} is out of range.*267 tokens"):
            use(token_id)
    with pytest.raises(InputError):
        small().check_ids([0, token_id])
    with pytest.raises(InputError):
        small().decode([token_id])


def test_merges_are_cut_at_the_first_space_after_the_beginning() -> None:
    specials = {" ": TokenType.NORMAL, " h": TokenType.NORMAL}
    tokenizer = Tokenizer.from_metadata(small_metadata({"merges": ["  h"]}, specials))
    assert tokenizer.vocab_size == 263


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "llama"}, "'llama'.*only 'gpt2'"),
        ({"model": None}, "None"),
        ({"pre": "llama-bpe"}, "'llama-bpe'; supported: qwen2, qwen35"),
        ({"pre": None}, "supported: qwen2, qwen35"),
        ({"pre": 3}, "pre must be of type str, not int"),
        ({"tokens": None}, "no tokenizer.ggml.tokens"),
        ({"tokens": "abc"}, "tokens must be an array of strings"),
        ({"tokens": np.arange(3)}, "tokens must be an array of strings"),
        ({"tokens": []}, "no token for byte 0x00"),
        ({"tokens": byte_alphabet()[:-20]}, "no token for byte 0xEC"),
        ({"tokens": [*byte_alphabet(), "h"]}, "'h' twice: ids 104 and 256"),
        ({"merges": None}, "no tokenizer.ggml.merges"),
        ({"merges": ["h e", "he"]}, r"merges\[1\] 'he' is not two parts"),
        ({"merges": ["h "]}, r"merges\[0\] 'h ' is not two parts"),
        ({"merges": [""]}, r"merges\[0\] '' is not two parts"),
        ({"merges": ["h zz"]}, r"needs 'zz', which is not a token"),
        ({"merges": ["h h"]}, r"needs 'hh', which is not a token"),
        ({"merges": ["h e l"]}, r"needs 'e l', which is not a token"),
        ({"token_type": np.array([1, 2])}, r"must be 267 integers.*shape \[2\]"),
        ({"token_type": np.full(267, 7)}, r"token 0 is 7, which is not in 0\.\.6"),
        ({"token_type": np.full(267, 1.0)}, "it is float64"),
        ({"eos_token_id": 267}, "eos_token_id is 267, and the vocabulary has 267 tokens"),
        ({"bos_token_id": 2**32 - 1}, "bos_token_id is 4294967295"),
        ({"eos_token_id": True}, "eos_token_id must be of type int, not bool"),
        ({"add_bos_token": 1}, "add_bos_token must be of type bool, not int"),
        ({"add_bos_token": True}, "no tokenizer.ggml.bos_token_id"),
    ],
)
def test_a_broken_vocabulary_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        Tokenizer.from_metadata(small_metadata(changes))
    assert caught.value.hint
