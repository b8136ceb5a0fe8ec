"""The command that makes a recipe a job: written, submitted, watched."""

from __future__ import annotations

import gc
from itertools import zip_longest
from typing import Any

import click

from meshwright import api
from meshwright.cli import complete
from meshwright.cli.options import as_json, emit, examples, gpus_option, options, overrides
from meshwright.errors import InputError

RUN_FAILED = 3
COMPLETED = "COMPLETED"

asked_of_slurm = options(
    click.option("--time", metavar="LIMIT", help="Time limit as SLURM reads it: 90, 12:00:00, 2-00:00:00."),
    click.option("--partition", metavar="NAME", help="SLURM partition, or several with commas."),
    click.option("--account", metavar="NAME", help="SLURM account."),
    click.option("--qos", metavar="NAME", help="SLURM quality of service."),
    click.option("--reservation", metavar="NAME", help="SLURM reservation."),
    click.option("--constraint", metavar="FEATURES", help="SLURM node features, e.g. 'h100&ib'."),
    click.option(
        "--sbatch", multiple=True, metavar="KEY[=VALUE]", help="Another sbatch option, e.g. mem=0; repeat it."
    ),
    click.option("--logs", metavar="DIR", help="Folder of the log NAME-ID.out; the folder it is submitted from."),
    click.option("--no-requeue", is_flag=True, help="End where the job is told to end."),
    click.option("--max-requeues", type=int, metavar="N", help="How often it may be requeued.  [default: 100]"),
    click.option(
        "--signal-ahead",
        "signal_ahead_s",
        type=int,
        metavar="SECONDS",
        help="How long before its end the run is told to save.  [default: checkpoint.grace_s + 60]",
    ),
    click.option("--container-kind", metavar="KIND", help="How SLURM starts --image: pyxis or apptainer."),
)
asked_of_any = options(
    click.option("--name", metavar="NAME", help="Name of the job; the recipe's by default."),
    click.option("--cpu", is_flag=True, help="Ask for no GPU: for --tiny runs. Ranks are counted as GPUs are."),
    click.option("--cpus-per-rank", type=int, metavar="N", help="CPU cores of a rank.  [default: 8, with --cpu 1]"),
    click.option("--python", metavar="PATH", help="Interpreter of the job.  [default: with --submit this one]"),
    click.option("--env", multiple=True, metavar="NAME=VALUE", help="Set in the job's environment; repeat it."),
    click.option("--setup", multiple=True, metavar="LINE", help="Shell before the run, e.g. 'module load cuda'."),
    click.option("--image", metavar="IMAGE", help="Container image."),
    click.option(
        "--mount",
        "mounts",
        multiple=True,
        metavar="SOURCE:/PATH",
        help="Into the container; for Kubernetes SOURCE is a volume claim; repeat it.",
    ),
    click.option("--hosts", metavar="A,B,…", help="The nodes, for --scheduler hosts."),
    click.option("--head", metavar="HOST", help="The node where all of them meet, for --scheduler torchrun."),
    click.option("--port", type=int, metavar="PORT", help="Where ranks meet.  [default: 29500; SLURM: by job]"),
    click.option("--max-restarts", type=int, metavar="N", help="How often ranks that failed are started again."),
    click.option("--kind", metavar="KIND", help="Kubernetes: pytorchjob or jobset."),
    click.option("--namespace", metavar="NAME", help="Kubernetes namespace."),
)


@click.command(
    epilog=examples(
        "meshwright launch llama3_8b_pretrain_config --scheduler slurm --gpus 2x8xH100 --time 1-00:00:00 --partition gpu",
        "meshwright launch my_recipe.toml --scheduler slurm --out runs/mine --submit --watch",
        "meshwright launch llama3_8b_sft_config --scheduler hosts --gpus 2x8xH100 --hosts node01,node02",
        "meshwright launch llama3_8b_sft_config --scheduler kubernetes --kind jobset --image IMAGE --write jobs",
        "meshwright launch llama3_70b_pretrain_config --to megatron-lm --scheduler slurm --gpus 8x8xH100 --write jobs",
        "meshwright launch llama3_8b_pretrain_config --scheduler slurm --tiny --cpu --gpus 2 --out runs/try --submit --watch",
    )
)
@options(
    click.argument("recipe", shell_complete=complete.recipes),
    overrides,
    click.option(
        "--scheduler", "on", required=True, metavar="NAME", help="torchrun, slurm, hosts, kubernetes or skypilot."
    ),
    gpus_option,
    click.option(
        "--to",
        metavar="FRAMEWORK",
        help="Run it there instead of on our own engine: " + ", ".join(api.FRAMEWORKS) + ".",
    ),
    click.option("--dataset", metavar="DATA", help="Data set name, file or folder; mock makes data up."),
    click.option("--model", metavar="MODEL", help="Train this model with the recipe instead of its own."),
    click.option("--tiny", is_flag=True, help="A laptop-size model of the same structure, on CPU: to try it out."),
    click.option("--out", metavar="DIR", help="Run folder: a job that is requeued goes on from its checkpoints."),
    asked_of_any,
    asked_of_slurm,
    click.option("--write", metavar="DIR", help="Write the files there."),
    click.option("--overwrite", is_flag=True, help="Replace files there that say something else."),
    click.option("--submit", is_flag=True, help="Hand it to SLURM."),
    click.option("--watch", is_flag=True, help="Follow the submitted job to its end: states and log."),
    as_json,
)
def launch(recipe: str, on: str, watch: bool, as_json: bool, **asked: Any) -> None:
    """Makes a RECIPE (a name or a file) a job: the script or commands that start it, submitted and watched.

    The rules check it on its cluster first; what cannot start or does not fit is not written. A SLURM job that is told
    to end, by its time limit or by preemption, saves, is requeued and goes on.

    Exit codes: 0 fine, 1 it cannot start or does not fit, 2 bad input, 3 the job was not taken or did not complete.
    """
    if watch and not asked["submit"]:
        raise InputError("follows a job that was submitted", field="--watch", fix=("--submit --watch",))
    started = api.launch(recipe, on, **_spoken(asked))
    if not as_json:
        _show(api.launch_to_dict(started))
    if watch and started.number is not None:
        started = _watched(started, as_json)
    if as_json:
        emit(api.launch_to_dict(started))
    if started.final_state is not None and started.final_state.state != COMPLETED:
        click.get_current_context().exit(RUN_FAILED)


def _spoken(asked: dict[str, Any]) -> dict[str, Any]:
    """The options as the verb takes them; those that were not given are left out."""
    given = {name: value for name, value in asked.items() if value not in (None, ())}
    flags = {"requeue": False} if given.pop("no_requeue") else {}
    return {name: value for name, value in given.items() if name != "cpu" or value} | flags


def _show(answer: dict[str, Any]) -> None:
    """The files and commands of a job, to be read, piped or run, letter by letter; or where they went."""
    for line in (*answer["notes"], *(f"{one['severity']}: {one['message']}" for one in answer["findings"])):
        click.echo(f"# {line}", err=True)
    for path in answer["written"]:
        click.echo(f"wrote {path}", err=True)
    if answer["submitted"] is not None:
        click.echo(f"submitted job {answer['submitted']['id']}")
        return
    for name, text in {} if answer["written"] else answer["files"].items():
        click.echo(f"# {name}\n{text}" if len(answer["files"]) > 1 else text, nl=False)
    if answer["written"] or not answer["files"]:
        for place, command in zip_longest(answer["hosts"], answer["commands"]):
            click.echo(f"# on {place}\n{command}" if place else command)


def _watched(started: Any, as_json: bool) -> Any:
    """The job's end; Ctrl-C ends the watching, not the job."""
    gc.enable()  # this may last for days
    number = started.number

    def say(line: str) -> None:
        click.echo(line, err=True)

    try:
        return api.watch(started, say, lambda line: click.echo(line, err=as_json))
    except KeyboardInterrupt:
        say(f"job {number} goes on; cancel it with: scancel {number}")
        raise
