"""plan, size and estimate: the search, GPU counts, and the price of one exact layout."""

from __future__ import annotations

import csv
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest


def test_plan_ranks_by_speed_and_lists_what_was_dropped(meshwright: Any) -> None:
    answer = meshwright("plan", "llama3-70b", "--gpus", "64xH100", "--goal", "pretrain", "--top", "4", "--json")
    assert answer.code == 0
    found = answer.json
    steps = [p["estimate"]["step_s"] for p in found["plans"]]
    assert len(steps) == 4
    assert steps == sorted(steps)
    assert all(p["estimate"]["fits"] for p in found["plans"])
    assert found["searched"] > 5000
    assert all(set(d) == {"reason", "count", "example"} and d["count"] > 0 for d in found["dropped"])
    assert any("memory" in d["reason"] for d in found["dropped"])


def test_plan_beats_or_equals_what_recommend_gives(meshwright: Any) -> None:
    asked = ("qwen3-30b-a3b", "--gpus", "16xH100", "--goal", "pretrain")
    best = meshwright("plan", *asked, "--top", "1", "--json").json["plans"][0]
    given = meshwright("recommend", *asked, "--json").json
    assert best["estimate"]["step_s"] <= given["estimate"]["step_s"] * 1.0001


def test_the_trade_off_has_no_beaten_layout(meshwright: Any) -> None:
    found = meshwright("plan", "llama3-8b", "--gpus", "8xH100", "--goal", "pretrain", "--json").json["pareto"]
    assert len(found) > 2
    for faster, slower in pairwise(found):
        assert faster["step_s"] <= slower["step_s"]
        assert faster["total_gib"] > slower["total_gib"]


def test_plan_keeps_what_is_pinned_and_takes_a_recipe(meshwright: Any) -> None:
    found = meshwright("plan", "llama3_70b_pretrain_config", "layout.tp=2", "--gpus", "64xH200", "--json")
    assert {p["layout"]["tp"] for p in found.json["plans"]} == {2}


def test_size_finds_the_smallest_and_the_days(meshwright: Any) -> None:
    words = ("size", "llama3-8b", "--goal", "pretrain", "--gpu", "H100", "--tokens", "1T", "--price", "2")
    found = meshwright(*words, "--max-gpus", "64", "--json").json
    assert found["smallest"]["fits"]
    assert found["smallest"]["gpus"] in (1, 2, 4, 8)  # one with the optimizer on the host
    assert all(not s["fits"] for s in found["sizes"] if s["gpus"] < found["smallest"]["gpus"])
    one = found["sizes"][-1]
    hours = one["days"] * 24 * one["gpus"]
    assert one["cost"] == pytest.approx(2 * hours)
    seconds = 1e12 / (one["tokens_per_s"] * one["goodput"]["share"])
    assert one["days"] == pytest.approx(seconds / 86400)


def test_estimate_is_of_exactly_the_requested_layout(meshwright: Any) -> None:
    asked = ("layout.tp=2", "layout.recompute=full", "--gpus", "8xH100")
    found = meshwright("estimate", "llama3-8b", *asked, "--json").json
    assert (found["layout"]["tp"], found["layout"]["recompute"]) == (2, "full")
    assert "match" not in found["recipe"]
    own = meshwright("estimate", "llama3_70b_pretrain_config", "--json").json
    assert own["question"]["gpus"] == "4x8xH100"
    assert own["changes"] == []


def test_the_parameters_of_a_small_model_are_not_rounded_to_none(meshwright: Any, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    config = {"model_type": "llama", "vocab_size": 512, "num_key_value_heads": 2, "max_position_embeddings": 8192}
    (tmp_path / "config.json").write_text(json.dumps({**config, **sizes}))
    for verb in ("check", "estimate"):
        assert "0.14 M parameters" in meshwright(verb, str(tmp_path), "--gpus", "1xH100").out


def test_a_layout_that_cannot_exist_is_an_error_finding(meshwright: Any) -> None:
    answer = meshwright("estimate", "llama3-8b", "layout.tp=3", "--gpus", "8xH100", "--json")
    assert answer.code == 1
    assert [f for f in answer.json["findings"] if f["severity"] == "error"]


@pytest.mark.parametrize(
    "words",
    [
        ("plan", "llama3-8b", "--gpus", "8xH100"),
        ("plan", "llama3-8b", "--gpus", "8xH100", "--goal", "sft", "--top", "0"),
        ("plan", "llama3_8b_sft_config", "--gpus", "8xH100", "--goal", "peft"),
        ("plan", "llama3-8b", "--goal", "sft"),
        ("size", "llama3-8b", "--goal", "sft", "--gpu", "H10O"),
        ("size", "llama3-8b", "--goal", "sft", "--gpu", "H100", "--tokens", "lots"),
        ("size", "llama3-8b", "--goal", "sft", "--gpu", "H100", "--tokens", "-3"),
        ("estimate", "llama3-8b"),
        ("estimate", "nosuchmodel", "--gpus", "8xH100"),
    ],
)
def test_bad_input(meshwright: Any, words: tuple[str, ...]) -> None:
    answer = meshwright(*words, "--json")
    assert answer.code == 2
    assert answer.json["error"]["message"]
    assert "Traceback" not in answer.err


@pytest.mark.parametrize("command", ["plan", "size", "estimate"])
def test_help_has_examples(meshwright: Any, command: str) -> None:
    assert "Examples:" in meshwright(command, "--help").out


def test_text(meshwright: Any) -> None:
    assert "legal layouts scored" in meshwright("plan", "llama3-8b", "--gpus", "8xH100", "--goal", "sft").out
    assert "smallest" in meshwright("size", "qwen3-0.6b", "--goal", "sft", "--gpu", "H100", "--max-gpus", "16").out
    assert "nothing searched" in meshwright("estimate", "llama3_8b_sft_config").out


ROOT = Path(__file__).parents[2]


def test_accuracy_has_the_shape_of_the_contract(meshwright: Any, tmp_path: Path) -> None:
    lines = (ROOT / "benchmarks" / "data" / "measurements.csv").read_text().splitlines(keepends=True)
    some = tmp_path / "some.csv"
    some.write_text("".join([lines[0], *lines[1::12]]))
    found = meshwright("accuracy", str(some), "--json").json
    assert found["rows"] == len(lines[1::12])
    assert found["predicted"] + sum(found["unsupported"].values()) == found["rows"]
    assert set(found["step_time"]) >= {"median_abs_pct", "p90_abs_pct", "by_source", "by_gpu"}
    assert set(found["memory"]) >= {"median_abs_pct", "p90_abs_pct", "by_source"}
    assert set(found["fit"]) == {"ok_called_ok", "ok_rows", "oom_called_oom", "oom_rows"}
    assert "rows predicted" in meshwright("accuracy", str(some)).out


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "source,model\n"])
def test_accuracy_of_a_table_that_is_none(meshwright: Any, tmp_path: Path, text: str) -> None:
    file = tmp_path / "bad.csv"
    file.write_text(text)
    assert meshwright("accuracy", str(file), "--json").code == 2
    assert meshwright("calibrate", str(file), "--out", str(tmp_path / "none.toml"), "--json").code == 2
    assert not (tmp_path / "none.toml").exists()


def test_calibrate_to_runs_and_use_it(meshwright: Any, tmp_path: Path) -> None:
    lines = (ROOT / "benchmarks" / "data" / "measurements.csv").read_text().splitlines(keepends=True)
    runs, out = tmp_path / "runs.csv", tmp_path / "mine.toml"
    runs.write_text("".join([lines[0], *(line for line in lines if ",torchtitan," in line and "H100" in line)][:9]))
    answer = meshwright("calibrate", str(runs), "--json")
    assert answer.code == 0
    profile = answer.json["profiles"][0]
    assert 0.4 <= profile["clock"] <= 2
    assert meshwright("calibrate", str(runs), "--out", str(out)).code == 0
    assert meshwright("estimate", "llama3_8b_sft_config", "--calibration", str(out), "--json").code == 0


def test_calibrate_without_a_gpu_is_an_error(meshwright: Any) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is one")
    answer = meshwright("calibrate", "--json")
    assert answer.code == 2
    assert "GPU" in answer.json["error"]["message"]


@pytest.mark.parametrize("suffix", ["svg", pytest.param("png", marks=pytest.mark.slow)])
def test_plots_are_written(meshwright: Any, tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / f"plot.{suffix}"
    size = ("size", "qwen3-0.6b", "--goal", "sft", "--gpu", "H100", "--max-gpus", "16")
    for words in (("estimate", "llama3_70b_pretrain_config"), size):
        assert meshwright(*words, "--plot", str(out)).code == 0
        assert out.stat().st_size > 3000
        out.unlink()


def test_a_plot_of_another_kind_is_refused(meshwright: Any, tmp_path: Path) -> None:
    answer = meshwright("estimate", "llama3_8b_sft_config", "--plot", str(tmp_path / "plot.pdf"), "--json")
    assert answer.code == 2
    assert answer.json["error"]["field"] == "plot"


def test_every_stage_is_available_and_the_worst_is_reported(meshwright: Any) -> None:
    found = meshwright("estimate", "llama3_70b_pretrain_config", "--json").json
    stages = found["memory_by_stage_gib"]
    assert len(stages) == found["layout"]["pp"]
    worst = max(stage["total"] for stage in stages.values())
    assert worst == pytest.approx(found["estimate"]["memory_gib"]["total"], rel=1e-3)


def test_ranked_plans_differ(meshwright: Any) -> None:
    found = meshwright("plan", "qwen3-30b-a3b", "--gpus", "16xH100", "--goal", "pretrain", "--json").json["plans"]
    layouts = [tuple(sorted((k, str(v)) for k, v in p["layout"].items())) for p in found]
    assert len(set(layouts)) == len(layouts) == 5


def test_a_layout_that_cannot_be_built_fits_nowhere(meshwright: Any) -> None:
    answer = meshwright("estimate", "llama3-8b", "layout.tp=16", "--gpus", "8xH100", "--json")
    assert answer.code == 1
    assert answer.json["estimate"]["fits"] is False
    assert "cannot be built" in meshwright("estimate", "llama3-8b", "layout.tp=16", "--gpus", "8xH100").out


def test_what_the_user_fixed_is_named_when_nothing_can_keep_it(meshwright: Any) -> None:
    found = meshwright("plan", "llama3-8b", "layout.tp=3", "--gpus", "8xH100", "--goal", "sft", "--json").json
    assert found["plans"] == []
    assert "tp=3" in found["dropped"][0]["reason"]


@pytest.mark.parametrize(
    "words",
    [
        ("plan", "llama3-8b", "--gpus", "8xH100", "--goal", "sft", "--top", "100000000"),
        ("size", "llama3-8b", "--goal", "sft", "--gpu", "H100", "--tokens", "1T", "--price", "nan"),
        ("size", "llama3-8b", "--goal", "sft", "--gpu", "H100", "--tokens", "1T", "--price", "-3"),
        ("size", "llama3-8b", "--goal", "sft", "--gpu", "H100", "--price", "3"),
        ("estimate", "llama3_8b_sft_config", "--goal", "pretrain"),
        ("estimate", "llama3_8b_sft_cofig"),
    ],
)
def test_more_bad_input(meshwright: Any, words: tuple[str, ...]) -> None:
    answer = meshwright(*words, "--json")
    assert answer.code == 2
    assert "NaN" not in answer.out


def test_a_saved_recipe_is_estimated(meshwright: Any, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    asked = ("--gpus", "8xH100", "--goal", "sft")
    plan = meshwright("recommend", "llama3-8b", *asked, "--save", str(file), "--json").json
    again = meshwright("estimate", str(file), "--json").json
    assert again["estimate"]["step_s"] == pytest.approx(plan["estimate"]["step_s"])


def test_what_cannot_be_written_ends_with_three(meshwright: Any, tmp_path: Path) -> None:
    asked = ("recommend", "llama3-8b", "--gpus", "8xH100", "--goal", "sft")
    assert meshwright(*asked, "--save", str(tmp_path / "no" / "x.toml"), "--json").code == 3


@pytest.mark.parametrize("step", ["nan", "1e9", "-1", "inf"])
def test_runs_that_make_no_sense_are_not_fitted(meshwright: Any, tmp_path: Path, step: str) -> None:
    with (ROOT / "benchmarks" / "data" / "measurements.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["source"] == "fms_fsdp"]
    runs, out = tmp_path / "runs.csv", tmp_path / "mine.toml"
    with runs.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows({**row, "step_time_s": step, "tokens_per_s_per_gpu": ""} for row in rows)
    assert meshwright("calibrate", str(runs), "--out", str(out), "--json").code == 2
    assert not out.exists()


def test_estimate_takes_a_sequence_length(meshwright: Any) -> None:
    found = meshwright("estimate", "llama3_8b_sft_config", "--seq", "4k", "--json").json
    assert found["contract"]["seq_length"] == 4096


def test_size_takes_one_node_or_the_type_alone(meshwright: Any) -> None:
    asked = ("size", "qwen3-0.6b", "--goal", "sft", "--json", "--max-gpus", "24", "--gpu")
    answer = meshwright(*asked, "4xH100").json
    assert answer["node"] == 4
    assert {3, 4, 12, 20} <= set(answer["tried"])
    assert meshwright(*asked, "H100").json["node"] == 8
