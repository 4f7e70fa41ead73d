"""Arithmetic that is broken on purpose, so that the protocol has something to find."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from unittest.mock import patch

import numpy as np

from strata_cli.engine.device.base import Device, Graph, Stream, Tensor
from strata_cli.engine.device.transfer import download, upload
from strata_cli.engine.engine import Engine, EngineOptions
from strata_cli.engine.kernels import moe


@dataclass(frozen=True)
class Break:
    """One way to break it.

    Attributes:
        what: in words.
        deterministic: of the protocol's reads: False leaves on what plain reads may do.
        around: what is broken while an engine is open.
        change: of an engine's options, for a model of some top_k.
        manner: of reading, in which it shows.
    """

    what: str
    deterministic: bool | None
    around: Callable[[Engine], AbstractContextManager[None]]
    change: Callable[[EngineOptions, int], EngineOptions]
    manner: str


@contextmanager
def _nothing(_engine: Engine) -> Iterator[None]:
    yield


def _same(options: EngineOptions, _top_k: int) -> EngineOptions:
    return options


def skip_tail(options: EngineOptions, top_k: int) -> EngineOptions:
    """Steps leave out misses of the last ranks: from 7 of 10 on, to scale."""
    return replace(options, tail_skip=max(7 * top_k // 10, 1))


def share_steps(options: EngineOptions, _top_k: int) -> EngineOptions:
    """The host's processor computes the experts that steps miss."""
    return replace(options, link_share=0.0)


@contextmanager
def _split(engine: Engine) -> Iterator[None]:
    """One layer adds up a token's experts in two parts, cut as the pass's rows say.

    Not in steps, which are recorded once and replayed: a recording has no room for the processor.
    """
    combine, calls, num_layers = moe.combine, 0, engine.spec.num_layers
    device, compute = engine._device, engine._forward.stream
    capture, is_recorded = compute.capture, False

    @contextmanager
    def noted() -> Iterator[Graph]:
        nonlocal is_recorded
        with capture() as graph:
            is_recorded = True
            try:
                yield graph
            finally:
                is_recorded = False

    def split(
        stream: Stream,
        expert_out: Tensor,
        pair_of: Tensor,
        weights: Tensor,
        shared_out: Tensor,
        shared_logit: Tensor,
        out: Tensor,
    ) -> None:
        nonlocal calls
        combine(stream, expert_out, pair_of, weights, shared_out, shared_logit, out)
        calls += 1
        if calls % num_layers == 1 and out.shape[0] > 1 and not is_recorded:
            _sum_in_parts(device, stream, expert_out, pair_of, weights, out)

    with patch.object(moe, "combine", split), patch.object(compute, "capture", noted):
        yield


def _sum_in_parts(
    device: Device,
    stream: Stream,
    expert_out: Tensor,
    pair_of: Tensor,
    weights: Tensor,
    out: Tensor,
) -> None:
    """Replace the experts' sum in out [T, D], rank after rank, by the sum of two parts'."""
    rows = download(device, stream, expert_out)[download(device, stream, pair_of)]
    terms = rows * download(device, stream, weights)[:, :, None]
    num_tokens, top_k = terms.shape[:2]
    cut = 1 + num_tokens % max(top_k - 1, 1)
    in_turn = np.zeros_like(terms[:, 0])
    parts = [np.zeros_like(in_turn), np.zeros_like(in_turn)]
    for rank in range(top_k):
        in_turn += terms[:, rank]
        parts[rank >= cut] += terms[:, rank]
    changed = download(device, stream, out) + (parts[0] + parts[1] - in_turn)
    upload(device, stream, out, changed)


def share_prompts(options: EngineOptions, _top_k: int) -> EngineOptions:
    """The host's processor computes half of a short prompt's experts that are not in slots."""
    return replace(options, streaming=replace(options.streaming, cpu_share=0.5))


BREAKS = {
    "split": Break("sums that depend on how many rows a pass has", None, _split, _same, "ABC"),
    "cpu-share": Break(  # on the host, whose processor is the device, nothing differs
        "the processor's share of prompts is left on", False, _nothing, share_prompts, "ABC"
    ),
    "pcie-frac": Break(  # on the host neither
        "the processor's share of steps is left on",
        False,
        _nothing,
        share_steps,
        "last token stepped",
    ),
    "tail-skip": Break(
        "the tail skip is left on", False, _nothing, skip_tail, "last token stepped"
    ),
}
