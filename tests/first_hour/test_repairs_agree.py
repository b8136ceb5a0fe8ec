"""Commands agree on repairs; values, GPUs and options that people type are understood or refused with the right fix."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from meshwright import clusters
from meshwright.errors import InputError

MEGATRON = """torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32 \\
 --ffn-hidden-size 14336 --swiglu --group-query-attention --num-query-groups 8 --seq-length 8192 \\
 --max-position-embeddings 8192 --position-embedding-type rope --normalization RMSNorm --vocab-size 128256 \\
 --untie-embeddings-and-output-weights --micro-batch-size 1 --global-batch-size 127 --sequence-parallel \\
 --tensor-model-parallel-size 3 --bf16 --train-iters 1000 --lr 3e-4 --mock-data --tokenizer-type NullTokenizer
"""
TITAN = """[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 1
global_batch_size = 127
seq_len = 8192
steps = 1000
[optimizer]
lr = 3e-4
[parallelism]
tensor_parallel_degree = 3
"""
ACCELERATE = """compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
mixed_precision: bf16
num_machines: 1
num_processes: 8
parallelism_config:
  parallelism_config_tp_size: 3
"""


@pytest.mark.parametrize(
    ("name", "text", "options"),
    [
        ("m.sh", MEGATRON, ()),
        ("t.toml", TITAN, ()),
        ("acc.yaml", ACCELERATE, ("--model", "llama3-8b", "--goal", "pretrain", "train.steps=1000")),
    ],
)
def test_launch_prints_the_repair_of_check(
    meshwright: Any, here: Path, name: str, text: str, options: tuple[str, ...]
) -> None:
    (here / name).write_text(text)
    on = (name, "--gpus", "8xH100", *options)
    repair = meshwright("check", *on, "--json").json["repair"]["overrides"]
    refused = meshwright("launch", *on, "--scheduler", "torchrun").err
    assert f"in {name}: {'  '.join(repair)}" in refused
    fix = refused.rpartition("fix:")[2].strip()
    if not fix.startswith("in "):
        assert meshwright("launch", *on, "--scheduler", "torchrun", *shlex.split(fix)).code == 0


SWIFT = (
    "NPROC_PER_NODE=8 swift sft --model Qwen/Qwen2.5-7B-Instruct --dataset AI-ModelScope/alpaca-gpt4-data-en "
    "--tuner_type lora --torch_dtype bfloat16 --num_train_epochs 1 --per_device_train_batch_size 1 "
    "--learning_rate {lr} --gradient_accumulation_steps 4 --max_length 2048 --attn_impl '{kernel}'\n"
)
FACTORY = """model_name_or_path: Qwen/Qwen2.5-7B-Instruct
stage: sft
do_train: true
finetuning_type: lora
dataset: alpaca_en_demo
template: qwen
cutoff_len: 2048
output_dir: out
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: {lr}
num_train_epochs: 3.0
bf16: true
flash_attn: {kernel}
"""
TRL = """model_name_or_path: Qwen/Qwen2.5-7B-Instruct
dataset_name: trl-lib/Capybara
attn_implementation: {kernel}
learning_rate: {lr}
per_device_train_batch_size: 1
bf16: true
max_length: 2048
num_train_epochs: 1
output_dir: out
"""


def invalid(answer: dict[str, Any]) -> list[list[str]]:
    return [one["fix"] for one in answer["findings"] if one["rule"] == "value.invalid"]


@pytest.mark.parametrize(
    ("name", "text", "kernel", "fix"),
    [
        ("s.sh", SWIFT, "auto", "--attn_impl sdpa"),
        ("s.sh", SWIFT, "nonsense", "--attn_impl sdpa"),
        ("s.sh", SWIFT, "fa3", "--attn_impl flash_attention_3"),
        ("s.sh", SWIFT, "flash_attn", ""),
        ("s.sh", SWIFT, "paged|sdpa", ""),
        ("s.sh", SWIFT, "kernels-community/flash-attn2", ""),
        ("lf.yaml", FACTORY, "flash_attention_2", "flash_attn: fa2"),
        ("lf.yaml", FACTORY, "flash", "flash_attn: fa2"),
        ("lf.yaml", FACTORY, "disabled", ""),
        ("trl.yaml", TRL, "flash_attention", "attn_implementation: flash_attention_2"),
        ("trl.yaml", TRL, "nonsense", "attn_implementation: sdpa"),
        ("trl.yaml", TRL, "kernels-community/vllm-flash-attn3", ""),
    ],
)
def test_an_unknown_attention_kernel_is_refused_with_one_that_exists(
    meshwright: Any, here: Path, name: str, text: str, kernel: str, fix: str
) -> None:
    (here / name).write_text(text.format(kernel=kernel, lr="1e-5"))
    answer = meshwright("check", name, "--gpus", "8xH100", "--json").json
    assert invalid(answer) == ([[fix]] if fix else [])


@pytest.mark.parametrize(
    ("typed", "gpus"),
    [
        ("a100-40g", "1xA100-40"),
        ("a100-80gb", "1xA100-80"),
        ("A100 40GB", "1xA100-40"),
        ("h100-80g", "1xH100"),
        ("h200-141g", "1xH200"),
        ("rtx4090-24g", "1xRTX4090"),
        ("8xv100-32g", "8xV100-32"),
        ("2x8xh100-80g", "2x8xH100"),
    ],
)
def test_a_gpu_may_be_named_with_its_memory(typed: str, gpus: str) -> None:
    assert str(clusters.cluster(typed)) == gpus


@pytest.mark.parametrize(("typed", "fix"), [("a100-60g", "1xA100-40"), ("a10-24", "1xA10"), ("rtx40900", "1xRTX4090")])
def test_an_unknown_gpu_without_a_count_has_the_nearest_one_as_its_fix(typed: str, fix: str) -> None:
    with pytest.raises(InputError) as refused:
        clusters.cluster(typed)
    assert refused.value.fix[0] == fix


AXOLOTL = """base_model: Qwen/Qwen2.5-7B
datasets: [{{path: tatsu-lab/alpaca, type: alpaca}}]
adapter: lora
lora_r: 16
lora_alpha: {alpha}
lora_target_linear: true
sequence_len: 2048
micro_batch_size: 1
gradient_accumulation_steps: 4
num_epochs: 1
learning_rate: {lr}
optimizer: adamw_torch_fused
bf16: true
output_dir: out
"""


@pytest.mark.parametrize(
    ("lr", "alpha", "warned"),
    [("1e-3", 32, False), ("3e-3", 32, True), ("9e-3", 16, True), ("3e-3", 8, False), ("2e-4", 32, False)],
)
def test_a_rate_that_nobody_trains_adapters_with_is_warned_about(
    meshwright: Any, here: Path, lr: str, alpha: int, warned: bool
) -> None:
    (here / "ax.yaml").write_text(AXOLOTL.format(lr=lr, alpha=alpha))
    answer = meshwright("check", "ax.yaml", "--gpus", "8xH100", "--json").json
    found = [one["fix"] for one in answer["findings"] if one["rule"] == "learning_rate.adapters-too-high"]
    assert found == ([["learning_rate: 0.0001"]] if warned else [])


@pytest.mark.parametrize(
    ("command", "warned"), [("swift sft", True), ("swift pt", False), ("swift sft --freeze_llm true", False)]
)
def test_ms_swift_trains_all_weights_at_the_rate_of_adapters(
    meshwright: Any, here: Path, command: str, warned: bool
) -> None:
    text = SWIFT.format(kernel="flash_attn", lr="1e-4").replace("swift sft", command).replace("lora", "full")
    (here / "s.sh").write_text(text.replace("--tuner_type", "--deepspeed zero3 --tuner_type"))
    answer = meshwright("check", "s.sh", "--gpus", "8xH100", "--json").json
    rates = [one["fix"] for one in answer["findings"] if one["rule"] == "learning_rate.fine-tuning"]
    assert rates == ([["--learning_rate 1e-05"]] if warned else [])


PROGRAM = """from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from datasets import load_dataset
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-14B-Instruct", dtype="bfloat16")
args = TrainingArguments(output_dir="o", bf16=True, per_device_train_batch_size=1, learning_rate=1e-5, max_steps=100)
Trainer(model=model, args=args, train_dataset=load_dataset("trl-lib/Capybara", split="train")).train()
"""


def test_the_layout_has_the_name_of_the_change(meshwright: Any, here: Path) -> None:
    (here / "p.py").write_text(PROGRAM)
    shown = meshwright("recommend", "p.py", "--gpus", "8xH100", "data.seq_length=2048").out
    assert "layout.strategy ddp → fsdp2" in shown
    assert "Layout   fsdp2 (fsdp1's full shard) · dp 8" in shown


ZERO3 = '{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 8, '
ZERO3 += '"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}'


def test_an_export_keeps_zero_or_says_what_it_becomes(meshwright: Any, here: Path) -> None:
    (here / "ds.json").write_text(ZERO3)
    words = ("export", "ds.json", "--model", "llama3-8b", "--goal", "sft", "--gpus", "8xH100")
    words = (*words, "train.steps=1000", "data.seq_length=2048", "--json", "--to")
    kept = meshwright(*words, "accelerate").json
    (config,) = [text for name, text in kept["files"].items() if name.endswith(".yaml")]
    assert "distributed_type: DEEPSPEED" in config
    assert "zero_stage: 3" in config
    other = meshwright(*words, "automodel").json
    assert "ZeRO of ds.json becomes layout.strategy=fsdp2: NeMo AutoModel has no DeepSpeed" in other["notes"]
