"""Compiles the host kernels that a pass needs, without running the pass."""

from __future__ import annotations

from collections.abc import Callable

from strata_cli.engine.device.base import HostFunction, Kernel, KernelArgument, Launch, Stream
from strata_cli.engine.device.host_stream import BodyArguments, body_arguments
from strata_cli.engine.device.paper import PaperStream


class CompilingStream(PaperStream):
    """Notes launches with their arguments, and later makes each without any items.

    numba compiles a function at its first call, for the types of the arguments it then sees.

    Args:
        like: the host stream that the launches are meant for.
    """

    def __init__(self, like: Stream) -> None:
        super().__init__("compiling", like, {})
        self._calls: dict[HostFunction, list[BodyArguments]] = {}

    def launch(self, kernel: Kernel, launch: Launch, *args: KernelArgument) -> None:
        if launch.items:
            self._calls.setdefault(kernel.host, []).append(body_arguments(kernel, args))

    def compile(
        self, *, last_first: bool = False, progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Compiles on the calling thread what was noted, or finds it in the cache.

        Args:
            last_first: begin with the kernel that was noted last.
            progress: called with (kernels done, kernels in all).
        """
        kernels = list(self._calls.items())
        for done, (function, calls) in enumerate(reversed(kernels) if last_first else kernels):
            for call in calls:
                function(0, 0, *call.values)
            if progress is not None:
                progress(done + 1, len(kernels))
