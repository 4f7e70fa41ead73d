"""Devices: where memory lives and kernels run. Nothing above this room asks which one it has."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from strata_cli.engine.device.base import Device
from strata_cli.engine.device.host import HostDevice
from strata_cli.errors import ConfigError, DeviceError

logger = logging.getLogger(__name__)

RESERVE_BYTES = 700 << 20
KERNELS_GPUS = Path("/proc/driver/nvidia/gpus")  # a folder in it for each NVIDIA GPU that is there


def open_device(
    name: str, *, threads: int = 0, vram_bytes: int = 0, vram_reserve_bytes: int = RESERVE_BYTES
) -> Device:
    """Opens the device that a setting names.

    Args:
        name: "host", "cuda:N", or "auto": the first GPU if it can be used, else the host.
        threads: threads that share a launch on the host; 0 takes every usable processor.
        vram_bytes: hard cap on device memory of a GPU; 0 takes what is free, less the reserve.
        vram_reserve_bytes: what is then left to others.

    Raises:
        ConfigError: the name is malformed, or names a GPU that is not there or needs an install.
        OutOfMemory: the GPU has not as much free as asked for.
    """
    if name == "host":
        return HostDevice(threads)
    if name == "auto":
        return _open_auto(threads, vram_bytes, vram_reserve_bytes)
    if re.fullmatch(r"cuda:\d+", name):
        return _open_cuda(int(name.partition(":")[2]), vram_bytes, vram_reserve_bytes)
    raise ConfigError(f"unknown device {name!r}", hint="auto, host, or cuda:N such as cuda:0")


def auto_name() -> str:
    """What "auto" would take here: "cuda:0" where that GPU can be used, else "host"."""
    from strata_cli.engine.device.cuda_driver import find_gpu  # slow to import

    try:
        find_gpu(0)
    except (ConfigError, DeviceError):
        return "host"
    return "cuda:0"


def _open_auto(threads: int, vram_bytes: int, vram_reserve_bytes: int) -> Device:
    try:
        return _open_cuda(0, vram_bytes, vram_reserve_bytes)
    except ConfigError as error:
        # Far slower than the GPU that is there, which nobody may notice otherwise.
        level = logging.WARNING if any(KERNELS_GPUS.glob("*")) else logging.INFO
        hint = f"; try: {error.hint}" if error.hint else ""
        logger.log(level, "computing on the host: %s%s", error.message, hint)
        return HostDevice(threads)


def _open_cuda(ordinal: int, vram_bytes: int, vram_reserve_bytes: int) -> Device:
    # The bindings are an extra, and slow to import.
    from strata_cli.engine.device.cuda import CudaDevice, CudaOptions
    from strata_cli.engine.device.cuda_driver import find_gpu

    options = CudaOptions(vram_bytes=vram_bytes, vram_reserve_bytes=vram_reserve_bytes)
    return CudaDevice(find_gpu(ordinal), options)
