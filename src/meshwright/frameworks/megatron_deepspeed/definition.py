"""How files of Megatron-DeepSpeed are detected, parsed, checked and written: loaded on first use."""

from __future__ import annotations

from meshwright.frameworks.framework import Framework
from meshwright.frameworks.megatron_deepspeed.flags import TITLE, commits, display, written
from meshwright.frameworks.megatron_deepspeed.parse import complete, detect, parse
from meshwright.frameworks.megatron_deepspeed.rules import RULES

FRAMEWORK = Framework(
    name="megatron-deepspeed",
    title=TITLE,
    version=f"commits {commits()}",
    engine="megatron",
    inputs=(
        "shell scripts that start pretrain_gpt.py or similar with --deepspeed, and the JSON that they name or write",
    ),
    detect=detect,
    parse=parse,
    format_setting=written,
    display_key=display,
    rules=RULES,
    complete=complete,
    derived_fields=("layout.dp_shard", "layout.strategy", "layout.reshard_after_forward"),
    keys_of="megatron-lm",
)
