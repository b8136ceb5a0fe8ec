"""How files of KempnerForge are detected, parsed, checked and written: loaded on first use."""

from __future__ import annotations

from meshwright.frameworks.common import format_toml
from meshwright.frameworks.framework import Framework
from meshwright.frameworks.kempnerforge.parse import PURE_BF16, complete, detect, parse
from meshwright.frameworks.kempnerforge.rules import RULES

EXTRA_KEYS = (
    "vlm.freeze", "vlm.module_patterns", "vlm.moma_experts_per_modality", "data.datasets", "data.phases",
    "data.anneal_weights", "checkpoint.dyn_ckpt_window",
)  # fmt: skip
"""Key prefixes outside the key map: tables and lists of tables."""


FRAMEWORK = Framework(
    name="kempnerforge",
    title="KempnerForge",
    version="commit 5666d0d, 2026-06-30",
    engine="kempnerforge",
    inputs=("TOML files", "the command `torchrun … scripts/train.py FILE.toml --section.key=value`"),
    detect=detect,
    parse=parse,
    format_setting=format_toml,
    rules=RULES,
    complete=complete,
    derived_fields=("train.global_batch_size", "layout.sp", *PURE_BF16),
    batch_follows=("layout.micro_batch_size", "layout.tp", "layout.pp", "layout.cp", "layout.ep"),
    accumulation_key="train.grad_accum_steps",
    is_extra_key=lambda key: key.startswith(EXTRA_KEYS),
)
