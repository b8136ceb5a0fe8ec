"""What `from meshwright import …` gives, used as the README does."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

import meshwright
from meshwright import InputError, Plan, Recipe, check, find_recipes, recipe, recommend


def test_names_are_public_and_unknown_ones_are_errors() -> None:
    assert all(getattr(meshwright, name) is not None for name in meshwright.__all__)
    with pytest.raises(AttributeError):
        _ = meshwright.nonsense


def test_recommend_then_read_the_plan() -> None:
    plan = recommend("llama3-8b", "8xH100", "sft")
    assert isinstance(plan, Plan)
    assert plan.ok
    assert plan.recipe.layout.tp >= 1
    assert 0 < plan.estimate.memory.total < 80
    assert plan.question.cluster.world == 8


def test_load_override_check() -> None:
    mine = recipe("llama3_70b_pretrain_config", ["layout.tp=4", "train.global_batch_size=256"])
    assert isinstance(mine, Recipe)
    assert (mine.layout.tp, mine.train.global_batch_size) == (4, 256)
    result = check(mine, gpus="64xH200")
    assert result.ok == (not [f for f in result.findings if f.severity == "error"])


def test_gpus_may_be_a_number() -> None:
    assert recommend("llama3-8b", 8, "peft").question.cluster.gpu.name == "H100"


def test_gpus_may_be_a_cluster_with_the_links_memory_and_price_of_its_file(tmp_path: Path) -> None:
    file = tmp_path / "site.toml"
    file.write_text(
        'gpu = "A100-80"\nnodes = 2\ngpus_per_node = 4\nmemory_gib = 64\nnetwork_gb_s = 12.5\nprice = 0.9\n'
    )
    own = meshwright.cluster(str(file))
    assert recommend("llama3-8b", own, "sft").question.cluster == own
    assert recommend("llama3-8b", meshwright.cluster("2x4xH100"), "sft").question.cluster.world == 8
    assert meshwright.size("llama3-8b", "sft", own, tokens="1B").price == 0.9
    more = msgspec.structs.replace(own, nodes=4)
    with pytest.raises(InputError, match="its counts, links, memory or price are not those of") as caught:
        recommend("llama3-8b", more, "sft")
    assert 'gpus="cluster.toml"' in caught.value.fix


def test_the_index_is_searchable() -> None:
    assert "llama3_70b_sft_config" in {e.name for e in find_recipes("llama3 70b", goal="sft")}


def test_mistakes_are_typed() -> None:
    with pytest.raises(InputError) as caught:
        recommend("llama3-8b", "8xH100", "sft", overrides=["layout.tpp=2"])
    assert "layout.tp=2" in caught.value.fix
    with pytest.raises(InputError):
        recommend("llama3-8b", "8xH100", "sft", seq=0)
