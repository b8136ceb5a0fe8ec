"""Properties of the functions that scale batch and learning rate."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.planner import batch_for_tokens, scaled_batch, scaled_lr

sizes = st.integers(1, 1 << 20)
rates = st.floats(1e-6, 1e-2)


@given(rates, sizes)
def test_the_same_batch_keeps_the_rate(lr: float, batch: int) -> None:
    assert scaled_lr(lr, batch, batch) == pytest.approx(lr, rel=5e-3)


@given(rates, st.integers(1, 4096))
def test_four_times_the_batch_doubles_the_rate_by_the_sqrt_law(lr: float, batch: int) -> None:
    assert scaled_lr(lr, batch, 4 * batch) == pytest.approx(2 * lr, rel=5e-3)
    assert scaled_lr(lr, batch, 4 * batch, "linear") == pytest.approx(4 * lr, rel=5e-3)


@given(rates, sizes, sizes)
def test_rates_grow_with_the_batch(lr: float, old: int, new: int) -> None:
    grown = scaled_lr(lr, old, new)
    assert (grown >= lr * 0.99) == (new >= old) or new == pytest.approx(old, rel=0.03)


@given(st.integers(1, 512), st.integers(1, 64), st.integers(1, 64))
def test_batch_per_rank_is_kept(per_rank: int, old_dp: int, new_dp: int) -> None:
    assert scaled_batch(per_rank * old_dp, old_dp, new_dp) == per_rank * new_dp


@given(st.integers(1, 4096), st.sampled_from([1024, 2048, 4096]), st.integers(0, 5))
def test_tokens_per_step_are_kept(batch: int, seq: int, doublings: int) -> None:
    longer = seq * 2**doublings
    kept = batch_for_tokens(batch * 2**doublings, seq, longer)
    assert kept * longer == batch * 2**doublings * seq
