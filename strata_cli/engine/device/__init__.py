"""Devices: where memory lives and kernels run. Nothing above this room asks which one it has."""

from __future__ import annotations

import re

from strata_cli.engine.device.base import Device
from strata_cli.engine.device.host import HostDevice
from strata_cli.errors import ConfigError, DeviceError


def open_device(name: str, *, threads: int = 0) -> Device:
    """Opens the device that a setting names.

    Args:
        name: "host", "cuda:N", or "auto": the first usable GPU, else the host.
        threads: threads that share a launch on the host; 0 takes every usable processor.

    Raises:
        ConfigError: the name is malformed, or names a GPU that is not there or needs an install.
    """
    if name == "host":
        return HostDevice(threads)
    if name == "auto":
        return _open_auto(threads)
    if re.fullmatch(r"cuda:\d+", name):
        return _open_cuda(int(name.partition(":")[2]))
    raise ConfigError(f"unknown device {name!r}", hint="auto, host, or cuda:N such as cuda:0")


def _open_cuda(ordinal: int) -> Device:
    raise ConfigError(
        f"device cuda:{ordinal} cannot be used: cuda-python is not installed",
        hint="pip install 'strata-cli[cuda]', or --device host",
    )


def _open_auto(threads: int) -> Device:
    try:
        return _open_cuda(0)
    except (ConfigError, DeviceError):
        return HostDevice(threads)
