"""LoRA settings that a file leaves out are those of the library that trains: PEFT, TRL, LLaMA-Factory, Unsloth."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

QUERY_VALUE = ["q_proj", "v_proj"]
PROGRAM = """from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

args = SFTConfig(output_dir="out", per_device_train_batch_size=1, max_length=2048, num_train_epochs=3)
peft_config = LoraConfig({})
SFTTrainer(model="{}", args=args, peft_config=peft_config).train()
"""
SCRIPT = (
    "accelerate launch --num_processes 1 trl/scripts/sft.py --model_name_or_path Qwen/Qwen3-8B --dataset_name chats "
    "--use_peft --max_length 2048 --per_device_train_batch_size 1 --output_dir out {}\n"
)


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def imported(meshwright: Any, name: str, text: str) -> dict[str, Any]:
    """Return the adapters of a file; those of our own defaults are not written."""
    Path(name).write_text(text, encoding="utf-8")
    done = meshwright("import", name, "--gpus", "1xRTX4090")
    peft = tomllib.loads(done.out).get("peft", {})
    return {key: peft.get(key) for key in ("rank", "alpha", "dropout", "targets")}


@pytest.mark.parametrize(
    ("given", "model", "expected"),
    [
        ("", "Qwen/Qwen3-8B", (8, 8.0, None, QUERY_VALUE)),
        ("r=64, lora_alpha=16", "Qwen/Qwen3-8B", (64, 16.0, None, QUERY_VALUE)),
        ('target_modules="all-linear", lora_dropout=0.1', "Qwen/Qwen3-8B", (8, 8.0, 0.1, ["all-linear"])),
        ("target_modules=chosen(model)", "Qwen/Qwen3-8B", (8, 8.0, None, None)),  # known when it runs
        ("", "Qwen/Qwen3-30B-A3B", (8, 8.0, None, None)),  # PEFT has no targets for qwen3_moe
        ("**options()", "Qwen/Qwen3-8B", (None, None, None, None)),
    ],
)
def test_lora_config_of_a_program(meshwright: Any, given: str, model: str, expected: tuple[Any, ...]) -> None:
    found = imported(meshwright, "train.py", PROGRAM.format(given, model))
    assert tuple(found.values()) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", (16, None, 0.05, QUERY_VALUE)),
        ("--lora_r 64 --lora_dropout 0", (64, None, None, QUERY_VALUE)),
        ("--lora_target_modules q_proj k_proj", (16, None, 0.05, ["q_proj", "k_proj"])),
    ],
)
def test_trl_script(meshwright: Any, given: str, expected: tuple[Any, ...]) -> None:
    assert tuple(imported(meshwright, "train.sh", SCRIPT.format(given)).values()) == expected


FACTORY = """model_name_or_path: Qwen/Qwen3-8B
stage: sft
do_train: true
finetuning_type: lora
dataset: identity
template: qwen3
cutoff_len: 2048
output_dir: out
per_device_train_batch_size: 1
bf16: true
"""
TRL = """model_name_or_path: Qwen/Qwen3-8B
dataset_name: chats
use_peft: true
max_length: 2048
per_device_train_batch_size: 1
"""
SWIFT = (
    "swift sft --model Qwen/Qwen3-8B --dataset chats.jsonl --tuner_type lora --max_length 2048 "
    "--per_device_train_batch_size 1 --torch_dtype bfloat16\n"
)


@pytest.mark.parametrize(
    ("name", "text", "rank"),
    [("f.yaml", FACTORY, "lora_rank: 8\nlora_target: all\n"), ("t.yaml", TRL, "lora_r: 16\n"),
        ("s.sh", SWIFT, "--lora_rank 8 --target_modules all-linear\n")],
)  # fmt: skip
def test_front_ends_count_the_adapters_of_their_own_defaults(meshwright: Any, name: str, text: str, rank: str) -> None:
    memory = []
    for content in (text, f"{text.rstrip()} {rank}" if name == "s.sh" else text + rank):
        Path(name).write_text(content, encoding="utf-8")
        memory.append(meshwright("check", name, "--gpus", "1xA100-80", "--json").json["estimate"]["memory_gib"])
    assert memory[0]["gradients"] == memory[1]["gradients"] < 0.1


def test_llama_factory_counts_21_8_million_adapter_parameters(meshwright: Any) -> None:
    """Its log states 21,823,488 trainable parameters for rank 8 in every linear layer of Qwen3-8B."""
    Path("f.yaml").write_text(FACTORY, encoding="utf-8")
    answer = meshwright("check", "f.yaml", "--gpus", "1xA100-80", "--json").json
    assert answer["estimate"]["memory_gib"]["gradients"] == 21_823_488 * 4 / 2**30
