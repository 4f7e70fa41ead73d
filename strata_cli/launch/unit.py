"""The text of the service's unit file, for systemd. Pure.

Left out on purpose, because CUDA or the compiler of host kernels would not survive it:
PrivateDevices and whatever implies a list of allowed devices (ProtectClock does) hide /dev/nvidia*;
MemoryDenyWriteExecute forbids compiled code; ProcSubset=pid hides /proc/driver/nvidia.

A user's service gets no sandbox: a user's manager may not set most of it up, and a setting that it
refuses would fail the start.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from strata_cli.errors import ConfigError, quoted

WATCHDOG_S = 60
STOP_S = 10
RESTART_S = 5
MOST_STARTS, STARTS_IN_S = 5, 600  # then the manager gives up, and says so
BAD_SETTING = 2  # exit code that a new start would only repeat
CACHE_NAME = "strata"

_SANDBOX = (
    "NoNewPrivileges=yes",
    "ProtectSystem=strict",
    "ProtectHome=read-only",
    "ProtectKernelModules=yes",
    "ProtectKernelLogs=yes",
    "ProtectKernelTunables=yes",
    "ProtectControlGroups=yes",
    "ProtectHostname=yes",
    "RestrictNamespaces=yes",
    "RestrictRealtime=yes",
    "RestrictSUIDSGID=yes",
    "LockPersonality=yes",
    "SystemCallArchitectures=native",
    "RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitOptions:
    """What a unit is for.

    Attributes:
        command: the program with its arguments; the first is an absolute path.
        scope: "user" or "system".
        description: of the service, on one line.
        user: that a system service runs as; empty: root.
        is_gpu: whether it needs the NVIDIA driver.
        environment: variables that it needs, by name.
        readable: files that it reads, beside those that the command names.
        writable: files or folders that it writes beside its cache.
    """

    command: tuple[str, ...]
    scope: str
    description: str
    user: str = ""
    is_gpu: bool = False
    environment: tuple[tuple[str, str], ...] = ()
    readable: tuple[Path, ...] = ()
    writable: tuple[Path, ...] = ()


def unit_text(options: UnitOptions) -> str:
    """The unit file.

    Raises:
        ConfigError: a path or argument has a character that no unit file can hold.
    """
    sections = {
        "Unit": _unit_lines(options),
        "Service": _service_lines(options),
        "Install": [f"WantedBy={_target(options)}"],
    }
    blocks = ("\n".join((f"[{name}]", *lines)) for name, lines in sections.items())
    return (
        "# Written by `strata launch --systemd`, which replaces it.\n" + "\n\n".join(blocks) + "\n"
    )


def exec_word(word: str) -> str:
    """One argument of a command line in a unit file.

    Source: systemd.service(5), "Command lines", and systemd.unit(5), "Specifiers".

    Raises:
        ConfigError: it has a line break or a NUL.
    """
    if any(each in word for each in "\n\r\0"):
        raise ConfigError(
            f"a service cannot be given an argument with a line break: {quoted(word)}",
            hint="rename the file",
        )
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    is_plain = word and all(each.isalnum() or each in "/-_.,:=@+" for each in word)
    return word if is_plain else f'"{escaped}"'


def _unit_lines(options: UnitOptions) -> list[str]:
    lines = [
        f"Description={' '.join(options.description.replace('%', '%%').split())}",
        "Documentation=man:systemd.service(5)",
        f"StartLimitIntervalSec={STARTS_IN_S}",
        f"StartLimitBurst={MOST_STARTS}",
    ]
    if options.scope == "system":
        lines.append("After=network.target nvidia-persistenced.service")
    return lines


def _service_lines(options: UnitOptions) -> list[str]:
    own = _system_lines(options) if options.scope == "system" else ()
    return [*_life_lines(options), *_memory_lines(), *own]


def _life_lines(options: UnitOptions) -> Iterator[str]:
    """Ready when the model is loaded, watched from then on, ended within STOP_S."""
    yield "Type=notify"
    yield "NotifyAccess=main"
    if options.is_gpu and options.scope == "system":
        # The device files appear when something asks for them that may create them.
        yield "ExecStartPre=+-/usr/bin/nvidia-modprobe -c 0 -u"
    for name, value in options.environment:
        yield f"Environment={exec_word(f'{name}={value}').replace('$$', '$')}"
    yield f"ExecStart={' '.join(map(exec_word, options.command))}"
    yield "TimeoutStartSec=infinity"  # a large model on a slow disk; the server reports progress
    yield f"TimeoutStopSec={STOP_S}"
    yield f"WatchdogSec={WATCHDOG_S}"
    yield "KillMode=mixed"
    yield "Restart=on-failure"
    yield f"RestartSec={RESTART_S}"
    yield f"RestartPreventExitStatus={BAD_SETTING}"
    yield "StandardOutput=journal"
    yield "StandardError=journal"
    yield "SyslogIdentifier=strata"


def _memory_lines() -> Iterator[str]:
    yield "LimitMEMLOCK=infinity"
    yield "LimitNOFILE=65536"
    yield "LimitCORE=0"  # a core file would have all weights in it
    yield "OOMPolicy=stop"
    yield "UMask=0077"


def _system_lines(options: UnitOptions) -> Iterator[str]:
    if options.user:
        yield f"User={options.user}"
        yield "CapabilityBoundingSet="
    yield f"CacheDirectory={CACHE_NAME}"
    yield "CacheDirectoryMode=0700"
    yield "Environment=XDG_CACHE_HOME=%C"
    yield f"Environment=SHIV_ROOT=%C/{CACHE_NAME}/program"
    yield from _SANDBOX
    if not _is_temporary((*map(Path, options.command), *options.readable, *options.writable)):
        yield "PrivateTmp=yes"
    for path in options.writable:
        yield f"ReadWritePaths=-{exec_word(str(path))}"


def _is_temporary(paths: tuple[Path, ...]) -> bool:
    """Whether a folder of its own for temporary files would hide one of these from the service."""
    return any(path.is_relative_to(folder) for path in paths for folder in ("/tmp", "/var/tmp"))


def _target(options: UnitOptions) -> str:
    return "multi-user.target" if options.scope == "system" else "default.target"
