"""The commands that answer a question about a training: recommend, plan, size, estimate, check."""

from __future__ import annotations

from typing import Any

import click

from meshwright import api
from meshwright.cli import complete
from meshwright.cli.options import (
    as_json,
    calibration_option,
    emit,
    end,
    engine_option,
    examples,
    framework_option,
    goal_option,
    gpus_option,
    options,
    overrides,
    plot_option,
    required_gpus,
    seq_option,
)
from meshwright.cli.prompt import ask_missing


@click.command(
    epilog=examples(
        "meshwright recommend llama3-8b --gpus 8xH100 --goal sft --explain",
        "meshwright recommend ./config.json --gpus auto --goal peft",
        "meshwright recommend qwen3-30b-a3b --gpus 4x8xH100 --goal pretrain --seq 32k layout.ep=8",
        "meshwright recommend llama3-70b --gpus 64xGB200 --goal pretrain --benchmark",
        "meshwright recommend llama3-70b --gpus 64xH100 --goal pretrain --dry-run",
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
    click.option(
        "--dry-run", "prove", is_flag=True, help="Then execute the layout at full size without GPUs (see dryrun)."
    ),
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
    prove: bool = False,
    as_json: bool = False,
) -> None:
    """Which recipe for my MODEL on my GPUs, adjusted how, and what will bite me?

    MODEL is a name, a Hugging Face id, or the path of a config.json. Overrides are kept; the rest is sized around them.
    """
    if prove:
        api.refuse_other_engines(engine)
    model, gpus, goal = ask_missing(model, gpus, goal)
    plan = api.recommend(
        model, gpus, goal, seq=seq, engine=engine, benchmark=benchmark, calibration=calibration, overrides=overrides
    )
    if save:
        api.save_recipe(plan, save)
    answer = api.plan_to_dict(plan, explain=explain) if as_json else None
    if answer is None:
        from meshwright.cli import render

        render.plan(plan, explain)
    proven = _proof(plan, answer) if prove else True
    if answer is not None:
        emit(answer)
    end(plan.ok and proven)


def _proof(plan: Any, answer: dict[str, Any] | None) -> bool:
    """Executes a plan's layout: shows what came out or adds it to the answer; whether it fits."""
    from meshwright.cli import dryrun, dryrun_report

    found = None
    if plan.exists:
        with dryrun.waiting() as progress:
            found = api.prove_plan(plan, progress=progress)
    told = None if found is None else api.dryrun_to_dict(found, brief=True)
    if answer is not None:
        answer["proof"] = told
    else:
        dryrun_report.section(told)
    return found is not None and found.fits


@click.command(
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


@click.command(
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


@click.command(
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
    seq_option,
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
    seq: str | None,
    engine: str,
    calibration: str | None,
    plot: str | None,
    as_json: bool,
) -> None:
    """Memory and step time by part of exactly this layout: the recipe's own with overrides, nothing searched."""
    found = api.estimate(
        target, gpus=gpus, goal=goal, seq=seq, engine=engine, calibration=calibration, overrides=overrides
    )
    if plot:
        from meshwright.cli import plots

        plots.estimate(api.estimate_to_dict(found), plot)
    if as_json:
        emit(api.estimate_to_dict(found))
    else:
        from meshwright.cli import render

        render.estimate(found)
    end(found.ok)


@click.command(
    epilog=examples(
        "meshwright check llama3_8b_pretrain_config --gpus 16xA100-80",
        "meshwright check my_recipe.toml",
        "meshwright check train_llama.sh --gpus 8x8xH100",
        "meshwright check automodel.yaml --json",
        "meshwright check ds_config.json --model llama3-8b --gpus 8xH100",
    )
)
@options(
    click.argument("target", metavar="RECIPE|FILE", shell_complete=complete.recipes),
    overrides,
    gpus_option,
    click.option("--engine", metavar="ENGINE", help="What will run a recipe of ours.", shell_complete=complete.engines),
    framework_option,
    click.option(
        "--model", metavar="MODEL", help="What a file trains that does not say it.", shell_complete=complete.models
    ),
    click.option("--advice", is_flag=True, help="Of another framework's file, also say what could be better."),
    as_json,
)
def check(
    target: str,
    overrides: tuple[str, ...],
    gpus: str | None,
    engine: str | None,
    framework: str | None,
    model: str | None,
    advice: bool,
    as_json: bool,
) -> None:
    """What is wrong with a recipe, or with a config or launch script of another framework, before it queues.

    A file of Megatron-LM, Megatron-Bridge, AutoModel, torchtitan, KempnerForge, DeepSpeed or Accelerate is read as it
    is; nothing in it is run. Findings name the line and the fix in that framework's spelling.
    """
    result = api.check(
        target, gpus=gpus, engine=engine, framework=framework, model=model, advice=advice, overrides=overrides
    )
    if as_json:
        emit(api.check_to_dict(result))
    else:
        from meshwright.cli import render

        render.check(result)
    end(result.ok)


@click.command(
    epilog=examples(
        "meshwright export llama3_8b_pretrain_config --to torchtitan --gpus 8xH100",
        "meshwright export my_recipe.toml --to automodel --out configs",
        "meshwright export llama3_70b_pretrain_config --to megatron-lm --gpus 8x8xH100 layout.tp=8",
    )
)
@options(
    click.argument("target", metavar="RECIPE|FILE", shell_complete=complete.recipes),
    overrides,
    click.option("--to", "to", required=True, metavar="FRAMEWORK", help="One of " + ", ".join(api.FRAMEWORKS) + "."),
    gpus_option,
    click.option("--out", metavar="FOLDER", help="Write the files there instead of showing them."),
    as_json,
)
def export(target: str, overrides: tuple[str, ...], to: str, gpus: str | None, out: str | None, as_json: bool) -> None:
    """A recipe as config and command of another framework; what that one cannot say is listed, not dropped."""
    written, judged = api.export(target, to, gpus=gpus, overrides=overrides)
    if out:
        api.save_files(written.files, out)
    if as_json:
        emit(api.export_to_dict(written, judged))
    else:
        from meshwright.cli import render

        render.export(written, judged)
    end(judged.ok)
