"""A fine-tuning walk on one RTX 4090: what was typed, and what is true of similar files and words."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import meshwright
from meshwright.errors import InputError
from meshwright.frameworks.front_ends import FRONT_ENDS
from meshwright.frameworks.front_ends.describe import FrontEnd
from meshwright.frameworks.other_trainers import FOUR_BITS, IMPLIED, LOSS_KEYS, STRATEGIES, VARIANTS
from meshwright.recipes.key_maps.hugging_face import ARGUMENTS, KEYS

FACTORY = """model_name_or_path: Qwen/Qwen3-4B-Instruct-2507
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
dataset: clauses_qa
cutoff_len: 2048
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
"""
HEADS = {
    "axolotl": "base_model: Qwen/Qwen3-4B\nsequence_len: 2048\nadapter: lora\n",
    "llama-factory": "model_name_or_path: Qwen/Qwen3-4B\nstage: sft\nfinetuning_type: lora\ntemplate: qwen\n",
    "ms-swift": "model: Qwen/Qwen3-4B\ntuner_type: lora\ndataset: a/b\n",
    "trl": "model_name_or_path: Qwen/Qwen3-4B\ndataset_name: a/b\nuse_peft: true\n",
}
"""The start of a file of each front end."""
SAMPLES = {"bool": ("true", "false"), "int": ("0", "7"), "float": ("0.0", "0.5"), "str": ("abc", "steps")}
SPECIAL = {*VARIANTS, *LOSS_KEYS, *STRATEGIES, *FOUR_BITS, *IMPLIED, "warmup_steps", "warmup_ratio", "max_samples"}
ROWS = {row.key: row.field for row in (*KEYS, *ARGUMENTS)}


def refused(path: Path, text: str, gpus: str | None = "1xRTX4090") -> InputError:
    path.write_text(text)
    with pytest.raises(InputError) as error:
        meshwright.import_file(str(path), gpus=gpus)
    return error.value


@pytest.mark.parametrize(("line", "word"), [
    ("packing: false", "data.packing=false"), ("packing: true", "data.packing=true"), ("", "data.packing=false"),
    ("weight_decay: 0.0", "optimizer.weight_decay=0.0"), ("seed: 0", "train.seed=0"), ("train_on_prompt: true",
    "data.train_on=all"), ("save_strategy: 'no'", "checkpoint.save_every=0"), ("use_dora: true", "peft.method=dora"),
    ("warmup_ratio: 0.0", "schedule.warmup_steps=0"), ("eval_strategy: steps\neval_steps: 50", "train.eval_every=50"),
])  # fmt: skip
def test_a_setting_of_llama_factory_is_in_the_command(tmp_path: Path, line: str, word: str) -> None:
    fix = refused(tmp_path / "sft.yaml", FACTORY + line + "\n").fix[0]
    assert word in fix.split()


def test_a_share_of_unknown_steps_is_listed(tmp_path: Path) -> None:
    error = refused(tmp_path / "sft.yaml", HEADS["trl"] + "warmup_ratio: 0.1\n")
    assert "warmup_ratio=0.1" in error.message
    assert "warmup_steps" not in error.fix[0]


def values_of(one: FrontEnd) -> Iterator[tuple[str, str]]:
    """Yield two values of each key that a recipe's field follows from, and of each tenth of the others."""
    keys = one.table.owners[""]
    meant = {*ROWS, *one.names, *SPECIAL}
    others = sorted(set(keys) - meant)[::10]
    for name in sorted({key for key in meant if key in keys} | set(others)):
        kind = next((kind for kind in keys[name].types if kind in SAMPLES), "bool")
        for value in SAMPLES[kind]:
            yield name, value


@pytest.mark.parametrize("name", FRONT_ENDS)
def test_every_key_of_a_front_end_is_accounted_for(tmp_path: Path, name: str) -> None:
    """A key is in the command, or listed, or switches off what no recipe does."""
    one, head = FRONT_ENDS[name], HEADS[name]
    started = {line.split(":")[0] for line in head.splitlines()} | {"model", "rl", "rlhf_type", *one.not_with}
    missing = []
    before = refused(tmp_path / "file.yaml", head).fix[0]
    for key, value in values_of(one):
        if key in started or (key in IMPLIED and value == "true"):
            continue
        error = refused(tmp_path / "file.yaml", f"{head}{key}: {value}\n")
        field = ROWS.get(key, "")
        stated = f" {key}=" in error.message or (field and f" {field}=" in error.fix[0]) or f" {key}=" in error.fix[0]
        if (
            not stated
            and error.fix[0] == before
            and (field not in ("peft.method", "") or value != "false" or key in IMPLIED)
        ):
            missing.append((key, value))
    assert not missing


def test_an_axolotl_file_without_gpus_states_its_assumption(tmp_path: Path) -> None:
    batch = "micro_batch_size: 2\ngradient_accumulation_steps: 4\n"
    error = refused(tmp_path / "qlora.yml", HEADS["axolotl"] + batch, gpus=None)
    assert "assumed by the fix: --gpus 1xH100 (global batch 8: micro_batch_size 2 × grad" in error.message
    assert {"1xH100", "train.global_batch_size=8"} <= set(error.fix[0].split())
    error = refused(tmp_path / "qlora.yml", HEADS["axolotl"] + batch, gpus="2xA100")
    assert "assumed" not in error.message
    assert "train.global_batch_size=16" in error.fix[0]


def test_a_torchtune_file_names_what_check_reads(tmp_path: Path) -> None:
    text = "model:\n  _component_: torchtune.models.llama3_2.lora_llama3_2_3b\ntokenizer:\n  _component_: a.b\n"
    assert (
        "check also reads those of axolotl, llama-factory, ms-swift, trl" in refused(tmp_path / "a.yaml", text).message
    )
