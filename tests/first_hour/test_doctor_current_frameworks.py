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


RECOMPUTED = "root - INFO - Applied full activation checkpointing to the model\n"
TITAN = """\
[titan] 2026-11-14 09:00:01,113 - root - INFO - torchtitan version: 0.2.2 (0.0.0 means __version__ is not defined).
[titan] 2026-11-14 09:00:02,101 - root - INFO - Building 1-D device mesh with ['dp_shard'], [128]
[titan] 2026-11-14 09:00:12,401 - root - INFO - Building llama3 8B with TransformerModelArgs(dim=4096, n_layers=32, \
n_heads=32, n_kv_heads=8, vocab_size=128256, multiple_of=1024, ffn_dim_multiplier=1.3, norm_eps=1e-05, \
rope_theta=500000, max_seq_len=8192)
[titan] 2026-11-14 09:00:12,601 - root - INFO - CUDA capacity: NVIDIA H100 80GB HBM3 with 79.11GiB memory
[titan] 2026-11-14 09:00:12,701 - root - INFO - Model llama3 8B size: 8,030,261,248 total parameters
{more}[titan] 2026-11-14 09:00:13,001 - root - INFO - Applied FSDP to the model
[titan] 2026-11-14 09:00:14,402 - root - INFO - Trainer is initialized with local batch size 1, global batch size 512, \
gradient accumulation steps 4, sequence length 8192, total steps 238419 (warmup 2000)
"""
TITAN_STEP = (
    "[titan] 2026-11-14 {hour:02d}:{minute:02d}:{second:02d},113 - root - INFO - step: {step:2d}  loss: {loss:8.5f}  "
    "grad_norm: 0.5123  memory: 22.10GiB(27.94%)  tps: {tps:,d}  tflops: 366.00  mfu: 37.00%\n"
)


def titan_log(more: str, tps: int) -> str:
    """Return torchtitan's log of Llama 3 8B on 128 GPUs."""
    text = TITAN.format(more=more)
    for number in range(1, 100):
        at = 32_400 + int(number * 10 * 4 * 8192 / tps)
        clock = {"hour": at // 3600, "minute": at // 60 % 60, "second": at % 60}
        text += TITAN_STEP.format(**clock, step=number * 10, loss=12 - number * 0.05, tps=tps + number % 7 * 5)
    return text


def test_a_torchtitan_run_that_recomputes_all_and_does_not_compile_is_compared_with_the_plan(
    meshwright: Any, tmp_path: Path
) -> None:
    cluster = ("--gpus", "16x8xH100")
    answer = diagnosed(
        meshwright, tmp_path, titan_log("[titan] 2026-11-14 09:00:12,801 - " + RECOMPUTED, 7100), *cluster
    )
    (finding,) = answer["findings"]
    assert finding["rule"] == "speed.better-layout"
    assert finding["remedies"][0]["try"] == ["layout.recompute=none", "kernels.compile=true"]
    assert "compile.enable = true" in " ".join(finding["remedies"][0]["there"])
    assert not diagnosed(meshwright, tmp_path, titan_log("", 9300), *cluster)["findings"]


def test_a_log_that_just_ends_may_be_of_a_run_that_hangs(meshwright: Any, tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text(titan_log("", 9300))
    answer = meshwright("doctor", str(tmp_path / "train.log"), "--gpus", "16x8xH100").out
    assert "it is still running, hangs (a line is due every 35.2 s; py-spy dump --pid PID shows where), was" in answer
