"""The command that starts a plan, for our own engine and for Megatron-Bridge."""

from __future__ import annotations

import shlex
from typing import Any

from meshwright.planner import Plan
from meshwright.recipes import aliases
from meshwright.recipes.index import entry
from meshwright.recipes.overrides import spell

# Megatron-Bridge (commit 067f987, 2026-08-22) has no recipe of these names, or one that raises.
NOT_IN_BRIDGE = {
    *(f"qwen2_{size}_{goal}_config" for size in ("14b", "32b") for goal in ("pretrain", "sft", "peft")),
    *(f"qwen25_3b_{goal}_config" for goal in ("pretrain", "sft", "peft")),
    "qwen3_next_80b_a3b_peft_config",
}
OWN_FAMILIES = ("kempner", "sizes")  # families that never were recipes of Megatron-Bridge
BRIDGE_DATASETS = {"mock": "mock", "squad": "squad", "tulu3": "tulu3"}


def commands(plan: Plan) -> dict[str, str]:
    """Launch commands by framework; a framework that cannot run the plan is left out."""
    written = {"meshwright": meshwright_command(plan), "megatron-bridge": bridge_command(plan)}
    return {name: text for name, text in written.items() if text}


def meshwright_command(plan: Plan) -> str:
    """How our own engine starts the plan: on one node by itself, on several under torchrun."""
    own = [spell(c.field, c.new) for c in plan.changes]
    if plan.recipe.model != plan.base.model:
        own.insert(0, f"model={plan.recipe.model}")
    words = ["train", plan.base.name, "--dataset", plan.recipe.data.dataset, *own]
    cluster = plan.question.cluster
    if cluster.nodes == 1:
        return shlex.join(["meshwright", *words[:2], "--nproc", str(cluster.world), *words[2:]])
    return shlex.join([*_torchrun(plan), "-m", "meshwright", *words])


def bridge_command(plan: Plan) -> str:
    """How Megatron-Bridge starts the plan, in today's spelling; empty when it has no such recipe."""
    name = plan.base.name
    if plan.recipe.model != plan.base.model or name in NOT_IN_BRIDGE or entry(name).family in OWN_FAMILIES:
        return ""
    words = ["scripts/training/run_recipe.py", "--recipe", name.lower()]
    if not plan.base.benchmark:  # benchmark recipes bring their own mock data and refuse the flag
        words += ["--dataset", BRIDGE_DATASETS.get(plan.recipe.data.dataset, "local-jsonl")]
    words += [f"{key}={value}" for key, value in _bridge_overrides(plan)]
    if plan.recipe.goal != "pretrain":  # no SFT or PEFT recipe starts there without a converted checkpoint
        words.append(f"checkpoint.pretrained_checkpoint={plan.recipe.checkpoint.pretrained or 'CONVERTED_CHECKPOINT'}")
    return shlex.join([*_torchrun(plan), *words])


def _bridge_overrides(plan: Plan) -> list[tuple[str, Any]]:
    found = [aliases.to_foreign(c.field, c.new, "megatron-bridge") for c in plan.changes]
    return [pair for pair in found if pair is not None]


def _torchrun(plan: Plan) -> list[str]:
    cluster = plan.question.cluster
    words = ["torchrun", f"--nproc-per-node={cluster.gpus_per_node}"]
    if cluster.nodes > 1:
        words += [f"--nnodes={cluster.nodes}", "--rdzv-backend=c10d", "--rdzv-endpoint=HEAD_NODE:29500"]
    return words
