"""Checking is fast enough for interactive use and search."""

from __future__ import annotations

from time import process_time

import numpy as np

from meshwright.recipes.types import ENGINES
from meshwright.rules import check, legal

from .helpers import LARGE_MIXTURE, case, cluster


def cpu_seconds(work: object) -> float:
    """Return the best of three times, so that a busy machine does not fail the test."""
    assert callable(work)
    times = []
    for _ in range(3):
        start = process_time()
        work()
        times.append(process_time() - start)
    return min(times)


def test_checking_one_case_takes_milliseconds() -> None:
    for engine in ENGINES:
        c = case(LARGE_MIXTURE, cluster(1024), engine, strategy="zero1", tp=8, pp=4, ep=32, global_batch_size=4096)
        assert cpu_seconds(lambda c=c: check(c)) < 0.020, engine


def test_a_hundred_thousand_candidates_take_under_two_seconds() -> None:
    random = np.random.default_rng(0)
    degrees = {name: 2 ** random.integers(0, 5, 100_000) for name in ("tp", "pp", "vp", "cp", "ep", "micro_batch_size")}
    options = {
        "recompute": random.choice(["none", "selective", "full"], 100_000),
        "pp_schedule": random.choice(["1f1b", "interleaved_1f1b"], 100_000),
        "sp": random.random(100_000) < 0.5,
    }
    c = case(LARGE_MIXTURE, cluster(1024), "megatron", strategy="zero1", global_batch_size=4096)
    many = c.replace(**degrees, **options)
    assert cpu_seconds(lambda: legal(many)) < 2.0
