"""`strata trace`: what reading a prompt did and when; and one setting's effect on it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import orjson

from strata_cli.commands import trace_arms, trace_report
from strata_cli.commands.logits_file import LogitsFile, check_logits_file
from strata_cli.commands.opening import (
    ENGINE_SETTINGS,
    SAMPLING_SETTINGS,
    input_files,
    open_engine,
    sampler_of,
)
from strata_cli.commands.options import config_file_of, config_options, load_config, written
from strata_cli.commands.progress import progress_bar
from strata_cli.commands.prompt import STDIN, PromptSource
from strata_cli.commands.prompt_flags import prompt_options
from strata_cli.commands.streams import require_stdout
from strata_cli.commands.trace_arms import Arms
from strata_cli.commands.whole_file import save_whole
from strata_cli.config import StrataConfig, flag_of
from strata_cli.engine.engine import Engine
from strata_cli.engine.measuring.perfetto import as_perfetto
from strata_cli.engine.measuring.summary import summarize
from strata_cli.engine.measuring.timing import read_before
from strata_cli.engine.reading import ReadRequest
from strata_cli.engine.trace import Event, read_trace
from strata_cli.errors import ConfigError
from strata_cli.parsers import file_path, new_file_path, whole_number

FILE, NEW_FILE = written(file_path), written(new_file_path)
IDENTITY_TOKENS = 64  # generated, where nothing else is asked for


@click.command(short_help="Show what reading a prompt did and when; time one setting.")
@prompt_options
@click.option(
    "--from",
    "trace_file",
    callback=FILE,
    metavar="FILE",
    help="Show a trace that STRATA_TRACE wrote; - is stdin.",
)
@click.option(
    "--perfetto",
    callback=NEW_FILE,
    metavar="FILE",
    help="Save the trace for Perfetto, chrome://tracing.",
)
@click.option("--layers", "every_layer", is_flag=True, help="Show the layers of every chunk.")
@click.option(
    "--warm-up", is_flag=True, help="Read the prompt once before, so that kernels are compiled."
)
@click.option(
    "--ab",
    metavar="SWITCH[=OFF,ON]",
    callback=lambda _context, _param, text: None if text is None else trace_arms.parse_switch(text),
    help="Time a setting, off and on, in mirrored pairs of fresh engines.",
)
@click.option(
    "--identity",
    is_flag=True,
    help="Compare bits of SWITCH off, by default, on, and off again, instead of times.",
)
@click.option(
    "--repeat",
    callback=written(whole_number(1)),
    metavar="N",
    help="Timed reads of each arm, after one that warms up; their median counts.  [1]",
)
@click.option(
    "--reuse",
    callback=written(whole_number(0)),
    metavar="N",
    help="Read the first N tokens of the prompt before, untimed and not shown.  [0]",
)
@click.option(
    "--max-tokens",
    callback=written(whole_number(0)),
    metavar="N",
    help="Generate up to N tokens in each arm.  [0; 64 with --identity]",
)
@click.option("--json", "is_json", is_flag=True, help="Print one JSON object.")
@config_options(*ENGINE_SETTINGS, *SAMPLING_SETTINGS, "progress")
def trace(
    trace_file: Path | None,
    perfetto: str | None,
    every_layer: bool,
    warm_up: bool,
    ab: trace_arms.Switch | None,
    identity: bool,
    repeat: int | None,
    reuse: int | None,
    max_tokens: int | None,
    is_json: bool,
    **flags: Any,
) -> int:
    """Read PROMPT and print what happened: chunks, layers, copies of experts, waits.

    PROMPT may also come from --file, --tokens, --tokens-file or stdin. With --from a trace that
    another run wrote is shown instead.

    With --ab the prompt is read by eight fresh engines, off on on off and on off off on, and the
    ratios of neighbours are printed with their median and its interval. SWITCH is any setting; it
    needs values where it does not take 0 and 1. --identity instead reads with SWITCH off, by
    default, on, and off again; the exit code is 1 unless every bit is the same.

    \b
    strata trace --file book.txt --perfetto trace.json
    STRATA_TRACE=run.jsonl strata read --file book.txt; strata trace --from run.jsonl
    strata trace --file book.txt --ab prefill=512,4096
    """
    source = PromptSource.taken_from(flags)
    config = load_config(flags)
    source.check()
    _check_modes(source, trace_file, ab, identity=identity, perfetto=perfetto)
    arms_alone = {"--repeat": repeat, "--max-tokens": max_tokens}
    runs_alone = {"--reuse": reuse, "--warm-up": warm_up or None}
    of_engine = {flag_of(name): flags[name] for name in ENGINE_SETTINGS}
    of_sampler = {flag_of(name): flags[name] for name in SAMPLING_SETTINGS}
    if trace_file is not None:
        all_alone = arms_alone | runs_alone | of_engine
        _refuse(all_alone, "has no effect on a trace that --from shows")
    if ab is None:
        _refuse(arms_alone | of_sampler, "has no effect without --ab")
    else:
        _refuse({"--layers": every_layer or None}, "has no effect with --ab")
        _refuse({"--warm-up": warm_up or None}, "has no effect with --ab, where each arm warms up")
        trace_arms.check_files(config, ab, identity=identity)
    if identity:
        _refuse({"--repeat": repeat}, "has no effect with --identity")
    require_stdout()
    inputs = input_files(config, source, config_file_of(flags))
    saved: LogitsFile | None = None
    if perfetto is not None:
        shown = {} if trace_file is None else {"trace": os.fspath(trace_file)}
        saved = check_logits_file("--perfetto", perfetto, inputs | shown)
    if trace_file is not None:
        path = Path("/dev/stdin") if str(trace_file) == STDIN else trace_file
        _show(read_trace(path), saved, every_layer=every_layer, is_json=is_json)
        return 0
    text_or_ids = source.read()
    will_chat = source.will_chat(text_or_ids)
    wanted = max_tokens if max_tokens is not None else IDENTITY_TOKENS if identity else 0

    def request_of(engine: Engine, config: StrataConfig) -> ReadRequest:
        ids = source.encode(engine, text_or_ids)
        return ReadRequest(ids=ids, max_tokens=wanted, sampler=sampler_of(config))

    if ab is None:
        events: list[Event] = []
        sinks = (events.append,)
        outputs = {} if perfetto is None else {"--perfetto": perfetto}
        opened = open_engine(
            config, will_chat=will_chat, inputs=inputs, outputs=outputs, sinks=sinks
        )
        with opened as engine:
            request = request_of(engine, config)
            _read(engine, request, config.progress, events, warms_up=warm_up, reuse=reuse or 0)
        events.sort(key=lambda event: int(event["t_ns"]))
        _show(events, saved, every_layer=every_layer, is_json=is_json)
        return 0
    arms = Arms(flags, ab, request_of, will_chat, reuse or 0, inputs)
    if identity:
        return _identity(arms, is_json=is_json)
    return _time(arms, repeat or 1, is_json=is_json)


def _check_modes(
    source: PromptSource,
    trace_file: Path | None,
    ab: trace_arms.Switch | None,
    *,
    identity: bool,
    perfetto: str | None,
) -> None:
    given = (source.text, source.file, source.tokens, source.tokens_file)
    has_prompt = any(item is not None for item in given)
    if trace_file is not None and (has_prompt or ab is not None):
        other = "--ab" if ab is not None else "a prompt"
        raise ConfigError(
            f"--from and {other} cannot be used together", hint="--from shows a run that is over"
        )
    if identity and ab is None:
        raise ConfigError("--identity needs --ab", hint="--ab SWITCH names what to compare")
    if perfetto is not None and ab is not None:
        raise ConfigError(
            "--perfetto and --ab cannot be used together", hint="trace each setting by itself"
        )


def _refuse(given: Mapping[str, object], why: str) -> None:
    for flag, value in given.items():
        if value is not None:
            raise ConfigError(f"{flag} {why}", hint="leave it out")


def _read(
    engine: Engine,
    request: ReadRequest,
    progress: bool | None,
    events: list[Event],
    *,
    warms_up: bool,
    reuse: int,
) -> None:
    """Read the prompt; of what came before, the events of the run's begin alone are kept."""
    if warms_up:
        with engine.sequence() as sequence:
            sequence.prefill(request.ids)
    with (
        engine.sequence() as sequence,
        progress_bar("reading", "tok", progress) as bar,
    ):
        ids = read_before(sequence, request, reuse).ids
        events[:] = [event for event in events if event["ev"] == "run.begin"]
        sequence.prefill(ids, progress=bar)


def _show(
    events: list[Event], saved: LogitsFile | None, *, every_layer: bool, is_json: bool
) -> None:
    run = summarize(events)
    if saved is not None:
        save_whole(saved, orjson.dumps(as_perfetto(events)))
    if is_json:
        _echo_json(trace_report.as_json(run))
    else:
        click.echo(trace_report.as_text(run, events, every_layer=every_layer))


def _time(arms: Arms, repeat: int, *, is_json: bool) -> int:
    comparisons = trace_arms.time_arms(arms, repeat)
    if is_json:
        _echo_json(trace_arms.timing_json(arms.switch, comparisons))
    else:
        click.echo(trace_arms.timing_text(arms.switch, comparisons))
    return 0


def _identity(arms: Arms, *, is_json: bool) -> int:
    done = trace_arms.identity_arms(arms)
    if is_json:
        _echo_json(trace_arms.identity_json(arms.switch, done))
    else:
        click.echo(trace_arms.identity_text(arms.switch, done))
    return int(any(arm.differs for arm in done))


def _echo_json(report: Any) -> None:
    click.echo(orjson.dumps(report, option=orjson.OPT_INDENT_2))
