"""When an engine counts as stuck."""

from __future__ import annotations

from strata_cli.server.protocol import Beat
from strata_cli.server.silence import MOST_TOKENS, TOKENS_PER_S, Silence


def beat(progress: int, pending_tokens: int = 0) -> Beat:
    return Beat(progress=progress, pending_tokens=pending_tokens)


def test_only_progress_is_a_sign_of_life() -> None:
    now = [0.0]
    silence = Silence(10, lambda: now[0])
    left = []
    for time_s, progress in ((1.0, 5), (4.0, 5), (6.0, 6), (9.0, 6), (16.5, 6)):
        now[0] = time_s
        silence.beat(beat(progress))
        left.append(silence.left_s())
    assert left == [10.0, 7.0, 10.0, 7.0, -0.5]
    silence.sign()
    assert silence.left_s() == 10.0


def test_a_pass_over_many_tokens_may_take_longer() -> None:
    now = [0.0]
    silence = Silence(10, lambda: now[0])
    silence.beat(beat(1, pending_tokens=500))
    assert silence.left_s() == 10 + 500 / TOKENS_PER_S
    silence.beat(beat(1, pending_tokens=10**9))
    assert silence.left_s() == 10 + MOST_TOKENS / TOKENS_PER_S
    now[0] = 12.0
    silence.beat(beat(1))
    assert silence.left_s() == -2
