"""Checks of Hugging Face programs, their DeepSpeed configs and their logs, as a team types them."""

from __future__ import annotations

from pathlib import Path

import pytest

import meshwright as mw

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
