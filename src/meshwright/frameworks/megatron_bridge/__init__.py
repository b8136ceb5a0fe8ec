"""Megatron-Bridge: run commands, Python overrides and saved run configs."""

from __future__ import annotations

from meshwright.frameworks.framework import Framework
from meshwright.frameworks.megatron_bridge.format_override import spell
from meshwright.frameworks.megatron_bridge.keys import known
from meshwright.frameworks.megatron_bridge.parse import parse, recognises
from meshwright.frameworks.megatron_bridge.rules import RULES
from meshwright.frameworks.megatron_bridge.runner import complete

FRAMEWORK = Framework(
    name="megatron-bridge",
    title="Megatron-Bridge",
    version="commit 067f987, 2026-08-22",
    engine="megatron",
    inputs=(
        "the command `torchrun … scripts/training/run_recipe.py --recipe NAME KEY=VALUE …`, and train.sh",
        "a Python file that assigns fields of a recipe's config and trains",
        "run_config.yaml as saved with a checkpoint",
    ),
    detect=recognises,
    parse=parse,
    format_setting=spell,
    rules=RULES,
    complete=complete,
    derived_fields=("layout.pp_schedule", "layout.dp_shard"),
    is_extra_key=known,
)
