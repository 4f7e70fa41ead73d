"""Text of an answer: whole characters, up to a stop string, each token with the text it begins."""

from __future__ import annotations

import functools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from strata_cli.engine.model.tokenizer import Tokenizer
from strata_cli.server.answer_text import AnswerText, Piece
from strata_cli.server.protocol import Token
from tests.server import fake_engine

TEXTS = st.text(alphabet="abé€🙂 ", max_size=12)
STOPS = st.lists(st.text(alphabet="abé€", min_size=1, max_size=3), max_size=3).map(tuple)


@functools.cache
def tokenizer() -> Tokenizer:
    return fake_engine.tokenizer()


def token(token_id: int, *, ends: bool = False) -> Token:
    return Token(request_id="", index=0, token_id=token_id, ends=ends)


def pieces(text: AnswerText, ids: list[int]) -> list[Piece]:
    return [*(text.push(token(item)) for item in ids), text.finish()]


def joined(parts: list[Piece]) -> tuple[str, list[int], list[int]]:
    """Text, ids and offsets of all pieces together."""
    placed = [item for part in parts for item in part.tokens]
    return (
        "".join(part.text for part in parts),
        [item.token.token_id for item in placed],
        [item.offset for item in placed],
    )


@given(TEXTS)
@example("€")
def test_without_stops_everything_comes_and_every_token_once(text: str) -> None:
    ids = tokenizer().encode(text, parse_special=False)
    got, got_ids, offsets = joined(pieces(AnswerText(tokenizer()), ids))
    assert (got, got_ids) == (text, ids)
    assert offsets == sorted(offsets)
    for place, offset in enumerate(offsets):
        assert text.startswith(tokenizer().decode(ids[:place]).rstrip("\ufffd"))
        assert offset <= len(text)


@given(TEXTS, STOPS, st.booleans())
@example("aab", ("ab", "b"), False)
@example("aab", ("ab", "b"), True)
@example("a🙂b", ("🙂",), False)
def test_a_stop_string_ends_the_text_where_it_first_comes(
    text: str, stops: tuple[str, ...], keeps: bool
) -> None:
    ids = tokenizer().encode(text, parse_special=False)
    answer = AnswerText(tokenizer(), stops=stops, keeps_stop=keeps)
    got, got_ids, offsets = joined(pieces(answer, ids))
    assert answer.is_stopped == any(stop in text for stop in stops)
    assert text.startswith(got)
    assert got_ids == ids[: len(got_ids)]
    if not answer.is_stopped:
        assert (got, got_ids) == (text, ids)
    elif keeps:
        assert any(got.endswith(stop) for stop in stops)
    else:
        assert not any(stop in got for stop in stops)
        assert any(text[len(got) :].startswith(stop) for stop in stops)
    assert all(offset < max(len(got), 1) for offset in offsets) or not answer.is_stopped


def test_what_may_become_a_stop_string_is_held_back() -> None:
    ids = tokenizer().encode("xhexhello", parse_special=False)
    answer = AnswerText(tokenizer(), stops=("hello",))
    texts = [part.text for part in pieces(answer, ids)]
    assert "".join(texts) == "xhex"
    assert texts[0] == "x"
    assert texts[1] == ""


@pytest.mark.parametrize("skips", [True, False])
def test_control_tokens_have_text_on_demand_and_ends_never(skips: bool) -> None:
    start, end = tokenizer().special_ids["<|im_start|>"], tokenizer().special_ids["<|im_end|>"]
    answer = AnswerText(tokenizer(), skips_control=skips)
    parts = [answer.push(token(start)), answer.push(token(end, ends=True)), answer.finish()]
    text, ids, _ = joined(parts)
    assert text == ("" if skips else "<|im_start|>")
    assert ids == [start, end]


def test_half_a_character_at_the_end_is_no_character() -> None:
    ids = tokenizer().encode("€", parse_special=False)[:2]
    assert joined(pieces(AnswerText(tokenizer()), ids)) == ("\ufffd", ids, [0, 0])
