"""How files of torchtitan are detected, parsed, checked and written: loaded on first use."""

from __future__ import annotations

from meshwright.frameworks.common import format_toml
from meshwright.frameworks.framework import Framework
from meshwright.frameworks.torchtitan.commands import formatter_for
from meshwright.frameworks.torchtitan.derived_fields import DERIVED_FIELDS, complete
from meshwright.frameworks.torchtitan.parse import detect, parse
from meshwright.frameworks.torchtitan.rules import RULES

FRAMEWORK = Framework(
    name="torchtitan",
    title="torchtitan",
    version="0.2.2 (TOML); 0.3.0 and main of 2026-08-21 (command)",
    engine="torchtitan",
    inputs=(
        "TOML files of the 0.2 line (0.2.0 to 0.2.2)",
        "the command `torchrun … -m torchtitan.train --job.config_file FILE.toml --section.key value` of the 0.2 line",
        "the command `torchrun … -m torchtitan.train --module llama3 --config llama3_8b --section.key value` (0.3.0+)",
        "`MODULE=llama3 CONFIG=llama3_8b NGPU=8 ./run_train.sh --section.key value`",
    ),
    detect=detect,
    parse=parse,
    format_setting=format_toml,
    formatter_for=formatter_for,
    rules=RULES,
    complete=complete,
    derived_fields=DERIVED_FIELDS,
    other_names={"lr_scheduler.min_lr_ratio": "lr_scheduler.min_lr_factor"},
    batch_follows=("layout.micro_batch_size", "layout.tp", "layout.pp", "layout.cp"),
)
