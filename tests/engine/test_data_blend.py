"""Blends: exact shares at every sample, none lost or repeated, the same sequence for any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.engine.data.blend import Blend, BlendSchedule, apply_temperature
from meshwright.engine.data.sample_types import Samples
from meshwright.engine.data.sampler import sample_numbers
from meshwright.errors import InputError

weights_of = st.lists(st.floats(0.001, 100), min_size=1, max_size=8)
quick = settings(max_examples=25, deadline=None)


class Labelled:
    """A source whose samples contain the source's label and their number."""

    def __init__(self, label: int) -> None:
        self.label = label

    def samples(self, numbers: Sequence[int]) -> Samples:
        """Return the samples with these numbers."""
        tokens = np.array([[self.label, number, 0] for number in numbers])
        return Samples(tokens, np.ones((len(numbers), 2), dtype=bool), extras={"label": tokens[:, :1]})


@given(weights=weights_of, far=st.integers(0, 10**12))
@quick
def test_shares_are_exact_at_every_sample(weights: list[float], far: int) -> None:
    schedule, exact = BlendSchedule(weights), np.array(weights) / sum(weights)
    limit = 0.5 + 1e-6 if len(weights) <= 2 else 2
    for samples in (*range(60), far):
        counts = schedule.counts(samples)
        assert sum(counts) == samples
        assert np.abs(np.array(counts) - samples * exact).max() <= limit + samples * 1e-11


@given(weights=weights_of, first=st.integers(0, 10**12))
@quick
def test_each_source_is_read_in_order(weights: list[float], first: int) -> None:
    schedule = BlendSchedule(weights)
    expected = schedule.counts(first)
    for number in range(first, first + 80):
        source, within = schedule.source(number)
        assert within == expected[source]
        expected[source] += 1
    assert expected == schedule.counts(first + 80)


@given(
    weights=st.lists(st.floats(0.01, 10), min_size=3, max_size=3),
    anneal=st.lists(st.floats(0.01, 10), min_size=2, max_size=2),
    border=st.integers(0, 60),
    plan=st.lists(st.sampled_from([(1, 8), (2, 4), (4, 2), (8, 1), (2, 2)]), min_size=1, max_size=6),
)
@quick
def test_ranks_and_resumes_do_not_change_the_samples(
    weights: list[float], anneal: list[float], border: int, plan: list[tuple[int, int]]
) -> None:
    batch = 8
    sources = [Labelled(i) for i in range(3)]
    blend = Blend(sources, weights, [0, *anneal], border)
    alone = blend.samples(range(batch * len(plan))).tokens[:, :2]
    for step, (ranks, micro_batch) in enumerate(plan):  # every step on another number of ranks
        shown = np.zeros((batch, 2), dtype=int)
        for rank in reversed(range(ranks)):
            numbers = sample_numbers(step, batch, micro_batch, ranks, rank)
            again = Blend(sources, weights, [0, *anneal], border)
            shown[np.array(numbers) - step * batch] = again.samples(numbers).tokens[:, :2]
        assert (shown == alone[step * batch : (step + 1) * batch]).all()
    for source in range(3):  # nothing lost or repeated, also where annealing starts
        mine = alone[alone[:, 0] == source, 1]
        assert (mine == np.arange(len(mine))).all()


def test_annealing_uses_its_weights_and_continues_each_source() -> None:
    blend = Blend([Labelled(0), Labelled(1), Labelled(2)], [0.75, 0.25, 0], [0.5, 0, 0.5], 40)
    tokens = blend.samples(range(60)).tokens
    assert np.bincount(tokens[:40, 0]).tolist() == [30, 10]
    assert np.bincount(tokens[40:, 0]).tolist() == [10, 0, 10]
    assert tokens[40:][tokens[40:, 0] == 0, 1].tolist() == list(range(30, 40))
    assert tokens[40:][tokens[40:, 0] == 2, 1].tolist() == list(range(10))


def test_extras_stay_with_their_samples() -> None:
    samples = Blend([Labelled(0), Labelled(1)], [1, 1]).samples([5, 3, 9, 4])
    assert (samples.extras["label"][:, 0] == samples.tokens[:, 0]).all()
    assert len(set(samples.tokens[:, 0].tolist())) == 2


def test_temperature_flattens_weights() -> None:
    weights = {"a": 8.0, "b": 2.0, "c": 0.0}
    assert apply_temperature(weights, 1.0) == pytest.approx({"a": 0.8, "b": 0.2, "c": 0.0})
    assert apply_temperature(weights, 2.0) == pytest.approx({"a": 2 / 3, "b": 1 / 3, "c": 0.0})
    assert apply_temperature(weights, 1e9)["b"] == pytest.approx(0.5)


@pytest.mark.parametrize("weights", [{"a": -1.0}, {"a": float("nan")}, {"a": float("inf")}, {"a": 0.0}, {}])
def test_invalid_weights_are_rejected(weights: dict[str, float]) -> None:
    with pytest.raises(InputError, match="weight"):
        apply_temperature(weights, 1.0)
