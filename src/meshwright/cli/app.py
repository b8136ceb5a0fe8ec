"""The command line: one group, its commands, and completion."""

from __future__ import annotations

import gc

import click
from click.shell_completion import get_completion_class

from meshwright import __version__
from meshwright.cli import catalogues, checkpoints, doctor, dryrun, launch, mcp, plan, train, web
from meshwright.cli.options import examples
from meshwright.engine.warning_filters import no_enum_warnings

WORKING = ("train", "bench", "tokenize", "generate", "evaluate", "convert", "calibrate", "web", "mcp")


@click.group(
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    epilog=examples(
        "meshwright recommend llama3-8b --gpus 8xH100 --goal sft",
        "meshwright check llama3_70b_pretrain_config --gpus 64xA100-80",
        "meshwright recipes llama --goal sft",
    ),
)
@click.version_option(__version__, message="meshwright %(version)s")
@click.pass_context
def app(context: click.Context) -> None:
    """Tell it your model, your GPUs and your goal: it picks the training recipe, sizes it, checks it and says why.

    Run without a command on a terminal, it asks. Exit codes: 0 fine, 1 the answer is no, 2 bad input, 3 a run failed,
    75 a run was asked to end and has saved.
    """
    if context.invoked_subcommand in WORKING:  # these run for long and hold tensors, also in cycles
        gc.enable()
        no_enum_warnings()
    if context.invoked_subcommand is None:
        context.invoke(plan.recommend)


for command in (
    plan.recommend,
    plan.plan,
    plan.size,
    plan.estimate,
    plan.check,
    plan.export,
    train.train,
    train.bench,
    dryrun.dryrun,
    launch.launch,
    doctor.doctor,
    checkpoints.tokenize,
    checkpoints.generate,
    checkpoints.evaluate,
    checkpoints.convert,
    catalogues.recipes,
    catalogues.recipe,
    catalogues.accuracy,
    catalogues.calibrate,
    catalogues.models,
    catalogues.gpus,
    catalogues.rules,
    web.web,
    mcp.mcp,
    catalogues.explain,
):
    app.add_command(command)


@app.command(epilog=examples('eval "$(meshwright completion bash)"', "meshwright completion fish | source"))
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """The script that makes your shell complete models, recipes and GPUs."""
    found = get_completion_class(shell)
    if found is not None:  # click knows the three shells above
        click.echo(found(app, {}, "meshwright", "_MESHWRIGHT_COMPLETE").source())
