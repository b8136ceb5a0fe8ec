"""Command lines of the Hugging Face Trainer: length, warmup, schedule and data are read, none is lost silently."""

from __future__ import annotations

import json
import shlex
import tomllib
from pathlib import Path
from typing import Any

MEGATRON = """torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32 \\
  --ffn-hidden-size 11008 --swiglu --group-query-attention --num-query-groups 32 --normalization RMSNorm \\
  --position-embedding-type rope --untie-embeddings-and-output-weights --disable-bias-linear --seq-length 4096 \\
  --max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 64 --train-iters 100 --lr 1e-4 --bf16 \\
  --tokenizer-type HuggingFaceTokenizer --tokenizer-model /lustre/tok --vocab-size 32000 \\
  --data-path 0.7 /lustre/c4 0.3 /lustre/code --split 99,1,0
"""
TITAN = """[model]
name = "llama3"
flavor = "70B"
[optimizer]
lr = 1.5e-4
[training]
local_batch_size = 8
global_batch_size = 512
seq_len = 8192
steps = 1000
dataset = "c4"
[parallelism]
tensor_parallel_degree = 8
pipeline_parallel_degree = 4
pipeline_parallel_schedule = "Interleaved1F1B"
"""
JSON = """{
  "bf16": {"enabled": "auto"},
  "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
  "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
  "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"
}
"""
COMMAND = """deepspeed --num_nodes 2 --num_gpus 8 run_clm.py --deepspeed ds.json \\
  --model_name_or_path meta-llama/Llama-2-13b-hf --per_device_train_batch_size 4 --gradient_accumulation_steps 2 \\
  --learning_rate 2e-5 --bf16 True --output_dir out"""
BY_EPOCHS = """ --block_size 4096 --gradient_checkpointing True --dataset_name wikitext --num_train_epochs 1 \\
  --lr_scheduler_type cosine --warmup_ratio 0.03 --report_to wandb --save_strategy epoch"""
BY_STEPS = """ --max_seq_length 2048 --train_file chats.jsonl --validation_file held.jsonl --max_steps 500 \\
  --warmup_steps 77 --weight_decay 0.1 --adam_beta2 0.95 --max_grad_norm 0.5 --seed 7 --logging_steps 5 \\
  --eval_strategy steps --eval_steps 50 --save_steps 100 --save_total_limit 2 --optim adamw_bnb_8bit"""
HERE = ("--gpus", "2x8xH100")


def test_a_typed_dataset_replaces_the_blend_of_a_file(meshwright: Any) -> None:
    Path("pretrain.sh").write_text(MEGATRON)
    run = meshwright("recommend", "pretrain.sh", "--gpus", "8xH100", "--json").json["commands"]["meshwright"]
    assert "--dataset" not in run  # the file's blend is what trains
    kept = meshwright("import", "pretrain.sh", "--gpus", "8xH100").out
    assert "c4" in kept
    typed = meshwright("import", "pretrain.sh", "--gpus", "8xH100", "data.dataset=mock").out
    assert "c4" not in typed
    words = ("train", "pretrain.sh", "--dataset", "mock", "--tiny", "train.steps=1", "--out", "run")
    assert meshwright(*words).code == 0


def test_another_engine_gets_the_unequal_stages_of_torchtitan(meshwright: Any) -> None:
    Path("titan.toml").write_text(TITAN)
    assert meshwright("check", "titan.toml", "--gpus", "16x8xH100").code == 0
    read = meshwright("import", "titan.toml", "--gpus", "16x8xH100", "--out", "ours.toml")
    assert "stage_layers = [10, 11, 10, 10, 10, 10, 10, 9]" in Path("ours.toml").read_text()
    assert "layout.stage_layers=[10,11,10,10,10,10,10,9]: as torchtitan splits the layers" in read.out + read.err
    assert "even-split" not in meshwright("check", "ours.toml").out


def test_the_fix_of_a_mount_names_the_typed_path(meshwright: Any) -> None:
    words = ("launch", "llama3_8b_pretrain_config", "--scheduler", "slurm", "--gpus", "8xH100", "--image", "x.sqsh")
    assert "--mount /lustre:/lustre" in meshwright(*words, "--mount", "/lustre", "--write", "jobs").err


def test_the_arguments_of_a_trainer_are_read(meshwright: Any) -> None:
    Path("ds.json").write_text(JSON)
    Path("epochs.sh").write_text(COMMAND + BY_EPOCHS)
    Path("steps.sh").write_text(COMMAND + BY_STEPS)
    Path("bare.sh").write_text(COMMAND)

    def read(*words: str) -> tuple[dict[str, Any], str]:
        found = meshwright("import", *words, *HERE)
        return tomllib.loads(found.out), found.err

    ours, said = read("epochs.sh")
    assert (ours["train"]["epochs"], ours["data"]["dataset"], ours["layout"]["recompute"]) == (1.0, "wikitext", "full")
    assert ours["optimizer"]["weight_decay"] == 0.0  # the Trainer's own, as its length and its schedule below
    assert "does not say how long" not in said
    assert ours["schedule"]["warmup_steps"] == 8
    assert "schedule.warmup_steps=8, 3 % of the 261 steps counted in the data" in said  # by wikitext's card
    for lost in ("--output_dir=out", "--report_to=wandb", "save_strategy at the end of every epoch"):
        assert lost in said, said
    assert read("epochs.sh", "train.steps=1000")[0]["schedule"]["warmup_steps"] == 30
    Path("uncounted.sh").write_text((COMMAND + BY_EPOCHS).replace("wikitext", "me/mine"))
    assert "warms up for 3 % of its steps, whose number follows from the data" in read("uncounted.sh")[1]

    ours, said = read("steps.sh")
    expected = {
        "data": {"dataset": "chats.jsonl", "validation": "held.jsonl", "seq_length": 2048},
        "train": {"steps": 500, "seed": 7, "log_every": 5, "eval_every": 50},
        "optimizer": {"name": "adamw8bit", "lr": 2e-5, "clip_grad": 0.5},
        "schedule": {"name": "linear", "warmup_steps": 77, "min_lr": 0.0},
        "checkpoint": {"save_every": 100, "keep": 2},
    }
    for section, fields in expected.items():
        assert fields.items() <= ours[section].items(), (section, ours[section])
    assert ours["optimizer"].get("weight_decay", 0.1) == 0.1

    ours, said = read("bare.sh")
    assert ours["train"]["epochs"] == 3.0
    assert "3 epochs, the Trainer's default" in said
    assert ours["data"]["dataset"] == "DATA"
    shown = meshwright("compare", "epochs.sh", "steps.sh", *HERE).out
    assert "300000" not in shown
    assert "300,000" not in shown


def test_printed_commands_of_a_trainer_file_run_as_typed(meshwright: Any) -> None:
    Path("ds.json").write_text(JSON)
    Path("epochs.sh").write_text(COMMAND + BY_EPOCHS)
    Path("bare.sh").write_text(COMMAND)
    commands = meshwright("recommend", "epochs.sh", *HERE, "--json").json["commands"]
    exported = meshwright(*shlex.split(commands["deepspeed"])[1:])
    assert exported.code == 0
    assert "--report_to wandb" in exported.out  # kept
    assert not list(Path("deepspeed").glob("*.py"))  # the program keeps its own arguments
    config = Path("deepspeed", "ds_config.json").read_text()
    assert not {"scheduler", "optimizer"} & json.loads(config).keys()  # left to the Trainer, as in the user's file
    for words in ("epochs.sh", "bare.sh"):
        for command in meshwright("recommend", words, "--gpus", "8x8xB200", "--json").json["commands"].values():
            assert "program" not in command
    open_length = ("recommend", "ds.json", "--model", "llama3-8b", "--goal", "sft", "--gpus", "8xH100", "--json")
    assert "deepspeed" not in meshwright(*open_length).json["commands"]
    assert "Memory" in meshwright("check", "epochs.sh", *HERE).out


def test_what_export_writes_is_read_with_its_arguments(meshwright: Any) -> None:
    for to, recipe in (("deepspeed", "llama3_8b_pretrain_config"), ("accelerate", "llama3_8b_peft_config")):
        words = ("layout.recompute=full", "train.global_batch_size=64", "data.seq_length=2048", "train.epochs=2")
        changes = words if to == "accelerate" else (*words[:3], "train.steps=70")
        assert meshwright("export", recipe, "--to", to, "--gpus", "8xH100", "--out", to, *changes).code == 0
        for path in sorted(Path(to).iterdir()):
            read = meshwright("import", str(path), "--gpus", "8xH100", "--model", "llama3-8b")
            ours = tomllib.loads(read.out)
            assert ours["layout"]["recompute"] == "full", path
            assert ours["train"]["global_batch_size"] == 64, path
            assert ours["data"]["seq_length"] == 2048, path
            length = ("epochs", 2.0) if to == "accelerate" else ("steps", 70)
            assert ours["train"][length[0]] == length[1], path
