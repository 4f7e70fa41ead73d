"""Whether llama.cpp reads a model file as this engine does.

    pip install xllamacpp                                   # llama.cpp as a Python package
    PYTHONPATH=. python benchmarks/llama_cpp.py MODEL.gguf [--tokens 130] [--floats]

Both read the same prompt, with keys and values in float32; llama.cpp's ten best tokens behind every
part of it are compared, with their log-probabilities. llama.cpp rounds the inputs of products with
quantized weights to 8 bits, so figures of a quantized file say little; --floats compares a copy of
it in float32. What is left then is rounding, and now and then an expert that was a near-tie.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import xllamacpp
from numpy.typing import NDArray

from benchmarks.arguments import run_benchmark
from strata_cli.engine.engine import Engine, EngineOptions
from tests.model.rewrite import write_float_copy
from tools.synth.prompts import zipf_prompt

BEST = 10


def best_of_llama_cpp(model: Path, ids: list[int]) -> list[list[dict[str, Any]]]:
    """Of each part of the prompt, the BEST tokens behind it; none where the next is no text."""
    params = xllamacpp.CommonParams()
    params.model.path = str(model)
    params.verbosity = 0
    params.n_ctx, params.n_parallel, params.warmup = len(ids) + 8, 1, False
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server, best = xllamacpp.Server(params), []
    for end in range(1, len(ids) + 1):
        asked = {"prompt": ids[:end], "n_predict": 1, "n_probs": BEST, "temperature": 0}
        answer = server.handle_completions({**asked, "ignore_eos": True, "stream": False})
        told = answer["choices"][0]["logprobs"]
        best.append(told["content"][0]["top_logprobs"] if told and told["content"] else [])
    return best


def read(model: Path, num_tokens: int) -> tuple[list[int], NDArray[np.float64]]:
    """A prompt, and the log-probabilities behind each of its tokens, [T, V]."""
    with Engine.open(EngineOptions(model=model, device="host", max_context=num_tokens)) as engine:
        ids = zipf_prompt(engine.spec.vocab_size, num_tokens, seed=1)
        with engine.sequence() as sequence:
            logits = sequence.prefill(ids, logits="all").astype(np.float64)
    return ids, logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)


def compare(model: Path, num_tokens: int) -> None:
    ids, logprobs = read(model, num_tokens)
    rows = [(row, best) for row, best in enumerate(best_of_llama_cpp(model, ids)) if best]
    same = sum(int(logprobs[row].argmax()) == best[0]["id"] for row, best in rows)
    errors = [max(abs(logprobs[row, e["id"]] - e["logprob"]) for e in best) for row, best in rows]
    print(f"{model.name}: the likeliest token is the same behind {same} of {len(rows)} tokens;")
    print(
        f"log-probabilities differ by {np.median(errors):.6f} (median), {max(errors):.4f} (most), "
        f"by over 0.001 behind {sum(error > 1e-3 for error in errors)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=130)
    parser.add_argument("--floats", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model
        if arguments.floats:
            model = write_float_copy(model, Path(folder) / f"{model.stem}-f32.gguf")
        compare(model, arguments.tokens)


if __name__ == "__main__":
    run_benchmark(main)
