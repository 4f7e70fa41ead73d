"""`strata trace --ab`: runs that differ in one setting, timed in pairs or compared bit by bit."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from strata_cli.commands.opening import open_engine
from strata_cli.commands.options import changed_config
from strata_cli.config import (
    PREFIX,
    StrataConfig,
    check_value,
    field_names,
    nearest,
    parser_of,
    variable_of,
)
from strata_cli.engine.engine import Engine
from strata_cli.engine.experts.residency_counts import ResidencyCounts
from strata_cli.engine.measuring import identity, pairs
from strata_cli.engine.measuring.identity import Fingerprint
from strata_cli.engine.measuring.pairs import Comparison
from strata_cli.engine.measuring.summary import summarize
from strata_cli.engine.measuring.timing import compare_arms, read_before, time_reads
from strata_cli.engine.reading import ReadRequest, read
from strata_cli.engine.trace import STDERR, Event
from strata_cli.errors import ConfigError, quoted

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 1

RequestOf = Callable[[Engine, StrataConfig], ReadRequest]


@dataclass(frozen=True, slots=True)
class Switch:
    """A setting and its two values, as a user would write them."""

    name: str
    off: str
    on: str


@dataclass(frozen=True, slots=True)
class Arms:
    """What all arms of a comparison share.

    Attributes:
        flags: settings from the command line, by field name.
        switch: the setting that differs.
        request_of: what is read, given the engine and the settings of the arm.
        will_chat: the prompt goes through the chat template.
        reuse: tokens of the prompt that are read before, untimed.
        inputs: see opening.input_files().
    """

    flags: Mapping[str, Any]
    switch: Switch
    request_of: RequestOf
    will_chat: bool
    reuse: int
    inputs: Mapping[str, str]

    def config(self, value: str) -> StrataConfig:
        """The settings of an arm.

        Raises:
            ConfigError: the switch does not take the value.
        """
        return changed_config(self.flags, self.switch.name, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class IdentityArm:
    """One run of the identity check.

    Attributes:
        name: of the arm, see identity.ARMS.
        value: of the switch.
        fingerprint: of what it computed.
        differs: fields that are not those of the first arm.
        copied, skipped: experts of the prompt; they may differ, since they depend on timing.
        routed, hits: experts that steps wanted, and those of them that were cached; 0 where all
            experts stay put. They may differ, too.
    """

    name: str
    value: str
    fingerprint: Fingerprint
    differs: list[str]
    copied: int
    skipped: int
    routed: int
    hits: int


def parse_switch(text: str) -> Switch:
    """A setting by any of its names, perhaps with values: NAME, NAME=ON or NAME=OFF,ON.

    Without values the setting must take 0 and 1; with one, its default is the other.

    Raises:
        ConfigError: there is no such setting, or no two values, or it does not take one.
    """
    written, _, values = text.partition("=")
    name = written.removeprefix(PREFIX).removeprefix("--").replace("-", "_").lower()
    specs = {spec.name: spec for spec in fields(StrataConfig)}
    if name not in specs:
        close = nearest(name, field_names())
        raise ConfigError(
            f"--ab: {quoted(written)} is not a setting",
            hint=f"did you mean {close}?" if close else "docs/settings.md lists them",
        )
    parse = parser_of(specs[name])
    default = parse.show(specs[name].default)
    if values:
        off, comma, on = values.partition(",")
        for value in (off, on) if comma else (off,):
            check_value(name, value, f"--ab: {written}")
        return Switch(name, off, on) if comma else Switch(name, default, off)
    try:
        parse("0"), parse("1")
    except ValueError:
        raise ConfigError(
            f"--ab {text} needs two values: {written} is {parse.expected}",
            hint=f"--ab {name}=OFF,ON, or --ab {name}=ON against the default, {default}",
        ) from None
    return Switch(name, "0", "1")


def check_files(config: StrataConfig, switch: Switch, *, identity: bool) -> None:
    """Refuse files that every arm would write anew, so that the last one's alone would stay.

    The switch itself may be one: what writing the file costs can be timed.

    Raises:
        ConfigError: the settings name one.
    """
    is_dumped = config.prefill_dump_r is not None or switch.name == "prefill_dump_r"
    if identity and is_dumped:
        raise ConfigError(
            "STRATA_PREFILL_DUMP_R has no effect with --identity, whose arms write dumps of "
            "their own",
            hint="leave it out, or write the dump with strata read",
        )
    named = {
        "trace": config.trace not in ("", STDERR),
        "prefill_dump_r": config.prefill_dump_r is not None,
        "expert_profile_save": config.expert_profile_save is not None,
    }
    for name, is_named in named.items():
        if is_named and name != switch.name:
            raise ConfigError(
                f"{variable_of(name)} and --ab cannot be used together: each arm would write the "
                "file anew",
                hint="leave it out, or run each setting by itself with strata read",
            )


def time_arms(arms: Arms, repeat: int) -> list[Comparison]:
    """Read with the switch off and on, each arm with a fresh engine; see measuring/pairs.py.

    Raises:
        StrataError: a run failed.
    """
    times = []
    for number, is_on in enumerate(pairs.ARMS, 1):
        value = arms.switch.on if is_on else arms.switch.off
        logger.info("arm %d of %d: %s=%s", number, len(pairs.ARMS), arms.switch.name, value)
        config = arms.config(value)
        with open_engine(config, will_chat=arms.will_chat, inputs=arms.inputs) as engine:
            request = arms.request_of(engine, config)
            times.append(time_reads(engine, request, repeat, arms.reuse))
    return compare_arms(times)


def identity_arms(arms: Arms) -> list[IdentityArm]:
    """Read with the switch off, as by default, on and off again, each with a fresh engine.

    Raises:
        StrataError: a run failed.
    """
    spec = next(spec for spec in fields(StrataConfig) if spec.name == arms.switch.name)
    default = parser_of(spec).show(spec.default)
    values = (arms.switch.off, default, arms.switch.on, arms.switch.off)
    done: list[IdentityArm] = []
    with tempfile.TemporaryDirectory(prefix="strata-identity-") as folder:
        for name, value in zip(identity.ARMS, values, strict=True):
            logger.info("%s: %s=%s", name, arms.switch.name, value)
            events: list[Event] = []
            fingerprint, steps = _fingerprint(arms, value, Path(folder) / "residual", events)
            traffic = summarize(events).traffic
            first = done[0].fingerprint if done else fingerprint
            done.append(
                IdentityArm(
                    name=name,
                    value=value,
                    fingerprint=fingerprint,
                    differs=identity.differences(first, fingerprint),
                    copied=traffic.copied,
                    skipped=traffic.skipped,
                    routed=steps.routed,
                    hits=steps.hits,
                )
            )
    return done


def _fingerprint(
    arms: Arms, value: str, dump: Path, events: list[Event]
) -> tuple[Fingerprint, ResidencyCounts]:
    config = replace(arms.config(value), prefill_dump_r=dump)
    sinks = (events.append,)
    with open_engine(config, will_chat=arms.will_chat, inputs=arms.inputs, sinks=sinks) as engine:
        request = replace(arms.request_of(engine, config), state_hash=True)
        with engine.sequence() as sequence:
            result = read(engine, sequence, read_before(sequence, request, arms.reuse))
    steps = result.residency or ResidencyCounts()
    return Fingerprint.of(result, len(request.ids), dump), steps


def timing_text(switch: Switch, comparisons: list[Comparison]) -> str:
    """The table of a timed comparison."""
    lines = [
        f"{variable_of(switch.name)}: off is {switch.off}, on is {switch.on}; "
        "ratios above 1: on is better",
        f"{'':22}{'off':>10}{'on':>10}  {'pair ratios':<25}{'median':>7}  "
        f"{'95 % interval':<16}{'change':>8}",
    ]
    for item in comparisons:
        ratios = " ".join(f"{ratio:.3f}" for ratio in item.ratios)
        interval = f"[{item.low:.3f}, {item.high:.3f}]"
        lines.append(
            f"{item.name:<22}{item.off:>10.1f}{item.on:>10.1f}  {ratios:<25}"
            f"{item.median:>7.3f}  {interval:<16}{100 * item.change:>+7.1f}%"
        )
    return "\n".join(lines)


def timing_json(switch: Switch, comparisons: list[Comparison]) -> Any:
    """The documented object of `strata trace --ab --json` (docs/trace.md)."""
    return {
        "version": SCHEMA_VERSION,
        "switch": switch.name,
        "values": {"off": switch.off, "on": switch.on},
        "arms": ["on" if is_on else "off" for is_on in pairs.ARMS],
        "measures": [asdict(item) for item in comparisons],
    }


def identity_text(switch: Switch, arms: list[IdentityArm]) -> str:
    """The table of an identity check, and its verdict."""
    head = f"{'arm':<12}{switch.name[:24]:<26}{'reply':<10}{'residual':<10}"
    lines = [f"{head}{'copied':<9}{'skipped':<9}hits"]
    for arm in arms:
        fingerprint = arm.fingerprint
        lines.append(
            f"{arm.name:<12}{arm.value[:24]:<26}{fingerprint.reply_sha256[:8]:<10}"
            f"{fingerprint.dump_sha256[:8]:<10}{arm.copied:<9}{arm.skipped:<9}"
            f"{arm.hits} of {arm.routed}"
        )
    lines += [f"{arm.name} differs in {', '.join(arm.differs)}" for arm in arms if arm.differs]
    return "\n".join([*lines, verdict(arms)])


def verdict(arms: list[IdentityArm]) -> str:
    """What an identity check came to."""
    if arms[-1].differs:
        return "no verdict: runs with equal settings differ"
    if any(arm.differs for arm in arms):
        return "not identical"
    return "identical: reply, logits, counts, state hash and residual dump"


def identity_json(switch: Switch, arms: list[IdentityArm]) -> Any:
    """The documented object of `strata trace --ab --identity --json` (docs/trace.md)."""
    return {
        "version": SCHEMA_VERSION,
        "switch": switch.name,
        "is_identical": not any(arm.differs for arm in arms),
        "arms": [asdict(arm) for arm in arms],
    }
