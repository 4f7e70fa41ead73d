"""Many one-token reads about one text through the engine's process: one by one, and all at once.

    PYTHONPATH=. python benchmarks/shared_questions.py [MODEL.gguf] [--device cuda:0] [--json FILE]

Each round asks about a text of its own, of random tokens, so that nothing is known from before; the
questions behind it differ. All values are checked to be those of a read that reuses nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.arguments import run_benchmark
from strata_cli.config import StrataConfig
from strata_cli.server.engine_process import EngineProcess
from strata_cli.server.protocol import Done, Generate, Token

ANSWERS = (5, 6, 7, 8)


def questions(rng: np.random.Generator, vocab: int, count: int, text: int) -> list[Generate]:
    shared = tuple(rng.integers(16, vocab - 64, text).tolist())
    return [
        Generate(
            prompt=shared + tuple(rng.integers(16, vocab - 64, 12).tolist()),
            max_tokens=1,
            logprobs=5,
            allowed_ids=ANSWERS,
        )
        for _ in range(count)
    ]


async def read(engine: EngineProcess, request: Generate) -> tuple[Token, Done]:
    async with aclosing(engine.generate(request)) as events:
        told = [event async for event in events]
    token, done = told[-2:]
    assert isinstance(token, Token)
    assert isinstance(done, Done)
    return msgspec.structs.replace(token, request_id=""), done


async def measure(
    engine: EngineProcess, requests: Sequence[Generate], *, at_once: bool
) -> tuple[dict[str, Any], list[Token]]:
    start = time.perf_counter()
    if at_once:
        results = await asyncio.gather(*(read(engine, request) for request in requests))
    else:
        results = [await read(engine, request) for request in requests]
    seconds = time.perf_counter() - start
    row = {
        "at_once": at_once,
        "seconds": seconds,
        "reads_per_s": len(requests) / seconds,
        "prompt_tokens": sum(done.prompt_tokens for _, done in results),
        "read_tokens": sum(done.read_tokens for _, done in results),
    }
    return row, [token for token, _ in results]


async def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    engine = EngineProcess(
        StrataConfig(
            model=arguments.model,
            device=arguments.device,
            parallel=arguments.parallel,
            max_context=arguments.text + 64,
        )
    )
    rng, rows = np.random.default_rng(1), []
    try:
        await engine.start()
        assert engine.facts is not None
        for round_ in range(arguments.rounds):
            for at_once in (False, True):
                vocab = engine.facts.vocab_size
                asked = questions(rng, vocab, arguments.questions, arguments.text)
                row, told = await measure(engine, asked, at_once=at_once)
                alone = msgspec.structs.replace(asked[-1], reuse=False)
                row["same_bits"] = (await read(engine, alone))[0] == told[-1]
                rows.append({"round": round_, **row})
                print(rows[-1])
    finally:
        await engine.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path, nargs="?", help="the embedded one if left out")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--questions", type=int, default=32)
    parser.add_argument("--text", type=int, default=400, help="tokens that all begin with")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="file for all figures")
    arguments = parser.parse_args()
    rows = asyncio.run(run(arguments))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    run_benchmark(main)
