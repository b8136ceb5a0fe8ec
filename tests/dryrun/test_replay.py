"""A shortened step, filled up again, is the whole step; and the whole step is what a GPU measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.dryrun_cases import CASES
from benchmarks.dryrun_predict import told_of

from meshwright.clusters import cluster
from meshwright.dryrun import run
from meshwright.dryrun.allocation_log import Key
from meshwright.dryrun.layer_dedup import contexts, kept_layers, likes
from meshwright.dryrun.memory_curve import levels
from meshwright.dryrun.replay import whole_step
from meshwright.dryrun.trace import trace
from meshwright.engine.model_families import family_of
from meshwright.recipes.index import load
from meshwright.recipes.overrides import apply

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
SMALL = ["data.seq_length=512", "layout.micro_batch_size=1"]
STEP = 1
STATED = {"gemma3 compiled": 4}  # per cent: what compiling does to its windows is not modelled to the end
LITTLE = 16 * 1024  # bytes: losses of micro batches, a few hundred bytes each, which nobody replays


def book(name: str, gpus: str, overrides: list[str], rank: int, shortened: bool) -> tuple[dict[Key, int], int]:
    """The highest point of every stretch of the last step, and by how much the book is off."""
    recipe = apply(load(name), [*SMALL, *overrides])
    kind = family_of(recipe)
    found = trace(recipe, kind, kind.config_for(recipe), cluster(gpus).world, rank, (9, 0), shortened)
    whole = whole_step(found)
    return {level.key: level.peak for level in levels(found, whole) if level.key.step == STEP}, whole.drift


DENSE = ("llama3_8b_pretrain", "8xH100", ["architecture.layers=4", "train.global_batch_size=16"], 0)
PIPELINE = ["architecture.layers=10", "layout.pp=2", "layout.tp=1", "layout.sp=false", "train.global_batch_size=6"]
INTERLEAVED = [
    *("architecture.layers=16", "layout.pp=2", "layout.vp=2", "layout.pp_schedule=interleaved_1f1b"),
    *("layout.tp=1", "layout.sp=false", "train.global_batch_size=8"),
]
EXPERTS = ("qwen3_30b_a3b_pretrain", "8xH100", ["architecture.layers=6", "train.global_batch_size=32"], 0)


@pytest.mark.parametrize(
    ("name", "gpus", "overrides", "rank"),
    [
        pytest.param(*DENSE, id="dense"),
        pytest.param("llama3_8b_pretrain", "2xH100", PIPELINE, 1, id="pipeline", marks=pytest.mark.slow),
        pytest.param("llama3_8b_pretrain", "2xH100", PIPELINE, 0, id="first of a pipeline", marks=pytest.mark.slow),
        pytest.param("llama3_8b_pretrain", "2xH100", INTERLEAVED, 0, id="interleaved", marks=pytest.mark.slow),
        pytest.param(*EXPERTS, id="experts", marks=pytest.mark.slow),
    ],
)
def test_a_shortened_step_filled_up_is_the_whole_step(name: str, gpus: str, overrides: list[str], rank: int) -> None:
    whole, nothing = book(name, gpus, overrides, rank, shortened=False)
    filled, drift = book(name, gpus, overrides, rank, shortened=True)
    assert nothing <= LITTLE
    assert drift <= LITTLE
    assert max(filled.values()) == pytest.approx(max(whole.values()), abs=LITTLE)
    for key, peak in filled.items():  # what a pipeline does at its end is of all layers at once, and lower
        assert key.phase == "between" or peak == pytest.approx(whole[key], abs=LITTLE), key


@pytest.mark.parametrize(
    "kinds", ["aaaaaaaa", "dddmmmmmmmm", "sssssfsssssfsssssfss", "mamambmamamb", "a", "ab", "abcabcabcabc"]
)
def test_every_layer_is_shown_between_its_neighbours(kinds: str) -> None:
    kept = kept_layers(kinds)
    shown = contexts([kinds[i] for i in kept])
    assert set(shown) == set(contexts(kinds))
    for layer, like in enumerate(likes(kinds, kept)):
        assert shown[kept.index(like)] == contexts(kinds)[layer]
    assert len(kept) <= len(kinds)


def test_many_like_layers_need_three() -> None:
    assert len(kept_layers("a" * 80)) == 3


def rows_of(file: str) -> list[dict[str, Any]]:
    """The rows of a result."""
    rows: list[dict[str, Any]] = json.loads((RESULTS / file).read_text())["rows"]
    return rows


def test_dry_runs_are_within_three_per_cent_of_what_an_h200_allocated() -> None:
    rows = [row for row in rows_of("dryrun_predicted_2026-11-15.json") if "error" not in row]
    assert len(rows) >= 40
    assert {
        row["name"]: row["allocated_pct"] for row in rows if abs(row["allocated_pct"]) > STATED.get(row["name"], 3)
    } == {}


def test_a_case_predicted_here_is_what_an_h200_allocated() -> None:
    case = next(case for case in CASES if case.name == "llama full")
    measured = next(row for row in rows_of("dryrun_h200_2026-11-15.json") if row["name"] == case.name)
    assert run.prove_rank(told_of(case)).allocated_gib * 2**30 == pytest.approx(measured["allocated"], rel=0.005)
