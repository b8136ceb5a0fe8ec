"""Memory stage by stage, and what torch would report."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from meshwright.costs.memory import PARTS, memory, memory_by_stage
from meshwright.costs.memory_profiles import memory_profiles
from meshwright.errors import InputError
from meshwright.recipes.types import ENGINES

from .helpers import case, llama
from .test_laws import engines, goals, layouts, models


@settings(max_examples=40, deadline=None)
@given(models, layouts, engines, goals)
def test_the_worst_stage_is_reported_and_all_are_available(model, layout, engine, goal):
    one = case(model, "64xH100", goal, engine, mtp_loss=0.1, **layout)
    every = memory_by_stage(one)
    assert len(every) == layout["pp"]
    worst = memory(one)
    assert worst.total == pytest.approx(max(stage.total for stage in every), rel=1e-9)
    assert memory(one, "first").total == pytest.approx(every[0].total, rel=1e-9)
    assert memory(one, "last").total == pytest.approx(every[-1].total, rel=1e-9)
    for stage in every:
        assert sum(getattr(stage, name) for name in PARTS) == pytest.approx(stage.total, rel=1e-9)
        assert stage.allocated <= stage.reserved <= stage.total


def test_stages_of_columns_are_rejected():
    with pytest.raises(InputError, match="one layout"):
        memory_by_stage(case(llama(), "64xH100", pp=np.array([1, 2])))


def test_the_first_stage_keeps_the_most_micro_batches_and_the_last_has_the_loss():
    one = case(llama(), "16xH100", pp=4, engine="megatron", strategy="zero1", global_batch_size=128, seq_length=8192)
    every = memory_by_stage(one)
    kept = [stage.activations for stage in every]
    assert kept == sorted(kept, reverse=True)
    assert [stage.logits > 0 for stage in every] == [False, False, False, True]


def test_every_engine_has_a_profile():
    assert set(ENGINES) <= set(memory_profiles())


def test_the_allocator_releases_cached_blocks_before_it_fails():
    roomy, tight = (memory(case(llama(), f"8x{gpu}", micro_batch_size=2, compile=True)) for gpu in ("H200", "H100"))
    assert roomy.allocated == pytest.approx(tight.allocated)
    assert tight.cache <= roomy.cache
