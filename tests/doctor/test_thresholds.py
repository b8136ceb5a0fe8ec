"""Thresholds: each has a reason and is used, and what was not examined is reported."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.doctor.corpus import TROUBLES
from tests.doctor.fake_runs import LOG_WRITERS, healthy
from tests.doctor.planted import FAULTS

from meshwright import doctor
from meshwright.doctor.run_stats import running_median
from meshwright.doctor.throughput import period

SOURCES = Path(doctor.__file__).parent


def test_every_threshold_has_a_reason_and_is_used() -> None:
    text = "\n".join(path.read_text() for path in SOURCES.glob("*.py"))
    used = set(re.findall(r'(?<!_)(?:limit|share)\("(\w+)"\)', text))
    assert used == set(doctor.THRESHOLDS)
    assert all(len(one.why.split()) >= 5 for one in doctor.THRESHOLDS.values())


def test_every_diagnosis_is_planted_somewhere_in_these_tests() -> None:
    planted = {one.finding for one in FAULTS.values()} | {"speed.low-mfu", "speed.bubbles"}
    planted |= {one.label.main for one in TROUBLES}
    planted |= {"loss.zero-gradients"}  # tests/first_hour/test_doctor_stated_values.py
    planted |= {"speed.tcp-sockets"}  # tests/first_hour/test_doctor_nccl.py
    planted |= {"loss.validation-rises"}  # tests/first_hour/test_front_end_keys.py
    planted |= {"speed.slower-than-baseline"}  # tests/first_hour/test_continued_pretraining_70b.py
    planted |= {"run.differs-from-file"}  # tests/first_hour/test_doctor_files_and_ranks.py
    planted |= {"run.settings"}  # of our own run folders: tests/first_hour/test_compare_runs.py
    for diagnosis in doctor.DIAGNOSES:
        assert any(name.startswith(diagnosis.id) for name in planted), diagnosis.id


def test_what_a_log_lacks_is_reported_per_diagnosis() -> None:
    found = doctor.examine(doctor.read_text(LOG_WRITERS["automodel"](healthy(8)), "log"))
    assert "--recipe" in found.not_examined["speed.low-mfu"]
    assert "20 step lines" in found.not_examined["speed.uneven-steps"]
    assert not set(found.looked_for) & set(found.not_examined)
    assert {*found.looked_for, *found.not_examined} == {one.id for one in doctor.DIAGNOSES}


@pytest.mark.parametrize(
    ("numbers", "every"),
    [((10, 20, 30), 10), ((5, 10, 20, 25), 5), ((7, 14), None), ((3, 8, 10, 19), None), ((1, 2, 3, 4), None)],
)
def test_periods_are_distances_in_common(numbers: tuple[int, ...], every: int | None) -> None:
    assert period(numbers) == every


def test_running_medians_are_those_of_each_window() -> None:
    import numpy as np

    values = np.random.default_rng(0).normal(size=97)
    for before, behind in ((10, 10), (49, 0), (0, 3), (200, 0)):
        expected = [np.median(values[max(0, i - before) : i + behind + 1]) for i in range(len(values))]
        assert running_median(values, before, behind) == pytest.approx(expected)
