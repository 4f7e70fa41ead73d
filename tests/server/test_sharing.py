"""How requests share the engine."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from strata_cli.server.sharing import (
    LEAST_SHARED,
    DecodeTurns,
    SlotUse,
    choose_slot,
    find_company,
    share_rows,
)

WANTED = st.lists(st.integers(1, 50), max_size=9)


@given(wanted=WANTED, most=st.integers(0, 100))
def test_rows_go_to_all_alike_and_none_is_left_that_somebody_wants(
    wanted: list[int], most: int
) -> None:
    shares = share_rows(wanted, most)
    assert all(0 <= share <= want for share, want in zip(shares, wanted, strict=True))
    assert sum(shares) == min(most, sum(wanted))
    unsatisfied = [share for share, want in zip(shares, wanted, strict=True) if share < want]
    assert not unsatisfied or max(shares) - min(unsatisfied) <= 1


@given(wanted=WANTED, most=st.integers(1, 100))
def test_every_prompt_is_done_in_the_end(wanted: list[int], most: int) -> None:
    left, passes = list(wanted), 0
    while left:
        left = [
            want - share for want, share in zip(left, share_rows(left, most), strict=True) if want
        ]
        left = [want for want in left if want]
        passes += 1
        assert passes <= sum(wanted)


def test_a_slot_is_chosen_for_what_it_holds() -> None:
    nothing, all_of_it = SlotUse(100, 0, 9), SlotUse(0, 0, 1)
    assert choose_slot([nothing, all_of_it]) == 1
    assert choose_slot([all_of_it, nothing]) == 0
    # A few common tokens are not worth a long conversation that has just been going on.
    assert choose_slot([SlotUse(90, 5000, 0), SlotUse(100, 0, 3)]) == 1
    # Of two that hold other things, the one nobody has asked for.
    assert choose_slot([SlotUse(100, 300, 1), SlotUse(100, 300, 7)]) == 1
    # Of two that are alike, the one that has been idle longer.
    assert choose_slot([SlotUse(100, 0, 1), SlotUse(100, 0, 7)]) == 1


def test_steps_get_their_share_of_the_time_beside_prompts() -> None:
    turns = DecodeTurns(share=0.25)
    due = [turns.is_due]
    turns.prompts_took(3.0)
    for _ in range(3):
        due.append(turns.is_due)
        turns.steps_took(0.55)
    turns.prompts_took(3.0)
    turns.forget()
    assert [*due, turns.is_due] == [False, True, True, False, False]


PROMPTS = st.lists(
    st.tuples(st.integers(0, 80), st.integers(0, 3), st.integers(1, 60)).map(
        lambda shape: [7] * shape[0] + [shape[1]] * shape[2]
    ),
    max_size=6,
)


@given(prompt=st.integers(1, 100).map(lambda length: [7] * length), others=PROMPTS)
def test_prompts_that_are_read_together_begin_alike(
    prompt: list[int], others: list[list[int]]
) -> None:
    company = find_company(prompt, others, most_rows=40)
    shared = company.shared_tokens
    assert shared < len(prompt)
    for number in company.others:
        assert others[number][:shared] == prompt[:shared]
        assert 1 <= len(others[number]) - shared <= 40
    if company.others:
        assert shared >= max(LEAST_SHARED, len(prompt) / 2)
        assert len(prompt) - shared <= 40


def test_the_same_prompt_twice_keeps_a_token_to_read() -> None:
    assert find_company([7] * 50, [[7] * 50, [7] * 50], 8) == ((0, 1), 49)
    assert find_company([7] * 50, [[7] * 20, [8] * 50], 8) == ((), 49)
