"""Small stumbles of a first fine-tuning: words, cluster files, exports and printed commands."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

LLAMA_FACTORY = """model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
stage: sft
do_train: true
finetuning_type: lora
dataset: identity
template: llama3
cutoff_len: 2048
output_dir: saves/x
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rows = [json.dumps({"prompt": f"what is {n}?", "response": f"it is {n}"}) for n in range(40)]
    Path("qa.jsonl").write_text("\n".join(rows))
    return tmp_path


@pytest.mark.parametrize("goal", ["sft", "pretrain"])
def test_an_export_to_the_trainer_stops_early(folder: Path, meshwright: Any, goal: str) -> None:
    Path("text.txt").write_text("some text\n\n" * 200)
    data = "qa.jsonl" if goal == "sft" else "text.txt"
    typed = [f"qwen3_600m_{goal}_config", "--to", "accelerate", "--gpus", "1xH100", f"data.dataset={data}"]
    stops = ["train.eval_every=10", "data.validation_part=0.1", "train.early_stop_patience=2"]
    done = meshwright("export", *typed, *stops, "train.early_stop_delta=0.01", "--out", "ours")
    assert done.code == 0, done.err
    assert "early_stop" not in done.out
    arguments = next(Path("ours").glob("*_args.py")).read_text()
    assert "callbacks = [EarlyStoppingCallback(early_stopping_patience=2, early_stopping_threshold=0.01)]" in arguments
    assert 'metric_for_best_model="eval_loss"' in arguments
    program = Path("ours/train.py").read_text()
    assert "    callbacks=callbacks," in program
    [imported] = [
        one for one in ast.parse(program).body if isinstance(one, ast.ImportFrom) and "_args" in str(one.module)
    ]
    assert "callbacks" in [one.name for one in imported.names]
    plain = meshwright("export", *typed, *stops[:2], "--out", "plain")
    assert plain.code == 0
    assert "callbacks" not in "".join(one.read_text() for one in Path("plain").glob("*.py"))


def test_explain_validation_says_how_data_is_held_out(meshwright: Any) -> None:
    out = meshwright("explain", "validation").out
    assert "data.validation_part=0.05 holds 5 %" in out.replace("\n         ", " ")
    assert "Default  none" in out


@pytest.mark.parametrize("name", ["ws.yaml", "./ws.yaml", "ws.json"])
def test_a_cluster_file_in_another_format_is_answered_with_its_lines(folder: Path, meshwright: Any, name: str) -> None:
    Path(name).write_text("nodes: 2\ngpu: H100\n")
    refused = meshwright("recommend", "llama3-8b", "--goal", "sft", "--gpus", name).err
    assert 'a cluster file is TOML, with lines such as gpu = "H100", nodes = 2, gpus_per_node = 8' in refused


def test_the_command_for_a_front_end_names_the_gpus_as_typed(folder: Path, meshwright: Any) -> None:
    Path("lf.yaml").write_text(LLAMA_FACTORY)
    refused = meshwright("train", "lf.yaml")
    assert "--gpus 1x" in refused.err
    assert "1x1x" not in refused.err


PROGRAM = """from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

dataset = load_dataset("json", data_files="rows.jsonl", split="train")
args = SFTConfig(output_dir="out", num_train_epochs=3, per_device_train_batch_size=2, bf16=True)
trainer = SFTTrainer(model="Qwen/Qwen3-0.6B", args=args, train_dataset=dataset)
trainer.train()
"""
ALPACA = {"instruction": "add", "input": "1 1", "output": "2"}


@pytest.mark.parametrize(
    ("row", "old", "new", "warned"),
    [
        (ALPACA, "", "", True),
        (ALPACA, 'split="train")', 'split="train").map(to_messages)', False),
        (ALPACA, "args=args", "args=args, formatting_func=join", False),
        (ALPACA, "bf16=True", 'bf16=True, dataset_text_field="output"', False),
        ({"prompt": "a", "completion": "b"}, "", "", False),
        ({"messages": [{"role": "user", "content": "a"}]}, "", "", False),
    ],
)
def test_rows_that_trl_does_not_know_need_a_map(
    folder: Path, meshwright: Any, row: dict[str, Any], old: str, new: str, warned: bool
) -> None:
    Path("rows.jsonl").write_text("\n".join([json.dumps(row)] * 100))
    Path("sft.py").write_text(PROGRAM.replace(old, new) if old else PROGRAM)
    out = " ".join(meshwright("check", "sft.py", "--gpus", "1xH100").out.split())
    assert ("rows.jsonl' have no column that SFTTrainer reads" in out) is warned


def test_the_fast_end_of_a_band_is_one_that_the_gpu_can_reach() -> None:
    from meshwright import recommend
    from meshwright.costs.estimate import MOST_MFU, to_dict

    found = recommend("qwen3-8b", "1xRTX4090", "qlora").estimate
    fastest = float(found.mfu) * float(found.step_s) / to_dict(found)["band"]["step_low_s"]
    assert float(found.mfu) < fastest <= MOST_MFU * 1.0001
