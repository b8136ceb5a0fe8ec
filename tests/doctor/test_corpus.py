"""The corpus of labelled logs: a sample here, all of it behind `slow`, and the results that docs/doctor.md shows."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from benchmarks.doctor_corpus import RESULTS, Result, judge, result, share, verdicts
from tests.doctor.corpus import HEALTHY, HELD_OUT, TROUBLES, TUNED, Log, logs
from tests.doctor.framework_logs import SOURCES, WRITERS

SAMPLE = [log for index, log in enumerate(logs(TUNED[:1])) if index % 11 == 3]
LEAST_RIGHT, MOST_ALARMS = 0.95, 0.02


@pytest.mark.parametrize("log", SAMPLE, ids=lambda log: log.name)
def test_a_sample_of_the_corpus_is_diagnosed_as_labelled(log: Log, tmp_path: Path) -> None:
    assert not judge(log, tmp_path).wrong


def test_the_corpus_is_large_and_its_formats_have_sources() -> None:
    assert len(HEALTHY) + len(TROUBLES) >= 60
    assert sum(len(one.writers) for one in HEALTHY) >= 25
    assert {writer for one in (*HEALTHY, *TROUBLES) for writer in one.writers} >= {*WRITERS} - {
        *("printed", "megatron", "torchtitan", "automodel", "automodel_json")  # planted.py has these
    }
    assert all(len(one.commit) == 40 for one in SOURCES)


def test_the_kept_results_are_good_enough() -> None:
    kept = msgspec.json.decode(RESULTS.read_bytes(), type=Result)
    assert {one.name for one in (*kept.healthy, *kept.troubles)} == {one.name for one in (*HEALTHY, *TROUBLES)}
    assert _good_enough(kept)


def _good_enough(found: Result) -> bool:
    shares = [(share(found.troubles, held_out), share(found.healthy, held_out)) for held_out in (False, True)]
    return all(
        right >= LEAST_RIGHT * every and healthy - calm <= MOST_ALARMS * healthy
        for (right, every), (calm, healthy) in shares
    )


@pytest.mark.slow
def test_the_whole_corpus_is_diagnosed_as_labelled() -> None:
    assert _good_enough(result(verdicts(TUNED), verdicts(HELD_OUT)))
