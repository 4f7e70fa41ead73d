"""Compiles the host kernels that a pass needs, without running the pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from strata_cli.engine.device.base import HostFunction, Kernel, KernelArgument, Launch, Stream
from strata_cli.engine.device.host_arrays import body_arguments
from strata_cli.engine.device.paper import PaperStream


class CompilingStream(PaperStream):
    """Notes launches with their arguments, and later makes each without any items.

    numba compiles a function at its first call, for the types of the arguments it then sees.

    Args:
        like: the host stream that the launches are meant for.
    """

    def __init__(self, like: Stream) -> None:
        super().__init__("compiling", like, {})
        self._launches: dict[HostFunction, list[_Launched]] = {}

    def launch(self, kernel: Kernel, launch: Launch, *args: KernelArgument) -> None:
        if launch.items:
            self._launches.setdefault(kernel.host, []).append(_Launched(kernel, args))

    def steps(self) -> list[Callable[[], None]]:
        """For each host body noted, in order, what compiles it or finds it in the cache."""
        return [partial(_call_without_items, launches) for launches in self._launches.values()]


class _Launched(NamedTuple):
    kernel: Kernel
    args: tuple[KernelArgument, ...]


def _call_without_items(launches: list[_Launched]) -> None:
    for kernel, args in launches:
        kernel.host(0, 0, *body_arguments(kernel, args).values)
