"""Goodput: failures, checkpoints and the share of training time."""

from __future__ import annotations

import csv
import itertools
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.planner.goodput import best_interval_s, best_spares, enough, goodput
from meshwright.planner.reliability import reliability

gpus = st.integers(1, 200_000)
state = st.floats(0.01, 200)


class Published(NamedTuple):
    """A run as its source describes it: GPUs, days, failures, what a failure stops and for how long."""

    name: str
    gpus: int
    share: float  # effective training time
    failures: float | None
    days: float
    restart_s: float | None
    replicas: int


def _published(row: dict[str, str]) -> Published:
    failures, restart_s = (float(row[name]) if row[name] else None for name in ("failures", "restart_s"))
    days, replicas = float(row["days"] or 0), int(row["replicas"])
    return Published(row["run"], int(row["gpus"]), float(row["share"]), failures, days, restart_s, replicas)


with (Path(__file__).parents[2] / "benchmarks/data/goodput_runs.csv").open(encoding="utf-8", newline="") as file:
    PUBLISHED = [_published(row) for row in csv.DictReader(file)]


@pytest.mark.parametrize("run", PUBLISHED, ids=[run.name for run in PUBLISHED])
@pytest.mark.parametrize("params", [405e9, 1e12])  # the sources do not give the size of every model
def test_published_runs_within_four_points(run: Published, params: float) -> None:
    found = goodput(run.gpus, params * 12 / run.gpus / 1e9, restart_s=run.restart_s, replicas=run.replicas)
    assert found.share == pytest.approx(run.share, abs=0.04)
    if run.failures is not None:
        expected = found.failures_per_day * run.days
        assert abs(expected - run.failures) <= 2 * run.failures**0.5  # counts vary by chance


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


@given(gpus, state, st.floats(1, 7200), st.integers(1, 32), st.booleans())
def test_laws_of_failures(count: int, gb: float, restart: float, replicas: int, background: bool) -> None:
    def share(count: int = count, restart: float = restart, spares: int | None = None) -> float:
        one = {"restart_s": restart, "stall_s": restart, "replicas": replicas, "background": background}
        if replicas > 1:  # they lose no work: a longer interval, as slow storage needs, only saves time
            one["interval_s"] = 3600.0
        return goodput(count, gb, spares=spares, **one).share  # type: ignore[arg-type]  # of the table above

    assert 0 <= share() <= 1
    assert share(count=2 * count) <= share() + 1e-12
    assert share(restart=1.5 * restart) <= share() + 1e-12
    by_spares = [share(spares=number) for number in (0, 1, 2, 5, 20, 100, 1000)]
    assert all(few <= more + 1e-12 for few, more in itertools.pairwise(by_spares))
    assert by_spares[-1] <= share() + 1e-12


@given(st.floats(0.001, 2000), st.integers(1, 16_384))
def test_spares_are_worth_their_nodes(away: float, nodes: int) -> None:
    best = best_spares(away, nodes)
    assert 0 <= best <= nodes
    if away < 100:
        gains = [enough(away, count) * nodes / (nodes + count) for count in (best, max(best - 1, 0), best + 1)]
        assert gains[0] >= max(gains[1:]) - 1e-9 or best == nodes


def test_replicas_pay_on_large_runs() -> None:
    small, large = (reliability(count, 8, 4860, 5.0, 10_000_000, 256) for count in (1024, 98_304))
    assert not small.replicas_pay
    assert large.replicas_pay
    assert small.replicas_pay_from == large.replicas_pay_from
    assert 8192 < (small.replicas_pay_from or 0) < 65_536
    assert large.share_with_replicas is not None
    assert large.share_with_replicas > large.share + 0.2
    assert small.spare_nodes < large.spare_nodes
    assert reliability(256, 8, 4860, 5.0, 10_000_000, 256).share_with_replicas is None
