"""How files of DeepSpeed are detected, parsed, checked and written: loaded on first use."""

from __future__ import annotations

from meshwright.frameworks.accelerate.dataset_files import readable
from meshwright.frameworks.deepspeed.format_override import format_setting
from meshwright.frameworks.deepspeed.keys import closed, known
from meshwright.frameworks.deepspeed.parse import complete, detect, parse
from meshwright.frameworks.deepspeed.rules import RULES
from meshwright.frameworks.framework import Framework

FRAMEWORK = Framework(
    name="deepspeed",
    title="DeepSpeed",
    version="0.19.8",
    engine="deepspeed",
    inputs=(
        "JSON files (ds_config.json)",
        "Python files with `TrainingArguments(deepspeed=FILE.json, …)`, such as the `…_args.py` of an export",
        "the commands `deepspeed … train.py --deepspeed FILE.json` and `--deepspeed_config FILE.json`",
    ),
    detect=detect,
    parse=parse,
    format_setting=format_setting,
    rules=RULES,
    complete=complete,
    rejects_unknown=closed,
    is_extra_key=known,
    readable_data=readable,
)
