"""Chooses the device that a model is to run on."""

from __future__ import annotations

from strata_cli.engine.device.gpu_survey import GpuFacts, GpuSurvey
from strata_cli.engine.device.sizes import gib
from strata_cli.errors import ConfigError
from strata_cli.launch.machine import Machine


def gpu_of(survey: GpuSurvey, wanted: str) -> GpuFacts | None:
    """The GPU that a device's name means; None where it means none of those that can be used.

    Args:
        survey: what there is.
        wanted: "cuda:N"; or "auto", the one with most free memory.
    """
    usable = [gpu for gpu in survey.gpus if not gpu.problem]
    if wanted == "auto":
        return max(usable, key=lambda gpu: (gpu.free_bytes, -gpu.ordinal), default=None)
    return next((gpu for gpu in usable if f"cuda:{gpu.ordinal}" == wanted), None)


def choose_device(machine: Machine, wanted: str) -> tuple[GpuFacts | None, str]:
    """The GPU to use, or None for the host; and why.

    Raises:
        ConfigError: the one that is wanted is not there or cannot be used, or none is wanted by
            name and there is one that cannot.
    """
    survey = machine.gpus
    if wanted == "host":
        return None, "the processor computes"
    gpu = gpu_of(survey, wanted)
    if gpu is not None:
        return gpu, f"{gpu.name}, {gib(gpu.free_bytes)} of {gib(gpu.total_bytes)} free"
    if wanted == "auto":
        if survey.seen:  # somebody who has a GPU does not expect the processor to do its work
            raise ConfigError(
                f"{', '.join(survey.seen)} cannot be used: {survey.problem}", hint=survey.hint
            )
        return None, "no NVIDIA GPU was found"
    found = next((gpu for gpu in survey.gpus if f"cuda:{gpu.ordinal}" == wanted), None)
    if found is None:
        problem = survey.problem or f"found {len(survey.gpus)} GPU(s)"
        raise ConfigError(
            f"there is no device {wanted}: {problem}", hint=survey.hint or "--device auto"
        )
    raise ConfigError(f"{wanted} cannot be used: {found.problem}", hint=found.hint)
