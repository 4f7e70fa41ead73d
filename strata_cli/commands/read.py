"""`strata read`: one prompt in; next-token log-probabilities, or text, out."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import click
import orjson

from strata_cli.commands.opening import (
    ENGINE_SETTINGS,
    SAMPLING_SETTINGS,
    check_sampling,
    input_files,
    open_engine,
    sampler_of,
)
from strata_cli.commands.options import config_file_of, config_options, load_config, written
from strata_cli.commands.progress import progress_bar
from strata_cli.commands.prompt import PromptSource, parse_ids
from strata_cli.commands.prompt_flags import prompt_options, utf8_text
from strata_cli.commands.report import as_json, as_table
from strata_cli.commands.result_file import check_result_file
from strata_cli.commands.streams import require_stdout
from strata_cli.commands.suffixes import (
    SuffixOutput,
    check_suffixes,
    read_suffix_file,
    report_suffixes,
    suffix_input,
)
from strata_cli.engine import reading
from strata_cli.engine.engine import Engine
from strata_cli.engine.model.tokenizer import StreamDecoder
from strata_cli.engine.reading import ReadRequest, ReadResult
from strata_cli.parsers import file_path, new_file_path, whole_number

DEFAULT_TOP = 5


FILE = written(file_path)
NEW_FILE = written(new_file_path)
COUNT = written(whole_number(0))


@click.command(short_help="Read one prompt: next-token probabilities, or text.")
@prompt_options
@click.option("--top", callback=COUNT, metavar="K", help="Report the K likeliest tokens.")
@click.option(
    "--allowed",
    multiple=True,
    callback=utf8_text,
    metavar="TEXT",
    help="Report this one-token text. Repeatable.",
)
@click.option("--allowed-token-ids", metavar="IDS", help="Report these token ids: 1,2,3.")
@click.option(
    "--max-tokens", callback=COUNT, default="0", metavar="N", help="Generate up to N tokens."
)
@click.option(
    "--suffixes",
    callback=FILE,
    metavar="FILE",
    help='Read each line, {"text": ...} or {"tokens": [...]}, behind PROMPT; - is stdin.',
)
@click.option("--json", "is_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--logits-out", callback=NEW_FILE, metavar="FILE.npy", help="Save the last logits, [V]."
)
@click.option(
    "--all-logits-out", callback=NEW_FILE, metavar="FILE.npy", help="Save all logits, [T, V]."
)
@config_options(
    *ENGINE_SETTINGS, "deterministic", "reuse", *SAMPLING_SETTINGS, "state_hash", "progress"
)
def read(
    top: int | None,
    allowed: tuple[str, ...],
    allowed_token_ids: str | None,
    max_tokens: int,
    suffixes: Path | None,
    is_json: bool,
    logits_out: str | None,
    all_logits_out: str | None,
    **flags: Any,
) -> None:
    """Read PROMPT and print what the model makes of it.

    Without --max-tokens the likeliest next tokens are printed; with it, text is generated and
    printed as it comes. PROMPT may also come from --file, --tokens, --tokens-file or stdin.

    With --suffixes, PROMPT is read once, and each line of the file as if it alone came behind it.

    Log-probabilities are natural logarithms over the whole vocabulary, before sampling rules.

    \b
    strata read "Which of these is a fruit?" --allowed A --allowed B
    echo "Once upon a time" | strata read --raw --max-tokens 40
    """
    source = PromptSource.taken_from(flags)
    config = load_config(flags)
    source.check()
    check_sampling(config, max_tokens)
    if suffixes is not None:
        others = {"--max-tokens": max_tokens, "--all-logits-out": all_logits_out}
        check_suffixes(suffixes, source, config, others)
    require_stdout()
    inputs = input_files(config, source, config_file_of(flags))
    inputs |= suffix_input(suffixes)
    paths = {"--logits-out": logits_out, "--all-logits-out": all_logits_out}
    outputs = {flag: path for flag, path in paths.items() if path is not None}
    files = {flag: check_result_file(flag, path, inputs) for flag, path in outputs.items()}
    last_file, all_file = map(files.get, paths)
    text_or_ids = source.read()
    suffix_file = None if suffixes is None else read_suffix_file(suffixes)
    ids_allowed = (
        [] if allowed_token_ids is None else parse_ids(allowed_token_ids, "--allowed-token-ids")
    )
    started = time.perf_counter()
    will_chat = source.will_chat(text_or_ids)
    with (
        open_engine(config, will_chat=will_chat, inputs=inputs, outputs=outputs) as engine,
        engine.sequence() as sequence,
    ):
        load_ms = (time.perf_counter() - started) * 1e3
        request = ReadRequest(
            ids=source.encode(engine, text_or_ids),
            top=_top(top, bool(allowed or ids_allowed), max_tokens),
            allowed_ids=_allowed(engine, allowed, ids_allowed),
            max_tokens=max_tokens,
            sampler=sampler_of(config),
            all_logits=all_file is not None,
            state_hash=config.state_hash,
            deterministic=config.deterministic,
            reuse=config.reuse,
        )
        if suffix_file is not None:
            output = SuffixOutput(is_json, load_ms, last_file)
            report_suffixes(engine, sequence, request, suffix_file, output, config.progress)
            return
        writer = None if is_json else TextWriter(engine)
        with progress_bar("reading", "tok", config.progress) as progress:
            result = reading.read(
                engine,
                sequence,
                request,
                on_token=writer.push if writer else None,
                progress=progress,
            )
        if last_file is not None:
            last_file.save_logits(result.logits)
        if all_file is not None and result.all_logits is not None:
            all_file.save_logits(result.all_logits)
        if writer is None:
            report = as_json(engine, request, result, load_ms)
            click.echo(orjson.dumps(report, option=orjson.OPT_INDENT_2))
        else:
            writer.finish(request, result)


class TextWriter:
    """Prints generated text as it comes, then the tables that were asked for."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._decoder = StreamDecoder(engine.tokenizer, skip_control=True)

    def push(self, token_id: int) -> None:
        """Print what a token completes."""
        click.echo(self._decoder.push(token_id), nl=False)
        sys.stdout.flush()

    def finish(self, request: ReadRequest, result: ReadResult) -> None:
        """Print the rest."""
        if request.max_tokens:
            click.echo(self._decoder.finish())
        for entries in (result.allowed, result.top):
            if entries:
                click.echo(as_table(self._engine, entries))
        if result.state_hash is not None:
            click.echo(result.state_hash.line())


def _top(top: int | None, has_allowed: bool, max_tokens: int) -> int:
    if top is not None:
        return top
    return 0 if has_allowed or max_tokens else DEFAULT_TOP


def _allowed(engine: Engine, texts: tuple[str, ...], ids: list[int]) -> tuple[int, ...]:
    engine.tokenizer.check_ids(ids)
    return (*(engine.tokenizer.single_token(text) for text in texts), *ids)
