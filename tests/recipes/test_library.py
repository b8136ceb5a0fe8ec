"""Every shipped recipe exists, builds, and matches its name."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest

from meshwright.clusters import cluster
from meshwright.models import find
from meshwright.recipes import Recipe, entries, load, names, published_recipe, recipe_fields
from meshwright.recipes import library as library_package
from meshwright.recipes import registry as registry_module
from meshwright.recipes.registry import registry

PUBLISHED_NAMES = (Path(__file__).parent / "published_names.txt").read_text().split()
PACKAGE = Path(library_package.__file__).parent.parent


def test_every_published_name_is_there() -> None:
    assert len(PUBLISHED_NAMES) == 201
    assert set(PUBLISHED_NAMES) <= set(names())


@pytest.mark.parametrize("room", ["library", "benchmarks"])
def test_every_file_is_in_the_registry(room: str) -> None:
    files = {path.stem for path in (PACKAGE / room).glob("*.py")} - {"__init__"}
    assert files == set(registry_module.LIBRARY if room == "library" else registry_module.BENCHMARKS)


def test_every_recipe_is_a_greppable_function_of_its_name() -> None:
    text = "\n".join(path.read_text() for room in ("library", "benchmarks") for path in (PACKAGE / room).glob("*.py"))
    assert all(f"def {name}() -> Recipe:" in text for name in names())


def test_every_recipe_builds_under_its_name_and_every_value_is_legal() -> None:
    for name in names():
        made = load(name)
        assert made.name == name
        assert msgspec.convert(msgspec.to_builtins(made), Recipe) == made


def test_every_recipe_names_a_model_and_a_cluster_that_exist() -> None:
    for entry in entries():
        assert find(entry.model).params.total == entry.params_total > 0
        there = cluster(load(entry.name).cluster)
        assert there.world == entry.gpus
        assert there.gpu.name == entry.gpu


def test_every_field_has_a_kind_and_a_description() -> None:
    for key, info in recipe_fields().items():
        assert info.kind in ("contract", "layout", "benchmark"), key
        assert info.text, key


def test_benchmarks_are_marked() -> None:
    for entry in entries():
        made = load(entry.name)
        assert entry.benchmark == ("benchmarks" in registry()[entry.name].build.__module__)
        if entry.benchmark:
            assert (made.train.steps, made.data.dataset, made.checkpoint.save_every) == (50, "mock", 0)
            assert not made.train.check_nan
            assert made.kernels.te_rng_tracker == (made.kernels.cuda_graphs != "none")
        else:
            assert made.train.check_nan
            assert not made.moe.force_balance


def test_the_name_says_the_goal_and_the_gpus_of_a_benchmark() -> None:
    for entry in entries():
        if entry.benchmark:
            assert f"_{entry.goal}_" in entry.name
            assert f"_{entry.gpus}gpu_{entry.gpu.lower()}_" in entry.name
        elif entry.name in PUBLISHED_NAMES:
            assert f"_{entry.goal}_" in entry.name


def test_published_values_are_restored() -> None:
    for name in PUBLISHED_NAMES:
        stated, made = registry()[name].published, published_recipe(name)
        for field in ("tp", "pp", "cp", "ep"):
            if (degree := getattr(stated, field)) is not None:
                assert getattr(made.layout, field) == degree, name
        if stated.seq is not None:
            assert made.data.seq_length == stated.seq
        if stated.gpus is not None:
            assert cluster(made.cluster).world == stated.gpus


def test_the_index_is_quick() -> None:
    entries.cache_clear()
    started = time.process_time()
    assert len(entries()) > 600
    assert time.process_time() - started < 1.0
