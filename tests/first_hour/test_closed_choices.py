"""Values that a framework refuses when it starts, for keys that take one of a few."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.cli.run import run
from meshwright.frameworks.saving import hourly

AXOLOTL = """base_model: NousResearch/Llama-3.2-1B
datasets: [{path: teknium/GPT4-LLM-Cleaned, type: alpaca}]
output_dir: out
sequence_len: 2048
adapter: lora
lora_r: 16
lora_alpha: 32
lora_target_linear: true
micro_batch_size: 2
gradient_accumulation_steps: 2
num_epochs: 1
learning_rate: 2e-4
bf16: auto
"""
FACTORY = """model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
stage: sft
do_train: true
finetuning_type: lora
lora_target: all
dataset: identity
template: llama3
cutoff_len: 2048
output_dir: out
per_device_train_batch_size: 1
learning_rate: 1.0e-4
num_train_epochs: 3.0
bf16: true
"""
TRL = """model_name_or_path: Qwen/Qwen2.5-0.5B
dataset_name: trl-lib/Capybara
learning_rate: 2.0e-5
per_device_train_batch_size: 2
max_length: 2048
packing: true
output_dir: out
"""
SWIFT = """model: Qwen/Qwen2.5-7B-Instruct
tuner_type: lora
dataset: AI-ModelScope/alpaca-gpt4-data-zh
learning_rate: 1e-4
max_length: 2048
output_dir: output
"""
ACCELERATE = """compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: true}
mixed_precision: bf16
num_machines: 1
"""


def check(capsys: pytest.CaptureFixture[str], path: Path, *words: str) -> list[dict[str, str]]:
    with pytest.raises(SystemExit):
        run(["check", str(path), "--json", *words])
    found: list[dict[str, str]] = json.loads(capsys.readouterr().out)["findings"]
    return found


def of_key(capsys: pytest.CaptureFixture[str], path: Path, text: str, line: str) -> dict[str, str]:
    """Return the only finding about the key of a line that is added to a file, or that replaces the key's line."""
    key = line.partition(":")[0]
    kept = "\n".join(one for one in text.splitlines() if one.partition(":")[0] != key)
    path.write_text(f"{kept}\n{line}\n", encoding="utf-8")
    (found,) = (one for one in check(capsys, path) if one["field"] == key)
    return found


@pytest.mark.parametrize(
    ("text", "line", "fix"),
    [
        (AXOLOTL, "optimizer: adamww", "optimizer: adamw_torch"),
        (AXOLOTL, "optimizer: nonsense", ""),
        (AXOLOTL, "lr_scheduler: adamww", ""),
        (AXOLOTL, "learning_rate: fast", ""),
        (AXOLOTL, "expert_backend: foo", ""),
        (FACTORY, "optim: AdamW", "optim: adamw_torch"),
        (FACTORY, "lr_scheduler_type: adamww", ""),
        (FACTORY, "tool_format: foo", ""),
        (TRL, "optim: adamww", "optim: adamw_torch"),
        (TRL, "packing_strategy: foo", ""),
        (TRL, "truncation_mode: middle", ""),
        (TRL, "dtype: bflaot16", "dtype: bfloat16"),
        (SWIFT, "optim: adamww", "optim: adamw_torch"),
        (SWIFT, "optimizer: adamww", ""),
        (SWIFT, "tuner_type: loar", "tuner_type: lora"),
        (SWIFT, "agent_template: foo", ""),
    ],
)
def test_a_value_that_the_program_refuses_is_an_error(
    text: str, line: str, fix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = of_key(capsys, tmp_path / "train.yaml", text, line)
    assert found["severity"] == "error"
    assert list(found["fix"]) == ([fix] if fix else [])
    assert fix or "allowed: " in found["message"] or "expected a number" in found["message"]


def test_a_type_of_dataset_that_axolotl_does_not_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.yaml"
    path.write_text(AXOLOTL.replace("type: alpaca", "type: foo"), encoding="utf-8")
    (found,) = check(capsys, path)
    assert "no such type of dataset; allowed: chat_template" in found["message"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (AXOLOTL, "optimizer: muon"),  # one of Axolotl's own
        (AXOLOTL, "lr_scheduler: rex"),
        (AXOLOTL, "optimizer: <your optimizer>"),
        (FACTORY, "optim: null"),
        (FACTORY, "lr_scheduler_type: cosine_with_min_lr"),
        (TRL, "packing_strategy: bfd-requeue"),  # its name before 1.0
        (SWIFT, "optimizer: mine\nexternal_plugins: plugin.py"),
        (SWIFT, "tuner_type: mine\nexternal_plugins: plugin.py"),
        (AXOLOTL.replace("type: alpaca", "type: mine.rows"), "rl: null"),
    ],
)
def test_what_the_program_accepts_is_no_finding(
    text: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "train.yaml"
    key = line.partition(":")[0]
    kept = "\n".join(one for one in text.splitlines() if one.partition(":")[0] != key)
    path.write_text(f"{kept}\n{line}\n", encoding="utf-8")
    assert [one for one in check(capsys, path) if "allowed" in one["message"] or "exist" in one["message"]] == []


@pytest.mark.parametrize(
    ("text", "line", "now"),
    [
        (AXOLOTL, "optimizer: adamw_hf", "adamw_torch"),
        (AXOLOTL, "optimizer: lion_pytorch", "lion_32bit"),
        (FACTORY, "optim: adamw_apex_fused", "adamw_torch_fused"),
    ],
)
def test_a_name_of_an_older_release_is_a_warning(
    text: str, line: str, now: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = of_key(capsys, tmp_path / "train.yaml", text, line)
    assert found["severity"] == "warning"
    assert "since version" in found["message"]
    assert found["fix"][0].endswith(now)


@pytest.mark.parametrize("value", ["0", "-1", "many"])
def test_a_length_of_no_tokens(value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.sh"
    path.write_text(
        "torchrun --nproc_per_node 8 run_clm.py --model_name_or_path meta-llama/Llama-3.1-8B --dataset_name wikitext "
        f"--block_size {value} --per_device_train_batch_size 1 --learning_rate 1e-5 --do_train --output_dir out\n",
        encoding="utf-8",
    )
    assert [one["severity"] for one in check(capsys, path, "--gpus", "8xH200") if one["field"] == "block_size"] == [
        "error"
    ]


@pytest.mark.parametrize(
    ("line", "severity"),
    [
        ("num_processes: 0", "error"),
        ("num_processes: -1", "warning"),
        ("dynamo_config: {dynamo_backend: INDUCTOR, dynamo_mode: foo}", "error"),
    ],
)
def test_values_of_accelerate(line: str, severity: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "fsdp.yaml"
    path.write_text(f"{ACCELERATE}{line}\n", encoding="utf-8")
    found = [one for one in check(capsys, path, "--gpus", "8xH100") if one["field"] in line.replace(": {", ".")]
    found = found or [one for one in check(capsys, path, "--gpus", "8xH100") if "dynamo" in one["field"]]
    assert [one["severity"] for one in found] == [severity]


@pytest.mark.parametrize(("step_s", "limit_h", "every"), [(36, None, 100), (7200, None, 1), (60, 0.5, 15)])
def test_the_interval_of_a_fix(step_s: float, limit_h: float | None, every: int) -> None:
    assert hourly(step_s, limit_h=limit_h) == every


@pytest.mark.parametrize("every", [1, 10])
def test_saving_every_step_is_as_often_as_it_gets(
    every: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps of about 18 hours."""
    path = tmp_path / "train.yaml"
    text = AXOLOTL.replace("Llama-3.2-1B", "Meta-Llama-3-8B").replace("steps: 2", "steps: 200000")
    path.write_text(
        text.replace("num_epochs: 1", "max_steps: 1000") + f"gradient_checkpointing: true\nsave_steps: {every}\n",
        encoding="utf-8",
    )
    found = [one for one in check(capsys, path, "--gpus", "1xH100") if one["rule"] == "saving.rarely"]
    assert [one["fix"][0] for one in found] == ([] if every == 1 else ["save_steps: 1"])
