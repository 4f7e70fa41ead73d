"""Writes the settings file: what somebody wrote into it by hand, comments too, stays as it is.

A setting that was chosen for the user says so in a comment with the value. As long as the value is
still that one, the next launch may choose another; a changed one has become the user's own.
"""

from __future__ import annotations

import os
import re
import stat
import tempfile
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strata_cli.config import StrataConfig, parser_of, read_config_file
from strata_cli.errors import ConfigError, path_text, quoted
from strata_cli.launch.planning import Choice

if TYPE_CHECKING:  # comes with the server's packages, and the doctor must run without them
    from tomlkit import TOMLDocument
    from tomlkit.items import Item

HEADER = (
    "Settings of `strata serve`, written by `strata launch`, which may change the lines that say",
    "so when it runs again. What you change or add stays. docs/settings.md lists all keys.",
)
MODE = 0o644
_NUMBER = re.compile(r"[0-9.]+(e[-+]?[0-9]+)?")


def own_keys(path: Path) -> frozenset[str]:
    """Keys of a settings file that its user set or changed; none where there is no file.

    Raises:
        ConfigError: the file cannot be read, is not TOML, or has a key that is no setting.
    """
    if not path.exists():
        return frozenset()
    table, document = read_config_file(path), _parse(path)
    items = {key: _item(document, key) for key in table}
    return frozenset(key for key, item in items.items() if item is None or not _is_chosen(item))


def settings_text(path: Path, choices: Iterable[Choice]) -> str:
    """What the file should say: as it is, with these settings changed or added.

    Args:
        path: the file; it need not exist.
        choices: the settings. Those chosen by hand that are there already are left alone if they
            have that value.

    Raises:
        ConfigError: the file that is there is not TOML.
    """
    import tomlkit

    is_new = not path.exists()
    document = tomlkit.document() if is_new else _parse(path)
    if is_new:
        for line in HEADER:
            document.add(tomlkit.comment(line))
        document.add(tomlkit.nl())
    for choice in choices:
        _put(document, choice)
    return tomlkit.dumps(document)


def write_settings(path: Path, text: str) -> Path | None:
    """Replace the file, whole or not at all, and keep the one before beside it.

    Args:
        path: the file, or a link to it, which stays one.
        text: what it should say.

    Returns:
        where the one before is; None where there was none, or it said the same.

    Raises:
        ConfigError: it cannot be written, or what it would say is no valid settings file.
    """
    path = path.resolve()
    before = path.read_bytes() if path.exists() else None
    if before == text.encode():
        return None
    backup = path.with_name(f"{path.name}.bak")
    try:
        mode = MODE if before is None else stat.S_IMODE(path.stat().st_mode)
        if before is not None:
            _replace(backup, before, mode)
        _replace(path, text.encode(), mode, check=True)
    except OSError as error:
        raise ConfigError(
            f"cannot write {path_text(path)}: {error.strerror}",
            hint="name another file with --config",
        ) from error
    return None if before is None else backup


def _put(document: TOMLDocument, choice: Choice) -> None:
    import tomlkit

    value = _toml_value(choice)
    there = _item(document, choice.name)
    if there is None:
        item = tomlkit.item(value)
        item.comment(_remark(choice, value))
        document.add(choice.name, item)
        return
    if choice.is_given and there.unwrap() == value:
        return
    was_chosen = _is_chosen(there)
    document[choice.name] = value
    written = _item(document, choice.name)
    if was_chosen and written is not None:
        written.comment(_remark(choice, value))


def _item(document: TOMLDocument, key: str) -> Item | None:
    """The value of a key with its comment; switches would come without it."""
    from tomlkit.items import Item

    item = document.item(key) if key in document else None
    return item if isinstance(item, Item) else None


def _remark(choice: Choice, value: Any) -> str:
    return _printable(choice.reason if choice.is_given else f"{_chosen(value)}{choice.reason}")


def _is_chosen(item: Item) -> bool:
    """Whether a value is still the one that an earlier launch chose."""
    return item.trivia.comment.startswith(f"# {_printable(_chosen(item.unwrap()))}")


def _chosen(value: Any) -> str:
    return f"launch chose {value}: "


def _printable(text: str) -> str:
    """What a comment can say."""
    return "".join(each if each.isprintable() else "?" for each in text)


def _toml_value(choice: Choice) -> str | int | float | bool:
    """The value in the type of TOML that reads best and is read back as the same."""
    spec = next(spec for spec in fields(StrataConfig) if spec.name == choice.name)
    parse, value = parser_of(spec), choice.value
    shown = parse.show(value)
    if not shown.isascii() and shown != shown.encode(errors="replace").decode():
        raise ConfigError(
            f"{choice.name} cannot be written into a settings file: {quoted(shown)} is not UTF-8",
            hint="rename the file or its folder",
        )
    is_number = isinstance(value, int | float) and _NUMBER.fullmatch(shown) is not None
    return value if isinstance(value, bool) or is_number else shown


def _parse(path: Path) -> TOMLDocument:
    try:
        import tomlkit
        from tomlkit.exceptions import TOMLKitError
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"a settings file that is there needs the package {error.name}, which is not installed",
            hint="pip install 'strata-cli[serve]'",
        ) from error
    try:
        return tomlkit.parse(path.read_text("utf-8-sig"))
    except (OSError, ValueError, TOMLKitError) as error:
        raise ConfigError(
            f"cannot read the config file {path_text(path)}: {error}",
            hint="mend it, or name another file with --config",
        ) from error


def _replace(path: Path, data: bytes, mode: int, *, check: bool = False) -> None:
    """Write beside the file, then put it in its place."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            os.fchmod(file.fileno(), mode)
            file.flush()
            os.fsync(file.fileno())
        if check:
            StrataConfig.load({"config": name}, {})
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
