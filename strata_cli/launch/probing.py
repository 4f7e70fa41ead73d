"""Puts together what this machine is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from strata_cli.engine.device.cgroup import cgroup_memory
from strata_cli.engine.device.gpu_survey import GpuFacts, GpuSurvey, measure_link, survey_gpus
from strata_cli.engine.device.host_memory import host_memory
from strata_cli.errors import DeviceError
from strata_cli.launch.disk_probe import probe_disk
from strata_cli.launch.host_probes import probe_memlock, probe_processor, probe_software
from strata_cli.launch.machine import Machine
from strata_cli.launch.port_probe import probe_port


def probe_machine(model: Path, host: str, port: int, *, with_gpus: bool = True) -> Machine:
    """Look at this machine. Takes a few seconds: disk and links are measured.

    Args:
        model: the model's file, or its first shard.
        host: where a server is to listen.
        port: the same.
        with_gpus: look for GPUs.

    Raises:
        OSError: the model's file cannot be read.
    """
    return Machine(
        processor=probe_processor(),
        memory=host_memory(),
        group_memory=cgroup_memory(),
        memlock=probe_memlock(),
        gpus=_measured(survey_gpus()) if with_gpus else GpuSurvey(),
        disk=probe_disk(model),
        port=probe_port(host, port),
        software=probe_software(),
    )


def _measured(survey: GpuSurvey) -> GpuSurvey:
    return replace(survey, gpus=tuple(map(_with_link, survey.gpus)))


def _with_link(gpu: GpuFacts) -> GpuFacts:
    if gpu.problem:
        return gpu
    try:
        return measure_link(gpu)
    except DeviceError:  # too full for the measurement; the plan says what does not fit
        return gpu
