"""Programs of TRL, the Trainer and Unsloth: read as they train, with TRL's own defaults."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import meshwright as library
from meshwright.errors import InputError

TRL = """
import os
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer

MODEL = "meta-llama/Llama-3.1-8B-Instruct"
bnb = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
model = AutoModelForCausalLM.from_pretrained(MODEL, quantization_config=bnb, attn_implementation="flash_attention_2")
tok = AutoTokenizer.from_pretrained("gpt2")
ds = load_dataset("json", data_files="tickets.jsonl", split="train")
peft_config = LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
args = SFTConfig(
    output_dir="out", num_train_epochs=3, per_device_train_batch_size=4, gradient_accumulation_steps=4,
    learning_rate=2e-4, max_length=4096, packing=True, assistant_only_loss=True, optim="paged_adamw_8bit",
)
trainer = SFTTrainer(model=model, args=args, train_dataset=ds, peft_config=peft_config, processing_class=tok)
"""
UNSLOTH = """
from unsloth import FastLanguageModel
model, tokenizer = FastLanguageModel.from_pretrained(
    model_name="unsloth/Qwen3-8B-unsloth-bnb-4bit", max_seq_length=2048, load_in_4bit=True
)
model = FastLanguageModel.get_peft_model(
    model, r=32, target_modules=["q_proj"], lora_alpha=16, use_gradient_checkpointing="unsloth", random_state=3407
)
trainer = SFTTrainer(model=model, tokenizer=tokenizer, args=SFTConfig(
    per_device_train_batch_size=2, gradient_accumulation_steps=4, max_steps=60, optim="adamw_8bit", output_dir="o"))
"""
TRAINER = """
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-8B", torch_dtype="auto")
args = TrainingArguments(output_dir="out", per_device_train_batch_size=1, num_train_epochs=2, bf16=True)
Trainer(model=model, args=args, data_collator=DataCollatorForLanguageModeling(tok, mlm=False)).train()
"""
COMMAND = """accelerate launch --num_processes 2 trl/scripts/sft.py --model_name_or_path Qwen/Qwen3-8B \\
  --dataset_name DATA.jsonl --use_peft --lora_r 32 --num_train_epochs 2 --per_device_train_batch_size 2 --bf16 \\
  --output_dir out"""


def write(name: str, text: str) -> str:
    Path(name).write_text(text)
    return name


def test_a_trl_program_is_checked_as_it_trains() -> None:
    found = library.check(write("train_trl.py", TRL), gpus="1x4090")
    recipe = found.recipe
    assert found.model is not None
    assert found.model.name == "llama31_8b"
    assert (recipe.goal, recipe.peft.method, recipe.peft.rank, recipe.peft.alpha) == ("peft", "qlora", 16, 32.0)
    assert (recipe.data.seq_length, recipe.data.packing, recipe.data.train_on) == (4096, True, "answers")
    assert (recipe.data.dataset, recipe.optimizer.name, recipe.optimizer.lr) == ("tickets.jsonl", "adamw8bit", 2e-4)
    assert (recipe.train.epochs, recipe.train.global_batch_size, recipe.layout.recompute) == (3.0, 16, "full")
    assert found.estimate is not None


def test_what_a_program_computes_is_listed_and_not_assumed() -> None:
    text = TRL.replace("learning_rate=2e-4", 'learning_rate=float(os.environ["LR"])').replace("4096", "length()")
    found = library.check(write("train_trl.py", text), gpus="1x4090")
    [note] = [one for one in found.notes if one.startswith("not read")]
    assert "learning_rate=float(os.environ['LR'])" in note
    assert "max_length=length()" in note
    assert any("data.seq_length" in one for one in found.notes)
    assert found.estimate is None


def test_an_unsloth_program_is_read() -> None:
    found = library.check(write("unsloth_train.py", UNSLOTH), gpus="1x4090")
    recipe = found.recipe
    assert found.model is not None
    assert found.model.name == "qwen3_8b"
    assert (recipe.peft.method, recipe.peft.rank, recipe.data.seq_length) == ("qlora", 32, 2048)
    assert (recipe.train.steps, recipe.optimizer.name, recipe.data.train_on) == (60, "adamw8bit", "all")
    assert found.ok


def test_a_trainer_program_names_its_model_and_its_loss() -> None:
    found = library.check(write("hf_train.py", TRAINER), gpus="2xL40S")
    assert found.model is not None
    assert (found.model.name, found.recipe.goal, found.recipe.data.train_on) == ("qwen3_8b", "sft", "all")
    assert not any("does not name its model" in one for one in found.notes)
    other = library.check(write("hf_train.py", TRAINER.replace("Qwen/Qwen3-8B", "acme/own-8b")), gpus="2xL40S")
    assert any("acme/own-8b is not in the catalogue" in one for one in other.notes)


def test_a_python_file_of_no_framework_offers_nothing_that_fails() -> None:
    with pytest.raises(InputError, match="matches no supported framework") as caught:
        library.check(write("other.py", "print('hello')\n"), gpus="1x4090")
    assert not caught.value.fix


@pytest.mark.parametrize(
    ("row", "words", "train_on"),
    [
        ({"messages": []}, "", "all"),
        ({"prompt": "a", "completion": "b"}, "", "answers"),
        ({"messages": []}, " --assistant_only_loss", "answers"),
        ({"messages": []}, " --assistant_only_loss False", "all"),
        ({"prompt": "a", "completion": "b"}, " --completion_only_loss False", "all"),
    ],
)
def test_the_loss_of_a_trl_command_is_trls(row: dict[str, object], words: str, train_on: str) -> None:
    write("DATA.jsonl", f"{json.dumps(row)}\n")
    found = library.check(write("run.sh", COMMAND + words), gpus="2xL40S")
    assert found.recipe.data.train_on == train_on
    noted = any("TRL's loss counts every token" in one for one in found.notes)
    assert noted == (not words and train_on == "all")


def test_an_export_of_a_trl_command_keeps_its_loss_and_defaults() -> None:
    write("DATA.jsonl", '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n')
    exported = library.export(write("run.sh", COMMAND), to="deepspeed", gpus="2xL40S")
    text = next(text for name, text in exported.written.files.items() if name.endswith(".py"))
    assert "assistant_only_loss=False" in text
    assert "learning_rate=2e-05" in text
    assert "max_length=1024" in text
