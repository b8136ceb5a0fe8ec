"""Recommendations: kept layouts, pinned values, suggestions, and errors when nothing works."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright import InputError, Plan, check, recipe, recommend
from meshwright.planner import reasons
from meshwright.planner.explain import neighbors
from meshwright.recipes import index

HOME = [
    e.name
    for e in index.entries(False)
    if e.name.endswith(("_pretrain_config", "_sft_config", "_peft_config")) and e.family not in ("kempner", "sizes")
][::9]


@pytest.mark.parametrize("name", HOME)
def test_a_recipe_on_its_reference_cluster_keeps_its_contract(name: str) -> None:
    own = recipe(name)
    plan = recommend(own.model, own.cluster, own.goal, seq=own.data.seq_length)
    if plan.base.name == name:  # another recipe of the same model may match as well
        assert plan.match == "exact"
        changed = [change for change in plan.changes if change.field not in plan.executed]
        assert {change.kind for change in plan.changes} <= {"layout", "benchmark"}
        assert plan.published is not None
        assert plan.published.kept == (not changed)
        assert plan.ok


@pytest.mark.parametrize(
    "override",
    [
        *("layout.tp=2", "layout.tp=1", "model.tensor_model_parallel_size=2", "layout.recompute=selective"),
        *("layout.recompute=none", "layout.micro_batch_size=1", "layout.pp=2", "layout.cp=2", "layout.dp_replicate=2"),
        *("layout.sp=false", "layout.offload=optimizer", "layout.vp=2", "layout.dp_shard=8"),
    ],
)
def test_pinned_values_stay_even_if_equal_to_the_recipe(override: str) -> None:
    plan = recommend("llama3-8b", "16xH200", "pretrain", overrides=[override])
    asked = recipe("llama3_8b_pretrain_config", [override])
    field = {"model.tensor_model_parallel_size": "tp"}.get(key := override.split("=")[0], key.removeprefix("layout."))
    assert getattr(plan.recipe.layout, field) == getattr(asked.layout, field)
    assert plan.ok


def test_a_pinned_strategy_stays() -> None:
    plan = recommend("llama32-1b", "16xH200", "pretrain", overrides=["layout.strategy=ddp"])
    assert plan.recipe.layout.strategy == "ddp"
    assert plan.ok


def test_the_rest_is_sized_around_pinned_values() -> None:
    big = recommend("llama3-8b", "64xH100", "pretrain", overrides=["layout.micro_batch_size=8"])
    assert big.recipe.layout.micro_batch_size == 8
    assert big.ok
    piped = recommend("llama3-8b", "64xH100", "pretrain", overrides=["layout.pp=4", "layout.pp_schedule=gpipe"])
    assert (piped.recipe.layout.pp, piped.recipe.layout.pp_schedule) == (4, "gpipe")
    assert piped.ok


QUESTIONS = [
    ("llama3-8b", "8xH100", "sft"),
    ("llama3-70b", "128xH100", "pretrain"),
    ("qwen3-30b-a3b", "32xH200", "pretrain"),
    ("gemma3-vl-27b", "16xH100", "sft"),
    ("qwen3-next-80b-a3b", "64xGB200", "sft"),
    ("nemotron-3-nano", "16xGB200", "sft"),
    ("flux-12b", "8xH100", "pretrain"),
    ("deepseek-v3", "256xGB200", "pretrain"),
]


@pytest.fixture(params=QUESTIONS, ids=lambda q: "-".join(q), scope="module")
def plan(request: pytest.FixtureRequest) -> Plan:
    model, gpus, goal = request.param
    return recommend(model, gpus, goal)


def test_the_plan_runs(plan: Plan) -> None:
    assert plan.ok
    case = plan.case
    assert case.dp * case.tp * case.pp * case.cp == case.world
    assert case.shard * case.dp_replicate == case.dp
    assert case.micro_batch_size * case.accumulation * case.dp == case.global_batch_size


def test_every_suggestion_is_legal_and_fits(plan: Plan) -> None:
    for suggestion in plan.suggestions:
        changed = check(recipe_of(plan, suggestion.overrides), gpus=str(plan.question.cluster))
        assert changed.ok, suggestion


def recipe_of(plan: Plan, overrides: tuple[str, ...]) -> object:
    from meshwright.recipes.overrides import apply

    return apply(plan.recipe, overrides)


def test_only_the_layout_changes_unless_requested(plan: Plan) -> None:
    assert {c.kind for c in plan.changes} <= {"layout"}
    assert all(c.why for c in plan.changes)


def test_reported_advice_helps(plan: Plan) -> None:
    for finding in plan.findings:
        saves_memory = finding.rule == "memory.uncertain"  # its fix need not be faster
        if finding.severity == "advice" and not saves_memory and all(k.startswith("layout.") for k in finding.fix):
            better = check(recipe_of(plan, finding.fix), gpus=str(plan.question.cluster))
            assert better.ok
            assert float(better.estimate.step_s) < float(plan.estimate.step_s)


def test_compared_neighbors_are_possible(plan: Plan) -> None:
    for name in ("tp", "pp", "cp"):
        assert all(plan.case.world % value == 0 for value in neighbors(plan.case, name))
    assert {r.field for r in reasons(plan)} >= {"tp", "pp", "cp", "dp", "recompute"}


@pytest.mark.parametrize(
    ("model", "gpus", "goal", "seq", "rule"),
    [
        ("gpt3-175b", "64xH100", "pretrain", 8192, "sequence.position-table"),
        ("nemotronh-56b", "64xA100-80", "pretrain", None, "precision.fp8-gpu"),
    ],
)
def test_errors_that_no_layout_fixes_are_findings_with_a_fix(
    model: str, gpus: str, goal: str, seq: int | None, rule: str
) -> None:
    plan = recommend(model, gpus, goal, seq=seq)
    assert not plan.ok
    found = {f.rule: f for f in plan.findings if f.severity == "error"}
    assert found[rule].fix


def test_a_setting_the_gpu_lacks_is_changed_and_reported() -> None:
    plan = recommend("qwen3-next-80b-a3b", "64xGB200", "sft", engine="megatron")
    changed = {c.field: c for c in plan.changes}
    assert changed["moe.dispatcher"].kind == "layout"
    assert "deepep" in changed["moe.dispatcher"].why.lower()


@pytest.mark.parametrize("gpus", ["49999xH100", "720720xH100", "1000000xH100"])
def test_huge_counts_are_planned_quickly(gpus: str) -> None:
    with pytest.raises(InputError) as refused:
        recommend("llama3-70b", gpus, "pretrain")
    assert gpus.split("x")[0] in refused.value.reason
    assert len(refused.value.fix) <= 4


def test_values_of_a_cluster_file_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "small.toml"
    file.write_text('gpu = "H100"\nnodes = 1\ngpus_per_node = 8\nmemory_gib = 40.0\n')
    plan = recommend("llama3-8b", str(file), "sft")
    assert plan.case.capacity_gib == 40
    assert plan.recipe.cluster == str(file)
    assert check(plan.recipe).cluster.gpu.memory_gib == 40


def test_conflicting_sequence_lengths_are_an_error() -> None:
    with pytest.raises(InputError, match="8192"):
        recommend("llama3-8b", "8xH100", "sft", seq=4096, overrides=["data.seq_length=8192"])


def test_a_suggested_batch_is_limited() -> None:
    plan = recommend("llama3-8b", "1024xH100", "pretrain")
    for suggestion in plan.suggestions:
        batch = [o for o in suggestion.overrides if o.startswith("train.global_batch_size=")]
        if batch:
            assert int(batch[0].split("=")[1]) * plan.recipe.data.seq_length <= 16 * 2**20


def test_gpus_with_few_tokens_get_a_larger_batch_suggested() -> None:
    plan = recommend("qwen3-235b-a22b", "128xB200", "pretrain")
    assert any(o.title == "scale the batch" for o in plan.suggestions)
