r"""Writes a qwen4exp model file of any size, filled with valid random quantized blocks.

    python tools/synth_model.py --preset bench12 --out FILE [--seed N] [--threads N]
    python tools/synth_model.py --out FILE --report-routing [--device cuda:0]

For measuring an engine without a download: sizes, types, vocabulary and routing are those of a
published model; what it says is noise. Equal arguments give equal bytes, whatever the threads.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import click
from tqdm import tqdm

if not __package__:  # run as a file: the project is the folder above, not this one
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from strata_cli.engine.model.spec import ModelSpec
from strata_cli.errors import StrataError
from tools.synth.presets import PRESETS, with_layers
from tools.synth.recipe import Recipe, plan_tensors
from tools.synth.routing import TOKEN_STD, UNROUTED_TARGETS
from tools.synth.writer import write_model

_LENGTHS = ",".join(str(count) for count in UNROUTED_TARGETS)


class PromptLengths(click.ParamType[list[int]]):
    """Comma-separated numbers of tokens, ascending."""

    name = "tokens,..."

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> list[int]:
        """The numbers."""
        if isinstance(value, list):
            return value
        try:
            counts = sorted({int(part) for part in str(value).split(",")})
        except ValueError:
            counts = [0]
        if counts[0] < 1:
            self.fail(f"{value!r} is not a list of positive numbers such as 1046,1965", param, ctx)
        return counts


HELP = """Write a model file of random weights.

The preset is one of

\b
  tiny     4 layers, hidden 256, 32 experts: 6 MB, for tests
  route    12 layers, 512 experts, narrow: 0.4 GB, to look at routing quickly
  bench12  12 layers at full width: 17 GB
  full     48 layers at full width: 61 GB

Full width: hidden 2560 in 4 streams, 512 experts of 640 and top 10, 248,320 tokens, and the types
of a published IQ3_XXS build (gate and up IQ3_XXS, down IQ4_NL, a few layers better; dense matrices
Q8_0, Q6_K, Q5_K; indexer BF16); only the n-gram table is small.

Weights have the deviation of trained ones, so activations keep their size and logits have one of
2.5. Routing is skewed and drifts with the text: no token of a prompt routes to about 42 % of the
(layer, expert) pairs at 1,046 tokens, 33 % at 1,437, 28 % at 1,965, 14 % at 4,867.
--report-routing measures that by reading prompts with the engine: random tokens, tokens as frequent
as words are, and the text of --text. Without --preset it measures the file that is there.

Speed is that of the disk or page cache; the file may be in /dev/shm. Memory: 4 MB a thread, and
the vocabulary."""


@click.command(help=HELP)
@click.option("--preset", type=click.Choice(list(PRESETS)), help="What to write.")
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), required=True, help="The model file."
)
@click.option("--seed", type=click.IntRange(0), default=1, show_default=True)
@click.option("--threads", type=click.IntRange(1), help="Threads that write.  [default: all cores]")
@click.option("--layers", type=click.IntRange(1, 512), help="Other than the preset's.")
@click.option("--experts", type=click.IntRange(10, 4096), help="Other than the preset's.")
@click.option(
    "--token-std",
    type=click.FloatRange(0, 10),
    default=TOKEN_STD,
    show_default=True,
    help="What a token itself adds to router logits; more leaves fewer experts unrouted.",
)
@click.option(
    "--report-routing",
    type=PromptLengths(),
    is_flag=False,
    flag_value=_LENGTHS,
    help=f"Measure routing at these prompt lengths.  [without a value: {_LENGTHS}]",
)
@click.option("--device", default="host", show_default=True, help="Where --report-routing runs.")
@click.option(
    "--text",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A text that --report-routing reads too.",
)
def main(
    preset: str | None,
    out: Path,
    seed: int,
    threads: int | None,
    layers: int | None,
    experts: int | None,
    token_std: float,
    report_routing: list[int] | None,
    device: str,
    text: Path | None,
) -> None:
    """See HELP."""
    if preset is not None:
        spec = PRESETS[preset]
        if layers is not None:
            spec = with_layers(spec, layers)
        if experts is not None:
            spec = replace(spec, num_experts=experts)
        _write(out, spec, Recipe(token_std=token_std), seed, threads)
    elif report_routing is None:
        raise click.UsageError("nothing to do: give --preset to write a file, or --report-routing")
    if report_routing:
        _report(out, report_routing, device, text)


def _write(out: Path, spec: ModelSpec, recipe: Recipe, seed: int, threads: int | None) -> None:
    tensors = plan_tensors(spec, recipe)
    threads = threads or len(os.sched_getaffinity(0))
    started = time.perf_counter()
    with tqdm(total=sum(t.nbytes for t in tensors), unit="B", unit_scale=True) as bar:
        size = write_model(out, spec, tensors, seed=seed, threads=threads, progress=bar.update)
    seconds = time.perf_counter() - started
    print(f"{out}: {size / 2**30:.2f} GiB in {seconds:.1f} s, {size / seconds / 1e9:.2f} GB/s")


def _report(model: Path, counts: list[int], device: str, text: Path | None) -> None:
    # The engine brings the compiler of the host's kernels; writing needs neither.
    from tools.synth.report import measure_routing, routing_table

    content = text.read_text("utf-8") if text else None
    print(routing_table(measure_routing(model, counts, device=device, text=content), counts))


if __name__ == "__main__":
    try:
        main(standalone_mode=True)
    except StrataError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
