"""The transformers config of a recipe's model is the model that the rules and the estimate speak of."""

from __future__ import annotations

import pytest
import transformers

from meshwright.engine.model.config import config_for, layer_signatures, spec_of, tiny
from meshwright.engine.tiny import scaled_layout, tiny_recipe
from meshwright.recipes.case import model_of
from meshwright.recipes.index import entries, load
from meshwright.recipes.overrides import apply
from meshwright.recipes.types import Layout, Recipe

transformers.logging.set_verbosity_error()


def one_recipe_per_model() -> list[Recipe]:
    """One recipe for each language model of the index."""
    found: dict[str, Recipe] = {}
    for entry in entries():
        recipe = load(entry.name)
        if recipe.model not in found and model_of(recipe).kind == "causal_lm":
            found[recipe.model] = recipe
    return list(found.values())


@pytest.mark.parametrize("recipe", one_recipe_per_model(), ids=lambda r: r.model)
def test_a_config_builds_the_model_of_the_catalogue(recipe: Recipe) -> None:
    config, model = config_for(recipe), model_of(recipe)
    assert spec_of(recipe, config).params == model.params
    small = spec_of(recipe, tiny(config, 4))
    kinds = [(type(g.layer.mixer), type(g.layer.ffn)) for g in model.groups]
    assert [(type(g.layer.mixer), type(g.layer.ffn)) for g in small.groups] == kinds
    assert small.tied == model.tied
    assert small.params.total < 2_000_000


@pytest.mark.parametrize(("model", "tied"), [("ministral3_3b", True), ("ministral3_8b", False)])
def test_a_language_model_ties_its_head_as_the_model_that_sees_does(model: str, tied: bool) -> None:
    recipe = load(f"{model}_sft_config")
    assert not recipe.data.images
    assert config_for(recipe).tie_word_embeddings is model_of(recipe).tied is tied


def test_changes_of_the_architecture_reach_the_config() -> None:
    recipe = apply(load("qwen3_next_80b_a3b_pretrain_config"), ["architecture.layers=6", "architecture.experts=16"])
    config = config_for(recipe)
    assert (config.num_hidden_layers, len(config.layer_types), config.num_experts) == (6, 6, 16)
    assert spec_of(recipe, config).params == model_of(recipe).params


def test_a_tiny_model_has_every_kind_of_layer() -> None:
    config = config_for(load("nemotron_3_super_pretrain_config"))
    small = tiny(config, 4)
    assert set(layer_signatures(small.to_dict())) == set(layer_signatures(config.to_dict()))


@pytest.mark.parametrize(
    ("layout", "world", "axes"),
    [
        (Layout(tp=8, pp=4, sp=True), 2, (2, 1, 1, 1)),
        (Layout(tp=8, pp=4, sp=True), 8, (4, 2, 1, 1)),
        (Layout(tp=2, cp=2, pp=2, ep=8), 8, (2, 2, 2, 4)),
        (Layout(ep=64), 4, (1, 1, 1, 4)),
        (Layout(tp=8), 3, (1, 1, 1, 1)),
    ],
)
def test_a_layout_is_scaled_to_the_processes(layout: Layout, world: int, axes: tuple[int, ...]) -> None:
    scaled = scaled_layout(layout, world)
    assert (scaled.tp, scaled.pp, scaled.cp, scaled.ep) == axes


@pytest.mark.parametrize(
    ("layout", "world", "typed", "axes"),
    [
        (Layout(pp=2), 2, {"ep": 2}, (1, 1, 1, 2)),  # two stages would leave one rank for the experts
        (Layout(pp=2), 4, {"ep": 2}, (1, 2, 1, 2)),
        (Layout(tp=8, pp=4, ep=8), 8, {"pp": 1}, (8, 1, 1, 8)),
        (Layout(tp=8, pp=4), 8, {"dp_replicate": 2}, (2, 2, 1, 1)),
        (Layout(tp=8, cp=8), 8, {"tp": 4, "etp": 2}, (4, 1, 2, 1)),
        (Layout(pp=2), 2, {"ep": 4}, (1, 1, 1, 4)),  # for a rule to refuse
    ],
)
def test_a_layout_is_scaled_around_what_the_user_typed(
    layout: Layout, world: int, typed: dict[str, int], axes: tuple[int, ...]
) -> None:
    """The typed value was set in a layout that had been scaled without it."""
    scaled = scaled_layout(layout, world, typed)
    assert (scaled.tp, scaled.pp, scaled.cp, scaled.ep) == axes
    assert all(getattr(scaled, name) == value for name, value in typed.items())


def test_what_the_user_fixed_stays() -> None:
    recipe = load("llama3_70b_pretrain_config")
    small, _ = tiny_recipe(recipe, config_for(recipe), 2, {"layout.pp": 2, "layout.tp": 1, "train.steps": 7})
    assert (small.layout.pp, small.layout.tp, small.train.steps) == (2, 1, 7)
