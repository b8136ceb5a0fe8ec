"""Keywords of TRL's constructors, and rates far above every usual one."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.cli.run import run

PROGRAM = """\
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
model_id = "Qwen/Qwen2.5-7B-Instruct"
tokenizer = AutoTokenizer.from_pretrained(model_id)
model = AutoModelForCausalLM.from_pretrained(model_id, dtype="bfloat16", attn_implementation="flash_attention_2")
dataset = load_dataset("json", data_files="alpaca.jsonl", split="train")
lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
args = SFTConfig(output_dir="out", num_train_epochs=3, per_device_train_batch_size=1, gradient_accumulation_steps=8,
    gradient_checkpointing=True, learning_rate=2e-4, bf16=True, max_length=4096, packing=True)
trainer = SFTTrainer(model=model, args=args, train_dataset=dataset, processing_class=tokenizer, peft_config=lora)
trainer.train()
"""


def _check(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, name: str = "train.py") -> str:
    (tmp_path / name).write_text(text)
    with pytest.raises(SystemExit):
        run(["check", name, "--gpus", "1xA100-40"])
    return capsys.readouterr().out


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_keywords_that_constructors_have_are_accepted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "has no" not in _check(tmp_path, capsys, PROGRAM)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("max_length=4096", "max_seq_length=4096", "max_seq_length since TRL 0.20, use max_length"),
        ("processing_class=", "tokenizer=", "SFTTrainer has no tokenizer since TRL 0.16, use processing_class"),
        ("bf16=True", 'evaluation_strategy="no"', "since transformers 4.51, use eval_strategy"),
        ("bf16=True", "warmup_ratio=0.03", "since transformers 5.15, use warmup_steps"),
        ("args=args", "args=args, packing=True", "since TRL 0.13, use packing of SFTConfig"),
    ],
)
def test_a_keyword_of_an_older_release_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, said: str
) -> None:
    text = _check(tmp_path, capsys, PROGRAM.replace(old, new))
    assert said in text
    assert "(key.removed)" in text


@pytest.mark.parametrize(
    ("old", "new", "meant"),
    [
        ("learning_rate=", "learning_rat=", "learning_rate=0.0002"),
        ("peft_config=", "peft_confg=", "peft_config=lora"),
        ("r=16", "rank=16", "r=16"),
    ],
)
def test_a_misspelled_keyword_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, meant: str
) -> None:
    text = _check(tmp_path, capsys, PROGRAM.replace(old, new))
    assert "cannot start" in text
    assert "did you mean" in text
    assert f"fix: {meant}" in text


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("from trl import SFTConfig, SFTTrainer", "from own import SFTConfig\nfrom trl import SFTTrainer"),
        ("from datasets", "import unsloth\nfrom datasets"),
        ("from trl import SFTConfig, SFTTrainer", "import trl\nfrom trl import *"),
    ],
)
def test_classes_of_other_packages_may_have_other_keywords(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str
) -> None:
    program = PROGRAM.replace("max_length=4096", "max_seq_length=4096").replace(old, new)
    assert "SFTConfig has no" not in _check(tmp_path, capsys, program)


def test_an_argument_that_transformers_removed_is_none_with_unsloth_either(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = PROGRAM.replace("max_length=4096", "max_seq_length=4096, evaluation_strategy='no'")
    text = _check(tmp_path, capsys, program.replace("from datasets", "import unsloth\nfrom datasets"))
    assert "SFTConfig has no evaluation_strategy since transformers" in text
    assert "fix: eval_strategy='no'" in text
    assert "max_seq_length since" not in text


def test_a_call_that_depends_on_the_version_is_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head, last = PROGRAM.rsplit("trainer = ", 1)
    call = last.partition("\n")[0]
    older = call.replace("processing_class=", "tokenizer=")
    program = f"{head}try:\n    trainer = {call}\nexcept TypeError:\n    trainer = {older}\ntrainer.train()\n"
    assert "SFTTrainer has no" not in _check(tmp_path, capsys, program)


def test_a_rate_far_above_every_usual_one_is_the_first_remedy_of_a_log_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = ["***** Running training *****", "  Num examples = 4,750", "  Num Epochs = 3"]
    head += ["  Total optimization steps = 891", "  Number of trainable parameters = 40,370,176"]
    losses = [2.1, 2.1, *(7.4 + 0.01 * (n % 5) for n in range(86))]
    rows = [
        str({"loss": round(loss, 4), "grad_norm": 0.07, "learning_rate": 0.02, "epoch": round(n * 10 / 297, 2)})
        for n, loss in enumerate(losses, 1)
    ]
    (tmp_path / "high.log").write_text("\n".join([*head, *rows, ""]))
    with pytest.raises(SystemExit):
        run(["doctor", "high.log"])
    text = capsys.readouterr().out
    assert "1. learning_rate: 0.0001  0.02 is far above every usual learning rate" in text
    assert "in a plan: optimizer.lr=0.0001" in text
    assert "2. resume from an earlier checkpoint with other samples" in text
