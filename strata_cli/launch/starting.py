"""The command line that runs the server, and the step from this process into it."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

from strata_cli.launch.planning import LaunchPlan
from strata_cli.launch.systemd import owner_of
from strata_cli.launch.unit import UnitOptions

OUTPUTS = ("expert_profile", "expert_profile_save", "trace", "prefill_dump_r")  # settings: files


def serve_command(settings: Path, argv0: str = "", *, is_service: bool = False) -> tuple[str, ...]:
    """What runs the server as this program is installed: in one file, or as packages.

    Args:
        settings: the settings file.
        argv0: what this process was started as; empty: sys.argv[0].
        is_service: it starts in some other folder, where Python should look for no packages.
    """
    started_as = argv0 or sys.argv[0]
    is_one_file = os.path.isfile(started_as) and zipfile.is_zipfile(started_as)
    packages = ("-P", "-m", "strata_cli") if is_service else ("-m", "strata_cli")
    program = (os.path.abspath(started_as),) if is_one_file else packages
    return (sys.executable, *program, "serve", "--config", os.path.abspath(settings))


def become(command: tuple[str, ...]) -> None:
    """Replace this process by the server, which may then lock as much memory as it can.

    Does not return. A GPU that was looked at is free again: no open file of its driver goes along.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2:
            with contextlib.suppress(OSError):  # the one that listed them
                os.set_inheritable(descriptor, False)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(command[0], command)


def unit_options(
    plan: LaunchPlan,
    scope: str,
    settings: Path,
    user: str | None,
    environment: Mapping[str, str],
) -> UnitOptions:
    """The service that runs a plan.

    Args:
        plan: what was chosen.
        scope: "user" or "system".
        settings: the settings file, whose folder's owner runs a system service.
        user: another one who does; None: that owner.
        environment: variables that say which GPUs there are, and in which order.
    """
    model = next(choice.reason for choice in plan.choices if choice.name == "model")
    return UnitOptions(
        command=serve_command(settings, is_service=True),
        scope=scope,
        description=f"Strata: {model}",
        user=owner_of(settings.absolute().parent) if user is None else user.replace("root", ""),
        is_gpu=str(plan.value("device")) != "host",
        environment=tuple(sorted(environment.items())),
        readable=tuple(path.absolute() for path in [plan.value("model")] if path is not None),
        writable=tuple(dict.fromkeys(_folders(plan))),
    )


def _folders(plan: LaunchPlan) -> list[Path]:
    """That the server writes files into."""
    values = [choice.value for choice in plan.choices if choice.name in OUTPUTS]
    return [Path(value).absolute().parent for value in values if value and str(value) != "1"]
