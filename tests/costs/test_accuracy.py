"""The accuracy report: its shape, its weighting, and the figure the shipped model must hold."""

from __future__ import annotations

import json

import numpy as np
import pytest

from meshwright.costs import accuracy
from meshwright.costs.accuracy import ALL_TIERS, Errors, compare, to_dict, weighted_quantile

from .helpers import published
from .test_measurements import ROW, table

# Source-weighted errors of the shipped profiles in per cent, with a little room for changes elsewhere in the model.
STEP_MEDIAN, STEP_P90, PREDICTED = 8.0, 28.0, 0.9
MEMORY_MEDIAN, MEMORY_P90 = 5.0, 12.0


@pytest.fixture(scope="module")
def report():
    return compare(published())


def test_the_report_has_the_documented_keys(tmp_path):
    path = table(tmp_path, ROW, {**ROW, "source": "other", "framework": "Unheard"})
    made = to_dict(accuracy.accuracy(path))
    assert json.loads(json.dumps(made)) == made
    assert {"rows", "predicted", "unsupported", "step_time", "memory", "fit"} <= set(made)
    assert made["rows"] == 2
    assert made["predicted"] == 1
    assert made["unsupported"] == {"no profile for framework Unheard": 1}
    assert {"median_abs_pct", "p90_abs_pct", "by_source", "by_gpu"} <= set(made["step_time"])
    assert {"median_abs_pct", "p90_abs_pct", "by_source"} <= set(made["memory"])
    assert set(made["fit"]) == {"ok_called_ok", "ok_rows", "oom_called_oom", "oom_rows"}
    assert set(made["step_time"]["by_source"]) == {"lab"}
    assert set(made["step_time"]["by_gpu"]) == {"A100-80"}
    assert made["memory"]["median_abs_pct"] is None  # nothing measured


def test_every_source_counts_the_same():
    errors = Errors(np.array([0.1] * 99 + [0.5]), ("many",) * 99 + ("one",), ("g",) * 100, np.ones(100))
    assert errors.quantile(0.4) == pytest.approx(10)
    assert errors.quantile(0.6) == pytest.approx(50)
    assert weighted_quantile(np.array([3.0, 1.0, 2.0]), np.ones(3), 0.5) == 2.0
    assert weighted_quantile(np.array([4.0, 1.0, 3.0, 2.0]), np.ones(4), 0.5) == 2.5  # as calibrate's median
    assert weighted_quantile(np.array([1.0, 2.0, 3.0]), np.array([0.1, 0.2, 0.3]), 0.5) == 2.5


def test_step_times_match_published_ones(report):
    assert report.step_time.quantile(0.5) <= STEP_MEDIAN
    assert report.step_time.quantile(0.9) <= STEP_P90


def test_memory_matches_published_peaks(report):
    assert report.memory.quantile(0.5) <= MEMORY_MEDIAN
    assert report.memory.quantile(0.9) <= MEMORY_P90


def test_rows_of_no_fit_are_priced_or_have_a_reason():
    rows = published("measurements_2")
    assert all(row.case is not None or row.unsupported for row in rows)
    assert sum(row.case is not None for row in rows) >= 0.75 * len(rows)
    found = compare(rows)
    assert found.step_time.quantile(0.5) < 20
    assert {"adapters", "dense", "diffusion"} <= set(found.step_time.kind)
    every = compare(rows, ALL_TIERS, ALL_TIERS, by_tflops=True)
    assert len(every.step_time.error) > len(found.step_time.error)
    assert set(every.memory.source) == {"automodel_ci_golden", "automodel_docs_memory"}


def test_nearly_every_row_is_supported(report):
    assert report.predicted >= PREDICTED * report.rows
    assert sum(report.unsupported.values()) == report.rows - report.predicted
