"""A twelfth walk through a fine-tuning: other trainers' configs and data that another framework cannot read."""

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
    for verb in (("check", "ax.yml"), ("export", "ax.yml", "--to", "automodel"), ("import", "ax.yml")):
        refused = meshwright(*verb, "--gpus", "2x4090").err
        assert "not carried over by the fix: wandb_project=support\n" in refused
        command = shlex.split(refused.partition("fix:   meshwright ")[2])
        assert {"2x4090", "multi.jsonl", "train.global_batch_size=8", "optim=adamw_torch"} <= set(command)
    answer = meshwright(*command)
    assert "rank 16 · 1,024 tokens × 8 per step" in answer.out, answer.err
    assert "--dataset multi.jsonl" in answer.out
