"""Combinations that other frameworks refuse, arguments that their parsers refuse, and repairs that can be pasted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


def check(meshwright: Any, path: Path, text: str, gpus: str) -> tuple[int, str]:
    """Write the text to a file, check it, and return the exit status and the report."""
    path.write_text(text)
    answer = meshwright("check", str(path), "--gpus", gpus)
    return answer.code, " ".join(answer.out.split())


TITAN = """\
[model]
name = "llama3"
flavor = "70B"
[training]
local_batch_size = 64
global_batch_size = 512
seq_len = 8192
[parallelism]
pipeline_parallel_degree = 4
tensor_parallel_degree = 4
pipeline_parallel_schedule = "{schedule}"
[compile]
enable = {compiled}
"""
MOE = """\
recipe: TrainFinetuneRecipeForNextTokenPrediction
step_scheduler: {{global_batch_size: 64, local_batch_size: 1, max_steps: 100}}
model:
  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained
  pretrained_model_name_or_path: Qwen/Qwen3-30B-A3B
distributed: {{strategy: fsdp2, tp_size: {tp}, ep_size: 8{more}}}
"""


@pytest.mark.parametrize("schedule", ["ZBVZeroBubble", "InterleavedZeroBubble", "DualPipeV"])
def test_torchtitan_cannot_split_the_backward_pass_of_compiled_blocks(
    schedule: str, tmp_path: Path, meshwright: Any
) -> None:
    status, found = check(meshwright, tmp_path / "t.toml", TITAN.format(schedule=schedule, compiled="true"), "8x8xH200")
    assert status == 1
    assert "schedule.compiled-split-backward" in found
    _, found = check(meshwright, tmp_path / "t.toml", TITAN.format(schedule=schedule, compiled="false"), "8x8xH200")
    assert "schedule.compiled-split-backward" not in found
    _, found = check(meshwright, tmp_path / "t.toml", TITAN.format(schedule="1F1B", compiled="true"), "8x8xH200")
    assert "schedule.compiled-split-backward" not in found


def test_no_torchtitan_plan_compiles_blocks_and_splits_the_backward_pass(meshwright: Any) -> None:
    typed = "recommend llama3.1-70b --gpus 16x8xH200 --goal pretrain --seq 8k --engine torchtitan layout.pp=4"
    found = meshwright(*typed.split()).out
    assert "kernels.compile=true" in found
    assert not any(name in found for name in ("zbv", "zero_bubble", "dualpipe_v"))


@pytest.mark.parametrize(
    ("tp", "more", "severity"),
    [(2, "", "error"), (1, "", ""), (2, ", tp_plan: my.plan", "warning"), (2, ", tp_plan: null", "error")],
)
def test_automodel_has_no_tensor_parallelism_beside_expert_parallelism(
    tp: int, more: str, severity: str, tmp_path: Path, meshwright: Any
) -> None:
    _, found = check(meshwright, tmp_path / "moe.yaml", MOE.format(tp=tp, more=more), "4x8xH100")
    assert ("automodel.experts-with-tensor-parallelism" in found) is bool(severity)
    assert ("fix: distributed.tp_size: 1" in found) is bool(severity)
    assert not severity or f"{severity} {tmp_path}/moe.yaml:6 tp_size=2 with ep_size=8" in found
    assert "moe.tensor-parallel-experts" not in found


@pytest.mark.parametrize(
    ("message", "rule"),
    [
        ("AssertionError: Tensor parallelism not supported for custom MoE models", "moe.tensor-parallel-experts"),
        ("RuntimeError: The ZBVZeroBubble schedule is not supported with stage modules that have used torch.compile. "
            "Found OptimizedModule in OptimizedModule", "schedule.compiled-split-backward"),
        ("RuntimeError: This backward function was compiled with non-empty donated buffers which requires "
            "create_graph=False and retain_graph=False.", "schedule.compiled-split-backward"),
    ],
)  # fmt: skip
def test_messages_of_these_combinations_are_known(message: str, rule: str, meshwright: Any) -> None:
    assert f"1. {rule}" in meshwright("explain", message).out


RUN = """\
deepspeed --num_nodes 4 --num_gpus 8 train.py --model_name_or_path meta-llama/Llama-3.1-70B --bf16 True \\
    --output_dir out --max_steps 2000 --per_device_train_batch_size 2 --gradient_accumulation_steps 4 \\
    --learning_rate 1e-5 --model_max_length 8192 --gradient_checkpointing {value} {more} --deepspeed ds.json
"""
ZERO3 = """{"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}, "train_micro_batch_size_per_gpu": "auto",
"gradient_accumulation_steps": "auto", "train_batch_size": "auto"}"""


@pytest.mark.parametrize(
    ("value", "more", "refused"),
    [
        ("full", "", "--gradient_checkpointing full"),
        ("True", "--save_strategy step", "--save_strategy step"),
        ("true", "--save_strategy steps", ""),
        ("1", "", ""),
    ],
)
def test_values_that_the_trainers_parser_refuses_are_errors(
    value: str, more: str, refused: str, tmp_path: Path, meshwright: Any
) -> None:
    (tmp_path / "ds.json").write_text(ZERO3)
    _, found = check(meshwright, tmp_path / "run.sh", RUN.format(value=value, more=more), "4x8xA100-80GB")
    assert ("deepspeed.argument-refused" in found) is bool(refused)
    assert refused in found
    assert "--gradient_checkpointing full" not in found or value == "full"


def test_a_fix_of_a_trainer_switch_is_true_or_false(tmp_path: Path, meshwright: Any) -> None:
    (tmp_path / "ds.json").write_text(ZERO3)
    _, found = check(meshwright, tmp_path / "run.sh", RUN.format(value="False", more=""), "4x8xA100-80GB")
    assert "--gradient_checkpointing True" in found
    assert "--gradient_checkpointing full" not in found


BRIDGE = """\
import argparse
import os
from megatron.bridge.recipes.llama import llama3_8b_pretrain_config

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="/lustre/run1")
args = parser.parse_args()
cfg = llama3_8b_pretrain_config()
cfg.train.train_iters = 40000
cfg.dataset.blend = [["/data/text"], None]
cfg.checkpoint.save = {path}
cfg.checkpoint.save_interval = 50000
"""


@pytest.mark.parametrize(
    "path",
    [
        '"/lustre/run1"',
        'os.environ.get("CKPT", "/lustre/run1")',
        'os.getenv("CKPT", "/lustre/run1")',
        'os.environ["CKPT"]',
        "args.out",
        'f"{args.out}/ckpt"',
        "folder_of(args)",
    ],
)
def test_the_interval_of_checkpoints_is_checked_whatever_names_their_folder(
    path: str, tmp_path: Path, meshwright: Any
) -> None:
    _, found = check(meshwright, tmp_path / "run.py", BRIDGE.format(path=path), "4x8xH100")
    assert "saving.only-at-the-end" in found


MOE_BRIDGE = """\
from megatron.bridge.recipes.qwen import qwen3_235b_a22b_pretrain_config

cfg = qwen3_235b_a22b_pretrain_config()
cfg.model.tensor_model_parallel_size = 4
cfg.model.sequence_parallel = False
cfg.dataset.blend = [["/data/text"], None]
"""


def test_a_pipeline_layout_string_can_be_pasted(tmp_path: Path, meshwright: Any) -> None:
    path = tmp_path / "run.py"
    path.write_text(MOE_BRIDGE)
    layout = "|".join(["E" + "t" * 11, *["t" * 12] * 6, "t" * 11 + "L"])
    pasted = ("model.pipeline_model_parallel_size=8", f'model.pipeline_model_parallel_layout="{layout}"')
    answer = meshwright("check", str(path), "--gpus", "16x8xH200", *pasted)
    assert answer.code < 2, answer.err
    assert "layout string" not in answer.out + answer.err
