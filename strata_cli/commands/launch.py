"""`strata launch`: looks at the machine, plans, writes the settings, and starts the server."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import click
import orjson

from strata_cli.commands.launch_report import (
    checks_as_json,
    checks_as_text,
    plan_as_json,
    plan_as_text,
)
from strata_cli.commands.opening import ENGINE_SETTINGS
from strata_cli.commands.options import (
    config_file_of,
    config_options,
    given_settings,
    gpu_variables,
    load_config,
    written,
)
from strata_cli.commands.streams import require_stdout
from strata_cli.config import StrataConfig, field_names, parser_of
from strata_cli.engine.model.tensors import load_model_file
from strata_cli.engine.trace import STDERR
from strata_cli.errors import ConfigError, StrataError, path_text
from strata_cli.launch.checking import Check, check_machine, check_plan, exit_code
from strata_cli.launch.fits import FileFacts
from strata_cli.launch.machine import Machine, Port
from strata_cli.launch.planning import LaunchPlan, LaunchWishes, plan_launch
from strata_cli.launch.probing import probe_machine
from strata_cli.launch.settings_file import own_keys, settings_text, write_settings
from strata_cli.launch.starting import become, serve_command, unit_options
from strata_cli.launch.systemd import Services
from strata_cli.launch.unit import unit_text
from strata_cli.models import DEMO_MODEL_PATH
from strata_cli.parsers import choice, embedded_or_path

DEFAULT_FILE = Path("strata.toml")
SETTINGS = (
    *(name for name in ENGINE_SETTINGS if name != "model"),
    "host",
    "port",
    "allow_no_key",
    "parallel",
)

SECRETS = frozenset(spec.name for spec in fields(StrataConfig) if parser_of(spec).is_secret)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the command line and the settings file say.

    Attributes:
        config: the settings as they are now.
        wishes: those of them that somebody chose.
        model: the file; None: the embedded model.
        file: for the settings.
    """

    config: StrataConfig
    wishes: LaunchWishes
    model: Path | None
    file: Path


@click.command(short_help="Set this machine up for a model, and start the server.")
@click.argument("model", required=False, callback=written(embedded_or_path))
@click.option("--check", is_flag=True, help="Only report what is fine here and what is not.")
@click.option("--dry-run", is_flag=True, help="Show the plan; write and start nothing.")
@click.option(
    "--systemd",
    callback=written(choice("user", "system")),
    metavar="user|system",
    help="Install the server as a service of this user or of the system, and start it.",
)
@click.option(
    "--service-user", metavar="NAME", help="User of a system service.  [owner of the file's folder]"
)
@click.option(
    "--json", "is_json", is_flag=True, help="Print one JSON object; with --check or --dry-run."
)
@config_options(*SETTINGS)
def launch(
    model: Path | None,
    check: bool,
    dry_run: bool,
    systemd: str | None,
    service_user: str | None,
    is_json: bool,
    **flags: Any,
) -> int:
    """Choose settings for MODEL on this machine, write them to strata.toml, and start the server.

    MODEL is a GGUF file (of a split model any shard), or embedded; without it the one in the
    settings file, else the embedded one. Flags, STRATA_* variables and lines that you wrote into
    the file yourself are kept; the rest is chosen anew at each launch.

    \b
    strata launch model.gguf
    strata launch model.gguf --dry-run
    strata launch model.gguf --systemd user
    strata launch --check
    """
    if is_json and not (check or dry_run):
        raise ConfigError(
            "--json needs --check or --dry-run", hint="the server itself prints no result"
        )
    if check and dry_run:
        raise ConfigError(
            "--check and --dry-run are two different reports", hint="give one of them"
        )
    if service_user is not None and systemd != "system":
        raise ConfigError(
            "--service-user is for a system service", hint="add --systemd system, or leave it out"
        )
    require_stdout()
    has_model = click.get_current_context().get_parameter_source("model")
    asked = _asked(model, has_model is not None and has_model.name == "COMMANDLINE", systemd, flags)
    if check:
        return _report_checks(_checks(asked), is_json=is_json)
    services = None if systemd is None else Services(systemd)
    if services is not None and not dry_run:
        services.check()
    plan = _plan(asked)
    text = settings_text(asked.file, plan.choices)
    command = serve_command(asked.file, is_service=services is not None)
    if is_json:
        report = plan_as_json(plan, asked.file, command)
        click.echo(orjson.dumps(report, option=orjson.OPT_INDENT_2))
    else:
        click.echo(plan_as_text(plan))
    if dry_run:
        return 0
    _write(asked.file, text)
    if services is None:
        click.echo(f"strata: starting {' '.join(command)}", err=True)
        become(command)
    else:
        _start_service(services, asked, plan, service_user)
    return 0


def _asked(
    model: Path | None, is_model_given: bool, systemd: str | None, flags: Mapping[str, Any]
) -> Asked:
    file = config_file_of(flags) or DEFAULT_FILE
    of_file = own_keys(file)
    config = load_config({**flags, "config": file if file.exists() else None})
    origin_of = {name: f"in {path_text(file)}" for name in of_file} | given_settings(flags)
    _check_secrets(origin_of, of_file, is_service=systemd is not None)
    given = {
        name: getattr(config, name) if name in of_file else _absolute(name, getattr(config, name))
        for name in origin_of
        if name not in {"model", *SECRETS}
    }
    wishes = LaunchWishes(given=given, origin_of=origin_of, service=systemd or "")
    return Asked(
        config=config,
        wishes=wishes,
        model=model if is_model_given else config.model,
        file=file,
    )


def _absolute(name: str, value: Any) -> Any:
    """A path that was given here must mean the same where the server starts."""
    if isinstance(value, Path):
        return value.absolute()
    is_path = name == "trace" and value not in ("", STDERR)
    return os.path.abspath(value) if is_path else value


def _check_secrets(
    origin_of: Mapping[str, str], of_file: frozenset[str], *, is_service: bool
) -> None:
    """No secret is written into a file by this program, so a service cannot come by it."""
    for name in SECRETS & (origin_of.keys() - of_file):
        if is_service:
            raise ConfigError(
                f"{origin_of[name]} does not reach a service, and is written into no file",
                hint=f"write {name} = ... into the settings file yourself, and chmod 600 that file",
            )


def _probe(asked: Asked) -> Machine:
    host, port = asked.config.host, asked.config.port
    file = asked.model or DEMO_MODEL_PATH
    device = asked.wishes.given.get("device", "auto")
    try:
        return probe_machine(file, host, port, device=device)
    except OSError:  # what is wrong with the model's file is said where it is opened
        return probe_machine(Path(), host, port, device=device)


def _check_bind(config: StrataConfig) -> None:
    """Refuse what the server would refuse, before anything is measured or written."""
    try:
        from strata_cli.server.access import check_bind
    except ModuleNotFoundError:  # the planner says which packages are missing
        return
    check_bind(config.host, has_key=config.api_key is not None, allow_no_key=config.allow_no_key)


def _plan(asked: Asked) -> LaunchPlan:
    _check_bind(asked.config)
    with ExitStack() as resources:
        model = resources.enter_context(load_model_file(asked.model or DEMO_MODEL_PATH))
        facts = FileFacts(model, asked.model)
        return plan_launch(_probe(asked), facts, asked.wishes, frozenset(field_names()))


def _checks(asked: Asked) -> list[Check]:
    machine = _probe(asked)
    # The doctor speaks of port and software by itself; the plan is about what fits.
    port = Port(machine.port.host, machine.port.port)
    able = replace(machine, port=port, software=machine.software._replace(missing=()))
    try:
        model = load_model_file(asked.model or DEMO_MODEL_PATH)
    except StrataError as error:
        return [*check_machine(machine), Check("model", "fail", error.message, error.hint)]
    with model:
        facts = FileFacts(model, asked.model)
        names = frozenset(field_names())
        found = Check("model", "ok", f"{facts.name}, {facts.num_experts} experts")
        plan = check_plan(lambda: plan_launch(able, facts, asked.wishes, names))
    return [*check_machine(machine), found, *plan]


def _report_checks(checks: list[Check], *, is_json: bool) -> int:
    if is_json:
        click.echo(orjson.dumps(checks_as_json(checks), option=orjson.OPT_INDENT_2))
    else:
        click.echo(checks_as_text(checks))
    return exit_code(checks)


def _write(file: Path, text: str) -> None:
    backup = write_settings(file, text)
    kept = f", the one before is {path_text(backup)}" if backup else ""
    click.echo(f"strata: settings are in {path_text(file.absolute())}{kept}", err=True)


def _start_service(
    services: Services, asked: Asked, plan: LaunchPlan, service_user: str | None
) -> None:
    options = unit_options(plan, services.scope, asked.file, service_user, gpu_variables())
    services.install(unit_text(options))
    click.echo(f"strata: starting {services.path}, ready when the model is loaded", err=True)
    services.start(lambda status: click.echo(f"strata: {status}", err=True))
    click.echo("\n".join(("running; look after it with:", *services.advice())))
