"""How files of Megatron-LM are detected, parsed, checked and written: loaded on first use."""

from __future__ import annotations

from meshwright.frameworks.accelerate.dataset_files import readable
from meshwright.frameworks.framework import Framework
from meshwright.frameworks.megatron_lm.arguments import MODEL_FLAGS, UNREAD_ARGS, format_flag
from meshwright.frameworks.megatron_lm.computed_flags import computed_differences
from meshwright.frameworks.megatron_lm.parse import complete, detect, parse
from meshwright.frameworks.megatron_lm.rules import RULES

SFT_ROWS = ({"messages"},)  # of the dataset that --sft reads
FRAMEWORK = Framework(
    name="megatron-lm",
    title="Megatron-LM",
    version="Megatron-Core 0.20.0, 2026-08-22",
    engine="megatron",
    inputs=(
        "shell scripts that start pretrain_gpt.py or similar with torchrun, srun or python -m torch.distributed.run",
        "argument lists (a file that starts with --)",
    ),
    detect=detect,
    parse=parse,
    format_setting=format_flag,
    display_key=lambda key: format_flag(key, True),
    rules=RULES,
    complete=complete,
    derived_fields=("layout.dp_shard", "kernels.te_rng_tracker"),
    other_names=MODEL_FLAGS,
    is_extra_key=lambda key: key == UNREAD_ARGS,
    readable_data=lambda recipe: readable(recipe, SFT_ROWS),
    computed_differences=computed_differences,
)
