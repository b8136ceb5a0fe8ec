"""Where gradients are: on the host (DeepSpeed's offload), unreduced on the GPU (FSDP2's), or in bf16 (Megatron)."""

from __future__ import annotations

import json
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


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


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
