"""Settings that an engine or its config cannot hold: recommend, compare and check say so before export does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

LONGER = ("architecture.rope_theta=5000000", "data.seq_length=65536", "train.global_batch_size=64")
ON = ("--gpus", "32x8xH100", "--goal", "pretrain")


def test_recommend_prints_no_command_that_export_refuses(meshwright: Any) -> None:
    answer = meshwright("recommend", "qwen3-30b-a3b", *ON, *LONGER, "--engine", "automodel", "--json").json
    assert "automodel" not in answer["commands"]
    assert answer["no_command"]["automodel"].startswith("architecture.rope_theta=5000000.0: NeMo AutoModel has no key")
    without = meshwright("recommend", "qwen3-30b-a3b", *ON, *LONGER[1:], "--engine", "automodel", "--json").json
    assert "automodel" in without["commands"]


def test_compare_counts_that_engine_as_one_that_cannot_run_it(meshwright: Any) -> None:
    shown = meshwright("compare", "qwen3-30b-a3b", *ON, *LONGER, "--engines", "automodel,megatron", "--json").json
    by_engine = {one["name"]: one for one in shown["sides"]}
    assert "architecture.rope_theta" in by_engine["automodel"]["error"]
    assert not by_engine["megatron"]["error"]


def test_the_gpus_that_are_there_come_first(meshwright: Any) -> None:
    answer = meshwright("recommend", "llama3-8b", "--gpus", "18x72xGB200", "--goal", "pretrain")
    assert answer.code == 2
    fixes = answer.err.partition("fix:")[2].split("|")
    counts = [int(one.split("--gpus ")[1].split("x")[0]) for one in fixes if "--gpus" in one]
    assert counts
    assert counts[0] == max(n for n in counts if n <= 1296)


def test_a_blend_is_not_reported_as_random_data(meshwright: Any, tmp_path: Path) -> None:
    blended = "data.blend=/data/web_text_document:0.7,/data/code_text_document:0.3"
    typed = ("export", "llama3_8b_pretrain_config", blended, "--to", "torchtitan", "--gpus", "8xH100")
    shown = meshwright(*typed, "--out", str(tmp_path / "out")).out
    assert "mock" not in shown
    assert "torchtitan has no blend of datasets (/data/web_text_document, /data/code_text_document)" in shown


def test_the_floor_of_the_learning_rate_by_its_other_name(meshwright: Any, tmp_path: Path) -> None:
    (tmp_path / "titan.toml").write_text(
        '[model]\nname = "llama3"\nflavor = "8B"\n[lr_scheduler]\nwarmup_steps = 100\nmin_lr_ratio = 0.1\n'
        "[training]\nlocal_batch_size = 1\nseq_len = 8192\nsteps = 1000\n"
    )
    answer = meshwright("check", str(tmp_path / "titan.toml"), "--gpus", "8xH100", "--json").json
    (finding,) = (one for one in answer["findings"] if one["rule"] == "key.unknown")
    assert finding["severity"] == "error"
    assert "did you mean lr_scheduler.min_lr_factor?" in finding["message"]


def test_what_an_engine_runs_instead_of_a_schedule_is_named(meshwright: Any) -> None:
    layout = ("layout.pp=4", "layout.pp_schedule=dualpipe_v")
    typed = ("compare", "llama3-8b", "--goal", "pretrain", "--gpus", "8x8xH100", "--engines", "deepspeed,megatron")
    sides = {one["name"]: one for one in meshwright(*typed, *layout, "--json").json["sides"]}
    (schedule,) = (one for one in sides["megatron"]["cannot"] if one["field"] == "layout.pp_schedule")
    assert schedule["why"] == "it runs 1f1b, interleaved_1f1b"
    refused = [one["field"] for one in sides["deepspeed"]["cannot"]]
    assert "layout.pp" in refused
    assert "layout.pp_schedule" not in refused
