"""How a read is shown: one JSON object, or text for people."""

from __future__ import annotations

import math
from typing import Any

from strata_cli.engine.engine import Engine
from strata_cli.engine.reading import ReadRequest, ReadResult, TokenLogprob

SCHEMA_VERSION = 1


def as_json(engine: Engine, request: ReadRequest, result: ReadResult, load_ms: float) -> Any:
    """The documented object of `strata read --json` (docs/read-json.md)."""
    timings = result.timings
    tokenizer = engine.tokenizer
    return {
        "version": SCHEMA_VERSION,
        "model": engine.model_name,
        "device": engine.device_name,
        "prompt_tokens": len(request.ids),
        "reused_tokens": result.reused_tokens,
        "read_tokens": len(request.ids) - result.reused_tokens,
        "top_logprobs": [_entry(engine, item) for item in result.top],
        "allowed": [_entry(engine, item) for item in result.allowed],
        "text": tokenizer.decode(result.generated_ids, skip_control=True),
        "generated_ids": result.generated_ids,
        "finish_reason": result.finish_reason,
        "canonical": request.is_canonical,
        "state_hash": None if result.state_hash is None else result.state_hash.as_dict(),
        "residency": None if result.residency is None else result.residency.as_dict(),
        "timings": {
            "load_ms": round(load_ms, 3),
            "prompt_ms": round(timings.prompt_ms, 3),
            "prompt_tokens_per_s": round(timings.prompt_tokens_per_s, 3),
            "generate_ms": round(timings.generate_ms, 3),
            "generate_tokens_per_s": round(timings.generate_tokens_per_s, 3),
        },
    }


def as_table(engine: Engine, entries: list[TokenLogprob]) -> str:
    """Lines of probability, log-probability, token id and token."""
    rows = [
        f"{math.exp(item.logprob):9.6f}  {item.logprob:11.6f}  {item.token_id:7d}  "
        f"{engine.tokenizer.token_text(item.token_id)!r}"
        for item in entries
    ]
    header = f"{'prob':>9}  {'logprob':>11}  {'id':>7}  token"
    return "\n".join([header, *rows])


def _entry(engine: Engine, item: TokenLogprob) -> dict[str, Any]:
    tokenizer = engine.tokenizer
    return {
        "id": item.token_id,
        "token": tokenizer.token_text(item.token_id),
        "bytes": list(tokenizer.token_bytes(item.token_id)),
        "logprob": item.logprob,
    }
