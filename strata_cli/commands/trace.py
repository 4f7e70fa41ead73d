"""`strata trace`: what reading a prompt did and when; and one setting's effect on it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click
import orjson

from strata_cli.commands import trace_arms, trace_report
from strata_cli.commands.opening import (
    ENGINE_SETTINGS,
    SAMPLING_SETTINGS,
    input_files,
    open_engine,
    sampler_of,
)
from strata_cli.commands.options import config_file_of, config_options, load_config
from strata_cli.commands.progress import progress_bar
from strata_cli.commands.prompt import STDIN, PromptSource
from strata_cli.commands.prompt_flags import prompt_options
from strata_cli.commands.result_file import ResultFile, check_result_file
from strata_cli.commands.streams import require_stdout
from strata_cli.commands.trace_arms import Arms
from strata_cli.commands.trace_flags import TraceFlags, trace_options
from strata_cli.config import StrataConfig
from strata_cli.engine.engine import Engine
from strata_cli.engine.measuring.perfetto import as_perfetto
from strata_cli.engine.measuring.summary import summarize
from strata_cli.engine.measuring.timing import read_before
from strata_cli.engine.reading import ReadRequest
from strata_cli.engine.trace import Event, read_trace


@click.command(short_help="Show what reading a prompt did and when; time one setting.")
@prompt_options
@trace_options
@click.option("--json", "is_json", is_flag=True, help="Print one JSON object.")
@config_options(*ENGINE_SETTINGS, *SAMPLING_SETTINGS, "progress")
def trace(is_json: bool, **flags: Any) -> int:
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
    source, asked = PromptSource.taken_from(flags), TraceFlags.taken_from(flags)
    config = load_config(flags)
    source.check()
    asked.check(source, config, flags)
    require_stdout()
    inputs = input_files(config, source, config_file_of(flags))
    saved: ResultFile | None = None
    if asked.perfetto is not None:
        shown = {} if asked.trace_file is None else {"trace": os.fspath(asked.trace_file)}
        saved = check_result_file("--perfetto", asked.perfetto, inputs | shown)
    if asked.trace_file is not None:
        is_stdin = str(asked.trace_file) == STDIN
        events = read_trace(Path("/dev/stdin") if is_stdin else asked.trace_file)
        _show(events, saved, every_layer=asked.every_layer, is_json=is_json)
        return 0
    text_or_ids = source.read()
    will_chat = source.will_chat(text_or_ids)

    def request_of(engine: Engine, config: StrataConfig) -> ReadRequest:
        ids = source.encode(engine, text_or_ids)
        sampler = sampler_of(config)
        return ReadRequest(ids=ids, max_tokens=asked.generated_tokens, sampler=sampler)

    if asked.ab is not None:
        arms = Arms(flags, asked.ab, request_of, will_chat, asked.reuse or 0, inputs)
        if asked.identity:
            return _identity(arms, is_json=is_json)
        return _time(arms, asked.repeat or 1, is_json=is_json)
    events = []
    outputs = {} if asked.perfetto is None else {"--perfetto": asked.perfetto}
    with open_engine(
        config, will_chat=will_chat, inputs=inputs, outputs=outputs, sinks=(events.append,)
    ) as engine:
        _read(engine, request_of(engine, config), config.progress, events, asked)
    events.sort(key=lambda event: int(event["t_ns"]))
    _show(events, saved, every_layer=asked.every_layer, is_json=is_json)
    return 0


def _read(
    engine: Engine,
    request: ReadRequest,
    progress: bool | None,
    events: list[Event],
    asked: TraceFlags,
) -> None:
    """Read the prompt; of what came before, the events of the run's begin alone are kept."""
    if asked.warm_up:
        with engine.sequence() as sequence:
            sequence.prefill(request.ids)
    with (
        engine.sequence() as sequence,
        progress_bar("reading", "tok", progress) as bar,
    ):
        ids = read_before(sequence, request, asked.reuse or 0).ids
        events[:] = [event for event in events if event["ev"] == "run.begin"]
        sequence.prefill(ids, progress=bar)


def _show(
    events: list[Event], saved: ResultFile | None, *, every_layer: bool, is_json: bool
) -> None:
    run = summarize(events)
    if saved is not None:
        saved.save(orjson.dumps(as_perfetto(events)))
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
