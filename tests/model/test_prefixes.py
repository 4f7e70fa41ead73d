"""Prompts are compared token by token, whatever holds them."""

from __future__ import annotations

import pytest

from strata_cli.engine.model.prefixes import common_prefix, common_tokens

LIVE = list(range(1000))


def test_common_tokens_of_short_prompts() -> None:
    assert [common_tokens([1, 2, 3], other) for other in ([], [1, 2], [1, 9, 3])] == [0, 2, 1]


@pytest.mark.parametrize("common", [0, 1, 255, 256, 257, 511, 512, 513, 999, 1000])
def test_common_tokens_of_long_prompts_whatever_holds_them(common: int) -> None:
    other = [*LIVE[:common], -1, *LIVE[common + 1 :]]
    for one in (LIVE, tuple(LIVE)):
        assert common_tokens(one, other) == common_tokens(tuple(other), one) == common
        assert common_tokens(one, other[:common]) == common


def test_each_prompt_keeps_a_token_of_its_own() -> None:
    assert common_prefix([[1, 2, 3]]) == [1, 2]
    assert common_prefix([[1, 2, 3], [1, 2]]) == [1]
    assert common_prefix([[1, 2, 3], [1, 2, 4], [1, 2, 3]]) == [1, 2]
    assert common_prefix([[2], [1, 5]]) == []
