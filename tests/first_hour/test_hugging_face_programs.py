"""Checks of Hugging Face programs, their DeepSpeed configs and their logs."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

import meshwright as mw
from meshwright.cli import doctor_report

EAGER = """from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.1-8B", attn_implementation="{kernel}")
args = TrainingArguments(output_dir="o", per_device_train_batch_size=1, gradient_checkpointing=True, bf16=True,
    max_steps=1000, learning_rate=1e-5, save_steps=100{more})
trainer = Trainer(model=model, args=args, train_dataset=None)
trainer.train()
"""
FACTORY = """model_name_or_path: meta-llama/Llama-3.1-8B
stage: sft
do_train: true
finetuning_type: full
dataset: alpaca
template: llama3
cutoff_len: 16384
flash_attn: disabled
output_dir: out
per_device_train_batch_size: 1
learning_rate: 1.0e-5
num_train_epochs: 1
bf16: true
"""
AXOLOTL = """base_model: meta-llama/Llama-3.1-8B
sequence_len: 16384
{attention}
datasets:
  - path: tatsu-lab/alpaca
    type: alpaca
micro_batch_size: 1
gradient_accumulation_steps: 1
num_epochs: 1
learning_rate: 1.0e-5
optimizer: adamw_torch
lr_scheduler: cosine
output_dir: out
bf16: true
gradient_checkpointing: true
"""
SWIFT = (
    "swift sft --model meta-llama/Llama-3.1-8B --tuner_type full --dataset alpaca --max_length 16384 --attn_impl eager "
    "--per_device_train_batch_size 1 --deepspeed zero3 --learning_rate 1e-5 --num_train_epochs 1\n"
)


def _findings(path: Path, text: str, *overrides: str) -> dict[str, mw.Finding]:
    path.write_text(text)
    return {one.rule: one for one in mw.check(str(path), gpus="8xH200", overrides=list(overrides)).findings}


@pytest.mark.parametrize(
    ("name", "text", "fix"),
    [
        ("train.py", EAGER.format(kernel="eager", more=""), ("attn_implementation='sdpa'",)),
        ("factory.yaml", FACTORY, ("flash_attn: sdpa",)),
        ("axolotl.yaml", AXOLOTL.format(attention="attn_implementation: eager"), ("attn_implementation: sdpa",)),
        (
            "axolotl.yaml",
            AXOLOTL.format(attention="eager_attention: true"),
            ("without eager_attention", "attn_implementation: sdpa"),
        ),
        ("swift.sh", SWIFT, ("--attn_impl sdpa",)),
    ],
)
def test_fix_of_eager_attention_is_a_kernel_of_the_front_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, fix: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert _findings(tmp_path / name, text, "data.seq_length=16384")["kernels.eager-attention"].fix == fix


@pytest.mark.parametrize(("kernel", "meant"), [("auto", "sdpa"), ("sdap", "sdpa"), ("flash_attn", "flash_attention_2")])
def test_attention_kernel_that_transformers_lacks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel: str, meant: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds.json").write_text('{"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 3}}')
    for more, framework in (("", "accelerate"), (', deepspeed="ds.json"', "deepspeed")):
        found = _findings(tmp_path / "train.py", EAGER.format(kernel=kernel, more=more))
        refused = found[f"{framework}.argument-refused"]
        assert refused.severity == "error"
        assert refused.fix == (f'attn_implementation="{meant}"',)
        assert "flash_attention_2, flash_attention_3" in refused.message


@pytest.mark.parametrize("kernel", ["sdpa", "flash_attention_3", "kernels-community/flash-attn3", "paged|sdpa"])
def test_attention_kernel_that_transformers_has_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "accelerate.argument-refused" not in _findings(tmp_path / "train.py", EAGER.format(kernel=kernel, more=""))


def test_attention_kernel_that_the_program_registers_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = "from transformers import AttentionInterface\n" + EAGER.format(kernel="ours", more="")
    assert "accelerate.argument-refused" not in _findings(tmp_path / "train.py", text)
    assert "accelerate.argument-refused" in _findings(tmp_path / "train.py", EAGER.format(kernel="ours", more=""))


def test_front_end_files_refuse_auto_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = _findings(tmp_path / "axolotl.yaml", AXOLOTL.format(attention="attn_implementation: auto"))
    assert found["value.invalid"].fix == ("attn_implementation: sdpa",)
    factory = _findings(tmp_path / "factory.yaml", FACTORY.replace("disabled", "auto"))
    assert "value.invalid" not in factory  # LLaMA-Factory's own default


ACCELERATE = """compute_environment: LOCAL_MACHINE
deepspeed_config:
  deepspeed_config_file: ds.json
  zero3_init_flag: true
distributed_type: DEEPSPEED
num_machines: 1
num_processes: 8
"""
DEEPSPEED = """{"bf16": {"enabled": true}, "fp16": {"enabled": false}, "zero_optimization": {"stage": 3},
 "gradient_accumulation_steps": 8,
 "train_batch_size": %d,
 "train_micro_batch_size_per_gpu": 1}"""


def test_config_of_accelerate_gets_the_checks_of_its_deepspeed_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "acc.yaml").write_text(ACCELERATE)
    (tmp_path / "ds.json").write_text(DEEPSPEED % 32)
    for gpus in ("8xH200", None):
        result = mw.check("acc.yaml", gpus=gpus)
        (wrong,) = [one for one in result.findings if one.severity == "error"]
        assert (wrong.rule, wrong.file, wrong.line) == ("deepspeed.batch-arithmetic", "ds.json", 3)
        assert "8 data-parallel ranks = 64" in wrong.message
        assert wrong.fix == ('"gradient_accumulation_steps": 4',)
    (tmp_path / "ds.json").write_text(DEEPSPEED % 64)
    assert mw.check("acc.yaml", gpus="8xH200").ok
    # With fewer processes than GPUs, the processes are wrong and the batch is that of all GPUs.
    (tmp_path / "acc.yaml").write_text(ACCELERATE.replace("num_processes: 8", "num_processes: 4"))
    (wrong,) = [one for one in mw.check("acc.yaml", gpus="8xH200").findings if one.severity == "error"]
    assert (wrong.field, wrong.fix) == ("num_processes", ("num_processes: 8",))
    (tmp_path / "ds.json").write_text(DEEPSPEED % 48)
    found = {one.rule: one.message for one in mw.check("acc.yaml", gpus="8xH200").findings}
    assert "8 data-parallel ranks = 64" in found["deepspeed.batch-arithmetic"]


def test_errors_of_a_deepspeed_config_have_a_fix_through_accelerate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "acc.yaml").write_text(ACCELERATE)
    (tmp_path / "ds.json").write_text((DEEPSPEED % 64).replace("false", "true"))
    (wrong,) = mw.check("acc.yaml", gpus="8xH200").findings
    assert (wrong.rule, wrong.fix) == ("deepspeed.two-dtypes", ('"fp16": {"enabled": false}',))


def test_program_and_its_deepspeed_config_have_one_repair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    more = ', deepspeed="ds.json", gradient_accumulation_steps=4'
    (tmp_path / "train.py").write_text(EAGER.format(kernel="eager", more=more))
    (tmp_path / "ds.json").write_text((DEEPSPEED % 128).replace("false", "true").replace('gpu": 1', 'gpu": 4'))
    result = mw.check("train.py", gpus="8xH200", overrides=["data.seq_length=16384"])
    rules = [one.rule for one in result.findings if one.severity == "error"]
    assert {"deepspeed.two-dtypes", "deepspeed.batch-arithmetic", "deepspeed.argument-mismatch"} < {*rules}
    assert result.repair is not None
    settings = {*result.repair.overrides}
    assert '"fp16": {"enabled": false}' in settings
    for one in result.findings:
        if one.severity == "error":
            assert one.fix, one.rule
            assert {*one.fix} <= settings, one.rule
    _paste(tmp_path, result.repair.overrides)
    assert mw.check("train.py", gpus="8xH200", overrides=["data.seq_length=16384"]).ok


def _paste(folder: Path, settings: Sequence[str]) -> None:
    """Write the settings of a repair into the program and its config, as a reader does."""
    program, config = folder / "train.py", folder / "ds.json"
    tree = json.loads(config.read_text())
    for text in settings:
        if text.startswith('"'):
            tree |= json.loads(f"{{{text}}}")
            continue
        name, _, value = text.partition("=")
        code, found = re.subn(rf"\b{name}=[^,)]+", f"{name}={value}", program.read_text())
        program.write_text(code if found else code.replace("output_dir=", f"{name}={value}, output_dir="))
    config.write_text(json.dumps(tree))


def _trainer_log(folder: Path) -> None:
    lines = [
        "***** Running training *****",
        "  Num examples = 96,000",
        "  Num Epochs = 2",
        "  Instantaneous batch size per device = 1",
        "  Total train batch size (w. parallel, distributed & accumulation) = 64",
        "  Gradient Accumulation steps = 1",
        "  Total optimization steps = 3,000",
    ]
    for step in range(1, 121):
        loss, norm = (1.4 - 0.002 * step, 1.2) if step < 95 else (2.0 * (step - 94), 9.0 ** (step - 94))
        values = f"'loss': {loss}, 'grad_norm': {norm}" if step < 99 else "'loss': 0.0, 'grad_norm': nan"
        lines.append(f"{{{values}, 'learning_rate': {min(step, 40) * 2.5e-07}, 'epoch': {step / 1500:.4f}}}")
    (folder / "nan.log").write_text("\n".join(lines) + "\n")


def test_remedies_of_a_trainer_program_are_arguments_of_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    more = ', deepspeed="ds.json", warmup_ratio=0.03, lr_scheduler_type="cosine"'
    program = EAGER.format(kernel="sdpa", more=more).replace("max_steps=1000", "num_train_epochs=2")
    (tmp_path / "train.py").write_text(program)
    (tmp_path / "ds.json").write_text(
        '{"bf16": {"enabled": true}, "zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": "auto",\n'
        ' "gradient_accumulation_steps": "auto", "train_batch_size": "auto"}'
    )
    _trainer_log(tmp_path)
    checkup = mw.diagnose("nan.log", recipe="train.py", gpus="8x8xH200")
    (damaged,) = [one for one in checkup.findings if one.rule == "loss.not-a-number"]
    there = [text for one in damaged.remedies for text in one.there]
    assert "warmup_steps=100" in there
    assert not any("scheduler" in text or "300000" in text for text in there)


def test_remedies_of_a_job_are_written_where_its_program_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    more = ', deepspeed="ds.json", gradient_accumulation_steps=1'
    program = EAGER.format(kernel="sdpa", more=more).replace("max_steps=1000", "num_train_epochs=2")
    (tmp_path / "train.py").write_text(program.replace("bf16=True", "fp16=True"))
    (tmp_path / "run.sh").write_text("deepspeed --num_nodes 8 --num_gpus 8 train.py\n")
    (tmp_path / "ds.json").write_text(
        '{"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 3},\n'
        ' "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}'
    )
    _trainer_log(tmp_path)
    checkup = mw.diagnose("nan.log", recipe="run.sh", gpus="8x8xH200")
    (damaged,) = [one for one in checkup.findings if one.rule == "loss.not-a-number"]
    there = {one.try_: one.there for one in damaged.remedies}
    assert there[("schedule.warmup_steps=100",)] == ("train.py: warmup_steps=100",)
    assert there[("precision.compute=bf16",)] == ("train.py: bf16=True", "train.py: without fp16")


def test_large_numbers_of_a_diagnosis_have_all_digits() -> None:
    assert doctor_report._number(182732) == "182,732"
    assert doctor_report._number(0.0002) == "0.0002"


SHARDED = """import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-4B", dtype=torch.bfloat16)
args = TrainingArguments(output_dir="out", max_steps=100, per_device_train_batch_size=1, bf16=True, OPTIONS)
Trainer(model=model, args=args, train_dataset=data).train()
"""


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ('fsdp="full_shard auto_wrap"', {}),
        ("fsdp=True", {}),  # transformers 5
        ('fsdp=["full_shard", "auto_wrap"]', {}),
        ('fsdp=True, fsdp_config={"reshard_after_forward": False}', {"reshard_after_forward": False}),
        ('fsdp=True, fsdp_config={"fsdp_version": 1, "reshard_after_forward": "shard_grad_op"}',
            {"reshard_after_forward": False}),
        ('fsdp="full_shard offload", fsdp_config={"version": 2, "min_num_params": 0}', {"offload": "params"}),
        ('fsdp=True, fsdp_config={"activation_checkpointing": True, "cpu_offload": True}',
            {"recompute": "full", "offload": "params"}),
        ("fsdp=False", {"strategy": "ddp"}),
        ("fsdp=None", {"strategy": "ddp"}),
        ('fsdp=""', {"strategy": "ddp"}),
    ],
)  # fmt: skip
def test_every_form_of_the_trainers_fsdp_shards(options: str, fields: dict[str, object], tmp_path: Path) -> None:
    (program := tmp_path / "train.py").write_text(SHARDED.replace("OPTIONS", options))
    imported = mw.import_file(str(program), gpus="8xH100", overrides=["data.seq_length=2048"])
    layout, is_replica = imported.recipe.layout, fields.get("strategy") == "ddp"
    sharded = {"strategy": "fsdp2", "offload": "none", "recompute": "none", "reshard_after_forward": True}
    expected = fields if is_replica else {**sharded, **fields}
    assert {name: getattr(layout, name) for name in expected} == expected
    assert not [one.key for one in imported.dropped if "fsdp" in one.key]
    typed = ["data.seq_length=2048", "layout.recompute=full"]
    estimate = mw.check(str(program), gpus="8xH100", overrides=typed).estimate
    assert estimate is not None
    assert (estimate.memory.weights > 7) == is_replica, "a replica has all weights"
