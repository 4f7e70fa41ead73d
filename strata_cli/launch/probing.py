"""Puts together what this machine is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from strata_cli.engine.device.cgroup import cgroup_memory
from strata_cli.engine.device.gpu_survey import GpuSurvey, measure_link, survey_gpus
from strata_cli.engine.device.host_memory import host_memory
from strata_cli.errors import DeviceError
from strata_cli.launch.devices import gpu_of
from strata_cli.launch.disk_probe import probe_disk
from strata_cli.launch.host_probes import probe_memlock, probe_processor, probe_software
from strata_cli.launch.machine import Machine
from strata_cli.launch.port_probe import probe_port


def probe_machine(model: Path, host: str, port: int, *, device: str = "auto") -> Machine:
    """Look at this machine. Takes a few seconds: the disk and a GPU's link are measured.

    Args:
        model: the model's file, or its first shard.
        host: where a server is to listen.
        port: the same.
        device: that is wanted; no GPU is looked for where that is the host.

    Raises:
        OSError: the model's file cannot be read.
    """
    return Machine(
        processor=probe_processor(),
        memory=host_memory(),
        group_memory=cgroup_memory(),
        memlock=probe_memlock(),
        gpus=GpuSurvey() if device == "host" else _measured(survey_gpus(), device),
        disk=probe_disk(model),
        port=probe_port(host, port),
        software=probe_software(),
    )


def _measured(survey: GpuSurvey, device: str) -> GpuSurvey:
    """With the link of the GPU that would be used."""
    wanted = gpu_of(survey, device)
    if wanted is None:
        return survey
    try:
        measured = measure_link(wanted)
    except DeviceError:  # too full for the measurement; the plan says what does not fit
        return survey
    return replace(survey, gpus=tuple(measured if gpu is wanted else gpu for gpu in survey.gpus))
