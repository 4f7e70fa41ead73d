"""The line in front of the engine: first come, first served, and never longer than agreed."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest

from strata_cli.server.failures import RequestFailed
from strata_cli.server.queue import RequestQueue


async def settle() -> None:
    """Let every task go as far as it can."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_too_many_requests_are_turned_away_with_a_time_to_come_back() -> None:
    queue = RequestQueue(parallel=2, most_waiting=1)
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(queue.enter())
        with pytest.raises(RequestFailed) as caught, queue.enter():
            pass
    failure = caught.value.failure
    assert (failure.status, failure.code) == (503, "queue_full")
    assert int(failure.headers["retry-after"]) >= 1
    assert (queue.entered, queue.refused) == (0, 1)
    with queue.enter():
        assert queue.entered == 1


def test_some_that_wait_do_so_in_the_engines_own_line() -> None:
    queue = RequestQueue(parallel=2, most_waiting=1, ahead=16)
    assert (queue.parallel, queue.most_waiting, queue.turns) == (2, 1, 3)
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(queue.enter())
        with pytest.raises(RequestFailed), queue.enter():
            pass


def test_turns_go_round_in_the_order_of_arrival() -> None:
    async def run() -> list[int]:
        queue = RequestQueue(parallel=2, most_waiting=10)
        order: list[int] = []
        gates = [asyncio.Event() for _ in range(6)]

        async def work(number: int) -> None:
            async with queue.turn():
                order.append(number)
                await gates[number].wait()

        tasks = [asyncio.create_task(work(number)) for number in range(6)]
        await settle()
        assert (queue.running, queue.waiting) == (2, 4)
        for gate in (1, 0, 2, 3, 4, 5):
            gates[gate].set()
            await settle()
        await asyncio.gather(*tasks)
        assert (queue.running, queue.waiting) == (0, 0)
        return order

    assert asyncio.run(run()) == [0, 1, 2, 3, 4, 5]


def test_whoever_leaves_the_line_gives_the_place_to_the_next() -> None:
    async def run() -> list[int]:
        queue = RequestQueue(parallel=1, most_waiting=10)
        order: list[int] = []
        first_may_end = asyncio.Event()

        async def work(number: int) -> None:
            async with queue.turn():
                order.append(number)
                if number == 0:
                    await first_may_end.wait()

        tasks = [asyncio.create_task(work(number)) for number in range(4)]
        await settle()
        tasks[1].cancel()  # waits in line
        await settle()
        first_may_end.set()
        await asyncio.sleep(0)
        tasks[2].cancel()  # its turn has come, and it does not know yet
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (queue.running, queue.waiting) == (0, 0)
        return order

    order = asyncio.run(run())
    assert order in ([0, 3], [0, 2, 3])


def test_a_turn_ends_when_its_work_fails() -> None:
    async def run() -> None:
        queue = RequestQueue(parallel=1, most_waiting=1)
        for _ in range(3):
            with pytest.raises(ValueError, match="no"):
                async with queue.turn():
                    raise ValueError("no")
        assert queue.running == 0

    asyncio.run(run())
