"""The commands that show what is known: recipes, models, GPUs, rules, and how well the costs hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from meshwright import api
from meshwright.cli import complete
from meshwright.cli.options import as_json, emit, end, examples, goal_option, options, overrides, plot_option


@click.command(
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


@click.command(
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


def _catalogue(found: list[Any], name: str, to_dict: Callable[[Any], dict[str, Any]], as_json: bool) -> None:
    """Prints a catalogue as JSON or as the table of the same name."""
    if as_json:
        emit({"schema": api.SCHEMA, name: [to_dict(row) for row in found]})
    else:
        from meshwright.cli import render

        getattr(render, name)(found)


@click.command(
    epilog=examples("meshwright models", "meshwright models qwen3", "meshwright models ./config.json --json")
)
@options(click.argument("query", required=False, shell_complete=complete.models), as_json)
def models(query: str | None, as_json: bool) -> None:
    """The catalogue of models with exact parameter counts; QUERY is part of a name, or a config.json."""
    _catalogue(api.model_catalogue(query), "models", api.model_to_dict, as_json)


@click.command(epilog=examples("meshwright gpus", "meshwright gpus --json"))
@as_json
def gpus(as_json: bool) -> None:
    """The catalogue of GPUs, with sources."""
    _catalogue(list(api.gpu_catalogue()), "gpus", api.gpu_to_dict, as_json)


@click.command(
    epilog=examples(
        "meshwright rules", "meshwright rules moe", "meshwright rules automodel", "meshwright rules --pitfalls"
    )
)
@options(
    click.argument("query", required=False),
    click.option("--pitfalls", is_flag=True, help="Only the well-known pitfalls."),
    as_json,
)
def rules(query: str | None, pitfalls: bool, as_json: bool) -> None:
    """Symptom, cause and fix of everything that is checked; QUERY is part of a rule's id, or a framework's name."""
    _catalogue(api.rule_catalogue(query, pitfalls=pitfalls), "rules", api.rule_to_dict, as_json)


@click.command(
    epilog=examples(
        "meshwright explain layout.recompute",
        "meshwright explain tensor_model_parallel_size",
        "meshwright explain heads.attention --json",
    )
)
@options(click.argument("about", metavar="RULE|FIELD|FINDING"), as_json)
def explain(about: str, as_json: bool) -> None:
    """Symptom, cause and fix of one rule; the meaning of one recipe field and what is checked about it.

    Findings of the doctor are explained as well. A field may be spelled as in another framework; a whole line of
    findings is understood too.
    """
    answer = api.explained_to_dict(api.explain(about))
    if as_json:
        emit(answer)
    else:
        from meshwright.cli import render

        render.explained(answer)


@click.command(epilog=examples("meshwright accuracy runs.csv", "meshwright accuracy runs.csv --json"))
@options(click.argument("file"), plot_option, as_json)
def accuracy(file: str, plot: str | None, as_json: bool) -> None:
    """The cost model against a CSV of measurements: error of step time and memory by source and GPU, fit labels."""
    report = api.accuracy(file)
    answer = {"schema": api.SCHEMA, **api.accuracy_to_dict(report)}
    if plot:
        from meshwright.cli import plots

        plots.accuracy(report.points, plot)
    if as_json:
        emit(answer)
    else:
        from meshwright.cli import render

        render.accuracy(answer)


@click.command(
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
    profiles = api.calibrate_runs(runs, one_type=bool(out)) if runs else [api.calibrate_machine()[0]]
    if out:
        api.save_profile(profiles[0], out)
    if as_json:
        emit({"schema": api.SCHEMA, "profiles": [api.profile_to_dict(p) for p in profiles]})
    elif not out:
        click.echo("\n".join(api.profile_text(p) for p in profiles))
