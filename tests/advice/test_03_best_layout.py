"""Item 3: the best known layout is the answer; the published one stands beside it with its cost."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from meshwright import planner
from meshwright.costs.accuracy import layout_pairs
from meshwright.costs.measurements import read
from meshwright.costs.uncertainty import error_bands
from meshwright.recipes import index

ROOT = Path(__file__).parents[2]
NEAR = 1.03


def audit_script() -> Any:
    spec = importlib.util.spec_from_file_location("advice_audit", ROOT / "benchmarks" / "advice_audit.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules["advice_audit"] = found
    spec.loader.exec_module(found)
    return found


def late(rows: list[dict[str, Any]]) -> list[str]:
    return [f"{r['name']}: {r['ratio']}" for r in rows if (r.get("ratio") or 0) > NEAR]


def missed(rows: list[dict[str, Any]]) -> list[str]:
    return [r["name"] for r in rows if r.get("best_s") and not r.get("ok")]


def test_recommend_is_as_fast_as_the_best_of_plan() -> None:
    script = audit_script()
    asked = [*script.recipe_questions(4), *script.random_questions(4, seed=3)]
    rows = [script.audit(*one) for one in asked]
    assert sum(bool(r.get("ratio")) for r in rows) >= 6
    assert not late(rows)
    assert not missed(rows)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [18, 19])
def test_recommend_is_as_fast_as_the_best_of_plan_for_all(seed: int) -> None:
    script = audit_script()
    asked = [*(script.recipe_questions(None) if seed == 18 else ()), *script.random_questions(300, seed)]
    rows = [script.audit(*one) for one in asked]
    assert not late(rows)
    assert not missed(rows)


def test_a_faster_layout_is_recommended_beside_the_published_one(meshwright: Any) -> None:
    answer = meshwright("recommend", "gpt-oss-20b", "--gpus", "16xH100", "--goal", "pretrain", "--json").json
    published, step_s = answer["published"], answer["estimate"]["step_s"]
    assert answer["recipe"]["name"] == published["recipe"] == "gpt_oss_20b_pretrain_config"
    assert answer["recipe"]["match"] == "exact"
    assert not published["kept"]
    assert published["fits"]
    assert published["step_s"] > (1 + error_bands().layout_gain_pct / 100) * step_s
    assert all(change["kind"] == "layout" for change in answer["changes"])
    assert {"tp": 2, "pp": 4, "ep": 4}.items() <= published["layout"].items()
    back = meshwright(
        *("recommend", "gpt-oss-20b", "--gpus", "16xH100", "--goal", "pretrain", "--json", *published["overrides"])
    ).json
    assert back["estimate"]["step_s"] == pytest.approx(published["step_s"], rel=0.02)
    estimate = meshwright("estimate", published["recipe"], "--json").json["estimate"]
    assert estimate["step_s"] == pytest.approx(published["step_s"], rel=1e-3)
    assert estimate["memory_gib"]["total"] == pytest.approx(published["total_gib"], rel=1e-3)


def test_the_published_layout_is_printed_with_its_cost(meshwright: Any) -> None:
    out = meshwright("recommend", "gpt-oss-20b", "--gpus", "16xH100", "--goal", "pretrain").out
    assert "tp 2 · pp 4 · ep 4" in out
    assert "meshwright train gpt_oss_20b_pretrain_config" in out


def measured_recipes() -> list[tuple[Any, Any]]:
    """Return small measured recipes, each with its question; and one of them with layouts that the search finds."""
    script, found = audit_script(), []
    for entry in index.entries(False):
        if not entry.published.measured or entry.gpus > 16:
            continue
        recipe = index.load(entry.name)
        question = script.question(recipe.model, recipe.cluster, recipe.goal, recipe.data.seq_length)
        found.append((question, recipe))
    question = next(q for q, recipe in found if recipe.name == "moonlight_16b_pretrain_config")
    return [*found, *((question, plan.recipe) for plan in planner.rank_layouts(question, top=3).plans)]


def test_a_measured_layout_stays_within_the_error_of_a_comparison() -> None:
    limit, kept = 1 + error_bands().layout_gain_pct / 100, []
    for question, recipe in measured_recipes():
        first, *others = planner.rank_layouts(question, top=3, recipe=recipe).plans
        published = first.published
        assert published is not None
        kept.append(published.kept)
        if published.kept:
            assert all(float(first.estimate.step_s) <= limit * float(p.estimate.step_s) for p in others), recipe.name
        elif published.fits:
            assert published.step_s > limit * float(first.estimate.step_s), recipe.name
    assert {True, False} <= set(kept)


def test_plan_prefers_headroom_as_recommend_does(meshwright: Any) -> None:
    answer = meshwright("plan", "llama3-8b", "--gpus", "8xH100", "--goal", "pretrain", "--top", "5", "--json").json
    shares = [p["estimate"]["memory_gib"] for p in answer["plans"]]
    assert all(gib["total"] <= 0.92 * gib["capacity"] for gib in shares)
    assert any("leaves less than" in one["reason"] for one in answer["dropped"])


@pytest.mark.slow
def test_the_error_of_a_comparison_is_that_of_the_measured_pairs() -> None:
    pairs = layout_pairs(read(ROOT / "benchmarks" / "data" / "measurements.csv"))
    assert len(pairs.predicted) > 5_000
    assert pairs.sources >= 10
    assert round(pairs.quantile(0.6), 1) == error_bands().layout_gain_pct
    assert pairs.faster(0.02) > 0.8
    assert pairs.faster(error_bands().layout_gain_pct / 100) > 0.85
