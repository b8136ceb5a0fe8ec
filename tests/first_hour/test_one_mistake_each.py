"""Files as their examples are, with one mistake that a user types: each is named, and the file with its fix passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

AXOLOTL = """base_model: meta-llama/Llama-3.2-1B
datasets:
  - path: tatsu-lab/alpaca
    type: alpaca
sequence_len: 4096
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 1
learning_rate: 0.0002
optimizer: adamw_torch
lr_scheduler: cosine
bf16: true
adapter: lora
lora_r: 16
lora_alpha: 32
lora_target_linear: true
output_dir: out
val_set_size: 0.05
save_steps: 100
warmup_steps: 10
"""
FACTORY = """model_name_or_path: meta-llama/Llama-3.2-1B
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
dataset: alpaca_en_demo
template: llama3
cutoff_len: 2048
output_dir: saves/out
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
"""
TRL = """trl sft --model_name_or_path Qwen/Qwen2.5-0.5B --dataset_name trl-lib/Capybara --learning_rate 2.0e-4 \\
  --num_train_epochs 1 --packing --per_device_train_batch_size 2 --gradient_accumulation_steps 8 \\
  --max_length 4096 --use_peft --lora_r 32 --lora_alpha 16 --output_dir out --bf16 true
"""
TRAINER = """torchrun --nproc_per_node 8 run_clm.py --model_name_or_path meta-llama/Llama-3.2-1B \\
  --dataset_name wikitext \\
  --per_device_train_batch_size 2 --gradient_accumulation_steps 4 --do_train --block_size 1024 \\
  --output_dir out --bf16 true --num_train_epochs 1 --learning_rate 5e-5
"""
MEGATRON = """torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 16 --hidden-size 2048 --num-attention-heads 32 \\
  --seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 64 \\
  --train-iters 1000 --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 100 --weight-decay 0.1 \\
  --clip-grad 1.0 --bf16 --tokenizer-type SentencePieceTokenizer --tokenizer-model tokenizer.model \\
  --data-path my_text_document --save ckpt --save-interval 500 --vocab-size 32000 --use-distributed-optimizer
"""
ACCELERATE = """compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: SHARDED_STATE_DICT
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 8
rdzv_backend: static
same_network: true
use_cpu: false
"""
TORCHTITAN = """[model]
name = "llama3"
flavor = "8B"
[optimizer]
name = "AdamW"
lr = 3e-4
[lr_scheduler]
warmup_steps = 100
[training]
local_batch_size = 1
seq_len = 8192
max_norm = 1.0
steps = 1000
[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = 8
tensor_parallel_degree = 1
[checkpoint]
enable = true
interval = 500
[activation_checkpoint]
mode = "selective"
"""
DEEPSPEED = """{
 "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4, "train_batch_size": 32,
 "bf16": {"enabled": true}, "zero_optimization": {"stage": 3, "overlap_comm": true}, "gradient_clipping": 1.0
}
"""
FILES = {
    "axolotl": ("axolotl.yaml", AXOLOTL),
    "factory": ("factory.yaml", FACTORY),
    "trl": ("trl.sh", TRL),
    "trainer": ("trainer.sh", TRAINER),
    "megatron": ("megatron.sh", MEGATRON),
    "accelerate": ("accelerate.yaml", ACCELERATE),
    "torchtitan": ("torchtitan.toml", TORCHTITAN),
    "deepspeed": ("deepspeed.json", DEEPSPEED),
}
MISTAKES = (
    ("axolotl", "sequence_len: 4096", "sequence_len: 4k", "sequence_len: 4096"),
    ("axolotl", "sequence_len: 4096", "sequence_len: 0", "sequence_len: 2048"),
    ("axolotl", "sequence_len: 4096", "max_seq_length: 4096", "sequence_len: 4096"),
    ("axolotl", "sequence_len: 4096", "seq_len: 4096", "sequence_len: 4096"),
    ("axolotl", "learning_rate: 0.0002", "learning_rate: -0.0002", "learning_rate: 0.0002"),
    ("axolotl", "learning_rate: 0.0002", "lr: 0.0002", "learning_rate: 0.0002"),
    ("axolotl", "micro_batch_size: 2", "micro_batch_size: 0", "micro_batch_size: 1"),
    ("axolotl", "lora_r: 16", "lora_r: sixteen", "lora_r: 16"),
    ("axolotl", "lora_r: 16", "lora_r: -16", "lora_r: 16"),
    ("axolotl", "num_epochs: 1", "epochs: 1", "num_epochs: 1"),
    ("axolotl", "val_set_size: 0.05", "val_set_size: 5%", "val_set_size: 0.05"),
    ("axolotl", "bf16: true", "bf16: ture", "bf16: true"),
    ("axolotl", "lr_scheduler: cosine", "lr_scheduler: cosin", "lr_scheduler: cosine"),
    ("axolotl", "adapter: lora", "adapter: lorra", "adapter: lora"),
    ("axolotl", "warmup_steps: 10", "warmup_steps: -10", "warmup_steps: 10"),
    ("factory", "cutoff_len: 2048", "cutoff_len: 4k", "cutoff_len: 4096"),
    ("factory", "cutoff_len: 2048", "cutoff_len: -1", "cutoff_len: 2048"),
    ("factory", "cutoff_len: 2048", "max_seq_length: 2048", "cutoff_len: 2048"),
    ("factory", "learning_rate: 1.0e-4", 'learning_rate: "1e-4"', "learning_rate: 1e-4"),
    ("factory", "lora_rank: 8", "lora_rank: 0", "lora_rank: 8"),
    ("factory", "stage: sft", "stage: stf", "stage: sft"),
    ("factory", "warmup_ratio: 0.1", "warmup_ratio: 10", "warmup_ratio: 0.1"),
    ("factory", "num_train_epochs: 3.0", "num_train_epochs: three", "num_train_epochs: 3"),
    ("factory", "num_train_epochs: 3.0", "epochs: 3", "num_train_epochs: 3"),
    ("trl", "--max_length 4096", "--max_length 4k", "--max_length 4096"),
    ("trl", "--max_length 4096", "--max_length -1", "--max_length 1024"),
    ("trl", "--lora_r 32", "--lora_r -32", "--lora_r 16"),
    ("trl", "--bf16 true", "--bf16 true --fp16 true", "--fp16 false"),
    ("trainer", "--block_size 1024", "--block_size 0", "--block_size 2048"),
    ("trainer", "--block_size 1024", "--block_size 1k", "--block_size 1024"),
    ("trainer", "--num_train_epochs 1", "--num_train_epochs -1", "--num_train_epochs 1"),
    ("megatron", "--max-position-embeddings 4096", "--max-position-embeddings 0", "--max-position-embeddings 4096"),
    ("megatron", "--train-iters 1000", "--train-iters 1k", "--train-iters 1000"),
    ("megatron", "--micro-batch-size 1", "--micro-batch-size 0", "--micro-batch-size 1"),
    ("megatron", "--clip-grad 1.0", "--clip-grad -1.0", "--clip-grad 1.0"),
    ("megatron", "--lr-warmup-iters 100", "--lr-warmup-iters 2000", "--lr-warmup-iters 100"),
    ("accelerate", "num_processes: 8", "num_processes: 0", "num_processes: 8"),
    ("accelerate", "mixed_precision: bf16", "mixed_precision: bfloat16", "mixed_precision: bf16"),
    ("accelerate", "distributed_type: FSDP", "distributed_type: FSDP2", "distributed_type: FSDP"),
    ("accelerate", "machine_rank: 0", "machine_rank: 1", "machine_rank: 0"),
    ("torchtitan", "steps = 1000", "steps = 0", "steps = 10000"),
    ("torchtitan", "seq_len = 8192", 'seq_len = "8k"', "seq_len = 8192"),
    ("torchtitan", "seq_len = 8192", "seq_len = -8192", "seq_len = 8192"),
    ("torchtitan", 'mode = "selective"', 'mode = "selectiv"', 'mode = "selective"'),
    ("torchtitan", 'name = "AdamW"', 'name = "AdmaW"', 'name = "AdamW"'),
    ("torchtitan", "interval = 500", "interval = 0", "interval = 500"),
    ("deepspeed", '"stage": 3', '"stage": 4', '"stage": 3'),
    ("deepspeed", '"train_batch_size": 32', '"train_batch_size": 33', '"train_batch_size": 32'),
    ("deepspeed", '"gradient_clipping": 1.0', '"gradient_clipping": -1.0', '"gradient_clipping": 1.0'),
    ("deepspeed", '"overlap_comm"', '"overlap_com"', '"overlap_comm"'),
)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", FILES)
def test_the_files_pass_without_a_mistake(meshwright: Any, name: str) -> None:
    file, text = FILES[name]
    Path(file).write_text(text)
    assert meshwright("check", file, "--gpus", "8xH100").code == 0


@pytest.mark.parametrize(("name", "right", "wrong", "fix"), MISTAKES)
def test_each_mistake_has_a_fix_that_passes(meshwright: Any, name: str, right: str, wrong: str, fix: str) -> None:
    file, text = FILES[name]
    assert right in text
    Path(file).write_text(text.replace(right, wrong, 1))
    answer = meshwright("check", file, "--gpus", "8xH100", "--json")
    assert answer.code == 1
    errors = [one for one in answer.json["findings"] if one["severity"] == "error"]
    assert any(fix in line for one in errors for line in one["fix"])
    Path(file).write_text(text.replace(right, "--bf16 true --fp16 false" if "fp16" in fix else fix, 1))
    assert meshwright("check", file, "--gpus", "8xH100").code == 0


def test_a_front_end_may_be_named(meshwright: Any) -> None:
    Path("own.yaml").write_text(AXOLOTL)
    assert "own.yaml with axolotl" in meshwright("check", "own.yaml", "--framework", "axolotl").out


def test_yaml_numbers_without_a_dot_are_numbers(meshwright: Any) -> None:
    for file, text in (FILES["axolotl"], FILES["factory"]):
        Path(file).write_text(text.replace("0.0002", "2e-4").replace("1.0e-4", "1e-4"))
        assert meshwright("check", file).code == 0
