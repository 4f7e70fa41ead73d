"""Texts that begin alike: the ids of each are those it has without any memory."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_cli.engine.model import piece_memory
from strata_cli.engine.model.gguf import open_gguf
from strata_cli.engine.model.piece_memory import PieceMemory, common_characters
from strata_cli.engine.model.tokenizer import Tokenizer
from strata_cli.models import DEMO_MODEL_PATH

PARTS = st.sampled_from(
    [*("\n", " ", "  ", "\r\n", "\t", "A. ", "games", "12", "é", "🙂", "'s", "'S", "..", "_x")]
)
TEXTS = st.lists(PARTS, max_size=12).map("".join)


@functools.cache
def tokenizer() -> Tokenizer:
    with open_gguf(DEMO_MODEL_PATH) as file:
        return Tokenizer.from_metadata(file.metadata)


@given(shared=TEXTS, ends=st.lists(TEXTS, min_size=2, max_size=5))
def test_a_memory_changes_no_id(shared: str, ends: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(piece_memory, "LEAST_SHARED", 1)
        memory = tokenizer().memory()
        for end in [*ends, ends[0]]:
            text = shared + end
            plain = tokenizer().encode(text, parse_special=True)
            assert tokenizer().encode(text, parse_special=True, memory=memory) == plain


def test_what_texts_share_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, lengths = tokenizer().memory(), list[int]()
    fresh = PieceMemory._fresh

    def counted(self: PieceMemory, text: str) -> list[int]:
        lengths.append(len(text))
        return fresh(self, text)

    monkeypatch.setattr(PieceMemory, "_fresh", counted)
    state = "State:\n" + "A line of the state.\n" * 200
    ends = ["A. games\nB. mail\n", "A. mail\nB. games\n", "A. fonts\nB. mail\n"]
    for end in ends:
        ids = tokenizer().encode(state + end, parse_special=True, memory=memory)
        assert ids == tokenizer().encode(state + end, parse_special=True)
    assert lengths
    assert max(lengths) < 2 * len(ends[0])
    assert memory.ids(state + ends[0]) == tokenizer().encode(state + ends[0], parse_special=True)


@given(st.text("ab", max_size=9), st.text("ab", max_size=9))
def test_common_characters(one: str, other: str) -> None:
    length = common_characters(one, other)
    assert one[:length] == other[:length]
    assert length == min(len(one), len(other)) or one[length] != other[length]
