"""Fits a model to its device: with the context that is wished for, or the longest usual one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from strata_cli.engine.device.gpu_survey import GpuFacts
from strata_cli.engine.device.paper import DescribedGpu
from strata_cli.engine.device.sizes import gib
from strata_cli.engine.options import AUTO_CONTEXT_TOKENS
from strata_cli.errors import OutOfMemory
from strata_cli.launch.fits import Fit, FitWishes, ModelFacts

MIB = 1 << 20
LEAST_CONTEXT_TOKENS = 1024  # less is no use to anybody who did not ask for it


class Fitted(NamedTuple):
    """A fit, and why its context is as long as it is."""

    fit: Fit
    reason: str


def fit_model(
    model: ModelFacts,
    gpu: GpuFacts | None,
    given: Mapping[str, Any],
    reserve_mib: int,
    pinned_bytes: int | None = None,
) -> Fitted:
    """The model on its device.

    Args:
        model: what is to run.
        gpu: where; None: the host.
        given: settings chosen by hand, by field name.
        reserve_mib: of a GPU, for others.
        pinned_bytes: most of experts in page-locked memory; None: all.

    Raises:
        OutOfMemory: it does not fit; says who uses the GPU where it would fit without them.
        InputError: it has no such context.
    """
    wishes = FitWishes(
        context_tokens=given.get("max_context", 0),
        chunk_tokens=given.get("prefill", 0),
        expert_cache=given.get("expert_cache"),
        pinned_bytes=pinned_bytes,
        num_sequences=given.get("parallel", 1),
        threads=given.get("threads", 0),
    )
    if gpu is None:
        return _longest(model, wishes, None)
    reserve_bytes = reserve_mib * MIB
    usable_bytes = given.get("vram_bytes") or max(gpu.free_bytes - reserve_bytes, 0)
    try:
        return _longest(model, wishes, _described(gpu, usable_bytes))
    except OutOfMemory as error:
        whole = _described(gpu, max(gpu.total_bytes - reserve_bytes, 0))
        if given.get("vram_bytes") or not _fits(model, wishes, whole):
            raise
        raise _in_use(gpu, error) from error


def _longest(model: ModelFacts, wishes: FitWishes, gpu: DescribedGpu | None) -> Fitted:
    usual = min(model.context_tokens, AUTO_CONTEXT_TOKENS)
    tokens = wishes.context_tokens or usual
    while True:
        try:
            fit = model.fit(wishes._replace(context_tokens=tokens), gpu)
            return Fitted(fit, _reason(model, tokens, usual))
        except OutOfMemory:
            if wishes.context_tokens or tokens // 2 < LEAST_CONTEXT_TOKENS:
                raise
            tokens //= 2


def _reason(model: ModelFacts, tokens: int, usual: int) -> str:
    if tokens < usual:
        return f"the longest of {usual}, {usual // 2}, ... that fits"
    if tokens == model.context_tokens:
        return "all that the model was made for"
    return f"the usual; the model was made for {model.context_tokens}"


def _fits(model: ModelFacts, wishes: FitWishes, gpu: DescribedGpu) -> bool:
    try:
        _longest(model, wishes, gpu)
    except OutOfMemory:
        return False
    return True


def _described(gpu: GpuFacts, free_bytes: int) -> DescribedGpu:
    return DescribedGpu(
        name=f"cuda:{gpu.ordinal}",
        free_bytes=free_bytes,
        total_bytes=gpu.total_bytes,
        shared_bytes=gpu.shared_bytes,
        num_multiprocessors=gpu.num_multiprocessors,
        capability=gpu.capability,
    )


def _in_use(gpu: GpuFacts, error: OutOfMemory) -> OutOfMemory:
    who = ", ".join(
        f"process {holder.pid} ({holder.name}"
        + (f", {gib(holder.nbytes)})" if holder.nbytes else ")")
        for holder in gpu.holders
    )
    pids = "".join(f" {holder.pid}" for holder in gpu.holders)
    return OutOfMemory(
        f"cuda:{gpu.ordinal} is in use: {gib(gpu.total_bytes - gpu.free_bytes)} of "
        f"{gib(gpu.total_bytes)} are taken by {who or 'others'}; {error.message}",
        hint=f"end what uses the GPU{f' (kill{pids})' if pids else ''}, or --device host",
    )
