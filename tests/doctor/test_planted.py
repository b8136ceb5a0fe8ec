"""A planted fault is found in every format that can show it, and nothing else; a healthy run has no findings."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.doctor.fake_runs import FORMAT, LOG_WRITERS, healthy
from tests.doctor.planted import FAULTS

from meshwright import api, doctor
from meshwright.recipes import index, overrides

SEEDS = st.integers(0, 2**20)
STEPS = st.integers(110, 200)
PAIRS = [(fault, writer) for fault, one in FAULTS.items() for writer in one.visible_in]

# Every fault in about half of the formats that show it, every format with about half of the faults.
QUICK = [
    (fault, writer)
    for number, (fault, one) in enumerate(FAULTS.items())
    for place, writer in enumerate(one.visible_in)
    if (number + place) % 2 == 0 or len(one.visible_in) == 1
]


@pytest.mark.parametrize("writer", LOG_WRITERS)
@settings(max_examples=6)
@given(seed=SEEDS, steps=st.integers(30, 300), first=st.sampled_from([1, 1, 101, 50_001]))
def test_nothing_is_found_in_a_healthy_run(writer: str, seed: int, steps: int, first: int) -> None:
    fake_run = healthy(steps, seed, first=first)
    run = doctor.read_text(LOG_WRITERS[writer](fake_run), "log")
    found = doctor.examine(run)
    assert run.kind == FORMAT[writer]
    assert [step.step for step in run.steps] == list(range(first, first + steps))
    assert found.ok, [finding.message for finding in found.findings]
    assert {figure.name for figure in found.figures} >= {"tokens/s/GPU", "peak memory", "last loss"}


def check_only_finding(fault: str, writer: str, seed: int, steps: int) -> None:
    planted = FAULTS[fault]
    fake_run = planted.plant(healthy(steps, seed), random.Random(seed))
    found = doctor.examine(doctor.read_text(LOG_WRITERS[writer](fake_run), "log"))
    assert [finding.id for finding in found.findings] == [planted.finding], [one.message for one in found.findings]
    (finding,) = found.findings
    assert finding.id in doctor.meanings()
    assert finding.remedies
    for remedy in finding.remedies:
        if remedy.what in ("layout", "contract"):
            overrides.apply(index.load("llama3_8b_pretrain_config"), remedy.try_)  # the overrides are valid
    assert finding.evidence or finding.lines
    assert all(line.startswith("log:") for line in finding.lines)
    json.dumps(api.to_json(api.doctor_response(found)), allow_nan=False)


def test_a_slowdown_after_a_fifth_of_a_short_run_is_found() -> None:
    """37 s are lost: most steps are slow, so the usual step is not the median one."""
    check_only_finding("sustained slowdown", "printed", 1434, 110)


@pytest.mark.parametrize(
    ("fault", "writer"), [pytest.param(*pair, marks=[] if pair in QUICK else [pytest.mark.slow]) for pair in PAIRS]
)
@settings(max_examples=2)
@given(seed=SEEDS, steps=STEPS)
def test_a_planted_fault_is_found_and_only_that_one(fault: str, writer: str, seed: int, steps: int) -> None:
    check_only_finding(fault, writer, seed, steps)


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "writer"), PAIRS)
@settings(max_examples=12)
@given(seed=SEEDS, steps=STEPS)
def test_a_planted_fault_is_found_in_many_runs(fault: str, writer: str, seed: int, steps: int) -> None:
    check_only_finding(fault, writer, seed, steps)


@settings(max_examples=10)
@given(seed=SEEDS, writer=st.sampled_from(["megatron", "torchtitan", "automodel"]), every=st.sampled_from([5, 10]))
def test_a_log_of_every_tenth_step_is_read_the_same(seed: int, writer: str, every: int) -> None:
    fake_run = healthy(600, seed)
    (rows,) = fake_run.starts
    thinned = replace(fake_run, starts=(tuple(one for one in rows if one.step == 1 or one.step % every == 0),))
    run = doctor.read_text(LOG_WRITERS[writer](thinned), "log")
    assert {step.covers for step in run.steps[2:]} == {every}
    assert doctor.examine(run).ok


@settings(max_examples=10)
@given(seed=SEEDS, ranks=st.integers(2, 8))
def test_duplicate_lines_of_other_ranks_are_dropped(seed: int, ranks: int) -> None:
    lines = LOG_WRITERS["torchtitan"](healthy(40, seed)).splitlines()
    lines_of_ranks = [line.replace("[rank0]", f"[rank{rank}]") for line in lines for rank in range(ranks)]
    without_prefix = [line.replace("[rank0]:", "") for line in lines for _ in range(ranks)]
    for text in (lines_of_ranks, without_prefix):
        run = doctor.read_text("\n".join(text), "log")
        assert [step.step for step in run.steps] == list(range(1, 41))
        assert len(run.attempts) == 1


@settings(max_examples=10)
@given(seed=SEEDS, ranks=st.integers(2, 8))
def test_ranks_without_a_prefix_may_log_their_steps_late(seed: int, ranks: int) -> None:
    rng = random.Random(seed)
    lines = LOG_WRITERS["automodel"](healthy(60, seed)).splitlines()[1:]
    behind = [rng.uniform(0, 2) for _ in range(ranks)]
    lines_of_ranks = sorted((at + late + rng.uniform(0, 0.9), line) for at, line in enumerate(lines) for late in behind)
    run = doctor.read_text("\n".join(line for _, line in lines_of_ranks), "log")
    assert [step.step for step in run.steps] == list(range(1, 61))
    assert len(run.attempts) == 1


@settings(max_examples=10)
@given(seed=SEEDS, at=st.lists(st.integers(2, 29), max_size=2))
def test_a_noisy_loss_and_one_or_two_pauses_are_not_findings(seed: int, at: list[int]) -> None:
    rng = random.Random(seed)
    calm = healthy(150, seed).changed(
        lambda one: replace(
            one,
            loss=1.1 + 0.08 * math.exp(-one.step / 30) + rng.gauss(0, 0.12),  # fine-tuning with small batches
            seconds=one.seconds * (10 if one.step in at else 1),
        )
    )
    found = doctor.examine(doctor.read_text(LOG_WRITERS["automodel"](calm), "log"))
    assert found.ok, [finding.message for finding in found.findings]
