"""How files of Megatron-Bridge are detected, parsed, checked and written: loaded on first use."""

from __future__ import annotations

from meshwright.frameworks.framework import Framework
from meshwright.frameworks.megatron_bridge.format_override import format_override
from meshwright.frameworks.megatron_bridge.keys import HUGGING_FACE_NAMES, is_extra_key
from meshwright.frameworks.megatron_bridge.parse import detect, parse
from meshwright.frameworks.megatron_bridge.rules import RULES
from meshwright.frameworks.megatron_bridge.runner import complete
from meshwright.frameworks.megatron_bridge.settings import KEYS

FRAMEWORK = Framework(
    name="megatron-bridge",
    title=KEYS.title,
    version="commit 067f987, 2026-08-22",
    engine="megatron",
    inputs=(
        "the command `torchrun … scripts/training/run_recipe.py --recipe NAME KEY=VALUE …`, and train.sh",
        "a Python file that sets fields of a recipe config and trains, or a script that starts it",
        "run_config.yaml saved with a checkpoint",
    ),
    detect=detect,
    parse=parse,
    format_setting=format_override,
    rules=RULES,
    complete=complete,
    derived_fields=("layout.pp_schedule", "layout.dp_shard"),
    other_names=HUGGING_FACE_NAMES,
    is_extra_key=is_extra_key,
)
