"""Runs that become slower, end on a NaN or name no GPUs: what doctor and a fit of their speed say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshwright import diagnose

ARGUMENTS = {
    "num_layers": 32, "hidden_size": 4096, "ffn_hidden_size": 14336, "num_attention_heads": 32,
    "num_query_groups": 8, "group_query_attention": True, "kv_channels": 128, "swiglu": True, "bf16": True,
    "untie_embeddings_and_output_weights": True, "padded_vocab_size": 128256, "vocab_size": 128256, "seq_length": 8192,
    "max_position_embeddings": 8192, "global_batch_size": 128, "micro_batch_size": 1, "world_size": 16,
    "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1, "context_parallel_size": 1,
    "data_parallel_size": 8, "sequence_parallel": True, "use_distributed_optimizer": True, "lr": 0.0003,
    "min_lr": 3e-05, "lr_decay_style": "cosine", "lr_warmup_iters": 2000, "train_iters": 100000,
    "recompute_granularity": "selective", "overlap_grad_reduce": True, "overlap_param_gather": True,
}  # fmt: skip
NAN = (
    "[rank9]: RuntimeError: Rank 9, node gpu-b07, device 1, iteration 403: Unexpected result nan (message='found NaN "
    "in local grad norm for bucket #0 in backward pass before data-parallel communication collective')"
)


def megatron_log(seconds: Callable[[int], float], end: str = "") -> str:
    """Return the log of 400 steps of Llama 3 8B on 16 GPUs that names everything except the GPUs' type."""
    lines = ["------------------------ arguments ------------------------"]
    lines += [f"  {name} {'.' * (47 - len(name))} {value}" for name, value in ARGUMENTS.items()]
    lines += ["-------------------- end of arguments ---------------------"]
    for step in range(10, 401, 10):
        noise = 1 + 0.002 * ((step * 7919) % 13 - 6) / 6
        lines.append(
            f" [2026-11-10 08:{step // 60 % 60:02}:{step % 60:02}] iteration {step:8}/  100000 | consumed samples: "
            f"{step * 128:12} | elapsed time per iteration (ms): {1000 * seconds(step) * noise:.1f} | learning rate: "
            f"{3e-4 * step / 2000:.6E} | global batch size:   128 | lm loss: {9 - 0.012 * step:.6E} | "
            f"loss scale: 1.0 | grad norm: {0.5 + 0.1 * noise:.3f} | number of skipped iterations:   0 | "
            "number of nan iterations:   0 |"
        )
    return "\n".join([*lines, *([end] if end else []), ""])


@pytest.fixture(scope="module")
def estimate_s(tmp_path_factory: pytest.TempPathFactory) -> float:
    """The estimated step time on 16 H100."""
    path = logged(tmp_path_factory.mktemp("logs"), "any.log", megatron_log(lambda _: 8.0))
    estimate = next(one.estimate for one in diagnose(path, gpus="2x8xH100").figures if one.name == "step time")
    assert estimate is not None
    return estimate


def logged(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_a_slowdown_is_not_low_mfu_too(meshwright: Any, tmp_path: Path, estimate_s: float) -> None:
    later = megatron_log(lambda step: estimate_s * (1.45 if step > 200 else 1.0))
    path = logged(tmp_path, "later.log", later)
    found = meshwright("doctor", path, "--gpus", "2x8xH100", "--json").json["findings"]
    assert [one["rule"] for one in found if one["severity"] == "warning"] == ["speed.sustained-slowdown"]


def test_a_run_that_was_slow_before_its_slowdown_has_both(meshwright: Any, tmp_path: Path, estimate_s: float) -> None:
    always = megatron_log(lambda step: estimate_s * (2.4 if step > 200 else 1.7))
    path = logged(tmp_path, "always.log", always)
    found = meshwright("doctor", path, "--gpus", "2x8xH100", "--json").json["findings"]
    rules = [one["rule"] for one in found]
    assert {"speed.sustained-slowdown", "speed.low-mfu"} <= set(rules)


def test_a_nan_that_one_rank_reports_names_step_rank_and_node(meshwright: Any, tmp_path: Path) -> None:
    path = logged(tmp_path, "nan.log", megatron_log(lambda _: 8.0, NAN))
    finding = meshwright("doctor", path, "--json").json["findings"][0]
    assert finding["rule"] == "loss.not-a-number"
    assert "in step 403, first reported by rank 9 (node gpu-b07, GPU 1)" in finding["message"]
    assert any("gpu-b07" in word for one in finding["remedies"] for word in one["try"])


def test_calibrate_warns_of_a_run_that_becomes_slower(meshwright: Any, tmp_path: Path, estimate_s: float) -> None:
    path = logged(tmp_path, "later.log", megatron_log(lambda step: estimate_s * (1.45 if step > 200 else 1.0)))
    profile = tmp_path / "mine.toml"
    shown = meshwright("calibrate", path, "--gpus", "2x8xH100", "--out", str(profile)).out
    assert "steps take" in shown
    assert "to step 200, then" in shown
    assert f"meshwright doctor {path}" in shown
    planned = meshwright(
        "estimate", "llama3-8b", "--goal", "pretrain", "--gpus", "16xH100", "--calibration", str(profile)
    )
    assert "to step 200, then" in planned.out


def test_a_sound_run_is_fitted_without_a_doubt(meshwright: Any, tmp_path: Path, estimate_s: float) -> None:
    path = logged(tmp_path, "sound.log", megatron_log(lambda _: estimate_s * 1.05))
    answer = meshwright("calibrate", path, "--gpus", "2x8xH100", "--json").json
    assert answer["profiles"][0]["doubts"] == []
    assert not any("times the shipped estimate" in one for one in answer["notes"])


def test_a_log_without_gpus_that_is_far_from_the_plans_says_how_to_name_them(
    meshwright: Any, tmp_path: Path, estimate_s: float
) -> None:
    path = logged(tmp_path, "sound.log", megatron_log(lambda _: estimate_s))
    asked = ("recommend", "llama3-8b", "--gpus", "16xGB200", "--goal", "pretrain", "--engine", "megatron")
    shown = meshwright(*asked, "--like", path).out
    assert "times the shipped estimate for GB200" in shown
    command = f"meshwright calibrate {path} --gpus 16xGPU --out mine.toml"
    assert command in shown.replace("\n", " ")
    typed = command.replace("xGPU", "xH100").replace("mine.toml", str(tmp_path / "mine.toml")).split()[1:]
    assert meshwright(*typed).code == 0
    with_profile = meshwright(*asked, "--calibration", str(tmp_path / "mine.toml")).out
    assert "does not apply to GB200; the shipped profile is used" in with_profile


def test_a_log_that_no_speed_of_the_assumed_gpus_fits_says_which_were_assumed(
    meshwright: Any, tmp_path: Path, estimate_s: float
) -> None:
    path = logged(tmp_path, "slow.log", megatron_log(lambda _: estimate_s * 6))
    answer = meshwright("recommend", "llama3-8b", "--gpus", "16xGB200", "--goal", "pretrain", "--like", path)
    assert answer.code == 2
    assert "does not name its GPUs" in answer.err
    assert "--gpus 16xGPU --out mine.toml" in answer.err
