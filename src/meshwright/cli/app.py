"""The commands. Each asks the front desk and renders the answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import click
from click.shell_completion import get_completion_class

from meshwright import __version__, api
from meshwright.cli import complete
from meshwright.cli.ask import ask_missing
from meshwright.errors import InputError, unknown

FAILED = 1  # the answer is no
DIALECTS = (
    "meshwright", "megatron-lm", "megatron-bridge", "automodel", "torchtitan", "kempnerforge", "deepspeed",
    "accelerate",
)  # fmt: skip


def examples(*lines: str) -> str:
    """The examples that close a help page, one line each."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def emit(answer: dict[str, Any]) -> None:
    """Prints one JSON object."""
    click.echo(json.dumps(answer, indent=2, default=str))


def end(ok: bool) -> None:
    """Leaves with the exit code of the answer."""
    click.get_current_context().exit(0 if ok else FAILED)


as_json = click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
overrides = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
gpus_option = click.option(
    "--gpus",
    metavar="CLUSTER",
    help="8xH100, 4x8xH100 (nodes × GPUs), 72xGB200, a count, auto, or a TOML file.",
    shell_complete=complete.gpus,
)
required_gpus = click.option(
    "--gpus", required=True, metavar="CLUSTER", help="8xH100, 4x8xH100, 72xGB200, …", shell_complete=complete.gpus
)
seq_option = click.option(
    "--seq", metavar="TOKENS", help="Sequence length, e.g. 8192 or 8k; the recipe's own by default."
)
goal_option = click.option("--goal", metavar="GOAL", help="pretrain, sft or peft.", shell_complete=complete.goals)
engine_option = click.option(
    "--engine",
    default="meshwright",
    show_default=True,
    metavar="ENGINE",
    help="What will run the plan: " + ", ".join(api.ENGINES) + ". It changes memory and speed.",
    shell_complete=complete.engines,
)


calibration_option = click.option(
    "--calibration", metavar="FILE", help="A profile of your own machine, as `meshwright calibrate` writes it."
)


plot_option = click.option("--plot", metavar="FILE", help="Also draw it, as .svg or .png (needs matplotlib).")


def options(*decorators: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Several decorators as one, in reading order."""

    def decorate(function: Any) -> Any:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate


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

    Run without a command on a terminal, it asks. Exit codes: 0 fine, 1 the answer is no, 2 bad input.
    """
    if context.invoked_subcommand is None:
        context.invoke(recommend)


@app.command(
    epilog=examples(
        "meshwright recommend llama3-8b --gpus 8xH100 --goal sft --explain",
        "meshwright recommend ./config.json --gpus auto --goal peft",
        "meshwright recommend qwen3-30b-a3b --gpus 4x8xH100 --goal pretrain --seq 32k layout.ep=8",
        "meshwright recommend llama3-70b --gpus 64xGB200 --goal pretrain --benchmark",
    )
)
@options(
    click.argument("model", required=False, shell_complete=complete.models),
    overrides,
    gpus_option,
    goal_option,
    seq_option,
    engine_option,
    calibration_option,
    click.option("--benchmark", is_flag=True, help="Upper-bound throughput on mock data; never a production setting."),
    click.option("--explain", is_flag=True, help="Say why each number of the layout was chosen."),
    click.option("--save", metavar="FILE", help="Write the plan's recipe to this TOML file."),
    as_json,
)
def recommend(
    model: str | None = None,
    overrides: tuple[str, ...] = (),
    gpus: str | None = None,
    goal: str | None = None,
    seq: str | None = None,
    engine: str = "meshwright",
    calibration: str | None = None,
    benchmark: bool = False,
    explain: bool = False,
    save: str | None = None,
    as_json: bool = False,
) -> None:
    """Which recipe for my MODEL on my GPUs, adjusted how, and what will bite me?

    MODEL is a name, a Hugging Face id, or the path of a config.json. Overrides are kept; the rest is sized around them.
    """
    model, gpus, goal = ask_missing(model, gpus, goal)
    plan = api.recommend(
        model, gpus, goal, seq=seq, engine=engine, benchmark=benchmark, calibration=calibration, overrides=overrides
    )
    if save:
        api.save_recipe(plan, save)
    if as_json:
        emit(api.plan_to_dict(plan, explain=explain))
    else:
        from meshwright.cli import render

        render.plan(plan, explain)
    end(plan.ok)


@app.command(
    epilog=examples(
        "meshwright plan llama3-70b --gpus 64xH100 --goal pretrain",
        "meshwright plan qwen3_30b_a3b_pretrain_config --gpus 4x8xH200 --top 10",
        "meshwright plan kimi-k2 --gpus 1024xGB200 --goal pretrain layout.tp=1 --json",
    )
)
@options(
    click.argument("target", metavar="MODEL|RECIPE", shell_complete=complete.recipes),
    overrides,
    required_gpus,
    goal_option,
    seq_option,
    engine_option,
    calibration_option,
    click.option("--top", type=int, default=5, show_default=True, help="How many plans."),
    as_json,
)
def plan(
    target: str,
    overrides: tuple[str, ...],
    gpus: str,
    goal: str | None,
    seq: str | None,
    engine: str,
    calibration: str | None,
    top: int,
    as_json: bool,
) -> None:
    """Search every legal layout: the fastest that fit, what trades memory for speed, and why others were dropped."""
    found = api.plan(target, gpus, goal, seq=seq, engine=engine, top=top, calibration=calibration, overrides=overrides)
    if as_json:
        emit(api.ranking_to_dict(found))
    else:
        from meshwright.cli import render

        render.ranking(found)
    end(any(p.ok for p in found.plans))


@app.command(
    epilog=examples(
        "meshwright size llama3-70b --goal pretrain --gpu H100",
        "meshwright size deepseek-v3 --goal pretrain --gpu GB200 --tokens 15T --price 3",
    )
)
@options(
    click.argument("model", shell_complete=complete.models),
    overrides,
    click.option("--goal", required=True, metavar="GOAL", help="pretrain, sft or peft.", shell_complete=complete.goals),
    click.option("--gpu", required=True, metavar="GPU", help="GPU type, e.g. H100."),
    seq_option,
    engine_option,
    calibration_option,
    click.option("--tokens", metavar="N", help="Token budget, e.g. 15T: adds days, and cost with --price."),
    click.option("--price", type=float, metavar="PER_GPU_HOUR", help="Price of one GPU for one hour."),
    plot_option,
    as_json,
)
def size(
    model: str,
    overrides: tuple[str, ...],
    goal: str,
    gpu: str,
    seq: str | None,
    engine: str,
    calibration: str | None,
    tokens: str | None,
    price: float | None,
    plot: str | None,
    as_json: bool,
) -> None:
    """How many GPUs: the smallest count that fits, the most efficient one, days and cost with failures counted in."""
    found = api.size(
        model,
        goal,
        gpu,
        seq=seq,
        engine=engine,
        tokens=tokens,
        price=price,
        calibration=calibration,
        overrides=overrides,
    )
    if plot:
        from meshwright.cli import plots

        plots.sizing(api.sizing_to_dict(found), plot)
    if as_json:
        emit(api.sizing_to_dict(found))
    else:
        from meshwright.cli import render

        render.sizing(found)
    end(found.smallest is not None)


@app.command(
    epilog=examples(
        "meshwright estimate llama3_70b_pretrain_config",
        "meshwright estimate llama3-8b --gpus 8xH100 layout.tp=2 layout.recompute=full",
        "meshwright estimate llama3_70b_pretrain_config --gpus 64xH200 --engine megatron --json",
    )
)
@options(
    click.argument("target", metavar="MODEL|RECIPE", shell_complete=complete.recipes),
    overrides,
    gpus_option,
    goal_option,
    engine_option,
    calibration_option,
    plot_option,
    as_json,
)
def estimate(
    target: str,
    overrides: tuple[str, ...],
    gpus: str | None,
    goal: str | None,
    engine: str,
    calibration: str | None,
    plot: str | None,
    as_json: bool,
) -> None:
    """Memory and step time by part of exactly this layout: the recipe's own with overrides, nothing searched."""
    found = api.estimate(target, gpus=gpus, goal=goal, engine=engine, calibration=calibration, overrides=overrides)
    if plot:
        from meshwright.cli import plots

        plots.estimate(api.estimate_to_dict(found), plot)
    if as_json:
        emit(api.estimate_to_dict(found))
    else:
        from meshwright.cli import render

        render.estimate(found)
    end(found.ok)


@app.command(epilog=examples("meshwright accuracy runs.csv", "meshwright accuracy runs.csv --json"))
@options(click.argument("file"), plot_option, as_json)
def accuracy(file: str, plot: str | None, as_json: bool) -> None:
    """The cost model against a CSV of measurements: error of step time and memory by source and GPU, fit labels."""
    answer = {"schema": api.SCHEMA, **api.accuracy_to_dict(api.accuracy(file))}
    if plot:
        from meshwright.cli import plots

        plots.accuracy(api.accuracy_points(file), plot)
    if as_json:
        emit(answer)
    else:
        from meshwright.cli import render

        render.accuracy(answer)


@app.command(
    epilog=examples(
        "meshwright calibrate --out mine.toml",
        "meshwright calibrate my_runs.csv --out mine.toml",
        "torchrun --nproc-per-node=8 -m meshwright calibrate --out mine.toml",
    )
)
@options(
    click.argument("runs", required=False),
    click.option("--out", metavar="FILE", help="Where to write the profile; printed when left out."),
    as_json,
)
def calibrate(runs: str | None, out: str | None, as_json: bool) -> None:
    """Measure this machine's GPU, or fit to your own RUNS (a CSV), into a profile for --calibration."""
    profiles = api.calibrate_runs(runs) if runs else [api.calibrate_machine()[0]]
    if out:
        api.save_profile(profiles, out)
    if as_json:
        emit({"schema": api.SCHEMA, "profiles": [api.profile_to_dict(p) for p in profiles]})
    elif not out:
        click.echo("\n".join(api.profile_text(p) for p in profiles))


@app.command(
    epilog=examples(
        "meshwright recipes llama --goal sft",
        'meshwright recipes "qwen3 moe 8xH100"',
        "meshwright recipes gb200 --benchmark --json",
    )
)
@options(
    click.argument("query", required=False),
    goal_option,
    click.option("--family", metavar="FAMILY", help="One family, e.g. llama."),
    click.option("--benchmark", is_flag=True, help="The throughput recipes instead of the library."),
    as_json,
)
def recipes(query: str | None, goal: str | None, family: str | None, benchmark: bool, as_json: bool) -> None:
    """The index of recipes. QUERY is a name, or words: a model, goal, GPUs (8xH100), tokens (128k), moe, vision, …"""
    found = api.find_recipes(query, goal=goal, family=family, benchmark=benchmark)
    if as_json:
        emit({"schema": api.SCHEMA, "recipes": api.entries_to_dicts(found)})
    else:
        from meshwright.cli import render

        render.recipes(found)
    if not found and not benchmark:
        elsewhere = api.find_recipes(query, goal=goal, family=family, benchmark=True)
        if elsewhere:
            click.echo(f"{len(elsewhere)} throughput recipes match: add --benchmark", err=True)
    end(bool(found))


@app.command(
    epilog=examples(
        "meshwright recipe llama3_70b_pretrain_config",
        "meshwright recipe llama3_8b_sft_config layout.tp=4 --format yaml",
    )
)
@options(
    click.argument("name", shell_complete=complete.recipes),
    overrides,
    click.option("--format", default="toml", show_default=True, help="toml, yaml, json or python."),
    as_json,
)
def recipe(name: str, overrides: tuple[str, ...], format: str, as_json: bool) -> None:
    """One recipe with overrides applied; NAME may be a file. --json gives every field, a format those not default."""
    found = api.recipe(name, overrides)
    if as_json:
        emit({"schema": api.SCHEMA, "recipe": api.recipe_to_dict(found)})
    else:
        click.echo(api.recipe_text(found, format))


@app.command(
    epilog=examples(
        "meshwright check llama3_8b_pretrain_config --gpus 16xA100-80",
        "meshwright check my_recipe.toml",
        "meshwright check llama3_70b_sft_config layout.tp=3",
    )
)
@options(
    click.argument("target", shell_complete=complete.recipes),
    overrides,
    gpus_option,
    engine_option,
    click.option("--dialect", default=DIALECTS[0], show_default=True, help="Whose words a file is written in."),
    as_json,
)
def check(target: str, overrides: tuple[str, ...], gpus: str | None, engine: str, dialect: str, as_json: bool) -> None:
    """What the rules find in a recipe or recipe file, on its own cluster or another."""
    if dialect not in DIALECTS:
        raise unknown("dialect", dialect, DIALECTS)
    if dialect != DIALECTS[0]:
        raise InputError("files of this framework are not read yet; meshwright is", field="dialect", value=dialect)
    result = api.check(target, gpus=gpus, engine=engine, overrides=overrides)
    if as_json:
        emit(api.check_to_dict(result))
    else:
        from meshwright.cli import render

        render.check(result)
    end(result.ok)


def _catalogue(found: list[Any], name: str, to_dict: Callable[[Any], dict[str, Any]], as_json: bool) -> None:
    """Prints a catalogue as JSON or as the table of the same name."""
    if as_json:
        emit({"schema": api.SCHEMA, name: [to_dict(row) for row in found]})
    else:
        from meshwright.cli import render

        getattr(render, name)(found)


@app.command(epilog=examples("meshwright models", "meshwright models qwen3", "meshwright models ./config.json --json"))
@options(click.argument("query", required=False, shell_complete=complete.models), as_json)
def models(query: str | None, as_json: bool) -> None:
    """The catalogue of models with exact parameter counts; QUERY is part of a name, or a config.json."""
    _catalogue(api.model_catalogue(query), "models", api.model_to_dict, as_json)


@app.command(epilog=examples("meshwright gpus", "meshwright gpus --json"))
@as_json
def gpus(as_json: bool) -> None:
    """The catalogue of GPUs, with sources."""
    _catalogue(list(api.gpu_catalogue()), "gpus", api.gpu_to_dict, as_json)


@app.command(epilog=examples("meshwright rules", "meshwright rules moe", "meshwright rules --pitfalls"))
@options(
    click.argument("query", required=False),
    click.option("--pitfalls", is_flag=True, help="Only the well-known pitfalls."),
    as_json,
)
def rules(query: str | None, pitfalls: bool, as_json: bool) -> None:
    """Symptom, cause and fix of everything that is checked; QUERY is part of a rule's id."""
    _catalogue(api.rule_catalogue(query, pitfalls=pitfalls), "rules", api.rule_to_dict, as_json)


@app.command(epilog=examples('eval "$(meshwright completion bash)"', "meshwright completion fish | source"))
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """The script that makes your shell complete models, recipes and GPUs."""
    found = get_completion_class(shell)
    if found is not None:  # click knows the three shells above
        click.echo(found(app, {}, "meshwright", "_MESHWRIGHT_COMPLETE").source())
