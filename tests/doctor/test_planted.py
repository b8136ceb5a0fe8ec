"""A planted fault is found in every log that can show it, and nothing else is; a healthy run has none."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.doctor.planted import FAULTS
from tests.doctor.stories import KIND, TELLERS, healthy

from meshwright import api, doctor
from meshwright.recipes import index, overrides

SEEDS = st.integers(0, 2**20)
STEPS = st.integers(110, 200)
PAIRS = [(fault, teller) for fault, one in FAULTS.items() for teller in one.told_by]


@pytest.mark.parametrize("teller", TELLERS)
@settings(max_examples=6)
@given(seed=SEEDS, steps=st.integers(30, 300), first=st.sampled_from([1, 1, 101, 50_001]))
def test_nothing_is_found_in_a_healthy_run(teller: str, seed: int, steps: int, first: int) -> None:
    story = healthy(steps, seed, first=first)
    run = doctor.read_text(TELLERS[teller](story), "log")
    found = doctor.examine(run)
    assert run.kind == KIND[teller]
    assert [step.step for step in run.steps] == list(range(first, first + steps))
    assert found.ok, [finding.message for finding in found.findings]
    assert {figure.name for figure in found.figures} >= {"tokens/s/GPU", "peak memory", "last loss"}


def found_and_alone(fault: str, teller: str, seed: int, steps: int) -> None:
    planted = FAULTS[fault]
    story = planted.plant(healthy(steps, seed), random.Random(seed))
    found = doctor.examine(doctor.read_text(TELLERS[teller](story), "log"))
    assert [finding.id for finding in found.findings] == [planted.finding], [one.message for one in found.findings]
    (finding,) = found.findings
    assert finding.id in doctor.meanings()
    assert finding.remedies
    for remedy in finding.remedies:
        if remedy.what in ("layout", "contract"):
            overrides.apply(index.load("llama3_8b_pretrain_config"), remedy.try_)  # what is typed is understood
    assert finding.evidence or finding.lines
    assert all(line.startswith("log:") for line in finding.lines)
    json.dumps(api.checkup_to_dict(found), allow_nan=False)


@pytest.mark.parametrize(("fault", "teller"), PAIRS)
@settings(max_examples=2)
@given(seed=SEEDS, steps=STEPS)
def test_a_planted_fault_is_found_and_only_that_one(fault: str, teller: str, seed: int, steps: int) -> None:
    found_and_alone(fault, teller, seed, steps)


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "teller"), PAIRS)
@settings(max_examples=25)
@given(seed=SEEDS, steps=STEPS)
def test_a_planted_fault_is_found_in_many_runs(fault: str, teller: str, seed: int, steps: int) -> None:
    found_and_alone(fault, teller, seed, steps)


@settings(max_examples=10)
@given(seed=SEEDS, teller=st.sampled_from(["megatron", "torchtitan", "automodel"]), every=st.sampled_from([5, 10]))
def test_a_log_that_tells_every_tenth_step_is_read_alike(seed: int, teller: str, every: int) -> None:
    story = healthy(600, seed)
    (rows,) = story.starts
    thinned = replace(story, starts=(tuple(one for one in rows if one.step == 1 or one.step % every == 0),))
    run = doctor.read_text(TELLERS[teller](thinned), "log")
    assert {step.covers for step in run.steps[2:]} == {every}
    assert doctor.examine(run).ok


@settings(max_examples=10)
@given(seed=SEEDS, ranks=st.integers(2, 8))
def test_ranks_that_tell_the_same_are_heard_once(seed: int, ranks: int) -> None:
    lines = TELLERS["torchtitan"](healthy(40, seed)).splitlines()
    told = [line.replace("[rank0]", f"[rank{rank}]") for line in lines for rank in range(ranks)]
    without = [line.replace("[rank0]:", "") for line in lines for _ in range(ranks)]
    for text in (told, without):
        run = doctor.read_text("\n".join(text), "log")
        assert [step.step for step in run.steps] == list(range(1, 41))
        assert len(run.attempts) == 1


@settings(max_examples=10)
@given(seed=SEEDS, ranks=st.integers(2, 8))
def test_ranks_without_a_number_may_tell_their_steps_late(seed: int, ranks: int) -> None:
    chance = random.Random(seed)
    lines = TELLERS["automodel"](healthy(60, seed)).splitlines()[1:]
    behind = [chance.uniform(0, 2) for _ in range(ranks)]
    told = sorted((at + late + chance.uniform(0, 0.9), line) for at, line in enumerate(lines) for late in behind)
    run = doctor.read_text("\n".join(line for _, line in told), "log")
    assert [step.step for step in run.steps] == list(range(1, 61))
    assert len(run.attempts) == 1


@settings(max_examples=20)
@given(seed=SEEDS, at=st.lists(st.integers(2, 29), max_size=2))
def test_a_noisy_loss_and_one_or_two_pauses_are_no_findings(seed: int, at: list[int]) -> None:
    chance = random.Random(seed)
    calm = healthy(150, seed).changed(
        lambda one: replace(
            one,
            loss=1.1 + 0.08 * math.exp(-one.step / 30) + chance.gauss(0, 0.12),  # a fine-tuning with small batches
            seconds=one.seconds * (10 if one.step in at else 1),
        )
    )
    found = doctor.examine(doctor.read_text(TELLERS["automodel"](calm), "log"))
    assert found.ok, [finding.message for finding in found.findings]
