"""Generate one page per framework from its key map and its rules, and their index."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import UNSET
from tables import table

from meshwright import frameworks
from meshwright.frameworks.rule_catalog import rules_of
from meshwright.frameworks.trainer_args import ARGUMENT_FIELDS
from meshwright.recipes.key_maps import ConfigKey, composite_keys, config_keys
from meshwright.recipes.types import recipe_fields

ENV = os.environ | {"COLUMNS": "120", "PYTHONPATH": str(Path(frameworks.__file__).parents[2])}


class Broken(NamedTuple):
    """An example config with mistakes."""

    file: str
    text: str
    options: tuple[str, ...] = ()


EXAMPLES: dict[str, Broken] = {
    "megatron-lm": Broken(
        "train_llama.sh",
        """#!/bin/bash
MODEL_ARGS=(
  --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
  --group-query-attention --num-query-groups 8 --swiglu --normalization RMSNorm --disable-bias-linear
  --position-embedding-type rope --untie-embeddings-and-output-weights
  --seq-length 8192 --max-position-embeddings 8192 --vocab-size 128256
)
torchrun --nnodes 1 --nproc-per-node 8 pretrain_gpt.py "${MODEL_ARGS[@]}" \\
  --tensor-model-parallel-size 3 --micro-batch-size 1 --global-batch-size 64 \\
  --train-iters 1000 --lr 3e-4 --min-lr 3e-5 --bf16 --use-distributed-optimizer \\
  --use-flash-attn --fp8-hybrid --mock-data --tokenizer-type NullTokenizer --attention-dropout 0 --hidden-dropout 0
""",
        ("--gpus", "8xH100"),
    ),
    "megatron-bridge": Broken(
        "run.sh",
        """torchrun --nproc-per-node=8 scripts/training/run_recipe.py --recipe llama3_8b_pretrain_config \\
  --dataset llm-pretrain-mock \\
  model.seq_length=32768 training.global_batch_size=64 +model.use_magic=true
""",
    ),
    "automodel": Broken(
        "finetune.yaml",
        """recipe: TrainFinetuneRecipeForNextTokenPrediction
step_scheduler:
  global_batch_size: 64
  local_batch_size: 8
  max_steps: 100
rng:
  seed: 1111
model:
  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained
  pretrained_model_name_or_path: meta-llama/Meta-Llama-3-8B
compile:
  enabled: true
distributed:
  strategy: fsdp2
  tp_size: 2
  pp_size: 2
  pipeline:
    pp_schedule: interleaved_1f1b
dataset:
  _target_: nemo_automodel.components.datasets.llm.squad.make_squad_dataset
optimizer:
  _target_: torch.optim.AdamW
  lr: 1e-5
""",
        ("--gpus", "8xH100"),
    ),
    "torchtitan": Broken(
        "llama3_8b.toml",
        """[model]
name = "llama3"
flavor = "8B"

[training]
local_batch_size = 3
global_batch_size = 64
seq_len = 8192
steps = 1000

[parallelism]
tensor_parallel_degree = 3
pipeline_parallel_degree = 2
pipeline_parallel_schedule = "zero_bubble"
enable_async_tensor_parallel = true
""",
        ("--gpus", "12xH100"),
    ),
    "deepspeed": Broken(
        "ds_config.json",
        """{
  "train_batch_size": 60,
  "train_micro_batch_size_per_gpu": 4,
  "gradient_accumulation_steps": 2,
  "bf16": {"enabled": true},
  "fp16": {"enabled": true},
  "zero_optimization": {
    "stage": 2,
    "offload_param": {"device": "cpu"}
  }
}
""",
        ("--gpus", "8xH100", "--model", "llama3-8b"),
    ),
    "accelerate": Broken(
        "fsdp.yaml",
        """compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
num_machines: 2
num_processes: 15
machine_rank: 0
fsdp_config:
  fsdp_version: 2
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_auto_wrap_policy: SIZE_BASED_WRAP
""",
        ("--model", "llama3-8b"),
    ),
    "kempnerforge": Broken(
        "7b.toml",
        """[model]
dim = 4096
n_layers = 32
n_heads = 32
n_kv_heads = 8
vocab_size = 128256
ffn_hidden_dim = 14336
max_seq_len = 4096

[train]
batch_size = 4
seq_len = 8192
grad_accum = 8

[distributed]
tp = 16
""",
        ("--gpus", "2x8xH100"),
    ),
}


RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
AGREEMENT = (
    "both accept",
    "both reject",
    "found here only",
    "only we reject",
    "only they reject",
    "not a config error",
)
WITH_ARGUMENTS = ("accelerate", "deepspeed")  # whose export has the arguments of the program, too


def index() -> str:
    """Index of the frameworks, with the comparison against their own parsers."""
    known = [frameworks.framework(name) for name in frameworks.NAMES]
    supported = [(f"[{d.title}](frameworks/{d.name}.md)", d.version, "; ".join(d.inputs)) for d in known]
    compared = [_compared(json.loads(path.read_text())) for path in sorted(RESULTS.glob("frameworks_*.json"))]
    audit = json.loads((RESULTS / "false_alarms_2026-11-15.json").read_text())
    alarms = [(name, *(row[key] for key in AUDIT_COLUMNS)) for name, row in audit["table"].items()]
    parts = [
        "# Import and export\n\n" + INTRO,
        table(("framework", "version", "reads"), supported),
        COMPARED,
        table(("release", "configs", *AGREEMENT), compared),
        ALARMS.format(date=audit["date"]),
        table(
            ("framework", "files", "with findings", "true", "debatable", "false, at first", "false, after fixes"),
            alarms,
        ),
    ]
    return "\n".join(parts)


AUDIT_COLUMNS = ("files", "files_with_findings", "true", "debatable", "false_before", "false_after")
INTRO = """```sh
meshwright check train_llama.sh --gpus 8x8xH100        # a launch script, YAML, TOML, JSON or Python file
meshwright check ds_config.json --model llama3-8b --gpus 8xH100
meshwright export llama3_70b_pretrain_config --to megatron-lm --gpus 8x8xH100
```

Scripts are never executed: variables, arrays, conditions and included files are followed, and a value that only
execution could determine is reported as unresolved, not guessed. The file is mapped to a recipe and checked with the
framework's own constraints, our rules and the estimate. Findings name file, line and the fix in the framework's own
keys: settings that prevent the start or exceed memory, and settings that are unused, ignored or overwritten.
`export` writes a recipe as the framework's config, parses the result again, and lists every setting that would be lost.
"""
COMPARED = """## Compared with the frameworks' own parsers

The configs of our tests, exports of every fifth shipped recipe and randomly drawn configs were given to each
framework's own parser and checks, on a machine without GPUs (`python -m benchmarks.against NAME --site FOLDER`, rows in
`benchmarks/results/frameworks_*.json`). *Found here only* counts failures that occur after the part that was executed:
memory, heads, schedules, data. A warning that another version may accept a setting counts as a rejection: the version
is known here. Differences were fixed, so the zeros are not an independent rate: of 1,600 newly drawn configs, 5
differed and were fixed too. Some wheels are older or newer than the commits that we support.
"""
ALARMS = """## False positives

{date}: published configs, reviewed by someone who had not written this code; each finding was classified by hand.
*Debatable* findings are mostly keys of the fork that a file was written for. Copies omit comments; caveats are in
`benchmarks/results/false_alarms_2026-11-15.json`. The last false positive was fixed afterwards.
"""


def _compared(result: dict[str, Any]) -> tuple[object, ...]:
    counts = [sum(part.get(kind, 0) for part in result["counts"].values()) for kind in AGREEMENT]
    return (result["framework"], sum(counts), *counts)


def page(name: str) -> str:
    """The page of one framework: what is read, checked and written."""
    framework = frameworks.framework(name)
    key_map = config_keys(framework.key_map)
    mapped = [row for row in key_map.values() if row.status == "read" and (row.field or row.key in _composite(name))]
    unmapped = [row for row in key_map.values() if row.status != "read"]
    covered = {row.field for row in mapped} | {
        field for composite in composite_keys(framework.key_map) for field in composite.fields
    }
    arguments = [key for key in ARGUMENT_FIELDS if name in WITH_ARGUMENTS and key not in covered]
    covered |= {*arguments}
    without_key = [key for key in recipe_fields() if key not in covered and not key.startswith("architecture.")]
    parts = [
        f"# {framework.title}\n\nVersion: {framework.title} {framework.version}. Files are parsed, never executed.\n",
        f"**Read**: {'; '.join(framework.inputs)}.\n",
        f"**Commands**: `meshwright check FILE [--gpus 8xH100]`; `meshwright export RECIPE --to {name}`",
        _example(name),
        f"## Key map\n\n{len(mapped)} keys are read and written through this table.\n\n" + _key_table(mapped, name),
    ]
    if unmapped:
        parts.append("## Removed, ignored and overwritten keys\n\n" + _removed_table(unmapped))
    if framework.rules:
        rows = [(f"`{r.id}`", r.severity, r.symptom, r.cause) for r in rules_of(name)]
        parts.append(
            "## Rules of this framework, in addition to [our own](../rules.md)\n\n"
            + table(("rule", "severity", "symptom", "cause"), rows)
        )
    if arguments:
        parts.append(
            "## Recipe fields in the arguments of the program\n\n`meshwright export` writes these to `…_args.py`, as "
            "arguments of the Trainer, TRL and PEFT: " + ", ".join(f"`{key}`" for key in arguments) + ".\n"
        )
    parts.append(
        "## Recipe fields without a key\n\n`meshwright export` lists these when a recipe sets them: "
        + ", ".join(f"`{key}`" for key in without_key)
        + ".\n"
    )
    return "\n".join(parts)


def _composite(name: str) -> set[str]:
    return {key for composite in composite_keys(frameworks.framework(name).key_map) for key in composite.keys}


def _key_table(mapped: Sequence[ConfigKey], name: str) -> str:
    fields_of = {
        key: composite.fields
        for composite in composite_keys(frameworks.framework(name).key_map)
        for key in composite.keys
    }
    rows = []
    for row in mapped:
        fields = ", ".join(f"`{key}`" for key in (fields_of.get(row.key) or (row.field,)))
        default = "" if row.default is UNSET else f"`{row.default}`"
        values = ", ".join(f"{value or '(empty)'} → {mapped_value}" for value, mapped_value in row.values.items())
        since = " ".join(f"{label} {text}" for label, text in (("since", row.since), ("until", row.until)) if text)
        rows.append((f"`{row.key}`", fields, default, values, " ".join(part for part in (since, row.note) if part)))
    return table(("key", "recipe field", "default", "values", "note"), rows)


def _removed_table(unmapped: Sequence[ConfigKey]) -> str:
    rows = [(f"`{w.key}`", w.status, w.until, f"`{w.replacement}`" if w.replacement else "", w.note) for w in unmapped]
    return table(("key", "status", "until", "replacement", "note"), rows)


def _example(name: str) -> str:
    """The output of `check` for the broken example."""
    if name not in EXAMPLES:
        return ""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, EXAMPLES[name].file).write_text(EXAMPLES[name].text)
        command = [sys.executable, "-m", "meshwright", "check", EXAMPLES[name].file, *EXAMPLES[name].options]
        answer = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=ENV)
    shown_command = " ".join(("$ meshwright", *command[3:]))
    output = answer.stdout.rstrip() or answer.stderr.rstrip()
    shown = f"`{EXAMPLES[name].file}`:\n\n```\n{EXAMPLES[name].text}```\n\n```\n{shown_command}\n{output}\n```\n"
    return f"\n## Example\n\n{shown}"
