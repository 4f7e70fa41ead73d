"""Chooses the settings for a model on a machine, each with its reason. It only reads values."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from strata_cli.engine.device.gpu_survey import GpuFacts
from strata_cli.engine.device.sizes import gib
from strata_cli.errors import path_text
from strata_cli.launch.contexts import fit_model
from strata_cli.launch.devices import choose_device
from strata_cli.launch.fits import Fit, ModelFacts
from strata_cli.launch.machine import Machine
from strata_cli.launch.pinning import GIB, Pinning, choose_pinning, given_pinning
from strata_cli.launch.refusals import check_locking, check_memory, check_port, check_software
from strata_cli.launch.tiers import Tier, tiers_of

RESERVE_MIB, DISPLAY_RESERVE_MIB = 700, 1024
TURNING_GBPS = 0.1  # of a disk that turns, where it was not measured
SOON_S = 2.0  # a file that is read in so long is not worth a note
FEW_SHARE = 0.05  # of the experts: with so few in the cache, nearly every one comes over the link


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchWishes:
    """What somebody wants.

    Attributes:
        given: values of settings that were chosen by hand, by field name.
        origin_of: where each of these was said, for the table.
        service: "user" or "system", the manager that is to run the server; empty: nobody.
    """

    given: Mapping[str, Any]
    origin_of: Mapping[str, str]
    service: str = ""


class Choice(NamedTuple):
    """A setting and why it is so.

    Attributes:
        name: of the field.
        value: of the setting.
        reason: for people.
        is_given: somebody chose it by hand.
    """

    name: str
    value: Any
    reason: str
    is_given: bool = False


class LaunchPlan(NamedTuple):
    """How a model is to run.

    Attributes:
        choices: settings to write.
        tiers: what each memory will hold.
        notes: what the user should know, and what to do about it.
        fit: the numbers.
        load_s: seconds that reading the weights will take; None: unknown.
    """

    choices: tuple[Choice, ...]
    tiers: tuple[Tier, ...]
    notes: tuple[str, ...]
    fit: Fit
    load_s: float | None

    def value(self, name: str) -> Any:
        """Of the setting of that name, which must be among the choices."""
        return next(choice.value for choice in self.choices if choice.name == name)


def plan_launch(
    machine: Machine, model: ModelFacts, wishes: LaunchWishes, names: frozenset[str]
) -> LaunchPlan:
    """Settings for a model on a machine.

    Args:
        machine: what there is.
        model: what is to run.
        wishes: what was chosen by hand; that is kept or refused, never changed.
        names: settings that exist; others are not chosen.

    Raises:
        ConfigError: no such device, the driver is too old, the port is taken, something is not
            installed.
        OutOfMemory: the model does not fit the GPU, the RAM, or what may be locked of it.
        InputError: the model has no such context.
    """
    given = wishes.given
    check_software(machine)
    if "port" in names:
        check_port(machine)
    gpu, device_reason = choose_device(machine, str(given.get("device", "auto")))
    reserve = _reserve(gpu, given)
    fit, context_reason, pinning = _fit(machine, model, gpu, given, reserve)
    check_memory(machine, model, fit, is_gpu=gpu is not None)
    check_locking(machine, fit, gpu, wishes.service)
    chosen = [
        _model(model),
        Choice("device", "host" if gpu is None else f"cuda:{gpu.ordinal}", device_reason),
        Choice("max_context", fit.context_tokens, context_reason),
        *_memory_choices(gpu, fit, reserve),
        *_pinning_choices(pinning),
        *SERVER_CHOICES,
    ]
    choices = [_as_given(choice, wishes) for choice in chosen if choice.name in names]
    extra = [name for name in given if name not in {choice.name for choice in choices}]
    choices += [_as_given(Choice(name, given[name], ""), wishes) for name in extra]
    return LaunchPlan(
        tuple(choices),
        tiers_of(machine, model, fit, gpu),
        tuple(_notes(machine, model, fit, gpu, wishes)),
        fit,
        _load_s(machine, model, gpu),
    )


class _Fitted(NamedTuple):
    fit: Fit
    reason: str
    pinning: Pinning


def _fit(
    machine: Machine,
    model: ModelFacts,
    gpu: GpuFacts | None,
    given: Mapping[str, Any],
    reserve: int,
) -> _Fitted:
    """The model on its device, with as many experts in page-locked memory as there is room for."""
    by_hand = given_pinning(given)
    if by_hand is not None:
        return _Fitted(*fit_model(model, gpu, given, reserve, by_hand.nbytes), by_hand)
    whole = fit_model(model, gpu, given, reserve)
    pinning = choose_pinning(machine, whole.fit)
    if gpu is None or pinning.nbytes is None:
        return _Fitted(*whole, Pinning(None))
    return _Fitted(*fit_model(model, gpu, given, reserve, pinning.nbytes), pinning)


def _pinning_choices(pinning: Pinning) -> list[Choice]:
    if not pinning.reason or pinning.nbytes is None:
        return []
    if pinning.nbytes == 0:
        return [Choice("mmap_experts", True, pinning.reason)]
    return [Choice("arena_pin_gib", pinning.nbytes / GIB, pinning.reason)]


def _reserve(gpu: GpuFacts | None, given: Mapping[str, Any]) -> int:
    """MiB of device memory for others."""
    if "vram_reserve_mib" in given:
        return int(given["vram_reserve_mib"])
    return DISPLAY_RESERVE_MIB if gpu is not None and gpu.drives_display else RESERVE_MIB


def _model(model: ModelFacts) -> Choice:
    path = None if model.path is None else Path(model.path).absolute()
    return Choice("model", path, f"{model.name}, {gib(model.file_bytes)}")


def _memory_choices(gpu: GpuFacts | None, fit: Fit, reserve: int) -> list[Choice]:
    prefill = Choice("prefill", 0, f"now chunks of {fit.chunk_tokens} tokens")
    if gpu is None:
        return [Choice("threads", 0, "one per usable core"), prefill]
    why = "a screen is connected" if reserve == DISPLAY_RESERVE_MIB else "for the driver and others"
    what = f"now {fit.num_resident} experts" if fit.is_streamed else "now all experts fit"
    return [prefill, Choice("expert_cache", None, what), Choice("vram_reserve_mib", reserve, why)]


SERVER_CHOICES = (
    Choice("host", "127.0.0.1", "reachable from this machine alone"),
    Choice("port", 8080, "free"),
    Choice("parallel", 1, "one request at a time has all the speed"),
)


def _as_given(choice: Choice, wishes: LaunchWishes) -> Choice:
    if choice.name == "model" or choice.name not in wishes.given:
        return choice
    origin = wishes.origin_of.get(choice.name, "given")
    return Choice(choice.name, wishes.given[choice.name], origin, is_given=True)


def _notes(
    machine: Machine,
    model: ModelFacts,
    fit: Fit,
    gpu: GpuFacts | None,
    wishes: LaunchWishes,
) -> list[str]:
    notes = []
    if gpu is not None and gpu.holders:
        names = ", ".join(f"{holder.name} ({holder.pid})" for holder in gpu.holders)
        notes.append(f"other processes have memory of {gpu.name}: {names}")
    if fit.is_streamed and fit.num_resident < FEW_SHARE * model.num_experts:
        notes.append(
            f"only {fit.num_resident} of {model.num_experts} experts fit beside the rest: "
            "a shorter --max-context or --prefill leaves room for more"
        )
    hot_bytes = model.file_bytes - model.table_bytes
    if gpu is None and hot_bytes > machine.memory.free_bytes:
        notes.append(
            f"{gib(hot_bytes)} of weights are used in place and only "
            f"{gib(machine.memory.free_bytes)} of RAM are available: "
            "the rest is read from the disk again and again"
        )
    is_file_in_use = gpu is None or (fit.is_streamed and fit.pinned_bytes < fit.experts_bytes)
    read_s = model.file_bytes / 1e9 / (machine.disk.read_gbps or TURNING_GBPS)
    if machine.disk.is_rotational and is_file_in_use and read_s > SOON_S:
        notes.append(
            "the model's file is used where it lies, and its disk turns: what is not in memory yet "
            f"comes slowly, row by row; cat {_files(model)} > /dev/null brings it there first, in "
            f"about {read_s:.0f} s"
        )
    if wishes.service == "user":
        notes.append("a user's services end with the login, but for: loginctl enable-linger")
    return notes


def _files(model: ModelFacts) -> str:
    """Its files, as a shell takes them: of shards, whose names differ in a number, a pattern."""
    first = path_text(model.files[0])
    if len(model.files) == 1:
        return shlex.quote(first)
    head, _, tail = first.rpartition("-00001-of-")
    return f"{shlex.quote(head)}-*-of-{shlex.quote(tail)}"


def _load_s(machine: Machine, model: ModelFacts, gpu: GpuFacts | None) -> float | None:
    """The host uses weights in place: nothing is read ahead."""
    rate = machine.disk.read_gbps
    return None if gpu is None or not rate else model.file_bytes / 1e9 / rate
