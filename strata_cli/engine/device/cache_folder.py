"""Where compiled kernels are kept between runs: one folder per set of sources."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path


def cache_root() -> Path:
    """The user's cache folder for this program; a folder under /tmp when there is no home."""
    base = os.environ.get("XDG_CACHE_HOME")  # noqa: TID251 - the desktop's convention, no setting
    candidates = [Path(base)] if base else []
    with contextlib.suppress(RuntimeError):  # no home folder
        candidates.append(Path.home() / ".cache")
    for candidate in candidates:
        if _is_writable(candidate):
            return candidate / "strata"
    return Path(tempfile.gettempdir()) / f"strata-cache-{os.getuid()}"


def sources_digest(sources: Iterable[Path]) -> str:
    """16 hex digits that change when any of the files does."""
    digest = hashlib.sha256()
    for path in sorted(sources):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _is_writable(folder: Path) -> bool:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return os.access(folder, os.W_OK)
