"""Adapters, sharding, early stopping and row counts of fine-tuning front ends, as they read them themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.frameworks.applied_fixes import fixed_text

AXOLOTL = """base_model: Qwen/Qwen3-14B
adapter: lora
lora_r: 16
lora_target_linear: true
datasets:
  - path: letters.jsonl
    type: alpaca
val_set_size: 0.1
sequence_len: 512
sample_packing: true
micro_batch_size: 1
gradient_accumulation_steps: 2
num_epochs: 3
learning_rate: 2e-4
bf16: true
flash_attention: true
optimizer: adamw_torch_fused
"""
SWIFT = """#!/bin/bash
NPROC_PER_NODE=4 CUDA_VISIBLE_DEVICES=0,1,2,3 swift sft --model Qwen/Qwen3-14B --tuner_type lora \\
    --dataset letters.jsonl --split_dataset_ratio 0.1 --num_train_epochs 3 --per_device_train_batch_size 1 \\
    --learning_rate 1e-4 --lora_rank 16 --max_length 512 --packing true --attn_impl flash_attn \\
    --gradient_accumulation_steps 2 --output_dir out --torch_dtype bfloat16 --deepspeed zero2 MORE
"""
FSDP = """fsdp_config:
  {0}version: 2
  {0}auto_wrap_policy: TRANSFORMER_BASED_WRAP
  {0}transformer_layer_cls_to_wrap: Qwen3DecoderLayer
  {0}activation_checkpointing: {1}
"""


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def check(meshwright: Any, name: str, text: str, *words: str) -> dict[str, Any]:
    Path(name).write_text(text, encoding="utf-8")
    answer: dict[str, Any] = meshwright("check", name, "--gpus", "4xA6000", *words, "--json").json
    return answer


def memory(answer: dict[str, Any]) -> dict[str, float]:
    found: dict[str, float] = answer["estimate"]["memory_gib"]
    return found


@pytest.mark.parametrize("prefix", ["", "fsdp_"])
def test_axolotl_reads_fsdp_config_with_and_without_the_prefix_of_its_keys(meshwright: Any, prefix: str) -> None:
    config = AXOLOTL.replace("sequence_len: 512", "sequence_len: 4096")
    stored, recomputed = (
        check(meshwright, "axo.yaml", config + FSDP.format(prefix, switch)) for switch in ("false", "true")
    )
    assert not [one for one in (*stored["findings"], *recomputed["findings"]) if one["rule"] == "key.unused"]
    assert memory(recomputed)["activations"] < 0.1 * memory(stored)["activations"]
    assert recomputed["ok"]
    unknown = check(meshwright, "axo.yaml", f"{config}{FSDP.format(prefix, 'true')}  {prefix}wrap_everything: true\n")
    assert [one["rule"] for one in unknown["findings"]] == ["key.unused"]


def test_axolotl_loads_4_bits_with_qlora_only(meshwright: Any) -> None:
    four = f"{AXOLOTL}load_in_4bit: true\n"
    plain, given = check(meshwright, "axo.yaml", AXOLOTL), check(meshwright, "axo.yaml", four)
    assert memory(given) == memory(plain)
    (found,) = given["findings"]
    assert found["message"].endswith(
        "load_in_4bit: true needs adapter: qlora, not adapter: lora: Axolotl loads weights in 16 bits"
    )
    assert found["fix"] == ["adapter: qlora"]
    fixed = check(meshwright, "axo.yaml", four.replace("adapter: lora", "adapter: qlora"))
    assert not fixed["findings"]
    assert memory(fixed)["weights"] < 0.4 * memory(plain)["weights"]
    assert not check(meshwright, "axo.yaml", four.replace("load_in_4bit", "load_in_8bit"))["findings"]


@pytest.mark.parametrize(
    ("name", "text", "fix"),
    [
        ("axo.yaml", AXOLOTL.replace("linear: true", "modules: [query_key_value]"),
            ["without lora_target_modules", "lora_target_linear: true"]),
        ("run.sh", SWIFT.replace("MORE", "--target_modules c_attn c_proj"), ["--target_modules all-linear"]),
    ],
)  # fmt: skip
def test_adapters_on_layers_that_the_model_does_not_have_are_refused(
    meshwright: Any, name: str, text: str, fix: list[str]
) -> None:
    (found,) = check(meshwright, name, text)["findings"]
    assert "names none of the model's linear layers (q_proj, k_proj, v_proj, o_proj, gate_proj" in found["message"]
    assert found["fix"] == fix
    known = text.replace("query_key_value", "q_proj, v_proj").replace("c_attn c_proj", "q_proj v_proj")
    assert not check(meshwright, name, known)["findings"]
    unused = SWIFT.replace("lora \\", "full \\").replace("MORE", "--target_modules c_attn")
    rules = [one["rule"] for one in check(meshwright, "run.sh", unused)["findings"]]
    assert "value.invalid" not in rules


@pytest.mark.parametrize("visible", ["NPROC_PER_NODE=1 CUDA", "CUDA"])
def test_swift_shards_over_processes_not_over_the_devices_of_one(meshwright: Any, visible: str) -> None:
    text = SWIFT.replace("MORE", "").replace("NPROC_PER_NODE=4 CUDA", visible)
    (found,) = check(meshwright, "run.sh", text)["findings"]
    assert "one process sees the 4 GPUs of CUDA_VISIBLE_DEVICES" in found["message"]
    assert found["fix"] == ["NPROC_PER_NODE=4"]
    assert not check(meshwright, "run.sh", SWIFT.replace("MORE", ""))["findings"]
    assert not check(meshwright, "run.sh", text.replace("--deepspeed zero2", ""))["findings"]


@pytest.mark.parametrize(
    "launcher", ["torchrun --nproc_per_node=4", "accelerate launch --num_processes 4", "accelerate launch", "deepspeed"]
)
def test_a_launchers_processes_are_those_that_swift_shards_over(meshwright: Any, launcher: str) -> None:
    text = SWIFT.replace("MORE", "").replace(
        "NPROC_PER_NODE=4 CUDA_VISIBLE_DEVICES=0,1,2,3 swift sft", f"{launcher} sft.py"
    )
    text = text.replace(launcher, f"CUDA_VISIBLE_DEVICES=0,1,2,3 {launcher}").replace("sft.py", "swift/cli/sft.py")
    found = check(meshwright, "run.sh", text)
    assert not [one for one in found["findings"] if one["severity"] == "error"]
    assert not any("spread" in one for one in found["notes"])


@pytest.mark.parametrize("command", ["axolotl train axo.yaml", "llamafactory-cli train lf.yaml"])
def test_commands_that_start_a_process_per_visible_gpu_are_estimated(meshwright: Any, command: str) -> None:
    Path("axo.yaml").write_text(AXOLOTL, encoding="utf-8")
    Path("lf.yaml").write_text(
        "model_name_or_path: Qwen/Qwen3-14B\nstage: sft\ndo_train: true\nfinetuning_type: lora\nlora_target: all\n"
        "dataset: letters\ntemplate: qwen3\ncutoff_len: 512\noutput_dir: out\nlearning_rate: 1.0e-4\nbf16: true\n"
        "per_device_train_batch_size: 1\n"
    )
    answer = check(meshwright, "run.sh", f"CUDA_VISIBLE_DEVICES=0,1,2,3 {command}\n")
    assert 28 < memory(answer)["total"] < 40
    assert not any("spread" in one for one in answer["notes"])


def test_early_stopping_keeps_the_evaluations_of_an_epoch(meshwright: Any) -> None:
    text = f"{AXOLOTL}evals_per_epoch: 4\nsaves_per_epoch: 4\nearly_stopping_patience: 3\n"
    (found,) = check(meshwright, "axo.yaml", text)["findings"]
    share = round(1 / 12, 4)
    assert found["fix"] == [
        *("without evals_per_epoch", "without saves_per_epoch"), *(f"eval_steps: {share}", f"save_steps: {share}")
    ]  # fmt: skip
    fixed = fixed_text(text, "axo.yaml", found["fix"])
    assert not check(meshwright, "axo.yaml", fixed.text)["findings"]


def test_the_highest_loss_is_not_the_best(meshwright: Any) -> None:
    steps = "eval_steps: 20\nsave_steps: 20\nload_best_model_at_end: true\nearly_stopping_patience: 3\n"
    text = f"{AXOLOTL}{steps}metric_for_best_model: eval_loss\ngreater_is_better: true\n"
    (found,) = check(meshwright, "axo.yaml", text)["findings"]
    assert found["message"].endswith("Axolotl keeps the worst checkpoint, and stops early while the loss falls")
    assert found["fix"] == ["greater_is_better: false"]
    assert not check(meshwright, "axo.yaml", text.replace("eval_loss", "eval_accuracy"))["findings"]
    more = "--load_best_model_at_end true --greater_is_better true --eval_steps 20 --save_steps 20"
    (found,) = check(meshwright, "run.sh", SWIFT.replace("MORE", more))["findings"]
    assert found["fix"] == ["--greater_is_better false"]


def test_rows_that_are_held_out_or_too_long_are_counted(meshwright: Any) -> None:
    rows = [{"instruction": "Befund " * (40 if i % 100 else 700), "output": "{}"} for i in range(1000)]
    Path("letters.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    words = ("--dataset", "letters.jsonl")
    (note,) = check(meshwright, "axo.yaml", AXOLOTL, *words)["notes"]
    assert "10 rows longer than data.seq_length=512 dropped (val_set_size leaves 891 rows): " in note
    assert "at most" not in note
    (cut,) = check(meshwright, "axo.yaml", f"{AXOLOTL}excess_length_strategy: truncate\n", *words)["notes"]
    assert "10 rows longer than data.seq_length=512 cut (val_set_size leaves 900 rows): " in cut
    (swift,) = check(meshwright, "run.sh", SWIFT.replace("MORE", ""), *words)["notes"]
    assert (
        swift.partition("longer than")[2].replace("split_dataset_ratio", "val_set_size")
        == note.partition("longer than")[2]
    )
    never = f"{AXOLOTL}eval_steps: 20\nsave_steps: 500\nearly_stopping_patience: 3\n".replace("500", "20")
    (found,) = check(meshwright, "axo.yaml", never, *words)["notes"]
    steps = int(note.partition("rows): ")[2].split()[0])
    assert ("it never stops the run" in found) == (steps // 20 <= 3)
    late = check(meshwright, "axo.yaml", f"{AXOLOTL}eval_steps: 500\nsave_steps: 500\n", *words)["notes"]
    assert "eval_steps=500 and save_steps=500 are never reached: nothing is validated or saved" in late[0]


@pytest.mark.parametrize(
    ("name", "text", "fix"),
    [
        ("axo.yaml", AXOLOTL.replace("alpaca", "chat_template") + "chat_template: gemma3\n", "chat_template: qwen3"),
        ("run.sh", SWIFT.replace("MORE", "--template gemma3_text"), "without --template"),
    ],
)
def test_a_template_of_another_family_is_reported(meshwright: Any, name: str, text: str, fix: str) -> None:
    (found,) = check(meshwright, name, text)["findings"]
    assert found["rule"] == "data.template-of-another-family"
    assert "writes <start_of_turn> <end_of_turn>, which Qwen/Qwen3-14B reads as plain text" in found["message"]
    assert found["fix"] == [fix]
    for fine in (
        text.replace("gemma3_text", "qwen3_thinking").replace("template: gemma3", "template: qwen3"),
        text.replace("gemma3_text", "chatml").replace("template: gemma3", "template: chatml"),
        text.replace("Qwen/Qwen3-14B", "google/gemma-3-4b-it"),
        f"{text}tokens: [<start_of_turn>, <end_of_turn>]\n" if name == "axo.yaml" else text.replace("gemma3_", "own_"),
    ):
        rules = [one["rule"] for one in check(meshwright, name, fine)["findings"]]
        assert "data.template-of-another-family" not in rules, fine
