"""TRL programs: adapters that are passed to nothing, evaluations without data."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli.run import run as run_command

PROGRAM = """
import torch
from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-7B-Instruct", DTYPE)
ds = load_dataset("json", data_files="tickets.jsonl", split="train")
adapters = LoraConfig(r=16, lora_alpha=32, task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"])
args = SFTConfig(output_dir="out", per_device_train_batch_size=2, gradient_accumulation_steps=8, num_train_epochs=3,
    learning_rate=RATE, max_length=4096, bf16=True, gradient_checkpointing=True, save_steps=200, MORE)
MAKE
trainer.train()
"""
TRAINED = "trainer = SFTTrainer(model=model, args=args, train_dataset=ds, peft_config=adapters)"


def checked(folder: Path, **parts: str) -> dict[str, Any]:
    """Return the answer of check for the program with some of its parts."""
    given = {"DTYPE": "dtype=torch.bfloat16", "RATE": "1e-4", "MORE": "logging_steps=10", "MAKE": TRAINED, **parts}
    text = PROGRAM
    for key, value in given.items():
        text = text.replace(key, value)
    (folder / "train.py").write_text(text, encoding="utf-8")
    answer: dict[str, Any] = json.loads(printed("check", "train.py", "--gpus", "1xA100-80", "--json"))
    return answer


def printed(*words: str) -> str:
    """Return what a command prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        run_command(list(words))
    return out.getvalue()


def findings(answer: dict[str, Any], rule: str) -> list[dict[str, Any]]:
    return [one for one in answer["findings"] if one["rule"] == rule]


UNUSED = {
    "trainer = SFTTrainer(model=model, args=args, train_dataset=ds)": "peft_config=adapters",
    "print(adapters)\nadapters.inference_mode = False\ntrainer = SFTTrainer(model, args)": "peft_config=adapters",
    "trainer = Trainer(model=model, args=args, train_dataset=ds)": "model = get_peft_model(model, adapters)",
}
USED = (
    TRAINED,
    "model = get_peft_model(model, adapters)\ntrainer = Trainer(model=model, args=args, train_dataset=ds)",
    "model.add_adapter(adapters)\ntrainer = SFTTrainer(model=model, args=args, train_dataset=ds)",
    "options = {'peft_config': adapters}\ntrainer = SFTTrainer(model=model, args=args, train_dataset=ds, **options)",
)


@pytest.mark.parametrize("make", UNUSED)
def test_adapters_that_are_passed_to_nothing_are_a_warning(here: Path, make: str) -> None:
    answer = checked(here, MAKE=make)
    (found,) = findings(answer, "key.unused")
    assert (found["severity"], found["fix"], found["line"]) == ("warning", [UNUSED[make]], 10)
    assert answer["estimate"]["memory_gib"]["optimizer"] > 25  # all weights are trained


@pytest.mark.parametrize("make", USED)
def test_adapters_that_are_passed_on_are_counted(here: Path, make: str) -> None:
    answer = checked(here, MAKE=make)
    assert not findings(answer, "key.unused")
    assert answer["estimate"]["memory_gib"]["optimizer"] < 1


EVALUATES = "eval_strategy='steps', eval_steps=200"
BEST = "load_best_model_at_end=True"
WITH_DATA = (
    TRAINED.replace("train_dataset=ds", "train_dataset=ds, eval_dataset=ds"),
    "trainer = SFTTrainer(model, args, None, ds, ds, peft_config=adapters)",
    "trainer = SFTTrainer(model=model, args=args, peft_config=adapters, **data)",
    "class OwnTrainer(SFTTrainer):\n    pass\n\n\ntrainer = OwnTrainer(model=model, args=args, peft_config=adapters)",
)


def test_an_evaluation_without_data_is_refused(here: Path) -> None:
    for more in (EVALUATES, "eval_strategy='epoch'"):
        (found,) = findings(checked(here, MORE=more), "value.invalid")
        assert (found["severity"], found["fix"]) == ("error", ["eval_strategy='no'"])
        assert "eval_dataset" in found["message"]
    none = TRAINED.replace("train_dataset=ds", "train_dataset=ds, eval_dataset=None")
    assert findings(checked(here, MORE=EVALUATES, MAKE=none), "value.invalid")
    (found,) = findings(checked(here, MORE=f"{EVALUATES}, {BEST}"), "value.invalid")
    assert found["fix"] == ["eval_strategy='no'", "load_best_model_at_end=False"]
    assert not findings(checked(here, MORE="eval_strategy='no', load_best_model_at_end=False"), "value.invalid")


@pytest.mark.parametrize("make", WITH_DATA)
def test_an_evaluation_with_data_is_accepted(here: Path, make: str) -> None:
    assert not findings(checked(here, MORE=EVALUATES, MAKE=make), "value.invalid")


def test_no_evaluation_is_prescribed_without_data(here: Path) -> None:
    (found,) = findings(checked(here, MORE=f"eval_strategy='no', {BEST}"), "value.invalid")
    assert found["fix"] == ["load_best_model_at_end=False"]
    (found,) = findings(checked(here, MORE="lr_scheduler_type='reduce_lr_on_plateau'"), "value.invalid")
    assert found["fix"] == ["lr_scheduler_type='cosine'"]
    (found,) = findings(checked(here, MORE=f"eval_strategy='no', {BEST}", MAKE=WITH_DATA[0]), "value.invalid")
    assert found["fix"] == ["eval_strategy='steps'", "eval_steps=200"]


def test_a_fix_of_a_program_is_printed_as_python(here: Path) -> None:
    checked(here, MORE=f"{EVALUATES}, {BEST}")
    text = " ".join(printed("check", "train.py", "--gpus", "1xA100-80").split())
    assert "fix: eval_strategy='no', load_best_model_at_end=False" in text


@pytest.mark.parametrize(("rate", "warned"), [("2e-2", True), ("1.2e-2", True), ("5e-3", False), ("2e-4", False)])
def test_a_rate_far_beyond_those_of_adapters_is_a_warning(here: Path, rate: str, warned: bool) -> None:
    found = findings(checked(here, RATE=rate), "learning_rate.far-too-high")
    assert [one["severity"] for one in found] == ["warning"] * warned


@pytest.mark.parametrize("dtype", ["torch_dtype=torch.float32", 'dtype="float32"', "dtype=torch.bfloat16"])
def test_frozen_weights_in_fp32_are_said_to_be_larger_than_counted(here: Path, dtype: str) -> None:
    notes = " ".join(checked(here, DTYPE=dtype)["notes"])
    assert ("the frozen weights take 4 bytes each" in notes) == ("float32" in dtype)
