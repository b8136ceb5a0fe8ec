"""Item 2: the recipe made for the model and cluster asked for is returned, without another model's settings."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from meshwright import clusters, models
from meshwright.planner import Question
from meshwright.planner.match import find_baseline_recipe
from meshwright.recipes import index
from meshwright.recipes.build import goal_data
from meshwright.recipes.registry import library


def own_question(name: str) -> Question:
    recipe = index.load(name)
    return Question(
        model=models.find(recipe.model),
        model_ref=recipe.model,
        cluster=clusters.cluster(recipe.cluster),
        goal=recipe.goal,
        seq_length=recipe.data.seq_length,
    )


def twins() -> dict[str, set[str]]:
    groups: dict[tuple[Any, ...], set[str]] = defaultdict(set)
    for e in index.entries(False):
        groups[e.model, e.goal, e.gpus, e.gpu, e.seq_length].add(e.name)
    return {name: group for group in groups.values() for name in group}


def test_every_recipe_is_matched_on_its_own_cluster() -> None:
    same, other = twins(), {}
    for entry in index.entries(False):
        found = find_baseline_recipe(own_question(entry.name))[0].name
        if found not in same[entry.name]:
            other[entry.name] = found
    # Recipes in fp8 are chosen only if asked for: the model's recipe in 16 bits is resized instead.
    assert sorted(other) == [f"gpt_oss_20b_{goal}_mxfp8_config" for goal in ("peft", "pretrain", "sft")]


@pytest.mark.parametrize(
    ("words", "recipe"),
    [
        (("kempner_7b", "--gpus", "4xH200"), "kempner_7b_4gpu_config"),
        (("kempner_7b", "--gpus", "3x4xH200"), "kempner_7b_12gpu_tp4_config"),
        (("kempner_13b", "--gpus", "6x4xH200"), "kempner_13b_24gpu_validation_config"),
        (("kempner_moe", "--gpus", "2x4xH200"), "kempner_moe_8gpu_stress_config"),
        (("deepseek-v3", "--gpus", "256xH100"), "deepseek_v3_pretrain_config_32nodes"),
        (("kempner_7b", "--gpus", "4x4xH200"), "kempner_7b_16gpu_adamw_config"),
        (("kempner_7b", "--gpus", "4x4xH200", "optimizer.name=muon"), "kempner_7b_16gpu_muon_config"),
        (("kempner_7b", "--gpus", "4x4xH200", "precision.matmul=fp8_tensor"), "kempner_7b_16gpu_fp8_config"),
        (("gpt-oss-20b", "--gpus", "16xB200"), "gpt_oss_20b_pretrain_config"),
        (("gpt-oss-20b", "--gpus", "16xB200", "precision.matmul=mxfp8"), "gpt_oss_20b_pretrain_mxfp8_config"),
        (("llama3-8b", "--gpus", "16xH100"), "llama3_8b_pretrain_config"),
        (("llama3-8b", "--gpus", "16xH100", "--seq", "128k"), "llama3_8b_128k_pretrain_config"),
    ],
)
def test_recommend_names_the_recipe_of_the_cluster(meshwright: Any, words: tuple[str, ...], recipe: str) -> None:
    model, *rest = words
    assert meshwright("recommend", model, "--goal", "pretrain", *rest, "--json").json["recipe"]["name"] == recipe


def test_a_short_run_is_no_base_of_a_production_answer() -> None:
    special = {e.name for e in index.entries(False) if not e.general}
    assert {"kempner_debug_config", "kempner_7b_1gpu_config", "gpt_oss_20b_sft_mxfp8_config"} <= special
    models_with_own = {(e.model, e.goal) for e in index.entries(False)}
    for model in models.names():
        for goal in ("pretrain", "sft", "peft"):
            if (model, goal) not in models_with_own:
                assert index.closest(models.find(model), goal).name not in special  # type: ignore[arg-type]
    for gpus in ("1xH100", "8xH100", "64xH200", "256xB200"):
        question = Question(models.find("kempner_7b"), "kempner_7b", clusters.cluster(gpus), "pretrain")
        assert find_baseline_recipe(question)[0].name not in special


def test_a_benchmark_is_matched_only_if_asked_for(meshwright: Any) -> None:
    words = ("recommend", "llama3-70b", "--gpus", "64xGB200", "--goal", "pretrain", "--json")
    assert meshwright(*words).json["recipe"]["benchmark"] is False
    assert meshwright(*words, "--benchmark").json["recipe"]["benchmark"] is True


@pytest.mark.parametrize(("model", "goal"), [("llama32-1b", "sft"), ("llama32-1b", "peft"), ("smollm2-1.7b", "sft")])
def test_the_closest_recipe_brings_no_foreign_data_settings(meshwright: Any, model: str, goal: str) -> None:
    answer = meshwright("recommend", model, "--gpus", "8xH100", "--goal", goal, "--json").json
    assert answer["recipe"]["match"] == "closest"
    own = goal_data(goal)  # type: ignore[arg-type]  # one of the goals
    expected = (own.seq_length, own.dataset, own.packing)
    contract = answer["contract"]
    assert (contract["seq_length"], contract["dataset"], contract["packing"]) == expected
    for change in answer["changes"]:
        if change["field"].startswith("data."):
            assert "not the setting of" in change["why"]


def test_every_model_without_a_recipe_has_its_own_data_settings() -> None:
    from meshwright.planner.baseline import baseline_for

    known = {(e.model, e.goal) for e in index.entries(False)}
    for model in models.names():
        spec = models.find(model)
        if (model, "sft") in known or spec.kind != "causal_lm":
            continue
        recipe = baseline_for(Question(spec, model, clusters.cluster("8xH100"), "sft")).requested
        assert recipe.data.seq_length == min(2048, spec.max_seq_length or 2048), model
        assert not recipe.data.images
        assert recipe.checkpoint.pretrained == ""
        assert recipe.train.mtp_loss == 0 or spec.mtp_layers


def test_measured_recipes_are_in_the_table_of_measurements() -> None:
    from pathlib import Path

    from meshwright.costs.measurements import read
    from meshwright.recipes.case import Case, model_of

    table = Path(__file__).parents[2] / "benchmarks" / "data" / "measurements.csv"
    rows = [row for row in read(table) if row.case is not None and row.step_s and not row.oom]
    names = ("goal", "seq_length", "world", "tp", "pp", "cp", "ep", "micro_batch_size", "global_batch_size", "matmul")

    def compared(case: Case) -> tuple[object, ...]:
        return (case.model.params.total, case.gpu.split("-")[0], *(getattr(case, one) for one in names))

    sources: dict[tuple[object, ...], set[str]] = {}
    for row in rows:
        if row.model is not None:
            sources.setdefault(compared(row.case), set()).add(row.source)
    for name, entry in library().items():
        recipe = entry.build()
        found = sources.get(compared(Case(recipe, model_of(recipe), clusters.cluster(recipe.cluster))), set())
        assert bool(found) == bool(entry.published.measured), (name, found, entry.published.measured)
        assert not found or entry.published.measured in found
