"""The commands. Each asks the front desk and renders the answer."""

from __future__ import annotations

import json
from typing import Annotated, Any, Optional

import typer

from meshwright import __version__, api
from meshwright.cli import complete
from meshwright.cli.ask import ask_missing

app = typer.Typer(
    name="meshwright",
    help="Tell it your model, your GPUs and your goal: it picks the training recipe, sizes it, checks it and says why.",
    no_args_is_help=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
Overrides = Annotated[Optional[list[str]], typer.Argument(help="Overrides, e.g. layout.tp=2 train.global_batch_size=64")]
Gpus = Annotated[
    Optional[str],
    typer.Option("--gpus", help="8xH100, 4x8xH100, 72xGB200, a count, auto, or a TOML file.", autocompletion=complete.gpus),
]
Goal = Annotated[Optional[str], typer.Option("--goal", help="pretrain, sft or peft.", autocompletion=complete.goals)]
Engine = Annotated[
    str, typer.Option("--engine", help="What will run the plan; changes memory and speed.", autocompletion=complete.engines)
]

EPILOG = {
    "recommend": "Examples:  meshwright recommend llama3-8b --gpus 8xH100 --goal sft   ·   "
    "meshwright recommend ./config.json --gpus auto --goal peft --explain   ·   "
    "meshwright recommend qwen3-30b-a3b --gpus 4x8xH100 --goal pretrain --seq 32k layout.ep=8",
    "recipes": "Examples:  meshwright recipes   ·   meshwright recipes llama --goal sft   ·   meshwright recipes --benchmark gb200",
    "recipe": "Examples:  meshwright recipe llama3_70b_pretrain_config   ·   "
    "meshwright recipe llama3_8b_sft_config layout.tp=4 --format yaml",
    "check": "Examples:  meshwright check llama3_8b_pretrain_config --gpus 16xA100-80   ·   "
    "meshwright check my_recipe.toml   ·   meshwright check llama3_70b_sft_config layout.tp=3",
    "models": "Examples:  meshwright models   ·   meshwright models qwen3   ·   meshwright models ./config.json",
    "gpus": "Examples:  meshwright gpus   ·   meshwright gpus --json",
    "rules": "Examples:  meshwright rules   ·   meshwright rules moe   ·   meshwright rules --pitfalls",
}


def emit(answer: dict[str, Any]) -> None:
    """Prints one JSON object."""
    typer.echo(json.dumps(answer, indent=2, default=str))


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    """Tell it your model, your GPUs and your goal: it picks the training recipe, sizes it, checks it and says why.

    Run without a command on a terminal, it asks. Exit codes: 0 fine, 1 the answer is no, 2 bad input, 3 a run failed.
    """
    if version:
        typer.echo(f"meshwright {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        recommend()


@app.command(epilog=EPILOG["recommend"])
def recommend(
    model: Annotated[
        Optional[str], typer.Argument(help="Name, Hugging Face id, or path of a config.json.", autocompletion=complete.models)
    ] = None,
    overrides: Overrides = None,
    gpus: Gpus = None,
    goal: Goal = None,
    seq: Annotated[Optional[str], typer.Option("--seq", help="Sequence length in tokens, e.g. 8192 or 8k.")] = None,
    engine: Engine = "meshwright",
    benchmark: Annotated[
        bool, typer.Option("--benchmark", help="Upper-bound throughput recipe on mock data; not for production.")
    ] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Say why each number of the layout was chosen.")] = False,
    as_json: Json = False,
) -> None:
    """Which recipe for my model on my GPUs, adjusted how, and what will bite me?"""
    model, gpus, goal = ask_missing(model, gpus, goal)
    plan = api.recommend(
        model, gpus, goal, seq=seq, engine=engine, benchmark=benchmark, overrides=overrides or ()
    )
    if as_json:
        emit(api.plan_to_dict(plan, explain=explain))
    else:
        from meshwright.cli import render

        render.plan(plan, explain)
    raise typer.Exit(0 if plan.ok else 1)


@app.command(epilog=EPILOG["recipes"])
def recipes(
    query: Annotated[Optional[str], typer.Argument(help="Words of a name, family, model or GPU.")] = None,
    goal: Goal = None,
    family: Annotated[Optional[str], typer.Option("--family", help="One family, e.g. llama.")] = None,
    benchmark: Annotated[bool, typer.Option("--benchmark", help="Throughput recipes instead of library recipes.")] = False,
    as_json: Json = False,
) -> None:
    """The index of recipes."""
    found = api.recipes(query, goal=goal, family=family, benchmark=benchmark)
    if as_json:
        emit({"schema": api.SCHEMA, "recipes": api.entries_to_dicts(found)})
    else:
        from meshwright.cli import render

        render.recipes(found)
    raise typer.Exit(0 if found else 1)


@app.command(epilog=EPILOG["recipe"])
def recipe(
    name: Annotated[str, typer.Argument(help="Recipe name or file.", autocompletion=complete.recipes)],
    overrides: Overrides = None,
    format: Annotated[str, typer.Option("--format", help="toml, yaml, json or python.")] = "toml",
    full: Annotated[bool, typer.Option("--full", help="Every field, not only those that differ from the defaults.")] = False,
    as_json: Json = False,
) -> None:
    """One recipe, resolved."""
    found = api.recipe(name, overrides or ())
    if as_json:
        emit({"schema": api.SCHEMA, "recipe": api.recipe_to_dict(found)})
    else:
        typer.echo(api.recipe_text(found, format, full=full))


@app.command(epilog=EPILOG["check"])
def check(
    target: Annotated[str, typer.Argument(help="Recipe name, or a recipe file.", autocompletion=complete.recipes)],
    overrides: Overrides = None,
    gpus: Gpus = None,
    engine: Engine = "meshwright",
    as_json: Json = False,
) -> None:
    """What the rules find in a recipe on its own cluster or another."""
    result = api.check(target, gpus=gpus, engine=engine, overrides=overrides or ())
    if as_json:
        emit(api.check_to_dict(result))
    else:
        from meshwright.cli import render

        render.check(result)
    raise typer.Exit(0 if result.ok else 1)


@app.command(epilog=EPILOG["models"])
def models(
    query: Annotated[
        Optional[str], typer.Argument(help="Part of a name, or a config.json.", autocompletion=complete.models)
    ] = None,
    as_json: Json = False,
) -> None:
    """The catalogue of models, with exact parameter counts."""
    found = api.model_catalogue(query)
    if as_json:
        emit({"schema": api.SCHEMA, "models": [api.model_to_dict(m) for m in found]})
    else:
        from meshwright.cli import render

        render.models(found)
    raise typer.Exit(0 if found else 1)


@app.command(epilog=EPILOG["gpus"])
def gpus(as_json: Json = False) -> None:
    """The catalogue of GPUs, with sources."""
    found = api.gpu_catalogue()
    if as_json:
        emit({"schema": api.SCHEMA, "gpus": [api.gpu_to_dict(g) for g in found]})
    else:
        from meshwright.cli import render

        render.gpus(found)


@app.command(epilog=EPILOG["rules"])
def rules(
    query: Annotated[Optional[str], typer.Argument(help="Part of a rule's id or subject.")] = None,
    pitfalls: Annotated[bool, typer.Option("--pitfalls", help="Only the well-known pitfalls.")] = False,
    as_json: Json = False,
) -> None:
    """The rules: symptom, cause and fix of everything that is checked."""
    found = api.rule_catalogue(query, pitfalls=pitfalls)
    if as_json:
        emit({"schema": api.SCHEMA, "rules": [api.rule_to_dict(r) for r in found]})
    else:
        from meshwright.cli import render

        render.rules(found)
    raise typer.Exit(0 if found else 1)
