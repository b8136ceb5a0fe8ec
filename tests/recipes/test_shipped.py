"""Shipped recipes can start: no rule is broken, and the memory estimate fits the cluster they name."""

from __future__ import annotations

import pytest

from meshwright.clusters import cluster
from meshwright.costs import estimate, memory
from meshwright.recipes import Recipe, load, names, published_recipe
from meshwright.recipes.case import Case, model_of
from meshwright.recipes.registry import registry
from meshwright.rules.evaluate import applicable

# Published layouts that fit by the estimate but not in the dry run.
REFUSED_BY_A_DRY_RUN = {
    "nemotron_3_nano_pretrain_config": "needs 78.7 of 79.7 GiB, of which 2 % stay free",
    "nemotronh_47b_sft_config": "needs 86.0 of 79.7 GiB",
    "nemotronh_47b_peft_config": "needs 83.5 of 79.7 GiB",
}


def case_of(recipe: Recipe) -> Case:
    return Case(recipe, model_of(recipe), cluster(recipe.cluster), memory_of=memory)


def broken(case: Case) -> list[str]:
    return [rule.id for rule in applicable(case, ("error",)) if bool(rule.broken(case))]


@pytest.mark.parametrize("family", sorted({entry.family for entry in registry().values()}))
def test_every_recipe_is_legal_and_fits_its_own_cluster(family: str) -> None:
    for name in names():
        if registry()[name].family == family:
            case = case_of(load(name))
            assert broken(case) == [], name
            assert bool(memory(case).fits), name


def test_a_published_layout_changes_only_if_it_cannot_work() -> None:
    changed = [name for name in names() if published_recipe(name) != load(name)]
    assert len(changed) > 100
    for name in changed:
        assert broken(case_of(published_recipe(name))) or name in REFUSED_BY_A_DRY_RUN, name


def test_a_recipe_with_profiling_has_an_estimate() -> None:
    """The field train.profile once shadowed a name of the cost model."""
    recipe = load("kempner_13b_24gpu_validation_config")
    assert recipe.train.profile
    assert estimate(Case(recipe, model_of(recipe), cluster(recipe.cluster))).step_s > 0
