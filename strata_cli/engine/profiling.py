"""The profile that fills an expert cache: read from its file, or measured once on a fixed text."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.device.cache_folder import open_cache
from strata_cli.engine.experts.profile import (
    ExpertProfile,
    even_profile,
    load_profile,
    model_key,
    save_profile,
)
from strata_cli.engine.forward.layers import Forward
from strata_cli.engine.forward.rows import RowPort
from strata_cli.engine.forward.state import new_state
from strata_cli.engine.model.tensors import ModelFile
from strata_cli.engine.model.tokenizer import Tokenizer
from strata_cli.engine.prefill.chunks import prefill
from strata_cli.engine.prefill.streamer import PromptStreamer
from strata_cli.engine.profile_text import PROFILE_TEXT
from strata_cli.errors import ConfigError

logger = logging.getLogger(__name__)

FOLDER = "profiles"


class Known(NamedTuple):
    """What is known of a model's use of its experts.

    Attributes:
        profile: even where nothing is.
        target: file that should get a measured one; None: no measuring.
    """

    profile: ExpertProfile
    target: Path | None


def find_profile(model: ModelFile, wanted: Path | None, *, keeps_own: bool) -> Known:
    """The profile of a model, if there is one already.

    Args:
        model: an opened, checked model file.
        wanted: the file that somebody named; None: the program's own.
        keeps_own: whether the program keeps one for each model.

    Raises:
        ConfigError: the named file is there but is no profile of this model.
    """
    if wanted is not None:
        is_there = wanted.exists()
        profile = load_profile(wanted, model) if is_there else even_profile(model)
        return Known(profile, None if is_there else wanted)
    if not keeps_own:
        return Known(even_profile(model), None)
    folder = open_cache(FOLDER)
    if folder.path is None:
        logger.warning("the use of experts cannot be kept: %s", folder.problem)
        return Known(even_profile(model), None)
    path = folder.path / f"{model_key(model)}.npz"
    try:
        return Known(load_profile(path, model), None)
    except ConfigError as error:
        if path.exists():
            logger.warning("measuring the use of experts again: %s", error.message)
        return Known(even_profile(model), path)


def measure_profile(
    known: Known,
    tokenizer: Tokenizer,
    forward: Forward,
    port: RowPort,
    streamer: PromptStreamer,
    context_tokens: int,
) -> ExpertProfile:
    """Count which experts the built-in text uses, keep that in the file, and hold those used most.

    Does nothing where no experts are streamed.

    Returns:
        What is known then.

    Args:
        known: an even profile and the file.
        tokenizer: of the model.
        forward: the model.
        port: staging of the forward's workspace.
        streamer: counts, and fills its cache.
        context_tokens: most that may be read.
    """
    ids = tokenizer.encode(PROFILE_TEXT, parse_special=False)[:context_tokens]
    use = _use_of(ids, forward, port, streamer, context_tokens)
    if use is None:
        return known.profile
    profile = known.profile.plus(use)
    streamer.hold(profile.ranking(), profile.scores)
    assert known.target is not None
    try:
        save_profile(known.target, profile)
    except ConfigError as error:
        logger.warning("%s", error.message)
    else:
        logger.info("use of experts measured on %d tokens and kept in %s", len(ids), known.target)
    return profile


def _use_of(
    ids: list[int],
    forward: Forward,
    port: RowPort,
    streamer: PromptStreamer,
    context_tokens: int,
) -> NDArray[np.int64] | None:
    """Tokens of each expert, [L, E]; None where they were not counted."""
    stream = forward.stream
    state = new_state(forward.spec, streamer.setting.device, stream, context_tokens)
    try:
        prefill(forward, port, state, ids, wanted="none", streamer=streamer)
        return streamer.use
    finally:
        stream.synchronize()
        state.close()
