"""A cluster's own files of DeepSpeed, Accelerate, torchtitan and Megatron-LM: jobs keep what the files say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .mistakes import call

DS_CONFIG = """{
  "train_micro_batch_size_per_gpu": 2,
  "gradient_accumulation_steps": 1,
  "gradient_clipping": 0.5,
  "bf16": {"enabled": true},
  "zero_optimization": {
    "stage": 3,
    "overlap_comm": true,
    "reduce_bucket_size": "auto",
    "stage3_max_live_parameters": 1e9,
    "stage3_gather_16bit_weights_on_model_save": true
  }
}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds_config.json").write_text(DS_CONFIG)
    return tmp_path


def test_a_changed_length_adds_no_scheduler_without_a_type(folder: Path) -> None:
    words = ("--model", "llama3-8b", "--gpus", "8xH100", "data.seq_length=4096")
    changes = ("train.steps=1000", "optimizer.lr=1e-4", "layout.recompute=full")
    found = call("export", "ds_config.json", "--to", "deepspeed", *words, *changes, "--out", "job")
    assert found.code == 0, found.err
    written = json.loads((folder / "job/ds_config.json").read_text())
    assert written == json.loads(DS_CONFIG)
    arguments = (folder / "job/ds_config_args.py").read_text()
    assert "max_steps=1000," in arguments
    assert "learning_rate=0.0001," in arguments


@pytest.mark.parametrize("section", ["scheduler", "optimizer"])
def test_a_section_without_a_type_is_an_error(folder: Path, section: str) -> None:
    config = {**json.loads(DS_CONFIG), section: {"params": {"lr" if section == "optimizer" else "warmup_num_steps": 2}}}
    (folder / "ds_config.json").write_text(json.dumps(config))
    found = call("check", "ds_config.json", "--model", "llama3-8b", "--gpus", "8xH100")
    assert found.code == 1
    (one,) = [one for one in found.json["findings"] if one["rule"] == "deepspeed.no-type"]
    assert section in one["message"]
