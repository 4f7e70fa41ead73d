"""Writes the expected logits of the shipped demo model, for the engine's tests.

    python -m tools.demo_model.golden WEIGHTS_FOLDER MODEL.gguf OUTPUT.npz

Keys: `NAME.text` (prompt, utf-8 bytes), `NAME.ids` i32, `NAME.logits_last` f32 [vocab], and
`NAME.greedy` i32 [16], the arg max continuation, which goes on after an end of turn.
"""

from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from tools.demo_model.prompt import choice, decision_prompt, render, yes_no
from tools.demo_model.reference import load_reference, stored_weights

GREEDY_TOKENS = 16
TETRIS = (
    "A fast-paced tetris clone for the console with falling blocks, high scores and a mode for "
    "two players."
)
POSTGRES = (
    "PostgreSQL is a fully featured object-relational database management system. It supports a "
    "large part of the SQL standard."
)
SECTIONS = ["games", "mail", "database", "sound", "graphics", "math"]
SECTION_QUESTION = "Which section does this package belong to?"


def prompts() -> dict[str, str]:
    """Return the golden prompts by name; `long` reaches over several prompt chunks."""
    return {
        "games": decision_prompt(TETRIS, choice(SECTION_QUESTION, SECTIONS)),
        "database": decision_prompt(POSTGRES, choice(SECTION_QUESTION, SECTIONS)),
        "yesno": decision_prompt(TETRIS, yes_no("Is this package a game?")),
        "chat": render([("user", "What is a database?")]),
        "plain": "In the beginning",
        "long": (POSTGRES + "\n" + TETRIS + "\n") * 8,
    }


def expected(model: Any, ids: list[int]) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """Return the last logits of a prompt and its greedy continuation."""
    sequence = list(ids)
    last: NDArray[np.float32] | None = None
    for _ in range(GREEDY_TOKENS):
        with torch.no_grad():
            logits = model(torch.tensor([sequence]), logits_to_keep=1).logits[0, -1].numpy()
        last = logits if last is None else last
        sequence.append(int(logits.argmax()))
    assert last is not None
    return last, np.asarray(sequence[len(ids) :], dtype=np.int32)


@click.command()
@click.argument("source", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("gguf", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("output", type=click.Path(dir_okay=False, path_type=Path))
def main(source: Path, gguf: Path, output: Path) -> None:
    """Write the expected values of GGUF, whose checkpoint is SOURCE, to OUTPUT."""
    torch.set_num_threads(1)
    model = load_reference(source, stored_weights(source, gguf))
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    arrays: dict[str, Any] = {}
    for name, text in prompts().items():
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        arrays[f"{name}.text"] = np.frombuffer(text.encode(), dtype=np.uint8)
        arrays[f"{name}.ids"] = np.asarray(ids, dtype=np.int32)
        arrays[f"{name}.logits_last"], arrays[f"{name}.greedy"] = expected(model, ids)
    np.savez_compressed(output, **arrays)


if __name__ == "__main__":
    main()
