"""Where gradients are: on the host (DeepSpeed's offload), unreduced on the GPU (FSDP2's), or in bf16 (Megatron)."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

TRAINER = """#!/bin/bash
deepspeed --num_gpus 2 train.py \\
    --deepspeed ds.json \\
    --model_name_or_path Qwen/Qwen3-8B \\
    --bf16 True \\
    --output_dir out \\
    --per_device_train_batch_size BATCH \\
    --gradient_accumulation_steps 4 \\
    --learning_rate 1e-5 \\
    --model_max_length 4096 \\
    --gradient_checkpointing True
"""
MEGATRON = """#!/bin/bash
torchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py --num-layers 40 --hidden-size 5120 --ffn-hidden-size 13824 \\
    --num-attention-heads 40 --seq-length 4096 --max-position-embeddings 4096 --position-embedding-type rope \\
    --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --vocab-size 32000 \\
    --tensor-model-parallel-size 2 --sequence-parallel --micro-batch-size 1 --global-batch-size 256 --train-iters 100 \\
    --lr 3e-4 --bf16 --mock-data --tokenizer-type NullTokenizer FLAGS
"""
AUTOMODEL = """step_scheduler:
  global_batch_size: 64
  local_batch_size: 1
model:
  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained
  pretrained_model_name_or_path: meta-llama/Llama-3.3-70B-Instruct
  torch_dtype: bfloat16
distributed:
  _target_: nemo_automodel.components.distributed.fsdp2.FSDP2Manager
  dp_size: none
  dp_replicate_size: 1
  tp_size: 4
  cp_size: 1
  sequence_parallel: true
packed_sequence:
  packed_sequence_size: 8192
optimizer:
  _target_: torch.optim.AdamW
  lr: 1.0e-5
"""


def deepspeed(stage: int, offload: str = "cpu", batch: int = 1, **more: Any) -> str:
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": True, "offload_optimizer": {"device": offload}, **more}
    automatic = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    config = {"bf16": {"enabled": "auto"}, "zero_optimization": zero, **dict.fromkeys(automatic, "auto")}
    Path("ds.json").write_text(json.dumps(config, indent=2))
    Path("run.sh").write_text(TRAINER.replace("BATCH", str(batch)))
    return "run.sh"


def gradients(meshwright: Any, target: str, gpus: str, *words: str) -> float:
    answer = meshwright("estimate", target, "--gpus", gpus, *words, "--json")
    return float(answer.json["estimate"]["memory_gib"]["gradients"])


def errors(meshwright: Any, target: str, gpus: str) -> list[dict[str, Any]]:
    findings = meshwright("check", target, "--gpus", gpus, "--json").json["findings"]
    return [found for found in findings if found["severity"] == "error"]


@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_keeps_gradient_partitions_with_the_offloaded_optimizer(meshwright: Any, stage: int) -> None:
    assert gradients(meshwright, deepspeed(stage), "2xL40S") == 0
    assert gradients(meshwright, deepspeed(stage, offload="none"), "2xL40S") == pytest.approx(7.6, abs=0.1)


def test_deepspeed_stage_1_keeps_its_gradients_on_the_gpu(meshwright: Any) -> None:
    assert gradients(meshwright, deepspeed(1), "2xL40S") > 15


def test_offloaded_parameters_do_not_take_deferred_gradients_along(meshwright: Any) -> None:
    words = ("--goal", "sft", "--engine", "automodel", "layout.tp=4", "layout.pp=1", "layout.recompute=full")
    words = (*words, "train.global_batch_size=64", "layout.micro_batch_size=1", "layout.defer_grad_sync=true")
    on_gpu = gradients(meshwright, "llama3-70b", "64xA100-40", *words, "layout.offload=none")
    assert on_gpu == pytest.approx(65.7, abs=0.1)
    assert gradients(meshwright, "llama3-70b", "64xA100-40", *words, "layout.offload=params") == on_gpu
    once = (*words[:-1], "layout.defer_grad_sync=false", "layout.offload=params")
    assert gradients(meshwright, "llama3-70b", "64xA100-40", *once) == 0


OFFLOAD = """  activation_checkpointing: true
  offload_policy:
    _target_: torch.distributed.fsdp.CPUOffloadPolicy
"""


@pytest.mark.parametrize(
    ("more", "gpus", "fix"),
    [
        ("", "32xH100", ("activation_checkpointing", "defer_fsdp_grad_sync")),
        (OFFLOAD, "64xA100-40", ("defer_fsdp_grad_sync",)),
        ("  activation_checkpointing: true\n", "16xH100", ("defer_fsdp_grad_sync",)),
    ],
)
def test_the_fix_of_deferred_gradients_is_their_switch(
    meshwright: Any, more: str, gpus: str, fix: tuple[str, ...]
) -> None:
    file = Path("sft.yaml")
    file.write_text(AUTOMODEL.replace("  sequence_parallel: true\n", f"  sequence_parallel: true\n{more}"))
    [found] = errors(meshwright, "sft.yaml", gpus)
    assert found["rule"].startswith("memory.")
    assert {text.split(":")[0] for text in found["fix"]} == {f"distributed.{key}" for key in fix}
    lines = "".join(f"  {text.removeprefix('distributed.')}\n" for text in found["fix"])
    file.write_text(file.read_text().replace("  sequence_parallel: true\n", f"  sequence_parallel: true\n{lines}"))
    assert not errors(meshwright, "sft.yaml", gpus)


@pytest.mark.parametrize("flags", ["--use-distributed-optimizer", "--use-megatron-fsdp --ckpt-format fsdp_dtensor"])
def test_megatron_accumulates_in_the_format_of_the_reduction(meshwright: Any, flags: str) -> None:
    found = []
    for more in ("", "--grad-reduce-in-bf16"):
        Path("train.sh").write_text(MEGATRON.replace("FLAGS", f"{flags} {more}"))
        found.append(gradients(meshwright, "train.sh", "16xH100"))
    assert found[1] == pytest.approx(found[0] / 2, rel=1e-3)


def test_precision_reduce_sets_the_buffer_of_megatron_recipes(meshwright: Any) -> None:
    words = ("--engine", "megatron", "layout.tp=4", "layout.pp=4")
    wide = gradients(meshwright, "llama3_70b_pretrain_config", "64xH100", *words, "precision.reduce=fp32")
    narrow = gradients(meshwright, "llama3_70b_pretrain_config", "64xH100", *words, "precision.reduce=bf16")
    assert narrow == pytest.approx(wide / 2, rel=1e-3)


ACCELERATE = """accelerate launch --config_file fsdp.yaml trl/scripts/sft.py --model_name_or_path Qwen/Qwen3-8B \\
  --dataset_name tickets.jsonl --use_peft --lora_r 32 --learning_rate 2e-4 --num_train_epochs 2 --packing \\
  --max_length 4096 --per_device_train_batch_size 8 --gradient_accumulation_steps 8 --bf16 \\
  --gradient_checkpointing False --output_dir out
"""
FSDP = """distributed_type: FSDP
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_reshard_after_forward: true
  fsdp_version: 2
mixed_precision: bf16
num_processes: 2
"""
PROGRAM = """from transformers import Trainer, TrainingArguments
args = TrainingArguments(output_dir="out", deepspeed="ds.json", per_device_train_batch_size=8, bf16=True,
    gradient_checkpointing=True, num_train_epochs=2)
"""
KEYS = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def apply(fix: list[str], target: str) -> None:
    """Write a fix where it says: flags of the command, keywords of a call, keys of the JSON file."""
    text = Path(target).read_text()
    for one in fix:
        if one.startswith('"'):
            config = json.loads(Path("ds.json").read_text()) | json.loads(f"{{{one}}}")
            Path("ds.json").write_text(json.dumps(config))
            continue
        name, mark, value = one.partition(" " if one.startswith("--") else "=")
        pattern = re.escape(name) + re.escape(mark) + r"\w+"
        if re.search(pattern, text):
            text = re.sub(pattern, f"{name}{mark}{value}", text)
        else:
            text = text.replace("bf16=True", f"bf16=True, {one}").replace("--bf16", f"{one} --bf16", 1)
    Path(target).write_text(text)


def batch_of(meshwright: Any, *words: str) -> int:
    return int(meshwright("estimate", *words, "--json").json["contract"]["global_batch_size"])


@pytest.mark.parametrize("kind", ["auto", "stated", "accelerate", "python"])
def test_a_memory_fix_goes_where_the_value_is_set(meshwright: Any, kind: str) -> None:
    deepspeed(3, batch=4)
    target, more = "run.sh", ()
    if kind == "stated":
        config = json.loads(Path("ds.json").read_text()) | {"train_batch_size": 32, **dict.fromkeys(KEYS, 4)}
        Path("ds.json").write_text(json.dumps(config))
    elif kind == "accelerate":
        Path("run.sh").write_text(ACCELERATE)
        Path("fsdp.yaml").write_text(FSDP)
    elif kind == "python":
        target, more = "train.py", ("--model", "qwen3-8b", "data.seq_length=4096")
        Path(target).write_text(PROGRAM)
    words = (target, "--gpus", "2xL40S", *more)
    batch = batch_of(meshwright, *words)
    [found] = [f for f in meshwright("check", *words, "--json").json["findings"] if f["severity"] == "error"]
    assert found["rule"] == "memory.peak"
    sets_flag = {"python": "per_device_train_batch_size=1"}.get(kind, "--per_device_train_batch_size 2")
    assert sets_flag in found["fix"]
    assert ('"train_micro_batch_size_per_gpu": 2' in found["fix"]) == (kind == "stated")
    apply(found["fix"], target)
    left = meshwright("check", *words, "--json").json["findings"]
    assert not [f for f in left if f["severity"] == "error"]
    assert batch_of(meshwright, *words) == batch


def test_ddp_of_the_trainer_keeps_its_buckets_besides_the_gradients(meshwright: Any) -> None:
    words = ("estimate", "qwen3-0.6b", "--goal", "sft", "--engine", "fsdp1", "layout.strategy=ddp", "--json", "--gpus")
    one, two = (meshwright(*words, gpus).json["estimate"]["memory_gib"]["gradients"] for gpus in ("1xH100", "2xH100"))
    assert two == pytest.approx(2 * one, rel=0.01)  # 0.94 GiB more of 0.94 GiB of gradients on an H200
