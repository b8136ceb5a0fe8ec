"""The price of a pretraining: checkpoints, deadlines, tokens in a number of days, and saved steps."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

ASKED = ("recommend", "llama3-8b", "--goal", "pretrain", "--gpus", "128xH100")
SIZE = ("size", "llama3-8b", "--goal", "pretrain")


@pytest.mark.parametrize("every", [100, 1000, 4000])
def test_the_interval_that_runs_is_priced(meshwright: Any, every: int) -> None:
    found = meshwright(*ASKED, "--tokens", "4T", f"checkpoint.save_every={every}", "--json").json
    good = found["budget"]["goodput"]
    assert good["save_every"] == every
    assert good["save_interval_s"] == pytest.approx(every * found["estimate"]["step_s"], rel=1e-3)


def test_a_bad_interval_names_a_better_one(meshwright: Any) -> None:
    words = (*ASKED, "--tokens", "4T", "--json")
    for every in (1, 10_000, 0):
        bad = meshwright(*words, f"checkpoint.save_every={every}").json["budget"]
        (better,) = (note.split()[-1] for note in bad["notes"] if "checkpoint.save_every=" in note)
        good = meshwright(*words, better).json["budget"]
        assert good["notes"] == []
        assert good["goodput"]["share"] > bad["goodput"]["share"] + 0.002
        assert good["days"] < bad["days"]


def test_a_run_shorter_than_the_interval_says_so(meshwright: Any) -> None:
    words = (*ASKED, "--tokens", "8B", "checkpoint.save_every=5000")
    assert "checkpoint only at the end (checkpoint.save_every=5000 is not below its 1,908 steps)" in " ".join(
        meshwright(*words).out.split()
    )
    budget = meshwright(*words, "--json").json["budget"]
    assert budget["goodput"]["save_interval_s"] < 1.01 * budget["days"] * 86400


def test_a_type_without_a_count_in_time_shows_none(meshwright: Any) -> None:
    words = (*SIZE, "--gpu", "H100,B200", "--tokens", "400B", "--days", "11", "--max-gpus", "32")
    compared = {one["gpu"]: one for one in meshwright(*words, "--json").json["compared"]}
    slow, fast = compared["H100"], compared["B200"]
    assert slow["in_time"] is None
    assert slow["soonest"]["days"] > 11 >= fast["in_time"]["days"]
    out = meshwright(*words).out
    assert "no count of H100" in out
    assert "none; " in next(line for line in out.splitlines() if line.startswith("H100 "))


def test_size_and_recommend_agree(meshwright: Any) -> None:
    sized = meshwright(*SIZE, "--gpu", "H100", "--max-gpus", "32", "--tokens", "1T", "--json").json["sizes"]
    for gpus in (4, 8, 32):
        words = ("recommend", "llama3-8b", "--goal", "pretrain", "--gpus", f"{gpus}xH100", "--tokens", "1T", "--json")
        found, one = meshwright(*words).json, next(s for s in sized if s["gpus"] == gpus)
        assert one["step_s"] == pytest.approx(found["estimate"]["step_s"], rel=1e-3)
        assert one["total_gib"] == pytest.approx(found["estimate"]["memory_gib"]["total"], rel=1e-3)
        assert one["days"] == pytest.approx(found["budget"]["days"], rel=1e-3)


def test_how_many_tokens_fit_into_six_weeks(meshwright: Any, tmp_path: Path) -> None:
    saved = tmp_path / "six.toml"
    found = meshwright(*ASKED, "--days", "42", "--price", "2", "--save", str(saved), "--json").json
    budget = found["budget"]
    rate = 128 * found["estimate"]["tokens_per_s_per_gpu"]
    assert budget["tokens"] == pytest.approx(42 * 86400 * rate * budget["goodput"]["share"], rel=1e-3)
    assert budget["tokens_band"]["low"] < budget["tokens"] < budget["tokens_band"]["high"]
    assert budget["cost"] == pytest.approx(42 * 24 * 128 * 2)
    assert tomllib.loads(saved.read_text())["train"]["steps"] == budget["steps"] == found["contract"]["steps"]
    back = meshwright(*ASKED, "--tokens", str(budget["tokens"]), "--json").json["budget"]
    assert (back["steps"], back["days"]) == (budget["steps"], pytest.approx(42, rel=1e-3))
    sized = meshwright(*SIZE, "--gpu", "H100", "--days", "42", "--max-gpus", "128", "--price", "2", "--json")
    assert sized.code == 0
    assert sized.json["sizes"][-1]["tokens"] == pytest.approx(budget["tokens"], rel=1e-3)
    late = meshwright(*ASKED, "--tokens", str(2 * budget["tokens"]), "--days", "42", "--json").json["budget"]["notes"]
    assert "more than --days 42" in late[0]


def test_a_saved_recipe_trains_the_requested_tokens(meshwright: Any, tmp_path: Path) -> None:
    saved = tmp_path / "own.toml"
    found = meshwright(*ASKED, "--tokens", "2T", "train.global_batch_size=1024", "--save", str(saved), "--json").json
    steps = -(-2 * 10**12 // (1024 * 8192))
    assert tomllib.loads(saved.read_text())["train"]["steps"] == steps
    (change,) = (one for one in found["changes"] if one["field"] == "train.steps")
    assert (change["to"], "2T tokens" in change["why"]) == (steps, True)
    assert f"train.steps={steps}" in found["commands"]["meshwright"]
    typed = meshwright(*ASKED, "--tokens", "2T", "train.steps=500", "--json").json
    assert typed["contract"]["steps"] == 500
    assert "train.steps=" in typed["budget"]["notes"][0]


def test_a_price_of_an_instance_is_named(meshwright: Any) -> None:
    typed = ("recommend", "llama3-8b", "--goal", "pretrain", "--tokens", "1B", "--gpus")
    note = "--price 98.32 is the price of one GPU for one hour; if it is that of"
    assert (
        f"{note} an instance of 8 GPUs, write --price 12.29"
        in meshwright(*typed, "p5.48xlarge", "--price", "98.32").err
    )
    assert f"{note} a node of 8 GPUs, write --price 12.29USD" in meshwright(*typed, "8xH100", "--price", "98.32USD").err
    for price in ("12.29", "98.32JPY"):
        assert "is the price of one GPU" not in meshwright(*typed, "p5.48xlarge", "--price", price).err
