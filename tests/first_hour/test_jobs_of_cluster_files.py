"""Files of DeepSpeed, Accelerate, torchtitan and Megatron-LM: jobs keep what the files say."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from .mistakes import call

DS_CONFIG = """{
  "train_micro_batch_size_per_gpu": 2,
  "gradient_accumulation_steps": 1,
  "gradient_clipping": 0.5,
  "bf16": {"enabled": true},
  "zero_optimization": {
    "stage": 3,
    "overlap_comm": true,
    "reduce_bucket_size": "auto",
    "stage3_max_live_parameters": 1e9,
    "stage3_gather_16bit_weights_on_model_save": true
  }
}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds_config.json").write_text(DS_CONFIG)
    return tmp_path


def test_a_changed_length_adds_no_scheduler_without_a_type(folder: Path) -> None:
    words = ("--model", "llama3-8b", "--gpus", "8xH100", "data.seq_length=4096")
    changes = ("train.steps=1000", "optimizer.lr=1e-4", "layout.recompute=full")
    found = call("export", "ds_config.json", "--to", "deepspeed", *words, *changes, "--out", "job")
    assert found.code == 0, found.err
    written = json.loads((folder / "job/ds_config.json").read_text())
    assert written == json.loads(DS_CONFIG)
    arguments = (folder / "job/ds_config_args.py").read_text()
    assert "max_steps=1000," in arguments
    assert "learning_rate=0.0001," in arguments


@pytest.mark.parametrize("section", ["scheduler", "optimizer"])
def test_a_section_without_a_type_is_an_error(folder: Path, section: str) -> None:
    config = {**json.loads(DS_CONFIG), section: {"params": {"lr" if section == "optimizer" else "warmup_num_steps": 2}}}
    (folder / "ds_config.json").write_text(json.dumps(config))
    found = call("check", "ds_config.json", "--model", "llama3-8b", "--gpus", "8xH100")
    assert found.code == 1
    (one,) = [one for one in found.json["findings"] if one["rule"] == "deepspeed.no-type"]
    assert section in one["message"]


ACCELERATE = """compute_environment: LOCAL_MACHINE
deepspeed_config:
  deepspeed_config_file: ds_config.json
  zero3_init_flag: true
distributed_type: DEEPSPEED
machine_rank: 0
main_process_ip: 10.0.0.1
main_process_port: 29500
num_machines: 1
num_processes: 8
"""
ON = ("--model", "llama3-8b", "--gpus", "8xH100", "data.seq_length=4096", "layout.recompute=full")


def with_settings(folder: Path, **settings: object) -> None:
    (folder / "ds_config.json").write_text(json.dumps({**json.loads(DS_CONFIG), **settings}))


def imported(name: str) -> dict[str, Any]:
    return tomllib.loads(call("import", name, *ON).json["text"])


def test_an_accelerate_config_has_all_settings_of_its_deepspeed_config(folder: Path) -> None:
    (folder / "accelerate.yaml").write_text(ACCELERATE)
    optimizer = {"type": "AdamW", "params": {"lr": 2e-4, "weight_decay": 0.2}}
    with_settings(folder, train_batch_size="auto", gradient_accumulation_steps=4, optimizer=optimizer)
    alone, named = (imported(name) for name in ("ds_config.json", "accelerate.yaml"))
    assert named["train"]["global_batch_size"] == 64
    assert named["layout"]["micro_batch_size"] == 2
    assert named["optimizer"] == alone["optimizer"]
    assert named["precision"] == alone["precision"]
    checked = [call("check", name, *ON).json for name in ("ds_config.json", "accelerate.yaml")]
    assert checked[0]["estimate"] == checked[1]["estimate"]
    assert not any("assumed" in note for note in checked[1]["notes"])


def test_auto_of_the_deepspeed_config_is_the_argument_of_the_trainer(folder: Path) -> None:
    (folder / "accelerate.yaml").write_text(ACCELERATE)
    with_settings(folder, train_micro_batch_size_per_gpu="auto", gradient_accumulation_steps="auto")
    assert any("micro batch 1 is assumed" in note for note in call("check", "accelerate.yaml", *ON).json["notes"])
    command = "accelerate launch --config_file accelerate.yaml train.py --output_dir out --max_steps 10 "
    (folder / "run.sh").write_text(f"{command}--per_device_train_batch_size 3 --gradient_accumulation_steps 5\n")
    assert imported("run.sh")["train"]["global_batch_size"] == 3 * 5 * 8


def variables(script: str) -> dict[str, str]:
    lines = [line.removeprefix("export ") for line in script.splitlines() if line.startswith("export ACCELERATE")]
    return dict(line.split("=", 1) for line in lines)


def test_an_accelerate_job_keeps_deepspeed_and_its_config(folder: Path) -> None:
    (folder / "accelerate.yaml").write_text(ACCELERATE)
    words = ("--scheduler", "slurm", "--write", "job", "train.steps=1000")
    found = call("launch", "accelerate.yaml", *ON, *words, "layout.micro_batch_size=1")
    assert found.code == 0, found.err
    config = (folder / "job/accelerate.yaml").read_text()
    assert "distributed_type: DEEPSPEED" in config
    assert "deepspeed_config_file: ds_config.json" in config
    inner = json.loads((folder / "job/ds_config.json").read_text())
    assert (inner["train_micro_batch_size_per_gpu"], inner["gradient_accumulation_steps"]) == (1, 2)
    assert inner["zero_optimization"] == json.loads(DS_CONFIG)["zero_optimization"]
    env = variables((folder / "job/accelerate.sbatch").read_text())
    assert env["ACCELERATE_USE_DEEPSPEED"] == "true"
    assert env["ACCELERATE_DEEPSPEED_CONFIG_FILE"] == "ds_config.json"
    assert not any("FSDP" in name for name in env)
    assert "bf16=True" in (folder / "job/accelerate_args.py").read_text()  # the Trainer compares it with the config
    assert call("check", "job/accelerate.yaml", *ON).code == 0


def test_a_stage_in_the_yaml_stays_deepspeed(folder: Path) -> None:
    text = ACCELERATE.replace("deepspeed_config_file: ds_config.json", "zero_stage: 3") + "mixed_precision: bf16\n"
    (folder / "accelerate.yaml").write_text(text)
    found = call("export", "accelerate.yaml", "--to", "accelerate", *ON, "train.steps=1000", "--out", "job")
    assert found.code == 0, found.err
    assert (folder / "job/accelerate.yaml").read_text().endswith(text)


def test_an_accelerate_config_exports_its_deepspeed_config(folder: Path) -> None:
    (folder / "accelerate.yaml").write_text(ACCELERATE)
    found = call("export", "accelerate.yaml", "--to", "deepspeed", *ON, "train.steps=1000", "--out", "job")
    assert found.code == 0, found.err
    assert json.loads((folder / "job/ds_config.json").read_text()) == json.loads(DS_CONFIG)


def test_a_command_of_accelerate_keeps_its_program_and_deepspeed(folder: Path) -> None:
    (folder / "accelerate.yaml").write_text(ACCELERATE)
    with_settings(folder, train_micro_batch_size_per_gpu="auto")
    (folder / "train.py").write_text("print('train')\n")
    arguments = "--output_dir out --max_steps 10 --per_device_train_batch_size 3 --bf16 true"
    (folder / "run.sh").write_text(f"accelerate launch --config_file accelerate.yaml train.py {arguments}\n")
    found = call("launch", "run.sh", *ON, "--scheduler", "torchrun", "--write", "job")
    assert found.code == 0, found.err
    inner = json.loads((folder / "job/ds_config.json").read_text())
    assert inner["train_micro_batch_size_per_gpu"] == "auto"
    command = found.json["commands"][0]
    assert f"ACCELERATE_DEEPSPEED_CONFIG_FILE={folder / 'job/ds_config.json'}" in command
    assert "--per_device_train_batch_size 3" in command


OWN = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 1024, "intermediate_size": 2816,
    "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 100352,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False,
    "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip
TITAN = """[model]
name = "llama3"
flavor = "13B"
hf_assets_path = "/lustre/tok/ours100k"

[training]
local_batch_size = 1
seq_len = 4096
steps = 100
dataset = "c4"

[parallelism]
data_parallel_shard_degree = -1
"""


def own_model(folder: Path) -> None:
    (folder / "ours").mkdir()
    (folder / "ours/config.json").write_text(json.dumps(OWN))


def test_a_torchtitan_job_uses_the_flavor_of_the_module_that_it_writes(folder: Path) -> None:
    own_model(folder)
    (folder / "titan.toml").write_text(TITAN)
    words = ("--model", "ours", "--gpus", "8xH100")
    assert call("export", "titan.toml", "--to", "torchtitan", *words, "--out", "job").code == 0
    config = tomllib.loads((folder / "job/config.toml").read_text())
    assert config["model"]["flavor"] == "ours"
    assert config["experimental"]["custom_import"] == "own_model"
    assert 'llama3_args["ours"]' in (folder / "job/own_model.py").read_text()
    back = call("check", "job/config.toml", "--gpus", "8xH100")
    assert back.code == 0, back.err
    assert back.json["estimate"] == call("check", "titan.toml", *words).json["estimate"]


def test_a_flavor_of_the_users_own_module_stays(folder: Path) -> None:
    own_model(folder)
    (folder / "titan.toml").write_text(TITAN + '\n[experimental]\ncustom_import = "our_models"\n')
    words = ("--model", "ours", "--gpus", "8xH100")
    assert call("export", "titan.toml", "--to", "torchtitan", *words, "--out", "job").code == 0
    config = tomllib.loads((folder / "job/config.toml").read_text())
    assert (config["model"]["flavor"], config["experimental"]["custom_import"]) == ("13B", "our_models")
    assert not (folder / "job/own_model.py").exists()


def test_a_reader_that_closes_the_pipe_does_not_turn_errors_into_success(folder: Path) -> None:
    with_settings(folder, scheduler={"params": {}}, optimizer={"params": {"lr": 0.1}})
    command = [
        sys.executable,
        "-m",
        "meshwright",
        "check",
        "ds_config.json",
        "--model",
        "llama3-8b",
        "--gpus",
        "8xH100",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait() == 1


LLAMA_SIZES = """torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py --num-layers 42 --hidden-size 5120 \\
  --ffn-hidden-size 13824 --num-attention-heads 40 --group-query-attention --num-query-groups 10 --kv-channels 128 \\
  --seq-length 8192 --max-position-embeddings 8192 --position-embedding-type rope --rotary-base 500000 \\
  --normalization RMSNorm --swiglu --vocab-size 100352 --disable-bias-linear --untie-embeddings-and-output-weights \\
  --micro-batch-size 1 --global-batch-size 512 --train-iters 1000 --lr 3e-4 --bf16 --use-distributed-optimizer \\
  --tokenizer-type HuggingFaceTokenizer --tokenizer-model /lustre/tok --data-path /lustre/data/mix \\
  --tensor-model-parallel-size 2 --sequence-parallel --recompute-granularity full --recompute-method uniform \\
  --recompute-num-layers 1
"""


def test_a_script_that_only_states_sizes_is_a_plain_llama(folder: Path) -> None:
    (folder / "pretrain.sh").write_text(LLAMA_SIZES)
    found = call("import", "pretrain.sh", "--gpus", "8xH100")
    recipe = tomllib.loads(found.json["text"])
    assert recipe["model"].startswith("llama")
    assert recipe["architecture"]["vocab"] == 100352
    assert call("export", "pretrain.sh", "--to", "torchtitan", "--gpus", "8xH100").code == 0


SBATCH = """#!/bin/bash
#SBATCH --nodes=1
#SBATCH --gpus-per-node=8
export NCCL_IB_HCA=mlx5
CKPT=/lustre/ckpt/ours/$(date +%m%d)
cd /lustre/code/Megatron-LM
srun """


def megatron_job(folder: Path) -> None:
    text = LLAMA_SIZES.replace("--data-path /lustre/data/mix", "--data-path $(cat /lustre/blend.txt)")
    text = text.replace("--bf16", "--bf16 --save $CKPT --load $CKPT --save-interval 100")
    (folder / "ours.sbatch").write_text(SBATCH + text)


def test_a_checkpoint_folder_with_the_date_is_a_finding(folder: Path) -> None:
    megatron_job(folder)
    found = call("check", "ours.sbatch", "--gpus", "8xH100").json["findings"]
    (one,) = [one for one in found if one["rule"] == "saving.new-folder"]
    assert one["fix"] == ["--save /lustre/ckpt/ours"]


def test_a_job_of_a_script_says_which_data_it_could_not_read(folder: Path) -> None:
    megatron_job(folder)
    words = ("launch", "ours.sbatch", "--gpus", "8xH100", "--scheduler", "slurm", "--write", "job")
    found = call(*words)
    assert found.code != 0
    assert "--data-path $(cat /lustre/blend.txt): command substitution is not executed" in found.out + found.err
    found = call(*words, "data.dataset=/lustre/data/mix")
    assert found.code == 0, found.err
    script = (folder / "job/ours.sbatch").read_text()
    assert "# set in ours.sbatch:4\nexport NCCL_IB_HCA=mlx5" in script
    assert "/lustre/code/Megatron-LM/pretrain_gpt.py" in script
    assert not any("data.dataset=/lustre/data/mix is assumed" in note for note in found.json["notes"])


def test_an_assumed_vocabulary_does_not_differ_from_the_given_model(folder: Path) -> None:
    own_model(folder)
    sizes = {"42": "8", "5120": "1024", "13824": "2816", "40 ": "16 ", "10 ": "4 ", "128": "64"}
    text = LLAMA_SIZES.replace("--vocab-size 100352 ", "")
    for old, new in sizes.items():
        text = text.replace(f" {old}", f" {new}")
    (folder / "ours.sh").write_text(text)
    found = call("check", "ours.sh", "--gpus", "8xH100", "--model", "ours").json
    assert not [one for one in found["findings"] if one["rule"].startswith("model.differs")], found["findings"]
    assert not any("50257" in note for note in found["notes"])


def test_a_job_of_a_model_says_how_long_it_trains(folder: Path) -> None:
    own_model(folder)
    words = ("launch", "ours", "--goal", "pretrain", "--to", "megatron-lm", "--gpus", "8xH100", "--scheduler", "slurm")
    said = call(*words, "--write", "job").err
    assert "the job trains " in said
    assert "write train.steps=N for another length" in said
    assert "the job trains " not in call(*words, "--write", "other", "train.steps=1000").err


def test_size_says_which_batch_it_sizes_and_the_failures_of_the_soonest_count(folder: Path) -> None:
    own_model(folder)
    words = ("size", "ours", "--goal", "pretrain", "--gpu", "H100", "--tokens", "2T", "--days", "0.01")
    found = call(*words).json
    assert any("sequences per step, from the recipe" in one["message"] for one in found["assumed"])
    soonest = min((one for one in found["sizes"] if one["fits"]), key=lambda one: one["days"])
    assert found["reliability"]["gpus"] == soonest["gpus"]


def test_a_job_of_a_deepspeed_config_reads_the_config_that_it_writes(folder: Path) -> None:
    words = ("--scheduler", "slurm", "--write", "job", "train.steps=1000", "layout.micro_batch_size=1")
    found = call("launch", "ds_config.json", *ON, *words)
    assert found.code == 0, found.err
    script = (folder / "job/ds_config.sbatch").read_text()
    assert "--deepspeed ds_config.json" in script
    assert str(folder / "ds_config.json") not in script


def test_a_seed_that_the_rng_block_repeats_is_no_finding(folder: Path) -> None:
    text = "recipe: TrainFinetuneRecipeForNextTokenPrediction\nstep_scheduler:\n  local_batch_size: 1\n"
    text += "model:\n  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_config\n"
    text += "  pretrained_model_name_or_path: meta-llama/Llama-3.1-8B\nrng:\n  seed: 1111\n"
    rules = []
    for more in ("", "seed: 1111\n"):
        (folder / "model.yaml").write_text(text + more)
        found = call("check", "model.yaml", "--gpus", "8xH100").json["findings"]
        rules.append("automodel.rng-ignored" in [one["rule"] for one in found])
    assert rules == [True, False]
