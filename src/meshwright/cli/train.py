"""The commands that run a recipe on our own engine: train and bench. Options have the names of the verbs' arguments."""

from __future__ import annotations

from typing import Any

import click

from meshwright import api
from meshwright.cli import complete
from meshwright.cli.options import as_json, emit, examples, options, overrides

shared = options(
    click.argument("recipe", shell_complete=complete.recipes),
    overrides,
    click.option("--nproc", type=click.IntRange(min=1), metavar="N", help="Start N ranks on this machine."),
    click.option("--model", metavar="MODEL", help="Train this model with the recipe instead of its own."),
    click.option(
        "--tiny", is_flag=True, help="A laptop-size model of the same structure, on CPU, the layout scaled to N."
    ),
    click.option(
        "--out", metavar="DIR", help="Run folder: metrics, checkpoints. Default runs/RECIPE-DATE (--tiny: none)."
    ),
    click.option("--tensorboard", is_flag=True, help="Metrics for TensorBoard too."),
    click.option(
        "--timeout",
        "timeout_s",
        type=float,
        default=600.0,
        show_default=True,
        help="End a rank that makes no progress for this many seconds.",
    ),
    as_json,
)


@click.command(
    epilog=examples(
        "meshwright train llama3_8b_pretrain_config --tiny --nproc 2",
        "meshwright train llama3_8b_sft_config --dataset mock --nproc 8 train.steps=100",
        "meshwright train qwen3_30b_a3b_pretrain_config --nproc 8 layout.micro_batch_size=auto",
        "torchrun --nproc-per-node 8 -m meshwright train llama3_8b_pretrain_config --dataset mock",
    )
)
@shared
@options(
    click.option("--dataset", metavar="DATA", help="Data set name, file or folder; mock makes data up."),
    click.option(
        "--on-nan",
        type=click.Choice(["stop", "skip"]),
        default="stop",
        show_default=True,
        help="What to do with a step whose loss is not a number; its samples are recorded either way.",
    ),
    click.option(
        "--accept-changes", is_flag=True, help="Go on from checkpoints though fields that make the training changed."
    ),
)
def train(recipe: str, as_json: bool, **asked: Any) -> None:
    """Trains a RECIPE (a name or a file) on our own engine: alone, on N ranks, under torchrun or under SLURM.

    A run folder that holds checkpoints is gone on from, on any number of ranks and in any layout. SIGTERM and SIGUSR1
    make the run save and end.

    Exit codes: 0 fine, 1 the rules refuse the layout, 2 bad input, 3 the run failed, 75 it was asked to end, has saved
    and wants to be started again.
    """
    _answer(api.train(recipe, json=as_json, **asked), as_json)


@click.command(
    epilog=examples(
        "meshwright bench llama3_8b_pretrain_config --nproc 8",
        "meshwright bench qwen3_600m_pretrain_config train.steps=20 layout.micro_batch_size=auto",
        "meshwright bench qwen3_30b_a3b_pretrain_config --tiny --nproc 2",
    )
)
@shared
def bench(recipe: str, as_json: bool, **asked: Any) -> None:
    """Measures a RECIPE's throughput: 50 iterations on mock data, beside the estimate. Never a production setting."""
    _answer(api.bench(recipe, json=as_json, **asked), as_json)


def _answer(done: Any, as_json: bool) -> None:
    """What rank 0 says; the other ranks of torchrun and SLURM end in silence."""
    if done.outcome is None:
        return
    if as_json:
        emit(api.training_to_dict(done))
    else:
        from meshwright.cli import render

        render.training(api.training_to_dict(done))
