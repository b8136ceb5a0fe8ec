"""Properties of every learning-rate schedule."""

from __future__ import annotations

from itertools import pairwise
from typing import get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.engine.schedules import SHAPES, WSD_SHAPES, learning_rate
from meshwright.recipes.types import Schedule

NAMES = ("cosine", "linear", "wsd", "constant", "inverse_sqrt", "rex")
REACHING = (*SHAPES, "wsd")


@st.composite
def trainings(draw: st.DrawFn, names: tuple[str, ...] = NAMES) -> tuple[Schedule, float, int]:
    warmup = draw(st.integers(0, 50))
    steps = draw(st.integers(warmup + 2, 400))
    end = draw(st.one_of(st.just(0), st.integers(warmup + 1, steps - 1)))
    peak = draw(st.floats(1e-6, 1.0))
    floor = draw(st.floats(0.0, 2.0)) * peak
    name = draw(st.sampled_from(names))
    decay, style = draw(st.integers(0, 500)), draw(st.sampled_from(tuple(WSD_SHAPES)))
    wsd = {"wsd_decay_steps": decay, "wsd_decay_style": style}
    return Schedule(name=name, warmup_steps=warmup, decay_steps=end, min_lr=floor, **wsd), peak, steps


def rates(training: tuple[Schedule, float, int]) -> list[float]:
    schedule, peak, steps = training
    return [learning_rate(schedule, peak, steps, step) for step in range(steps)]


@given(trainings())
def test_the_rate_is_positive_before_the_end_and_never_above_the_peak(training: tuple[Schedule, float, int]) -> None:
    _, peak, _ = training
    every = rates(training)
    assert all(0 < rate <= peak * (1 + 1e-12) for rate in every[:-1] if training[0].decay_steps == 0)
    assert all(0 <= rate <= peak * (1 + 1e-12) for rate in every)


@given(trainings())
def test_the_warm_up_rises_in_equal_parts_and_ends_on_the_peak(training: tuple[Schedule, float, int]) -> None:
    schedule, peak, _ = training
    every = [0.0, *rates(training)]
    rises = [after - before for before, after in pairwise(every[: schedule.warmup_steps + 2])]
    assert rises == pytest.approx([peak / (schedule.warmup_steps + 1)] * (schedule.warmup_steps + 1))
    assert every[schedule.warmup_steps + 1] == pytest.approx(peak)


@given(trainings())
def test_the_rate_never_rises_after_the_warm_up(training: tuple[Schedule, float, int]) -> None:
    every = rates(training)[training[0].warmup_steps :]
    assert all(after <= before * (1 + 1e-12) for before, after in pairwise(every))


@given(trainings(REACHING))
def test_a_decay_ends_on_min_lr_and_stays_there(training: tuple[Schedule, float, int]) -> None:
    schedule, peak, steps = training
    end = schedule.decay_steps or steps - 1
    assert rates(training)[end:] == pytest.approx([min(schedule.min_lr, peak)] * (steps - end))


def test_every_name_of_the_recipe_has_a_rate() -> None:
    names = get_args(get_type_hints(Schedule)["name"])
    assert set(names) == set(NAMES)


@pytest.mark.parametrize(
    ("name", "middle"),
    [
        ("cosine", 0.5),
        ("linear", 0.5),
        ("wsd", 1.0),
        ("constant", 1.0),
        ("rex", 2 / 3),
        ("inverse_sqrt", (1 / 51) ** 0.5),
    ],
)
def test_half_way_down(name: str, middle: float) -> None:
    schedule = Schedule(name=name, warmup_steps=0, min_lr=0.0)
    assert learning_rate(schedule, 1.0, 101, 50) == pytest.approx(middle)


def test_wsd_decays_over_the_last_fifth() -> None:
    schedule = Schedule(name="wsd", warmup_steps=0, min_lr=0.0)
    assert learning_rate(schedule, 1.0, 101, 80) == pytest.approx(1.0, abs=1e-6)
    assert learning_rate(schedule, 1.0, 101, 85) == pytest.approx(0.5)


def test_a_run_of_one_step_learns_at_its_peak() -> None:
    assert learning_rate(Schedule(warmup_steps=0), 1e-3, 1, 0) == 1e-3
