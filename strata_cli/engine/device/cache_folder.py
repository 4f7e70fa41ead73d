"""Where compiled kernels are kept between runs: a private folder for each set of sources.

Compiled code is run when it is found again, without a look inside. So a folder is used only where
nobody else can have put anything into it: ours, no link, and closed to others' writing.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

_PROBE = bytes(4096)  # an empty file can still be made on a disk that is full


class CacheFolder(NamedTuple):
    """A place to keep things between runs.

    Attributes:
        path: the folder; None where there is none that can be used.
        problem: why there is none, on one line.
    """

    path: Path | None
    problem: str = ""


def open_cache(*names: str) -> CacheFolder:
    """A folder in the user's cache, made if need be and closed to others.

    It lies under $XDG_CACHE_HOME or ~/.cache; where neither can be used, in a folder of the user's
    own under the system's folder for temporary files.

    Args:
        names: folders from the program's cache folder down to the one that is meant.
    """
    problems = []
    for root in _roots():
        try:
            return CacheFolder(_private_folder(root, names))
        except OSError as error:
            problems.append(f"{error.filename or root}: {error.strerror}")
    return CacheFolder(None, "; ".join(problems) or "no folder for temporary files")


def sources_digest(sources: Iterable[Path]) -> str:
    """16 hex digits that change when any of the files does."""
    digest = hashlib.sha256()
    for path in sorted(sources):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _roots() -> Iterator[Path]:
    xdg = os.environ.get("XDG_CACHE_HOME", "")  # noqa: TID251 - the desktop's convention, no setting
    if os.path.isabs(xdg):  # its specification says to ignore others
        yield Path(xdg) / "strata"
    with contextlib.suppress(RuntimeError):  # no home folder
        home = Path.home()
        if home.is_absolute():
            yield home / ".cache" / "strata"
    with contextlib.suppress(FileNotFoundError):  # no folder for temporary files can be written
        yield Path(tempfile.gettempdir()) / f"strata-cache-{os.geteuid()}"


def _private_folder(root: Path, names: Iterable[str]) -> Path:
    """Make and check the folders from root on.

    Raises:
        OSError: one cannot be made, written or trusted; has the file name and says why.
    """
    root.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if _mode(root.parent) & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH:
        raise _refused(root.parent, "anybody may rename what is in it")
    folder = root
    _make_private(folder)
    for name in names:
        folder /= name
        _make_private(folder)
    with tempfile.TemporaryFile(dir=folder, buffering=0) as probe:
        probe.write(_PROBE)
    return folder


def _make_private(folder: Path) -> None:
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if stat.S_ISLNK(status.st_mode):
        raise _refused(folder, "is a link")
    if not stat.S_ISDIR(status.st_mode):
        raise _refused(folder, "is not a folder")
    if status.st_uid != os.geteuid():
        raise _refused(folder, f"belongs to user {status.st_uid}")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise _refused(folder, f"others may write to it (mode {stat.S_IMODE(status.st_mode):04o})")


def _mode(folder: Path) -> int:
    return folder.stat().st_mode


def _refused(folder: Path, reason: str) -> OSError:
    return OSError(None, reason, str(folder))
