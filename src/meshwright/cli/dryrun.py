"""The command that executes a recipe without GPUs: dryrun; and how far it is, for those who wait."""

from __future__ import annotations

import gc
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import click

from meshwright import api
from meshwright.cli import complete
from meshwright.cli.options import as_json, emit, end, examples, gpus_option, options, overrides, plot_option
from meshwright.engine.warning_filters import no_enum_warnings

START_OF_LINE = "\r\x1b[2K"  # and nothing on it


@click.command(
    epilog=examples(
        "meshwright dryrun llama3_70b_pretrain_config --gpus 64xH100",
        "meshwright dryrun llama3_8b_sft_config --gpus 8xH100 layout.recompute=full --plot memory.svg",
        "meshwright dryrun qwen3_30b_a3b_pretrain_config --gpus 16xH100 layout.ep=8 --json",
        "meshwright dryrun my_recipe.toml --exact",
    )
)
@options(
    click.argument("recipe", shell_complete=complete.recipes),
    overrides,
    gpus_option,
    click.option("--exact", is_flag=True, help="Trace every layer and micro batch; like ones are replayed otherwise."),
    click.option(
        "--processes", type=click.IntRange(min=1), metavar="N", help="Ranks traced at the same time; as many as cores."
    ),
    plot_option,
    as_json,
)
def dryrun(recipe: str, as_json: bool, plot: str | None, **asked: Any) -> None:
    """Executes a RECIPE's step at full size on tensors without data: no GPU is needed, and nothing is left behind.

    The engine's own code runs for every kind of rank of the cluster (the recipe's own one without --gpus): forward,
    backward, gradients, optimizer. It says what memory the worst rank needs and what holds it, the floating-point
    operations, every collective, and the difference to the estimate.

    Exit codes: 0 it fits, 1 it does not or the rules refuse it, 2 bad input, 3 the dry run failed.
    """
    if plot:
        from meshwright.cli import plots

        plots.ready(plot)
    with waiting() as progress:
        proof = api.dryrun(recipe, progress=progress, **asked)
    answer = api.dryrun_to_dict(proof)
    if plot:
        plots.proof(answer, plot)
    if as_json:
        emit(answer)
    else:
        from meshwright.cli import dryrun_report as text

        text.whole(answer)
    end(proof.fits)


@contextmanager
def waiting() -> Iterator[Callable[[str], None] | None]:
    """What shows how far long work is, on one line of a terminal's stderr; it is gone afterwards."""
    gc.enable()  # tensors are held in cycles, too
    no_enum_warnings()
    shown = sys.stderr is not None and sys.stderr.isatty()
    try:
        yield _show if shown else None
    except KeyboardInterrupt:
        _write(START_OF_LINE * shown + "interrupted; nothing was left behind")  # click ends the line
        raise
    finally:
        _write(START_OF_LINE * shown)


def _show(text: str) -> None:
    _write(START_OF_LINE + text[: shutil.get_terminal_size().columns - 1])


def _write(text: str) -> None:
    with suppress(OSError, ValueError, AttributeError):  # nobody listens
        sys.stderr.write(text)
        sys.stderr.flush()
