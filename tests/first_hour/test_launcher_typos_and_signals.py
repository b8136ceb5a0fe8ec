"""Options of launchers with a wrong letter, and a signal that reaches only the shell of a job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

CONFIG = """compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
mixed_precision: bf16
num_machines: 1
"""
ARGUMENTS = "--model_name_or_path meta-llama/Llama-3.2-1B --train_file chats.jsonl --per_device_train_batch_size 1"
ARGUMENTS += " --max_steps 100 --output_dir out --bf16"


def findings(meshwright: Any, command: str, head: str = "#!/bin/bash", before: str = "") -> list[dict[str, Any]]:
    Path("acc.yaml").write_text(CONFIG)
    Path("run.sh").write_text(f"{head}\n{before}{command} run_clm.py {ARGUMENTS}\n")
    found: list[dict[str, Any]] = meshwright("check", "run.sh", "--gpus", "4xA100-80", "--json").json["findings"]
    return found


ACCELERATE = "accelerate launch --config_file acc.yaml"


@pytest.mark.parametrize(
    ("command", "fix"),
    [
        (f"{ACCELERATE} --num_proceses 4", "accelerate launch --num_processes 4"),
        (f"{ACCELERATE} --num-proccesses=4", "accelerate launch --num_processes 4"),
        ("torchrun --nproc_per_nodes 4", "torchrun --nproc_per_node=4"),
        ("torchrun --nproc_per_node 4 --standallone", "torchrun --standalone"),
        (f"{ACCELERATE} --num_processes 4 --multi_gp", "accelerate launch --multi_gpu"),
        (f"{ACCELERATE} --multi_gp --num_processes 4", "accelerate launch --multi_gpu"),
        ("deepspeed --num_gups 4", "deepspeed --num_gpus 4"),
        ("deepspeed --inclde localhost:0,1,2,3", "deepspeed --include localhost:0,1,2,3"),
        ("deepspeed --hotsfile hosts --num_gpus 4", "deepspeed --hostfile hosts"),
        ("deepspeed --num_gpus 4 --forc_multi", "deepspeed --force_multi"),
    ],
)
def test_a_mistyped_option_of_a_launcher_has_the_right_one_as_fix(meshwright: Any, command: str, fix: str) -> None:
    (error,) = [one for one in findings(meshwright, command) if one["rule"] == "key.unknown"]
    assert (error["severity"], error["fix"]) == ("error", [fix])
    fixed = fix if fix.startswith("torchrun") else fix.replace("launch", "launch --config_file acc.yaml")
    assert "key.unknown" not in {one["rule"] for one in findings(meshwright, fixed)}


@pytest.mark.parametrize(
    "command",
    [
        f"{ACCELERATE} --num_processes 4 --main-process-port 29501 --multi_gpu --num_machines 1",
        f"{ACCELERATE} --num_processes 4 --megatron_lm_tp_degree 2 --tpu_zone x --debug",
        "torchrun --nproc_per_n 4",  # torchrun's parser takes the beginning of an option
        "torchrun --nproc_per_node 4 --standalon",
        "deepspeed --num_gpu 4 --hostfil hosts --force_m",  # so does that of deepspeed
        "deepspeed --includ localhost:0,1,2,3",
        "torchrun --nproc-per-node=4 --rdzv_backend c10d --rdzv-endpoint localhost:0 --log_dir logs",
    ],
)
def test_options_that_a_launcher_has_are_known(meshwright: Any, command: str) -> None:
    assert "key.unknown" not in {one["rule"] for one in findings(meshwright, command)}


@pytest.mark.parametrize("before", ["accelerate launch --multi_gp -m", "accelerate launch --multi_gp"])
def test_a_module_and_a_program_after_a_mistyped_switch_are_found(meshwright: Any, before: str) -> None:
    Path("sft.py").write_text("from transformers import Trainer\n")
    Path("run.sh").write_text(f"{before} {'sft' if before.endswith('-m') else 'sft.py'} {ARGUMENTS}\n")
    answer = meshwright("check", "run.sh", "--gpus", "4xA100-80", "--json").json
    (error,) = [one for one in answer["findings"] if one["rule"] == "key.unknown"]
    assert error["fix"] == ["accelerate launch --multi_gpu"]


def test_the_beginning_of_an_option_is_that_option(meshwright: Any) -> None:
    found = findings(meshwright, "deepspeed --num_gpu 8")
    assert [one["fix"] for one in found if one["rule"] == "launch.gpus"] == [["deepspeed --num_gpus 4"]]


HEAD = "#!/bin/bash\n#SBATCH --gpus-per-node=4\n#SBATCH --signal=B:USR1@120"


@pytest.mark.parametrize(
    ("before", "is_reported"),
    [
        ("source ~/venvs/trl/bin/activate\n", True),
        ('source "$(conda info --base)/etc/profile.d/conda.sh"  # conda\n', True),
        (". ~/.bashrc && conda activate trl\n", True),
        ("source ./signals.sh\n", False),
        ("trap 'kill -TERM $PID' USR1\n", False),
    ],
)
def test_a_signal_of_the_shell_that_nothing_traps_is_reported(meshwright: Any, before: str, is_reported: bool) -> None:
    found = findings(meshwright, "torchrun --nproc_per_node 4", HEAD, before)
    reported = [one for one in found if one["rule"] == "launch.signal"]
    assert bool(reported) == is_reported
    assert all("has no trap for USR1" in one["message"] for one in reported)
