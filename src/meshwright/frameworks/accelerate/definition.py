"""How files of Hugging Face Accelerate are detected, parsed, checked and written: loaded on first use."""

from __future__ import annotations

from meshwright.frameworks.accelerate.dataset_files import readable
from meshwright.frameworks.accelerate.keys import closed, format_setting, known
from meshwright.frameworks.accelerate.launch_options import formatter_for
from meshwright.frameworks.accelerate.parse import complete, detect, parse
from meshwright.frameworks.accelerate.rules import RULES
from meshwright.frameworks.framework import Framework

FRAMEWORK = Framework(
    name="accelerate",
    title="Accelerate",
    version="1.15.0",
    engine="fsdp1",
    inputs=(
        "YAML files of `accelerate config`",
        "the `…_args.py` that an export writes beside its YAML file",
        "a Python program that constructs `SFTConfig` or `TrainingArguments` (TRL, the Trainer, Unsloth)",
        "the command `accelerate launch --config_file FILE.yaml … train.py …`",
        "the command `trl sft …`, also with `--accelerate_config` and `--config FILE.yaml`",
    ),
    detect=detect,
    parse=parse,
    format_setting=format_setting,
    formatter_for=formatter_for,
    rules=RULES,
    complete=complete,
    rejects_unknown=closed,
    is_extra_key=known,
    readable_data=readable,
)
