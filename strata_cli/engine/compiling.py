"""A first start on the host: every kernel compiled before the first read, from both ends at once.

numba compiles one function at a time in a process. So a second process compiles the same kernels in
the opposite order, into the same cache, and where the two meet each finds the other's work.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import numpy as np

from strata_cli.engine.device.base import Device
from strata_cli.engine.device.host import usable_threads
from strata_cli.engine.device.host_compiling import CompilingStream
from strata_cli.engine.forward.layers import Forward
from strata_cli.engine.forward.rows import single
from strata_cli.engine.forward.state import new_state
from strata_cli.engine.kernels.hash import fnv1a64
from strata_cli.engine.kernels.head import log_softmax_row
from strata_cli.engine.kernels.jit import keep_as_complete, why_uncached

Progress: TypeAlias = Callable[[int, int], None]

# -I keeps the working folder out of the helper's search path; it gets this process's own instead.
_BOOT = (
    "import sys; sys.path[:] = sys.argv[2:];"
    f" from {__name__} import end_with_parent, main; end_with_parent(); main()"
)


def compile_ahead(
    forward: Forward, device: Device, model: Path, progress: Progress | None = None
) -> None:
    """Compile all host kernels of a model, with the help of a second process.

    Args:
        forward: the model on the host.
        device: the host.
        model: the model's file.
        progress: called with (kernels done, kernels in all).
    """
    with _helper(model):
        compile_kernels(forward, device, progress=progress)
    keep_as_complete()


def compile_kernels(
    forward: Forward, device: Device, *, last_first: bool = False, progress: Progress | None = None
) -> None:
    """Compile what a step, its log-probabilities and a state hash need; or load it from the cache.

    Args:
        forward: the model on the host.
        device: the host.
        last_first: begin with what a step needs last.
        progress: called with (kernels done, kernels in all).
    """
    spec, stream, paper = forward.spec, forward.stream, CompilingStream(forward.stream)
    state = new_state(spec, device, stream, context_tokens=max(1, *spec.index_ratio))
    on_paper = dataclasses.replace(forward, stream=paper)
    on_paper.run(single(state, 1))
    on_paper.head(0, 1)
    steps = [*paper.steps(), _compile_log_softmax, _compile_hash]
    with _rare_collections():
        for index, step in enumerate(reversed(steps) if last_first else steps):
            # On the stream's thread: an interrupt of this one could get lost inside the compiler.
            stream.call(step)
            stream.synchronize()
            if progress is not None:
                progress(index + 1, len(steps))
    state.close()


def _compile_log_softmax() -> None:
    log_softmax_row(np.zeros(1, np.float32))


def _compile_hash() -> None:
    fnv1a64(np.zeros(1, np.uint8))


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Fewer garbage collections: a compiler's many long-lived objects make each one slow."""
    thresholds = gc.get_threshold()
    gc.set_threshold(50_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


@contextmanager
def _helper(model: Path) -> Iterator[None]:
    """The second process, ended with the block; nothing where it could not help this one."""
    if usable_threads() < 2 or not sys.executable or why_uncached():
        yield
        return
    command = [sys.executable, "-I", "-c", _BOOT, os.fspath(model), *sys.path]
    quiet = subprocess.DEVNULL
    pipe = subprocess.PIPE  # closed when this process ends, however it ends
    with subprocess.Popen(command, stdin=pipe, stdout=quiet, stderr=quiet) as process:
        try:
            yield
        finally:
            process.terminate()


def end_with_parent() -> None:
    """End this process as soon as its stdin ends."""

    def wait() -> None:
        os.read(0, 1)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def main() -> None:
    """What the second process does."""
    from strata_cli.engine.engine import Engine, EngineOptions  # that module imports this one

    options = EngineOptions(
        model=Path(sys.argv[1]), device="host", threads=1, prefill=1, compile_ahead=False
    )
    with Engine.open(options) as engine:
        compile_kernels(engine._forward, engine._device, last_first=True)
