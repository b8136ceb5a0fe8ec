"""The candidate space and the search over it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright import clusters, costs, rules
from meshwright.planner.search import SEARCHED_NAMES, best, score
from meshwright.planner.space import axes, candidates
from meshwright.recipes import index
from meshwright.recipes.case import Case, model_of
from meshwright.recipes.stage_layers import balanced_stages


def case(name: str, gpus: str, engine: str = "meshwright") -> Case:
    recipe = index.load(name)
    return Case(recipe, model_of(recipe), clusters.cluster(gpus), engine, memory_of=costs.memory)  # type: ignore[arg-type]


@given(st.integers(1, 200), st.integers(1, 64))
def test_balanced_stages_cover_all_layers_and_differ_by_one(layers: int, chunks: int) -> None:
    stages = balanced_stages(layers, chunks)
    assert len(stages) == chunks
    assert sum(stages) == layers
    assert max(stages) - min(stages) <= 1
    assert stages[-1] == min(stages)  # the head's stage is never the fuller one


@pytest.mark.parametrize("gpus", ["8xH100", "12xH200", "64xH100", "6xA100-80"])
@pytest.mark.parametrize("name", ["llama3_8b_pretrain_config", "qwen3_30b_a3b_pretrain_config"])
def test_every_degree_divides_the_gpus(name: str, gpus: str) -> None:
    a = axes(c := case(name, gpus))
    assert len(a.tp) > 3
    assert not (c.world % (a.tp * a.pp * a.cp)).any()
    assert not ((c.world // a.pp) % a.ep).any()
    assert (a.tp <= c.nvlink_domain).all()


@pytest.mark.parametrize("engine", ["meshwright", "megatron", "kempnerforge"])
def test_scored_candidates_are_legal_and_match_single_estimates(engine: str) -> None:
    c = case("qwen3_30b_a3b_pretrain_config", "16xH100", engine)
    c = c.replace(strategy="zero1") if engine == "megatron" else c
    seen = 0
    for batch in score(c, {}):
        for i in range(0, len(batch), max(len(batch) // 7, 1)):
            row = batch.row(i)
            alone = c.replace(**row.layout)
            assert bool(rules.legal(alone))
            price = costs.estimate(alone)
            assert row.step_s == (pytest.approx(float(price.step_s), rel=1e-9) if row.fits else float("inf"))
            assert float(price.memory.total) == pytest.approx(row.total_gib, rel=1e-9)
            assert bool(price.fits) == row.fits
            seen += 1
    assert seen > 5 or engine == "kempnerforge"


def test_the_best_is_within_three_percent_of_the_fastest_with_headroom() -> None:
    c = case("llama3_70b_pretrain_config", "64xH100")
    chosen = best(c, {})
    assert chosen is not None
    assert chosen.fits
    fastest = min(float(b.step_s[b.has_headroom].min()) for b in score(c, {}) if b.has_headroom.any())
    assert chosen.step_s <= 1.03 * fastest + 1e-9


def test_pinned_values_are_kept() -> None:
    c = case("llama3_70b_pretrain_config", "64xH100")
    chosen = best(c, {"tp": 8, "recompute": "full"})
    assert chosen is not None
    assert (chosen.layout["tp"], chosen.layout["recompute"]) == (8, "full")
    assert best(c, {"tp": 7}) is None


def test_layers_that_do_not_divide_are_split_unevenly() -> None:
    c = case("deepseek_v3_pretrain_config", "1024xH100")  # 61 layers
    rows = [b.rows(int(i)) for b in candidates(c) for i in np.unique(b.pp, return_index=True)[1]]
    stages = {len(row.stage_layers): row for row in rows if row.stage_layers}
    assert {2, 4, 8, 16} <= set(stages)
    assert all(sum(row.stage_layers) == 61 and row.pp == count for count, row in stages.items())


def test_rows_hold_plain_values() -> None:
    c = case("llama3_8b_pretrain_config", "8xH100")
    row = next(iter(score(c, {}))).row(0)
    assert set(row.layout) == set(SEARCHED_NAMES)
    assert not any(isinstance(v, np.generic | np.ndarray) for v in row.layout.values())
