"""Looks at the disk that a model lies on: what is free, whether it turns, how fast it reads."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

from strata_cli.launch.machine import Disk

BLOCK_DEVICES = Path("/sys/dev/block")
PIECE_BYTES = 8 << 20
MOST_PIECES = 16
MOST_SECONDS = 2.0  # a disk that turns may take as long for two pieces
LEAST_BYTES = 4 << 20  # a rate of less says nothing


def probe_disk(file: Path, devices: Path = BLOCK_DEVICES) -> Disk:
    """The disk of a file. Reads up to 128 MiB of it, for up to two seconds.

    Raises:
        OSError: the file cannot be read.
    """
    status, system = file.stat(), os.statvfs(file)
    return Disk(
        free_bytes=system.f_bavail * system.f_frsize,
        is_rotational=_is_rotational(status.st_dev, devices),
        read_gbps=read_rate(file),
    )


def read_rate(file: Path) -> float | None:
    """10^9 bytes per second, in pieces from all over the file, past the page cache.

    Returns:
        None where the file is too small, or its file system reads through the cache alone.
    """
    size = file.stat().st_size
    if size < LEAST_BYTES:
        return None
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:  # file systems in memory and some over a network
        return None
    try:
        with mmap.mmap(-1, PIECE_BYTES) as room:  # pages are aligned as direct reads want it
            return _read_pieces(descriptor, size, room)
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _read_pieces(descriptor: int, size: int, room: mmap.mmap) -> float:
    step = max(size // MOST_PIECES, PIECE_BYTES) // mmap.PAGESIZE * mmap.PAGESIZE
    done_bytes, start = 0, time.perf_counter()
    for offset in range(0, size, step):
        done_bytes += os.preadv(descriptor, [room], offset)
        if time.perf_counter() - start > MOST_SECONDS:
            break
    return done_bytes / 1e9 / max(time.perf_counter() - start, 1e-9)


def _is_rotational(device: int, devices: Path) -> bool | None:
    """Of a partition, what its disk says."""
    entry = (devices / f"{os.major(device)}:{os.minor(device)}").resolve()
    for folder in (entry, entry.parent):
        try:
            return (folder / "queue" / "rotational").read_text(encoding="ascii").strip() == "1"
        except OSError:
            continue
    return None
