"""`strata read --suffixes`: a file with one suffix a line, and what is printed about each."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
import orjson

from strata_cli.commands.progress import progress_bar
from strata_cli.commands.prompt import STDIN, PromptSource, input_bytes
from strata_cli.commands.report import as_json, as_table
from strata_cli.commands.result_file import ResultFile
from strata_cli.config import StrataConfig
from strata_cli.engine.engine import Engine, Sequence
from strata_cli.engine.reading import ReadRequest, room_hint
from strata_cli.engine.suffixes import read_suffixes
from strata_cli.errors import ConfigError, InputError, quoted
from strata_cli.json_objects import RepeatedKeyError, check_keys

LINE_HINT = 'each line is one object: {"text": "..."} or {"tokens": [1, 2, 3]}'


class SuffixLine(NamedTuple):
    """A line's number, from 1, and its text or token ids."""

    number: int
    content: str | list[int]


@dataclass(frozen=True, slots=True)
class SuffixFile:
    """The lines of a file, at least one, and what to call the file."""

    origin: str
    lines: list[SuffixLine]

    def encode(self, engine: Engine, prefix: list[int]) -> list[list[int]]:
        """Token ids of every suffix, each by itself.

        Raises:
            InputError: one has no tokens, an id outside the vocabulary, or does not fit the
                context behind the prefix; names the line.
        """
        suffixes = []
        for line in self.lines:
            try:
                ids = _encode(engine, line.content)
            except InputError as error:
                raise self._wrong(line, error.message, error.hint or LINE_HINT) from None
            if len(prefix) + len(ids) > engine.context_tokens:
                problem = (
                    f"{len(prefix)} prefix tokens and {len(ids)} suffix tokens do not fit the "
                    f"context of {engine.context_tokens} tokens"
                )
                raise self._wrong(line, problem, room_hint(engine, "shorten either"))
            suffixes.append(ids)
        return suffixes

    def _wrong(self, line: SuffixLine, problem: str, hint: str) -> InputError:
        return InputError(f"{self.origin}, line {line.number}: {problem}", hint=hint)


class SuffixOutput(NamedTuple):
    """What is wanted of a run: objects instead of tables, how long loading took, a file or None."""

    is_json: bool
    load_ms: float
    logits_file: ResultFile | None


def check_suffixes(
    file: Path, source: PromptSource, config: StrataConfig, others: dict[str, Any]
) -> None:
    """Refuse what does not go with suffixes.

    Args:
        file: what --suffixes names.
        source: of the prefix.
        config: the settings.
        others: values of flags that make no sense for suffixes, by flag.

    Raises:
        ConfigError: naming the flags.
    """
    others = {**others, "--state-hash": config.state_hash}
    for flag, value in others.items():
        if value:
            raise ConfigError(
                f"--suffixes and {flag} cannot be used together",
                hint="suffixes are read for the probabilities of their next tokens",
            )
    if str(file) == STDIN and source.is_from_stdin():
        raise ConfigError(
            "--suffixes and the prompt cannot both come from stdin", hint="give one as a file"
        )


def suffix_input(file: Path | None) -> dict[str, str]:
    """The file that is read, by what it is: no output may go there."""
    if file is None:
        return {}
    return {"suffixes' file": "/dev/stdin" if str(file) == STDIN else os.fspath(file)}


def read_suffix_file(file: Path) -> SuffixFile:
    """Read all lines.

    Raises:
        InputError: the file cannot be read, has no lines, or one is not as it should be.
    """
    data, origin = input_bytes(file)
    lines = [
        SuffixLine(number, _parse(line, f"{origin}, line {number}"))
        for number, line in enumerate(data.removesuffix(b"\n").split(b"\n"), 1)
        if data
    ]
    if not lines:
        raise InputError(f"{origin} has no suffixes", hint=LINE_HINT)
    return SuffixFile(origin, lines)


def report_suffixes(
    engine: Engine,
    sequence: Sequence,
    request: ReadRequest,
    file: SuffixFile,
    output: SuffixOutput,
    progress: bool | None,
) -> None:
    """Read the suffixes and print each as soon as it is known.

    Args:
        engine: the sequence's engine.
        sequence: an empty one.
        request: its ids are the prefix.
        file: the suffixes.
        output: what is wanted.
        progress: whether to show a bar; None: on a terminal.
    """
    rows = []
    suffixes = file.encode(engine, request.ids)
    with progress_bar("reading", "tok", progress) as bar:
        reads = read_suffixes(engine, sequence, request, suffixes, progress=bar)
        for line, (own, result) in zip(file.lines, reads, strict=True):
            if output.is_json:
                report = as_json(engine, own, result, output.load_ms)
                click.echo(orjson.dumps({"line": line.number, **report}))
            else:
                click.echo(f"line {line.number}")
                for entries in (result.allowed, result.top):
                    if entries:
                        click.echo(as_table(engine, entries))
            if output.logits_file is not None:
                rows.append(result.logits)
    if output.logits_file is not None:
        output.logits_file.save_logits(np.stack(rows))


def _encode(engine: Engine, content: str | list[int]) -> list[int]:
    tokenizer = engine.tokenizer
    if isinstance(content, list):
        tokenizer.check_ids(content)
        return content
    return tokenizer.encode(content, parse_special=True, add_bos=False)


def _parse(line: bytes, origin: str) -> str | list[int]:
    if not line.strip():
        raise InputError(f"{origin} is empty", hint=LINE_HINT)
    try:
        entry = orjson.loads(line)
        check_keys(line)
    except RecursionError:
        raise InputError(f"{origin} is nested too deeply", hint=LINE_HINT) from None
    except RepeatedKeyError as error:
        raise InputError(f"{origin}: the key {error}", hint="name it once") from None
    except ValueError as error:
        raise InputError(f"{origin} is not valid JSON: {error}", hint=LINE_HINT) from None
    if not isinstance(entry, dict) or len({"text", "tokens"} & entry.keys()) != 1:
        raise InputError(f"{origin} has not one of text and tokens", hint=LINE_HINT)
    text, tokens = entry.get("text"), entry.get("tokens")
    if isinstance(text, str):
        return _not_empty(text, origin)
    # A bool is an int to Python, and no token id.
    if isinstance(tokens, list) and all(type(item) is int for item in tokens):
        return _not_empty(tokens, origin)
    key, kind = ("text", "a text") if "text" in entry else ("tokens", "a list of whole numbers")
    shown = quoted(orjson.dumps(entry[key]).decode())
    raise InputError(f"{origin}: {key} is not {kind}: {shown}", hint=LINE_HINT)


def _not_empty(content: str | list[int], origin: str) -> str | list[int]:
    if not content:
        raise InputError(f"{origin}: the suffix is empty", hint="give it at least one token")
    return content
