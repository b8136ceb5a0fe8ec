"""The doctor on logs of current frameworks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from tests.doctor import corpus
from tests.doctor.framework_logs import WRITERS


def diagnosed(meshwright: Any, folder: Path, text: str, *typed: str) -> dict[str, Any]:
    (folder / "train.log").write_text(text)
    answer: dict[str, Any] = meshwright("doctor", str(folder / "train.log"), *typed, "--json").json
    return answer


def test_a_torchtitan_log_that_counts_its_batch_in_tokens(meshwright: Any, tmp_path: Path) -> None:
    text = WRITERS["torchtitan_now"](corpus.pretraining(random.Random(3)))
    assert "tokens per DP rank" in text
    answer = diagnosed(meshwright, tmp_path, text)
    assert not answer["findings"]
    assert {"step time", "tokens/s/GPU"} <= {one["name"] for one in answer["figures"]}


@pytest.mark.parametrize(("writer", "key"), [("axolotl", "learning_rate: "), ("trainer", "learning_rate: ")])
def test_a_loss_of_0_with_nan_norms_is_a_nan(meshwright: Any, tmp_path: Path, writer: str, key: str) -> None:
    answer = diagnosed(meshwright, tmp_path, WRITERS[writer](corpus.hidden_nan(random.Random(5))))
    (finding,) = answer["findings"]
    assert finding["rule"] == "loss.not-a-number"
    assert "the Trainer logs a NaN loss as 0" in finding["message"]
    assert any(line.startswith(key) for one in finding["remedies"] for line in one["there"])


def test_a_layout_is_compared_with_the_best_one(meshwright: Any, tmp_path: Path) -> None:
    answer = diagnosed(meshwright, tmp_path, WRITERS["torchtitan_now"](corpus.wide_layout(random.Random(7))))
    finding = next(one for one in answer["findings"] if one["rule"] == "speed.better-layout")
    assert "tp=8" in finding["message"]
    (remedy,) = finding["remedies"]
    assert "layout.tp=1" in remedy["try"]
    assert any("tensor_parallel_degree" in line for line in remedy["there"])


@pytest.mark.parametrize(("writer", "offered"), [("megatron_now", False), ("torchtitan_now", False), ("own", True)])
def test_a_loss_is_offered_where_the_framework_has_it(
    meshwright: Any, tmp_path: Path, writer: str, offered: bool
) -> None:
    text = WRITERS[writer](corpus.spike(random.Random(11)))
    answer = diagnosed(meshwright, tmp_path, text, "--recipe", "llama3_8b_pretrain_config", "--gpus", "8xH100")
    finding = next(one for one in answer["findings"] if one["rule"] == "loss.spikes")
    tried = [text for one in finding["remedies"] for text in one["try"]]
    assert any(text.startswith("optimizer.lr=") or "rate" in text for text in tried)
    assert any(text.startswith("train.z_loss=") for text in tried) == offered
