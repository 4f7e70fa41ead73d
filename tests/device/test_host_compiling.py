from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.device.base import Kernel, Launch, empty
from strata_cli.engine.device.host import HostDevice
from strata_cli.engine.device.host_compiling import CompilingStream

CALLS: list[tuple[Any, ...]] = []


def _first(begin: int, end: int, x: NDArray[np.float32], factor: float) -> None:
    CALLS.append(("first", begin, end, x.shape, factor))


def _second(begin: int, end: int, doubled: int) -> None:
    CALLS.append(("second", begin, end, doubled))


FIRST = Kernel("first", _first, _first)
SECOND = Kernel("second", _second, _second, bind=lambda number: (2 * number,))


def test_every_launch_is_made_without_items_when_its_step_runs() -> None:
    CALLS.clear()
    with HostDevice(1) as device:
        stream = CompilingStream(device.stream("compute"))
        x = empty(device, (3, 4))
        stream.launch(FIRST, Launch(items=3), x, 0.5)
        stream.launch(SECOND, Launch(items=9), 7)
        stream.launch(FIRST, Launch(items=2), x.rows(0, 2), 1.5)
        stream.launch(SECOND, Launch(items=0), 8)
        steps = stream.steps()
        assert CALLS == []
        for step in reversed(steps):
            step()
    assert CALLS == [
        ("second", 0, 0, 14),
        ("first", 0, 0, (3, 4), 0.5),
        ("first", 0, 0, (2, 4), 1.5),
    ]
