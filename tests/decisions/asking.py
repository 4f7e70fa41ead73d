"""What the tests of decisions ask, and of which models."""

from __future__ import annotations

import pytest

from strata_cli.engine.engine import Engine, EngineOptions
from tests.model.tiny_model import write_tiny_model

MESSAGES = [{"role": "system", "content": "Answer."}, {"role": "user", "content": "Which?"}]
STATE = "A fast multiplayer shooter in which teams fight over flags on many maps."
QUESTION = "Which section does this package belong to?"
OPTIONS = ["mail", "games", "python", "fonts"]


def open_tiny(folder: pytest.TempPathFactory) -> Engine:
    """A model whose tokens are bytes and a few pairs, without a chat template."""
    path = write_tiny_model(folder.mktemp("tiny") / "m.gguf")
    path.write_bytes(path.read_bytes().replace(b"chat_template", b"that_template"))
    return Engine.open(EngineOptions(model=path, device="host"))
