"""Goodput: failures, checkpoints and the share of training time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.planner.goodput import best_interval_s, goodput

gpus = st.integers(1, 200_000)
state = st.floats(0.01, 200)


def test_llama_3_interruptions_and_effective_time() -> None:
    run = goodput(16_384, state_gb_per_gpu=405e9 * 12 / 16_384 / 1e9)
    assert run.failures_per_day * 54 == pytest.approx(419, abs=1)
    assert run.share > 0.9  # the paper reports more than 90 % effective training time


def test_bloom_saw_one_or_two_failures_a_week() -> None:
    assert 1 <= goodput(384, 5).failures_per_day * 7 <= 2  # BLOOM, 2022: 1-2 GPU failures a week on 384 A100


@given(gpus, state)
def test_more_gpus_never_train_a_larger_share(count: int, gb: float) -> None:
    assert goodput(2 * count, gb).share <= goodput(count, gb).share + 1e-12


@given(gpus, state)
def test_share_is_a_share(count: int, gb: float) -> None:
    assert 0 <= goodput(count, gb).share <= 1


@given(gpus, st.floats(0.5, 100), st.floats(0.3, 3))
def test_no_other_interval_loses_less(count: int, save_s: float, factor: float) -> None:
    hours = 1 / (count * 2e-5)
    best = best_interval_s(save_s, hours)

    def lost(interval: float) -> float:
        return save_s / interval + interval / 2 / (hours * 3600)

    if best > 60:
        assert lost(best) <= lost(best * factor) + 1e-12


def test_failures_are_negligible_on_one_gpu() -> None:
    assert goodput(1, 10).share > 0.99
