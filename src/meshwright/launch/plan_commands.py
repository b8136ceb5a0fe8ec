"""Launch commands for a plan: our own engine, Megatron-Bridge, or the export to another framework."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from meshwright.clusters import Cluster
from meshwright.frameworks import Program
from meshwright.frameworks.common import torchrun
from meshwright.planner import Plan
from meshwright.recipes.format_override import format_override

CONFIGS = {
    "megatron": "megatron-lm",
    "torchtitan": "torchtitan",
    "automodel": "automodel",
    "kempnerforge": "kempnerforge",
    "deepspeed": "deepspeed",
}
"""Engine -> the framework whose config drives it."""


def commands_of(plan: Plan, refused: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return launch commands by framework, except the refused ones; none for a plan that cannot run."""
    if not plan.ok:
        return {}
    commands = {"meshwright": meshwright_command(plan)}
    if "megatron-bridge" not in (left_out(plan) if refused is None else refused):
        from meshwright.frameworks.megatron_bridge import plans  # lazy: it loads a table that few commands need

        commands["megatron-bridge"] = command_of(plans.program(plan), plan.question.cluster)
    framework = CONFIGS.get(plan.question.engine)
    if framework is not None and plan.recipe.model == plan.base.model:
        commands[framework] = export_command(plan, framework)
    return commands


def left_out(plan: Plan) -> dict[str, str]:
    """Return the frameworks without a command for this plan, and why."""
    from meshwright.frameworks.megatron_bridge import plans

    reason = plans.unsupported_reason(plan) if plan.ok else None
    return {} if reason is None else {"megatron-bridge": reason}


def meshwright_command(plan: Plan) -> str:
    """Return the command of our own engine: direct on one node, under torchrun on several."""
    arguments = ["train", plan.base.name]
    if plan.recipe.model != plan.base.model:
        arguments += ["--model", plan.recipe.model]
    arguments += ["--dataset", plan.recipe.data.dataset]
    overrides = [format_override(c.field, c.new) for c in plan.changes if c.field != "data.dataset"]
    cluster = plan.question.cluster
    if cluster.nodes == 1:
        return shlex.join(["meshwright", *arguments, "--nproc", str(cluster.world), *overrides])
    return command_of(Program(("-m", "meshwright", *arguments, *overrides)), cluster)


def export_command(plan: Plan, to: str) -> str:
    """Return the command that exports the plan to another framework."""
    gpus = plan.question.cluster_ref or str(plan.question.cluster)
    overrides = [format_override(c.field, c.new) for c in plan.changes]
    return shlex.join(["meshwright", "export", plan.base.name, "--to", to, "--gpus", gpus, "--out", to, *overrides])


def command_of(program: Program, cluster: Cluster) -> str:
    """Return the torchrun command that starts a program on every GPU of a cluster."""
    return shlex.join([*torchrun(cluster), *program.argv])
