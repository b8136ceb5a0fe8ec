"""Launch commands for a plan: our own engine, Megatron-Bridge, or the export to another framework."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from meshwright import costs, frameworks, rules
from meshwright.clusters import Cluster
from meshwright.errors import InputError
from meshwright.frameworks import Framework, Program
from meshwright.planner import Plan, case_of, moved_to, with_listed_stages
from meshwright.recipes.case import Case
from meshwright.recipes.engine_models import lacking
from meshwright.recipes.format_override import format_override
from meshwright.recipes.overrides import with_minimum
from meshwright.recipes.types import RANDOM_WEIGHTS, Recipe, recipe_fields

CONFIGS = {
    "megatron": "megatron-lm",
    "torchtitan": "torchtitan",
    "automodel": "automodel",
    "kempnerforge": "kempnerforge",
    "deepspeed": "deepspeed",
}
"""Engine -> the framework whose config drives it."""


STRATEGY = "layout.strategy="


NO_LENGTH = "the file does not say how long it trains; add train.epochs=N or train.steps=N"


SLOWER = 1.2  # times the plan's step; less is within the error of the estimates


EXPORTED = "written by meshwright export"


def commands_of(plan: Plan, refused: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return launch commands by framework, except the refused ones; none for a plan that cannot run."""
    if not plan.ok:
        return {}
    refused = left_out(plan) if refused is None else refused
    plan = plan.repaired or plan
    commands = {}
    framework = CONFIGS.get(plan.question.engine)
    if framework is not None and framework not in refused:  # the requested engine comes first
        commands[framework] = export_command(plan, framework)
    if "meshwright" not in refused:
        commands["meshwright"] = meshwright_command(plan)
    if "megatron-bridge" not in refused:
        from meshwright.frameworks.megatron_bridge import plans  # lazy: it loads a table that few commands need

        if plans.own_row(plan) is not None:
            commands["megatron-bridge"] = command_of(plans.program(plan), plan.question.cluster)
        else:
            commands["megatron-bridge"] = export_command(plan, "megatron-bridge", plans.export_changes(plan))
    return commands


def left_out(plan: Plan) -> dict[str, str]:
    """Return the frameworks without a command for this plan, and why."""
    from meshwright.frameworks.megatron_bridge import plans

    if not plan.ok:
        return {}
    plan = plan.repaired or plan
    framework = CONFIGS.get(plan.question.engine)
    if plan.question.file_error:
        return dict.fromkeys(filter(None, (framework, "meshwright", "megatron-bridge")), plan.question.file_error)
    bridge = plans.unsupported_reason(plan)
    if bridge is None and not plan.has_length and plans.own_row(plan) is None:
        bridge = NO_LENGTH
    found = {"meshwright": _our_reason(plan), "megatron-bridge": bridge}
    if framework is not None:
        found[framework] = _export_reason(plan, framework)
    return {name: reason for name, reason in found.items() if reason is not None}


def unavailable_engine(plan: Plan, refused: Mapping[str, str]) -> tuple[str, ...]:
    """Return a note if the framework of the plan's own engine has no command for it, which its figures do not show."""
    framework = CONFIGS.get(plan.question.engine, "")
    reason = refused.get(framework)
    if reason is None or reason in (NO_LENGTH, plan.question.file_error):
        return ()
    return (f"the plan is for {plan.question.engine}, but there is no command for it: {reason}",)


def _our_reason(plan: Plan) -> str | None:
    """Return why our engine cannot run a plan, because of its model or because it was made for another engine."""
    if lacks := lacking(plan.case.model):
        return f"it does not train {plan.case.model.model_type} models: it lacks {lacks}"
    if plan.question.engine == "meshwright":
        return None
    case = _our_case(plan)
    broken = [rule for rule in rules.applicable(case, ("error",)) if bool(rule.broken(case))]
    return rules.message(broken[0], case) + "; ask with --engine meshwright" if broken else None


def _our_case(plan: Plan) -> Case:
    return case_of(_for_our_engine(plan), plan.case.model, plan.case.cluster)


def other_speeds(plan: Plan, commands: Collection[str]) -> tuple[str, ...]:
    """Return notes on commands for other engines that take longer for this layout than the plan's engine."""
    from meshwright.frameworks.megatron_bridge import plans

    plan = plan.repaired or plan
    planned, engine, found = float(plan.estimate.step_s), plan.question.engine, []
    if engine != "meshwright" and "meshwright" in commands:
        found.append(("meshwright", "meshwright", _our_case(plan)))
    if engine == "meshwright" and "megatron-bridge" in commands:
        found.append(("megatron-bridge", "megatron", plans.case_there(plan)))
    steps = [(name, other, float(costs.estimate(case).step_s)) for name, other, case in found]
    return tuple(
        f"speed and budget are those of {engine}: the {name} command takes an estimated {there:.2f} s per step "
        f"in place of {planned:.2f} s; --engine {other} plans for it"
        for name, other, there in steps
        if there > SLOWER * planned
    )


def _for_our_engine(plan: Plan) -> Recipe:
    """Return a plan's recipe as train runs it: one that was made for another engine has our strategy."""
    if plan.question.recipe_engine == "meshwright":
        return plan.recipe
    moved, source = moved_to(plan.recipe, "meshwright"), plan.question.recipe_engine
    return with_listed_stages(moved, plan.case.model, source, "meshwright")


def _export_reason(plan: Plan, framework: str) -> str | None:
    """Return why a plan cannot be written for a framework, or None."""
    if not plan.has_length:
        return NO_LENGTH
    to = frameworks.framework(framework)
    try:
        frameworks.export(to, plan.recipe, plan.case.model, plan.question.cluster)
    except InputError as error:
        return error.reason
    return lost_number(plan, to)


def lost_number(plan: Plan, to: Framework) -> str | None:
    """Return why export refuses a plan: a number of the model that the user sets has no key in the framework."""
    fields = recipe_fields()
    changed = {fields[one.field].flat for one in plan.changes if one.field in fields}
    users = {*changed, *plan.question.stated}
    lost = frameworks.lost_numbers(to, plan.recipe)
    return next((f"{n.field}={n.value}: {n.reason}" for n in lost if fields[n.field].flat in users), None)


def meshwright_command(plan: Plan) -> str:
    """Return the command of our own engine: direct on one node, under torchrun on several."""
    typed = plan.question.recipe_words
    words = [one for one in typed if not one.startswith((STRATEGY, "data.dataset="))]
    arguments = ["train", *(words or (plan.base.name,))]
    if plan.recipe.model != plan.base.model:
        arguments += ["--model", plan.recipe.model]
    blended = bool(plan.recipe.data.blend)  # --dataset would replace it
    arguments += [] if blended else ["--dataset", _dataset(plan.recipe)]
    of_dataset = ("data.dataset",) if blended else ("data.dataset", "data.blend", "data.anneal_blend")
    changes = with_minimum({c.field: c.new for c in plan.changes if c.field not in of_dataset}, plan.recipe)
    strategy = _for_our_engine(plan).layout.strategy
    if any(one.startswith(STRATEGY) for one in typed) or strategy != _strategy_of_file(plan, strategy):
        changes["layout.strategy"] = strategy
    if _lacks_validation(plan.recipe):  # train refuses to start: a finding says so, with this as its fix
        from meshwright.frameworks.trainer_program import VALIDATION_PART

        changes["data.validation_part"] = VALIDATION_PART
    overrides = [format_override(field, value) for field, value in changes.items()]
    cluster = plan.question.cluster
    if cluster.nodes == 1:
        return shlex.join(["meshwright", *arguments, "--nproc", str(cluster.world), *overrides])
    return command_of(Program(("-m", "meshwright", *arguments, *overrides)), cluster)


def _lacks_validation(recipe: Recipe) -> bool:
    """Return whether a run validates on the user's own data, of which none are held out."""
    data = recipe.data
    names = data.blend or (data.dataset,)
    own = any(Path(name).suffix or name.startswith(("/", ".", "~")) for name in names)
    return own and bool(recipe.train.eval_every) and not data.validation and not data.validation_part


def _strategy_of_file(plan: Plan, strategy: str) -> str:
    """Return the strategy that train gives the file or recipe of a plan without a typed one."""
    if plan.question.recipe_engine == "meshwright":
        return strategy
    return str(moved_to(plan.base, "meshwright").layout.strategy)


def _dataset(recipe: Recipe) -> str:
    """Return the dataset of a run's command; random data would spoil the weights that pretraining continues from."""
    continues = recipe.goal == "pretrain" and recipe.checkpoint.pretrained not in ("", RANDOM_WEIGHTS)
    return "DATA" if continues and recipe.data.dataset == "mock" else recipe.data.dataset


def export_command(plan: Plan, to: str, changes: Sequence[str] | None = None) -> str:
    """Return the command that exports the plan to another framework; `changes` if not all of the plan's."""
    gpus = plan.question.cluster_ref or str(plan.question.cluster)
    model = [] if plan.recipe.model == plan.base.model else ["--model", plan.recipe.model]
    differing = with_minimum({c.field: c.new for c in plan.changes}, plan.recipe)
    overrides = [format_override(key, value) for key, value in differing.items()] if changes is None else changes
    arguments = [*(plan.question.recipe_words or (plan.base.name,)), *model, "--to", to, "--gpus", gpus, "--out", to]
    return shlex.join(["meshwright", "export", *arguments, *overrides])


def command_of(program: Program, cluster: Cluster) -> str:
    """Return the torchrun command that starts a program on every GPU of a cluster."""
    from meshwright.frameworks.common import torchrun  # 5 ms that a plan of one node saves
    from meshwright.frameworks.initial_weights import shell_word

    words = (*torchrun(cluster), *program.argv)
    return " ".join(shell_word(word, program.variables, program.expanded) for word in words)


def start_script(program: Program, cluster: Cluster, name: str, setup: Sequence[str] = (), start: str = "") -> str:
    """Return the script that starts the user's program with an exported config, after the setup of its own script.

    Without `start`, a folder, it starts in that of the script.
    """
    folder = shlex.quote(start) if start else '"$(dirname "$0")"'
    head = ["#!/bin/bash", f"# {name} on {cluster}, {EXPORTED}"]
    head += [*([*setup, ""] if setup else []), f"cd {folder} || exit 2", ""]
    needed = [f': "${{{variable}:?{what}}}"' for variable, what in program.variables.items()]
    exports = [f"export {key}={shlex.quote(value)}" for key, value in program.env.items()]
    return "\n".join((*head, *needed, *exports, command_of(program, cluster), ""))
