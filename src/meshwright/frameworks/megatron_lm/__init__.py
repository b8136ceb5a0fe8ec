"""Megatron-LM."""

from __future__ import annotations

from meshwright.frameworks.framework import Framework
from meshwright.frameworks.megatron_lm.arguments import REST, spell
from meshwright.frameworks.megatron_lm.parse import complete, parse, recognises
from meshwright.frameworks.megatron_lm.rules import RULES

FRAMEWORK = Framework(
    name="megatron-lm",
    title="Megatron-LM",
    version="Megatron-Core 0.20.0, 2026-08-22",
    engine="megatron",
    inputs=(
        "shell scripts that start pretrain_gpt.py and its like with torchrun, srun or python -m torch.distributed.run",
        "bare lists of arguments (a file that begins with --)",
    ),
    detect=recognises,
    parse=parse,
    format_setting=spell,
    display_key=lambda key: spell(key, True),
    rules=RULES,
    complete=complete,
    derived_fields=("layout.dp_shard", "kernels.te_rng_tracker"),
    is_extra_key=lambda key: key == REST,
)
