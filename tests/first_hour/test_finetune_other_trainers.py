"""Other trainers' configs, and data that another framework cannot read."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

AXOLOTL = """\
base_model: Qwen/Qwen3-8B
load_in_4bit: true
adapter: qlora
lora_r: 16
lora_alpha: 32
datasets:
  - path: multi.jsonl
    type: chat_template
val_set_size: 0.1
sequence_len: 1024
micro_batch_size: 2
gradient_accumulation_steps: 2
num_epochs: 3
optimizer: adamw_torch
learning_rate: 0.0002
bf16: true
wandb_project: support
"""
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the same conversations as messages, as questions and answers, as both and as CSV."""
    asked = [{"question": f"what is {i}?", "answer": f"it is {i}", "category": "tech"} for i in range(40)]
    rows = {"multi": [{"messages": CHAT}] * 40, "tickets": asked, "mixed": [*asked, {"messages": CHAT}]}
    for name, found in rows.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, found)))
    lines = [",".join(one.values()) for one in asked]
    (tmp_path / "tickets.csv").write_text("\n".join(("question,answer,category", *lines)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    return tmp_path


def test_the_command_for_an_axolotl_config_has_its_batch_its_data_and_my_gpus(here: Path, meshwright: Any) -> None:
    (here / "ax.yml").write_text(AXOLOTL)
    for verb in (("export", "ax.yml", "--to", "automodel"), ("import", "ax.yml")):
        refused = meshwright(*verb, "--gpus", "2x4090").err
        assert "not carried over by the fix: wandb_project=support\n" in refused
        command = shlex.split(refused.partition("fix:   meshwright ")[2])
        assert {"2x4090", "multi.jsonl", "train.global_batch_size=8", "optim=adamw_torch"} <= set(command)
    answer = meshwright(*command)
    assert "peft: qlora, rank 16, frozen weights in 4 bits (NF4) · 1,024 tokens × 8 per step" in answer.out, answer.err
    assert "--dataset multi.jsonl" in answer.out


RECIPE = """\
name = "lora"
model = "qwen3_8b"
goal = "peft"
cluster = "2xH100"

[data]
dataset = "mixed.jsonl"
seq_length = 1024

[train]
global_batch_size = 8
epochs = 3.0

[peft]
rank = 16
targets = ["all-linear"]
"""


def test_automodel_gets_the_rows_that_it_reads(here: Path, meshwright: Any) -> None:
    (here / "lora.toml").write_text(RECIPE)
    words = ("export", "lora.toml", "--to", "automodel")
    for name, count in (("mixed.jsonl", 41), ("tickets.csv", 40), ("tickets.jsonl", 40)):
        refused = meshwright(*words, f"data.dataset={name}")
        assert "(automodel.dataset-rows)  fix: --out FOLDER" in refused.out
        assert "for a layout that runs" not in refused.out
        out = f"out_{name}"
        written = meshwright(*words, f"data.dataset={name}", "--out", out)
        converted = f"{Path(name).stem}.messages.jsonl"
        assert f"path_or_dataset_id: {converted}\n" in (here / out / "lora.yaml").read_text(), written.err
        rows = [json.loads(line) for line in (here / out / converted).read_text().splitlines()]
        assert len(rows) == count
        assert rows[0]["messages"][1] == {"role": "assistant", "content": "it is 0"}
        assert rows[-1]["messages"][-1]["content"] == ("hello" if count == 41 else "it is 39")
    text = (here / out / "lora.yaml").read_text().replace(converted, "mixed.jsonl")
    (here / "typed.yaml").write_text(text)
    checked = meshwright("check", "typed.yaml", "--gpus", "2xH100", "--json").json
    [finding] = [one for one in checked["findings"] if one["rule"] == "automodel.dataset-rows"]
    assert "mixed.jsonl:1: ChatDataset needs a messages list, and the row has question, answer" in finding["message"]
    assert meshwright(*finding["fix"][0].split()[1:]).code == 0
    assert (here / "FOLDER" / "mixed.messages.jsonl").is_file()
    as_is = meshwright(*words, "data.dataset=multi.jsonl", "--out", "plain")
    assert "dataset-rows" not in as_is.out
    assert f"path_or_dataset_id: {here / 'multi.jsonl'}\n" in (here / "plain" / "lora.yaml").read_text()
    (here / "typed.yaml").write_text(text.replace("mixed.jsonl", "multi.jsonl"))
    assert "dataset-rows" not in meshwright("check", "typed.yaml", "--gpus", "2xH100").out


def test_an_export_to_trl_has_every_value_whose_default_differs_there(here: Path, meshwright: Any) -> None:
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    (here / "lora.toml").write_text(RECIPE)
    answer = meshwright(
        "export", "lora.toml", "--to", "trl", "layout.pp=1", "--out", "trl", "layout.micro_batch_size=1"
    )
    unmapped = answer.out.partition("Unmapped")[2].partition("Notes")[0]
    assert "global_batch_size" not in unmapped  # 1 × 4 × 2 are the arguments
    assert not any(f"{name}." in unmapped for name in ("peft", "optimizer", "schedule"))
    seen: dict[str, dict[str, Any]] = {}
    text = (here / "trl" / "lora_args.py").read_text().replace("from trl", "# from trl").replace("from peft", "#")
    namespace = {
        name: lambda _name=name, **values: seen.update({_name: values}) for name in ("SFTConfig", "LoraConfig")
    }
    exec(text, namespace)
    args, adapter = seen["SFTConfig"], seen["LoraConfig"]
    assert args["per_device_train_batch_size"] * args["gradient_accumulation_steps"] * 2 == 8
    assert (args["weight_decay"], args["adam_beta2"], args["max_length"]) == (0.1, 0.95, 1024)
    assert args["lr_scheduler_type"].startswith("cosine")
    assert (args["num_train_epochs"], args["gradient_checkpointing"]) == (3.0, False)
    of_trl = {"max_length", "packing", "assistant_only_loss"}
    assert set(args) - of_trl <= set(transformers.TrainingArguments.__dataclass_fields__)
    assert (adapter["r"], adapter["lora_alpha"], adapter["target_modules"]) == (16, 32, "all-linear")
    assert peft.LoraConfig(**adapter).lora_alpha == 32
    full = meshwright("export", "lora.toml", "--to", "trl", "layout.pp=1", "layout.recompute=full", "peft.method=qlora")
    assert "fsdp_activation_checkpointing: true" in full.out
    assert "gradient_checkpointing=False" in full.out  # the Trainer refuses both
    assert "load_in_4bit=True" in full.out


def test_small_mistakes_name_what_works(here: Path, meshwright: Any) -> None:
    moved = meshwright("convert", "runB", "--checkpoint", "best", "--merge", "--out", "merged").err
    assert "source=runB: no such file or folder" in moved  # --out is the target
    (here / "lora.toml").write_text(RECIPE)
    other = meshwright("export", "lora.toml", "--to", "axolotl").err
    assert "configs of Axolotl are not written, and only `meshwright check FILE` reads them; choose acc" in other
    for key in ("eval_split", "test_size"):
        answer = meshwright("check", "lora.toml", f"{key}=0.2")
        assert "unknown key" not in answer.err
    plan = ("recommend", "qwen3-8b", "--gpus", "2xH100", "--goal", "lora", "--dataset", "ticket.jsonl")
    assert "did you mean data.dataset=tickets." in meshwright(*plan).out
    (here / "bad.csv").write_text("question,answer\nhi,hello, you\n")
    words = ("train", "lora.toml", "--tiny", "--out", "run", "train.epochs=1", "layout.pp=1")
    assert 'put cells that contain commas in double quotes: "a, b"' in meshwright(*words, "data.dataset=bad.csv").err
    (here / "lora.toml").write_text(RECIPE.replace("mixed.jsonl", "multi.jsonl"))
    trained = meshwright(*words)
    assert "multi.jsonl → mock" not in trained.err
    assert trained.code == 0, trained.err


def test_doctor_says_that_all_weights_were_not_trained_where_they_do_not_fit(here: Path, meshwright: Any) -> None:
    lines = [f"{{'loss': {2 - step / 10}, 'learning_rate': 0.0001, 'epoch': {step / 10}}}\n" for step in range(1, 9)]
    (here / "trainer.log").write_text("".join(lines))
    words = ("doctor", "trainer.log", "--gpus", "1xRTX4090", "--json")
    notes = meshwright(*words, "--model", "qwen3-8b").json["notes"]
    assert any("adapters are assumed, --goal peft; --goal qlora" in one for one in notes)
    for named in (("--model", "qwen3-8b", "--goal", "qlora"), ("--model", "qwen3-600m")):
        assert not [one for one in meshwright(*words, *named).json["notes"] if "training all weights" in one]


def test_an_exported_run_does_not_report_its_own_files_as_changed(here: Path, meshwright: Any) -> None:
    (here / "lora.toml").write_text(RECIPE.replace("[train]", 'validation = "multi.jsonl"\n\n[train]\neval_every = 5'))
    shown = meshwright("export", "lora.toml", "--to", "trl", "--out", "out", "optimizer.lr=3e-5", "layout.pp=1")
    assert "changed: optimizer.lr" in shown.out
    assert "changed: data.validation" not in shown.out
