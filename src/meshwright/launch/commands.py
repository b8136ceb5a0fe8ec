"""The command that starts a plan, for our own engine and for Megatron-Bridge."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from meshwright import rules
from meshwright.clusters import Cluster
from meshwright.dialects import Program
from meshwright.planner import Plan, case_of, on_engine
from meshwright.recipes.foreign import foreign_key, to_foreign
from meshwright.recipes.foreign.together import dispatcher_keys, recompute_keys
from meshwright.recipes.index import family, knows
from meshwright.recipes.spelling import spell

# Megatron-Bridge (commit 067f987, 2026-08-22) has no recipe of these names, or one that raises.
NOT_IN_BRIDGE = {
    *(f"qwen2_{size}_{goal}_config" for size in ("14b", "32b") for goal in ("pretrain", "sft", "peft")),
    *(f"qwen25_3b_{goal}_config" for goal in ("pretrain", "sft", "peft")),
    "qwen3_next_80b_a3b_peft_config",
}
OWN_FAMILIES = ("kempner", "sizes")  # families that never were recipes of Megatron-Bridge
BRIDGE = "megatron_bridge"  # its name in the alias table
BRIDGE_DATASETS = {"mock": "mock", "squad": "squad", "tulu3": "tulu3", "cord-v2": "cord-v2"}
BRIDGE_DERIVES = ("layout.strategy", "layout.pp_schedule", "layout.dp_shard", "kernels.loss")
"""What Megatron-Bridge works out by itself: there is no key to set."""


def commands(plan: Plan, refused: Mapping[str, str] | None = None) -> dict[str, str]:
    """Launch commands by framework, but for those refused (as left_out says); none for a plan that cannot run."""
    if not plan.ok:
        return {}
    written = {"meshwright": meshwright_command(plan)}
    if "megatron-bridge" not in (left_out(plan) if refused is None else refused):
        written["megatron-bridge"] = bridge_command(plan)
    return written


def left_out(plan: Plan) -> dict[str, str]:
    """The frameworks that have no command for this plan, and why."""
    reason = why_not_bridge(plan) if plan.ok else None
    return {} if reason is None else {"megatron-bridge": reason}


def why_not_bridge(plan: Plan) -> str | None:
    """Why Megatron-Bridge cannot run this plan as it is, or None when it can."""
    name = plan.base.name
    if not knows(name) or plan.recipe.model != plan.base.model or name in NOT_IN_BRIDGE or family(name) in OWN_FAMILIES:
        return "it has no recipe for this"
    if plan.question.engine not in ("meshwright", "megatron"):
        return f"the plan was made for the {plan.question.engine} engine"
    unsaid = [c.field for c in plan.changes if c.field not in BRIDGE_DERIVES and not _sayable(c.field)]
    if unsaid or plan.recipe.layout.strategy == "megatron_fsdp":
        return f"it has no single key for {', '.join(unsaid) or 'layout.strategy'}"
    case = case_of(on_engine(plan.recipe, "megatron"), plan.case.model, plan.case.cluster, "megatron")
    broken = [r for r in rules.applicable(case, ("error",)) if bool(r.broken(case))]
    return rules.message(broken[0], case) + " there; ask with --engine megatron" if broken else None


def _sayable(field: str) -> bool:
    special = field.startswith("layout.recompute") or field in ("moe.dispatcher", "layout.vp", "data.dataset")
    return special or foreign_key(field, BRIDGE) is not None


def meshwright_command(plan: Plan) -> str:
    """How our own engine starts the plan: on one node by itself, on several under torchrun."""
    words = ["train", plan.base.name]
    if plan.recipe.model != plan.base.model:
        words += ["--model", plan.recipe.model]
    words += ["--dataset", plan.recipe.data.dataset]
    overrides = [spell(c.field, c.new) for c in plan.changes if c.field != "data.dataset"]
    cluster = plan.question.cluster
    if cluster.nodes == 1:
        return shlex.join(["meshwright", *words, "--nproc", str(cluster.world), *overrides])
    return command_of(Program(("-m", "meshwright", *words, *overrides)), cluster)


def bridge_command(plan: Plan) -> str:
    """How Megatron-Bridge starts the plan, in today's spelling."""
    words = ["scripts/training/run_recipe.py", "--recipe", plan.base.name.lower()]
    if not plan.base.benchmark:  # benchmark recipes bring their own mock data and refuse the flag
        words += ["--dataset", BRIDGE_DATASETS.get(plan.recipe.data.dataset, "local-jsonl")]
    words += _bridge_overrides(plan)
    if plan.recipe.goal != "pretrain":  # no SFT or PEFT recipe starts there without a converted checkpoint
        words.append(f"checkpoint.pretrained_checkpoint={plan.recipe.checkpoint.pretrained or 'CONVERTED_CHECKPOINT'}")
    return command_of(Program(tuple(words)), plan.question.cluster)


def _bridge_overrides(plan: Plan) -> list[str]:
    """The plan's changes in Megatron-Bridge's keys."""
    said: dict[str, object] = {}
    for change in plan.changes:
        if change.field in BRIDGE_DERIVES or change.field == "data.dataset":
            continue
        if change.field.startswith("layout.recompute"):
            keys: dict[str, object] = {**recompute_keys(plan.recipe)} or {"recompute_granularity": None}
            said |= {f"model.{key}": value for key, value in keys.items()}
        elif change.field == "moe.dispatcher":
            said |= {f"model.{key}": value for key, value in dispatcher_keys(change.new).items()}
        elif change.field == "layout.vp":
            said["model.virtual_pipeline_model_parallel_size"] = None if change.new == 1 else change.new
        else:
            key, value = to_foreign(change.field, change.new, BRIDGE)
            # The runner copies dataset.seq_length over model.seq_length, so only the former takes effect.
            said["dataset.seq_length" if change.field == "data.seq_length" else key] = value
    return [spell(key, value) for key, value in said.items()]


def command_of(program: Program, cluster: Cluster) -> str:
    """How torchrun starts a program on every GPU of a cluster."""
    words = ["torchrun", f"--nproc-per-node={cluster.gpus_per_node}"]
    if cluster.nodes > 1:
        words += [f"--nnodes={cluster.nodes}", "--rdzv-backend=c10d", "--rdzv-endpoint=HEAD_NODE:29500"]
    return shlex.join([*words, *program.words])
