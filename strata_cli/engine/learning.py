"""The expert profile that a run learns: what its prompts and steps used, saved now and then."""

from __future__ import annotations

import logging
import time
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.device.helper_thread import HelperThread
from strata_cli.engine.experts.profile import ExpertProfile, save_profile
from strata_cli.errors import ConfigError

logger = logging.getLogger(__name__)


class ProfileLearner:
    """Adds use to a profile, and keeps it in a file. Used from one thread.

    Saving at an interval happens on a thread of its own, for a disk may take long; a file that
    cannot be written is a warning, for the run goes on. What such a save had is saved with the next
    one, at the latest at the end.

    Args:
        path: of the file, which is replaced whole or not at all.
        profile: what was known before.
        every_s: seconds between two saves; 0: only at the end.
    """

    def __init__(self, path: Path, profile: ExpertProfile, every_s: float) -> None:
        self._path = path
        self._profile = profile
        self._every_s = every_s
        self._use = np.zeros(profile.use.shape, np.int64)
        self._is_new = False
        self._saved_at = time.monotonic()
        self._saving: HelperThread | None = None
        self._has_failed = False  # written by the thread that saves; one at a time

    @property
    def profile(self) -> ExpertProfile:
        """What is known now."""
        return self._profile.plus(self._use)

    def add_pairs(self, pairs: NDArray[np.int64]) -> None:
        """A window used these pairs, layer * E + expert, none twice; [n]."""
        self._use.reshape(-1)[pairs] += 1
        self._note()

    def add_use(self, use: NDArray[np.int64]) -> None:
        """Prompts had so many tokens for each expert, [L, E]."""
        self._use += use
        self._note()

    def close(self) -> None:
        """Save what is new. Safe to call twice."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.join()
        if self._is_new or self._has_failed:
            self._is_new = False
            self._save(self.profile)

    def _note(self) -> None:
        self._is_new = True
        now = time.monotonic()
        is_saving = self._saving is not None and self._saving.is_alive()
        if not self._every_s or is_saving or now - self._saved_at < self._every_s:
            return
        self._saved_at = now
        saving = HelperThread(partial(self._save, self.profile), "strata-profile")
        try:
            saving.start()
        except RuntimeError as error:  # how Python says that the system refuses
            logger.warning("no thread can be started that saves the use of experts: %s", error)
            return
        self._saving, self._is_new = saving, False

    def _save(self, profile: ExpertProfile) -> None:
        try:
            save_profile(self._path, profile)
        except ConfigError as error:
            self._has_failed = True
            logger.warning("%s", error.message)
        else:
            self._has_failed = False
            logger.info("use of experts kept in %s", self._path)
