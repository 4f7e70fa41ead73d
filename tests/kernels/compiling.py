"""Compiling kernels for GPUs that are not here."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from strata_cli.engine.device.cuda_kernels import KERNELS_FOLDER
from strata_cli.engine.device.nvrtc import Compiler, read_unit
from strata_cli.engine.kernels.products import Unit
from strata_cli.errors import ConfigError

ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a")
# The first of those for which the sources have lines of their own (__CUDA_ARCH__); the others
# compile the same lines as one of these.
FIRSTS = ("sm_75", "sm_80", "sm_90a")


def assert_they_compile(units: Iterable[Unit], architecture: str) -> None:
    """Compile functions, or skip where no compiler is installed."""
    try:
        compiler = Compiler()
    except ConfigError as error:
        pytest.skip(error.message)
    for source, function, defines in units:
        unit = read_unit(KERNELS_FOLDER / source, defines=defines, instances=(function,))
        assert compiler.compile(unit, architecture).symbols
