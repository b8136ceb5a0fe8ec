"""A script that launches the user's own program with Accelerate: it stays the program of the job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

CONFIG = """compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
mixed_precision: bf16
num_machines: 4
num_processes: 32
"""
SCRIPT = """accelerate launch --config_file fsdp.yaml --machine_rank $SLURM_NODEID run_clm.py \\
  --model_name_or_path meta-llama/Meta-Llama-3-70B --dataset_name squad --per_device_train_batch_size 2 \\
  --gradient_accumulation_steps 4 --block_size 8192 --learning_rate 1e-5 --num_train_epochs 1 --bf16 True \\
  --gradient_checkpointing True --warmup_ratio 0.03 --lr_scheduler_type cosine --save_steps 200 --output_dir out
"""
STEP = "{{'loss': {:.2f}, 'grad_norm': 1.2, 'learning_rate': 1e-05, 'epoch': {:.2f}}}\n"
END = "{'train_runtime': 29000.0, 'train_steps_per_second': 0.00535, 'train_loss': 1.7, 'epoch': 1.0}\n"


def test_the_doctor_uses_the_engine_of_the_file(meshwright: Any) -> None:
    Path("fsdp.yaml").write_text(CONFIG)
    Path("run_sft.sh").write_text(SCRIPT)
    Path("hf.log").write_text("".join(STEP.format(1.9 - 0.01 * n, 0.02 * n) for n in range(1, 40)) + END)
    said = meshwright("doctor", "hf.log", "--gpus", "32xH100", "--recipe", "run_sft.sh", "--json").json
    assert said["engine"] == "fsdp1"
    planned = meshwright("estimate", "run_sft.sh", "--gpus", "32xH100", "--json").json
    step = next(one for one in said["figures"] if one["name"] == "step time")
    assert step["estimate"] == pytest.approx(planned["estimate"]["step_s"], rel=1e-3)


def test_a_job_runs_the_program_of_the_script_with_its_arguments(meshwright: Any) -> None:
    Path("fsdp.yaml").write_text(CONFIG)
    Path("run_sft.sh").write_text(SCRIPT)
    words = ("launch", "run_sft.sh", "--scheduler", "slurm", "--gpus", "4x8xH100", "--write", "jobs")
    assert meshwright(*words, "checkpoint.save_every=100", "optimizer.lr=2e-5", "data.seq_length=4096").code == 0
    job = Path("jobs/run_sft.sbatch").read_text()
    arguments = SCRIPT.partition("run_clm.py")[2].replace("\\\n", "").split()
    changed = " ".join(arguments).replace("_rate 1e-5", "_rate 2e-05").replace("size 8192", "size 4096")
    changed = changed.replace("output_dir out", f"output_dir {Path('out').resolve()}")  # not in the job's folder
    assert f"run_clm.py {changed.replace('save_steps 200', 'save_steps 100')}" in job
    assert "FSDP_VERSION=1" in job
    assert "FSDP_SHARDING_STRATEGY=FULL_SHARD" in job
    comment, _, rest = Path("jobs/run_sft.yaml").read_text().partition("\n")
    assert (comment.startswith("# not in this file: model="), rest) == (True, CONFIG)
    assert not list(Path("jobs").glob("*.py"))


def test_the_loss_of_a_trainer_keeps_all_logits(meshwright: Any) -> None:
    Path("fsdp.yaml").write_text(CONFIG)
    Path("run_sft.sh").write_text(SCRIPT)
    found = meshwright("estimate", "run_sft.sh", "--gpus", "4x8xH100", "--json").json
    tokens, vocab = found["layout"]["micro_batch_size"] * found["contract"]["seq_length"], 128_256
    assert found["estimate"]["memory_gib"]["logits"] * 2**30 / (tokens * vocab) == pytest.approx(12)
