"""A shortened step is expanded to the full step, and the full step matches a GPU."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from benchmarks.dryrun_cases import CASES
from benchmarks.dryrun_predict import task_of

from meshwright.clusters import cluster
from meshwright.dryrun import run
from meshwright.dryrun.allocation_log import SegmentKey
from meshwright.dryrun.layer_dedup import contexts, kept_layers, representatives
from meshwright.dryrun.memory_curve import segment_peaks
from meshwright.dryrun.replay import replay_step
from meshwright.dryrun.trace import trace
from meshwright.engine.model_families import family_of
from meshwright.recipes.index import load
from meshwright.recipes.overrides import apply

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
SMALL = ["data.seq_length=512", "layout.micro_batch_size=1"]
TINY = [
    *("architecture.layers=4", "architecture.hidden=256", "architecture.heads=4", "architecture.kv_heads=2"),
    *("architecture.head_dim=64", "architecture.vocab=1024", "architecture.experts=8", "architecture.topk=2"),
    *("architecture.ffn=256", "data.seq_length=128", "layout.micro_batch_size=1"),
]
STEP = 1
TOLERANCE_PCT = {"gemma3 compiled": 4}  # per cent: compiled sliding windows are only partly modeled
NEGLIGIBLE = 16 * 1024  # bytes: losses of micro batches, a few hundred bytes each, are not replayed


def peaks_and_drift(
    name: str, gpus: str, overrides: list[str], rank: int, shortened: bool
) -> tuple[dict[SegmentKey, int], int]:
    """Return the peak of every segment of the last step, and the drift of the log."""
    recipe = apply(load(name), [*SMALL, *overrides])
    family = family_of(recipe)
    found = trace(recipe, family, family.config_for(recipe), cluster(gpus).world, rank, (9, 0), shortened)
    step = replay_step(found)
    return {one.key: one.peak for one in segment_peaks(found, step) if one.key.step == STEP}, step.drift


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
        pytest.param(*DENSE, id="dense", marks=pytest.mark.slow),
        pytest.param("llama3_8b_pretrain", "2xH100", PIPELINE, 1, id="pipeline", marks=pytest.mark.slow),
        pytest.param("llama3_8b_pretrain", "2xH100", PIPELINE, 0, id="first of a pipeline", marks=pytest.mark.slow),
        pytest.param("llama3_8b_pretrain", "2xH100", INTERLEAVED, 0, id="interleaved", marks=pytest.mark.slow),
        pytest.param(*EXPERTS, id="experts", marks=pytest.mark.slow),
    ],
)
def test_a_shortened_step_expands_to_the_full_step(name: str, gpus: str, overrides: list[str], rank: int) -> None:
    full, no_drift = peaks_and_drift(name, gpus, overrides, rank, shortened=False)
    filled, drift = peaks_and_drift(name, gpus, overrides, rank, shortened=True)
    assert no_drift <= NEGLIGIBLE
    assert drift <= NEGLIGIBLE
    assert max(filled.values()) == pytest.approx(max(full.values()), abs=NEGLIGIBLE)
    for key, peak in filled.items():  # a pipeline's final work covers all layers at the same time, and is lower
        assert key.phase == "between" or peak == pytest.approx(full[key], abs=NEGLIGIBLE), key


def expert_overrides(ep: int, micro_batches: int, defer: bool, reshard: bool, recompute: str) -> list[str]:
    """Return the overrides of a compiled step on 8 GPUs: the libraries' buffers are then made in the first layer."""
    modules = "[moe]" if recompute == "selective" else "[]"
    return [
        *(*TINY, "kernels.compile=true", f"layout.ep={ep}", f"train.global_batch_size={8 * micro_batches}"),
        *(f"layout.defer_grad_sync={str(defer).lower()}", f"layout.reshard_after_forward={str(reshard).lower()}"),
        *(f"layout.recompute={recompute}", f"layout.recompute_modules={modules}"),
    ]


QUICK = [(1, 1, True, True, "full"), (2, 4, False, True, "none")]
THOROUGH = [
    case
    for case in product((1, 2, 8), (1, 4), (True, False), (True, False), ("none", "selective", "full"))
    if case not in QUICK and (case[1] > 1 or case[2])  # one micro batch has nothing to defer
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in THOROUGH)], ids=lambda case: repr(case)
)
def test_gathered_experts_are_freed_in_every_layer(case: tuple[int, int, bool, bool, str]) -> None:
    recipe = apply(load("qwen3_30b_a3b_pretrain"), expert_overrides(*case))
    family = family_of(recipe)
    peaks = []
    for shortened in (False, True):
        found = trace(recipe, family, family.config_for(recipe), 8, 0, (9, 0), shortened)
        step = replay_step(found)
        assert step.drift <= NEGLIGIBLE, "the first step or the second holds what the rank does not"
        peaks.append({one.key: one.peak for one in segment_peaks(found, step)})
    full, filled = peaks
    assert max(filled.values()) == pytest.approx(max(full.values()), abs=NEGLIGIBLE)
    for key, peak in filled.items():  # the first step is traced with its last micro batch alone
        if key.step == STEP or case[1] == 1:
            assert peak == pytest.approx(full[key], abs=NEGLIGIBLE), key


@pytest.mark.parametrize(
    "signatures", ["aaaaaaaa", "dddmmmmmmmm", "sssssfsssssfsssssfss", "mamambmamamb", "a", "ab", "abcabcabcabc"]
)
def test_every_layer_is_kept_between_its_neighbors(signatures: str) -> None:
    kept = kept_layers(signatures)
    shown = contexts([signatures[i] for i in kept])
    assert set(shown) == set(contexts(signatures))
    for layer, like in enumerate(representatives(signatures, kept)):
        assert shown[kept.index(like)] == contexts(signatures)[layer]
    assert len(kept) <= len(signatures)


def test_many_identical_layers_need_three() -> None:
    assert len(kept_layers("a" * 80)) == 3


def rows_of(file: str) -> list[dict[str, Any]]:
    """Return the rows of a result file."""
    rows: list[dict[str, Any]] = json.loads((RESULTS / file).read_text())["rows"]
    return rows


def test_dry_runs_are_within_three_per_cent_of_an_h200() -> None:
    rows = [row for row in rows_of("dryrun_predicted_2026-11-15.json") if "error" not in row]
    assert len(rows) >= 40
    errors = {row["name"]: row["allocated_pct"] for row in rows}
    assert {name: error for name, error in errors.items() if abs(error) > TOLERANCE_PCT.get(name, 3)} == {}


def test_a_dry_run_made_now_matches_an_h200() -> None:
    case = next(case for case in CASES if case.name == "llama full")
    measured = next(row for row in rows_of("dryrun_h200_2026-11-15.json") if row["name"] == case.name)
    assert run.dry_run_rank(task_of(case)).allocated_gib * 2**30 == pytest.approx(measured["allocated"], rel=0.005)
