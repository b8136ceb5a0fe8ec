"""The command that starts a plan: on our own engine, on Megatron-Bridge, or by way of another framework's config."""

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
"""The framework in which an engine is told what to do."""


def commands_of(plan: Plan, refused: Mapping[str, str] | None = None) -> dict[str, str]:
    """Launch commands by framework, but for those refused (as left_out says); none for a plan that cannot run."""
    if not plan.ok:
        return {}
    written = {"meshwright": meshwright_command(plan)}
    if "megatron-bridge" not in (left_out(plan) if refused is None else refused):
        from meshwright.frameworks.megatron_bridge import plans  # a table of its own: not for every command

        written["megatron-bridge"] = command_of(plans.program(plan), plan.question.cluster)
    theirs = CONFIGS.get(plan.question.engine)
    if theirs is not None and plan.recipe.model == plan.base.model:
        written[theirs] = export_command(plan, theirs)
    return written


def left_out(plan: Plan) -> dict[str, str]:
    """The frameworks that have no command for this plan, and why."""
    from meshwright.frameworks.megatron_bridge import plans

    reason = plans.why_not(plan) if plan.ok else None
    return {} if reason is None else {"megatron-bridge": reason}


def meshwright_command(plan: Plan) -> str:
    """How our own engine starts the plan: on one node by itself, on several under torchrun."""
    words = ["train", plan.base.name]
    if plan.recipe.model != plan.base.model:
        words += ["--model", plan.recipe.model]
    words += ["--dataset", plan.recipe.data.dataset]
    overrides = [format_override(c.field, c.new) for c in plan.changes if c.field != "data.dataset"]
    cluster = plan.question.cluster
    if cluster.nodes == 1:
        return shlex.join(["meshwright", *words, "--nproc", str(cluster.world), *overrides])
    return command_of(Program(("-m", "meshwright", *words, *overrides)), cluster)


def export_command(plan: Plan, to: str) -> str:
    """How the plan becomes a config of another framework, and the command that starts it."""
    where = plan.question.cluster_ref or str(plan.question.cluster)
    overrides = [format_override(c.field, c.new) for c in plan.changes]
    return shlex.join(["meshwright", "export", plan.base.name, "--to", to, "--gpus", where, "--out", to, *overrides])


def command_of(program: Program, cluster: Cluster) -> str:
    """How torchrun starts a program on every GPU of a cluster."""
    return shlex.join([*torchrun(cluster), *program.argv])
