"""Counts that may hold a training: none that a search would find is left out."""

from __future__ import annotations

from typing import Any

import pytest
from tests.each import each

from meshwright import clusters, models, planner
from meshwright.planner import Question, levers, smallest_cluster
from meshwright.planner.baseline import Baseline
from meshwright.planner.may_fit import MayFit
from meshwright.planner.plan import Plan
from meshwright.recipes.case import Case

QUESTIONS: tuple[tuple[str, str, str, int | None, str, tuple[str, ...]], ...] = (
    ("llama31_405b", "20xMI300X", "sft", 8192, "automodel", ("layout.micro_batch_size=2",)),
    ("qwen3_vl_235b_a22b", "8xB200", "sft", 16384, "torchtitan", ()),
    ("kimi_k2", "144xGH200", "pretrain", 2048, "deepspeed", ()),
    ("llama3_70b", "1xH100", "sft", None, "meshwright", ()),
)


def planned(model: str, gpus: str, goal: Any, seq: int | None, engine: Any, fixed: tuple[str, ...]) -> Plan:
    on = clusters.cluster(gpus)
    asked = Question(model=models.find(model), model_ref=model, cluster=on, goal=goal, seq_length=seq, engine=engine)
    return planner.recommend(asked, fixed)


def smallest(question: Any, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    plan = planned(*question)
    found = planner.smallest_fit(plan, question[-1], most)
    every = frozenset(range(1, most + 1))
    monkeypatch.setattr(smallest_cluster, "may_fit", lambda *_: MayFit(every, every))
    assert planner.smallest_fit(plan, question[-1], most) == found
    assert found.cluster is not None


@pytest.mark.parametrize("question", QUESTIONS[:2], ids=lambda one: " ".join(map(str, one[:2])))
def test_the_smallest_cluster_is_that_of_a_search_of_every_count(
    question: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    smallest(question, monkeypatch, most=40)


@pytest.mark.slow
@pytest.mark.parametrize("question", QUESTIONS, ids=lambda one: " ".join(map(str, one[:2])))
def test_the_smallest_of_many_clusters_is_that_of_a_search_of_every_count(
    question: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    smallest(question, monkeypatch, most=256)


def searched(plan: Plan) -> tuple[list[int], smallest_cluster.Smallest]:
    """Return the counts that are searched for the smallest cluster, and the clusters found."""
    counts: list[int] = []
    search = smallest_cluster._needs_offload

    def counted(baseline: Baseline, *held: bool) -> bool | None:
        counts.append(baseline.case.cluster.world)
        return search(baseline, *held)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(smallest_cluster, "_needs_offload", counted)
        return counts, planner.smallest_fit(plan)


@each(
    ("question", "most"),
    [
        (("llama31_405b", "8xL4", "sft", 131072, "deepspeed", ()), 0),  # no count holds it
        (("nemotron_nano_v2_vl_12b", "128xRTX4090", "sft", 131072, "meshwright", ()), 0),  # 2 % too large on each
        (("glm_45v", "4xL4", "sft", 131072, "meshwright", ()), 1),  # only with host memory
        (("mixtral_8x22b", "4xA5000", "sft", None, "meshwright", ()), 2),  # with and without host memory
    ],
)
def test_a_count_that_holds_nothing_is_not_searched(question: Any, most: int) -> None:
    counts, found = searched(planned(*question))
    assert len(counts) <= most
    assert len({one for one in found if one is not None}) == most


def test_gradients_reduced_in_every_micro_batch_count_next_to_offloaded_activations() -> None:
    plan = planned("nemotronh_8b", "8xT4", "sft", 131072, "meshwright", ("layout.recompute=selective",))
    found = planner.smallest_fit(plan, ("layout.recompute=selective",), 16)
    assert found.cluster is not None
    assert found.cluster.world == 16


def test_an_answer_scores_the_layouts_of_a_lever_once(monkeypatch: pytest.MonkeyPatch) -> None:
    scored: list[tuple[Any, ...]] = []
    score = levers.score

    def counted(case: Case, pinned: Any, space: Any, **more: Any) -> Any:
        changed = (case.recipe.peft.method, case.loss, case.defer_grad_sync, case.offload)
        scored.append((*changed, case.cluster.world, space, bool(more)))
        return score(case, pinned, space, **more)

    monkeypatch.setattr(levers, "score", counted)
    planned("kimi_k2", "6xH200", "peft", None, "meshwright", ())
    qlora = [one for one in scored if one[0] == "qlora"]
    assert qlora
    assert len(qlora) == len(set(qlora))
