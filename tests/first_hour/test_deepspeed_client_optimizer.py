"""An optimizer of the Trainer beside a DeepSpeed config that offloads the optimizer states."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

AXOLOTL = """base_model: meta-llama/Llama-3.1-8B-Instruct
datasets:
  - path: tatsu-lab/alpaca
    type: alpaca
adapter: lora
lora_r: 16
lora_alpha: 32
lora_target_linear: true
sequence_len: 2048
micro_batch_size: 1
gradient_accumulation_steps: 4
num_epochs: 1
learning_rate: 2e-4
gradient_checkpointing: true
flash_attention: true
bf16: true
deepspeed: ds.json
output_dir: out
optimizer: {optimizer}
"""
COMMAND = (
    "torchrun --nproc_per_node 4 run_clm.py --model_name_or_path meta-llama/Llama-3.1-8B-Instruct --dataset_name "
    "wikitext --do_train --output_dir out --deepspeed ds.json --per_device_train_batch_size 1 --bf16 "
    "--weight_decay 0.1 --optim {optimizer}\n"
)
OFFLOAD = {"stage": 2, "offload_optimizer": {"device": "cpu"}}


@pytest.fixture
def check(meshwright: Any) -> Any:
    def run(file: str, text: str, zero: dict[str, Any] = OFFLOAD, **more: Any) -> list[dict[str, Any]]:
        sizes = ("gradient_accumulation_steps", "train_batch_size", "train_micro_batch_size_per_gpu")
        config = {"zero_optimization": zero, "bf16": {"enabled": "auto"}, **dict.fromkeys(sizes, "auto"), **more}
        Path("ds.json").write_text(json.dumps(config))
        Path(file).write_text(text)
        found = meshwright("check", file, "--gpus", "4xL40S", "--json").json["findings"]
        return [one for one in found if "DeepSpeedCPUAdam" in one["message"]]

    return run


@pytest.mark.parametrize(
    ("file", "text", "fix", "optimizer"),
    [
        ("a.yml", AXOLOTL, "optimizer: adamw_torch", "adamw_bnb_8bit"),
        ("a.yml", AXOLOTL, "optimizer: adamw_torch", "lion_8bit"),
        ("run.sh", COMMAND, "--optim adamw_torch", "paged_adamw_8bit"),
        ("run.sh", COMMAND, "--optim adamw_torch", "adafactor"),
    ],
)
def test_another_optimizer_does_not_run_where_states_are_offloaded(
    check: Any, file: str, text: str, fix: str, optimizer: str
) -> None:
    (found,) = check(file, text.format(optimizer=optimizer))
    assert (found["rule"], found["severity"], found["fix"]) == ("key.unused", "warning", [fix])
    assert fix.replace("adamw_torch", optimizer) in found["message"]
    is_decayed_adamw = "adamw" in optimizer and "weight_decay" in text
    assert ("L2 penalty" in found["message"]) == is_decayed_adamw
    assert not check(file, text.format(optimizer="adamw_torch"))


@pytest.mark.parametrize(
    "config",
    [
        {"zero": {"stage": 2}},
        {"zero_force_ds_cpu_optimizer": False},
        {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}},
    ],
)
def test_an_optimizer_that_runs_or_is_the_configs_own_has_no_finding(check: Any, config: dict[str, Any]) -> None:
    assert not check("run.sh", COMMAND.format(optimizer="adafactor"), **config)


def test_doctor_knows_the_error_of_a_program_with_an_optimizer_of_its_own(meshwright: Any) -> None:
    Path("run.log").write_text(
        'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n'
        "deepspeed.runtime.zero.utils.ZeRORuntimeException: You are using ZeRO-Offload with a client provided "
        "optimizer (<class 'torch.optim.adamw.AdamW'>) which in most cases will yield poor performance. Please either "
        "use deepspeed.ops.adam.DeepSpeedCPUAdam or set an optimizer in your ds-config\n"
    )
    printed = meshwright("doctor", "run.log").out
    assert "error.offload-client-optimizer" in printed
    assert '"zero_force_ds_cpu_optimizer": false' in printed
