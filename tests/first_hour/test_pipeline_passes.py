"""Pipelines whose step has several passes: what check, estimate, plan and export say of torchtitan and AutoModel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

TITAN = """[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = {local}
global_batch_size = 64
seq_len = 8192
[parallelism]
pipeline_parallel_degree = 4
pipeline_parallel_schedule = "1F1B"
[checkpoint]
enable = true
"""
AUTOMODEL = """recipe: TrainFinetuneRecipeForNextTokenPrediction
step_scheduler:
  global_batch_size: 64
  local_batch_size: {local}
  max_steps: 100
model:
  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained
  pretrained_model_name_or_path: meta-llama/Meta-Llama-3-8B
distributed:
  strategy: fsdp2
  pp_size: 4
  pipeline:
    pp_schedule: 1f1b
    pp_microbatch_size: 1
"""
GPUS = ("--gpus", "8xH100")


@pytest.mark.parametrize(
    ("name", "text", "key"),
    [("a.toml", TITAN, "training.local_batch_size"), ("a.yaml", AUTOMODEL, "step_scheduler.local_batch_size")],
)
def test_a_typed_local_batch_is_that_of_the_file(
    meshwright: Any, tmp_path: Path, name: str, text: str, key: str
) -> None:
    file = tmp_path / name
    file.write_text(text.format(local=4))
    typed = meshwright("estimate", str(file), *GPUS, f"{key}=8", "--json").json
    ours = meshwright("estimate", str(file), *GPUS, "layout.pp_micro_batches=8", "--json").json
    file.write_text(text.format(local=8))
    written = meshwright("estimate", str(file), *GPUS, "--json").json
    assert typed["layout"]["pp_micro_batches"] == written["layout"]["pp_micro_batches"] == 8
    assert typed["layout"]["gradient_accumulation"] == 32
    assert typed["estimate"]["step_s"] == ours["estimate"]["step_s"] == written["estimate"]["step_s"]
    shown = meshwright("estimate", str(file), *GPUS).out
    assert "micro batch 1 × 32 accumulated, 8 per pass" in shown
    file.write_text(text.format(local=32))
    assert "per pass" not in meshwright("estimate", str(file), *GPUS).out


def test_a_plan_splits_the_step_into_passes_and_its_export_reads_back(meshwright: Any, tmp_path: Path) -> None:
    """With all micro batches in one pass, torchtitan keeps the logits of all: 565 GiB here."""
    typed = ("layout.pp=4", "layout.tp=1", "layout.cp=1", "kernels.loss=vocab_parallel")
    words = ("llama3_8b_pretrain_config", *GPUS)
    plan = meshwright("recommend", *words, "--engine", "torchtitan", *typed, "--json").json
    layout = plan["layout"]
    assert layout["offload"] == "none"
    assert 4 < layout["pp_micro_batches"] < layout["gradient_accumulation"]
    changes = [f"{one['field']}={one['to']}" for one in plan["changes"] if one["field"].startswith("layout.")]
    assert f"layout.pp_micro_batches={layout['pp_micro_batches']}" in changes
    written = tmp_path / "out"
    done = meshwright("export", *words, "--to", "torchtitan", "--out", str(written), *typed, *changes)
    assert done.code == 0, done.err
    assert "pp_micro_batches" not in done.out
    for name in ("config.toml", "run.sh", "run_0.3.0.sh"):
        found = meshwright("estimate", str(written / name), *GPUS, "--json").json
        assert found["layout"]["pp_micro_batches"] == layout["pp_micro_batches"]
    found = meshwright("estimate", str(written / "config.toml"), *GPUS, "--json").json["estimate"]
    assert found["step_s"] == pytest.approx(plan["estimate"]["step_s"])
    assert found["memory_gib"]["total"] == pytest.approx(plan["estimate"]["memory_gib"]["total"])


def test_fixes_of_a_pass_hold_when_typed(meshwright: Any, tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text(TITAN.format(local=2))
    found = meshwright("check", str(file), *GPUS, "--json").json["findings"]
    rules = {one["rule"]: one["fix"] for one in found}
    assert "schedule.idle-stages" not in rules, "one finding says it"
    assert rules["torchtitan.pipeline-underfilled"] == ["training.local_batch_size = 4"]
    file.write_text(TITAN.format(local=4))
    assert not [
        one
        for one in meshwright("check", str(file), *GPUS, "--json").json["findings"]
        if "underfilled" in one["rule"] or "idle" in one["rule"]
    ]
    words = ("check", "llama3_8b_pretrain_config", *GPUS, "--engine", "torchtitan", "layout.pp=4", "layout.tp=1")
    uneven = meshwright(*words, "layout.sp=false", "layout.pp_micro_batches=6", "--json").json
    assert "schedule.uneven-passes" in {one["rule"] for one in uneven["findings"]}
    [fixed] = [one for one in uneven["repair"]["overrides"] if "pp_micro_batches" in one]
    again = meshwright(*words, "layout.sp=false", fixed, "--json").json
    assert "schedule.uneven-passes" not in {one["rule"] for one in again["findings"]}


def test_engines_with_one_pass_say_that_they_ignore_several(meshwright: Any) -> None:
    words = ("check", "llama3_8b_pretrain_config", *GPUS, "layout.pp=2", "layout.tp=1", "layout.sp=false")
    for engine, typed, ignored in (
        ("megatron", "layout.pp_micro_batches=4", True),
        ("megatron", "layout.pp_micro_batches=0", False),
        ("automodel", "layout.pp_micro_batches=4", False),
    ):
        found = meshwright(*words, "--engine", engine, typed, "--json").json["findings"]
        assert ("engine.ignores-pp-micro-batches" in {one["rule"] for one in found}) == ignored


def test_a_typed_global_batch_holds_in_a_file_without_one(meshwright: Any, tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text(TITAN.format(local=4).replace("global_batch_size = 64\n", ""))
    done = meshwright("estimate", str(file), *GPUS, "train.global_batch_size=128", "--json").json
    assert done["layout"]["gradient_accumulation"] == 64


def test_a_plan_for_torchtitan_assumes_only_what_its_file_can_say(meshwright: Any, tmp_path: Path) -> None:
    saved, out = str(tmp_path / "q.toml"), tmp_path / "out"
    words = ("--gpus", "16x8xH100")
    asked = ("recommend", "qwen3-30b-a3b", *words, "--goal", "pretrain", "--seq", "8k", "--engine", "torchtitan")
    plan = meshwright(*asked, "--save", saved, "--json").json  # its recipe reduces in bf16 and has a chunked loss
    assert "precision.bf16-reduction" not in {one["rule"] for one in plan["findings"]}  # torchtitan reduces in fp32
    assert not any("kernels.loss" in " ".join(one["overrides"]) for one in plan["suggestions"])
    assert "kernels.loss=" not in meshwright("export", saved, "--to", "torchtitan", *words, "--out", str(out)).out
    read = meshwright("estimate", str(out / "config.toml"), *words, "--json").json["estimate"]
    assert read["memory_gib"] == pytest.approx(plan["estimate"]["memory_gib"], rel=0.01)
    assert read["step_s"] == pytest.approx(plan["estimate"]["step_s"], rel=0.01)
