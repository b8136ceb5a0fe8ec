"""Runs compared with their estimate: what is slow, what does not fit, and remedies that the cost model confirms."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.doctor.fake_runs import ENGINE, LOG_WRITERS, OLD_OOM, OOM, at_estimated_speed, case
from tests.doctor.planted import FAULTS

from meshwright import costs, doctor, rules
from meshwright.costs.memory_constants import RESERVE
from meshwright.recipes import overrides

WRITERS = ("own", "megatron", "torchtitan", "automodel")
SEEDS = st.integers(0, 2**20)


@pytest.mark.parametrize("writer", WRITERS)
@settings(max_examples=5)
@given(seed=SEEDS, slower=st.floats(0.8, 1.1))
def test_a_run_as_fast_as_its_estimate_is_healthy(writer: str, seed: int, slower: float) -> None:
    made = case("llama3_8b_pretrain_config", "8xH100", ENGINE[writer])
    found = doctor.examine(
        doctor.read_text(LOG_WRITERS[writer](at_estimated_speed(made, 40, seed, slower)), "log"), made
    )
    assert found.ok, [finding.message for finding in found.findings]
    measured = {figure.name: figure for figure in found.figures}
    mfu = measured["MFU"]
    assert mfu.estimate is not None
    assert mfu.measured == pytest.approx(mfu.estimate / slower, rel=0.02)
    assert "causal attention counted as half" in found.mfu_convention


STRAGGLERS = "speed.stragglers"


@pytest.mark.parametrize(("slow", "expected"), [(1.4, [STRAGGLERS]), (2.5, [STRAGGLERS, "speed.low-mfu"])])
def test_a_slow_rank_explains_only_the_time_that_the_others_wait_for_it(slow: float, expected: list[str]) -> None:
    made = case("llama3_8b_pretrain_config", "8xH100", "megatron")
    usual = 1e3 * float(costs.estimate(made).step_s)
    ranks = f"(min, max) time across ranks (ms):\n    backward-compute ......: ({usual:.2f}, {1.4 * usual:.2f})"
    lines = LOG_WRITERS["megatron"](at_estimated_speed(made, 40, 1, slow)).splitlines()
    text = "\n".join(f"{line}\n{ranks}" if " iteration " in line else line for line in lines)
    assert [one.id for one in doctor.examine(doctor.read_text(text, "log"), made).findings] == expected


@pytest.mark.parametrize("writer", WRITERS)
@settings(max_examples=3)
@given(seed=SEEDS, slower=st.floats(1.5, 5))
def test_a_run_much_slower_than_its_estimate_has_low_mfu(writer: str, seed: int, slower: float) -> None:
    made = case("llama3_8b_pretrain_config", "8xH100", ENGINE[writer])
    found = doctor.examine(
        doctor.read_text(LOG_WRITERS[writer](at_estimated_speed(made, 40, seed, slower)), "log"), made
    )
    (finding,) = found.findings
    assert finding.id == "speed.low-mfu"
    step = next(one for one in finding.evidence if one.name == "step time")
    assert isinstance(step.value, float)
    assert isinstance(step.against, float)
    assert step.value / step.against == pytest.approx(slower, rel=0.02)
    for remedy in finding.remedies:
        if remedy.step_ratio is not None:
            _matches_cost_model(made, remedy)
            assert remedy.step_ratio < 1


def test_data_time_is_not_reported_twice() -> None:
    made = case()
    fake_run = at_estimated_speed(made, 40, slower=2.0).changed(lambda one: replace(one, data_s=0.5 * one.seconds))
    found = doctor.examine(doctor.read_text(LOG_WRITERS["own"](fake_run), "log"), made)
    assert [finding.id for finding in found.findings] == ["speed.slow-data"]


def test_the_slow_part_is_named() -> None:
    made = case()
    estimate = costs.estimate(made)
    text = LOG_WRITERS["own"](at_estimated_speed(made, 40, slower=2.0))
    (finding,) = doctor.examine(doctor.read_text(text, "log"), made).findings
    assert "Forward and backward took" in finding.message
    parts = {one.name: one for one in finding.evidence}
    expected_s = sum(float(estimate.parts[name]) for name in ("compute", "tp", "cp", "ep", "pp_bubble", "dp"))
    assert parts["forward and backward"].against == pytest.approx(expected_s, rel=0.02)


@pytest.mark.parametrize("writer", ["own", "megatron"])
def test_collectives_are_compared_with_the_estimate(writer: str) -> None:
    made = case("llama3_8b_pretrain_config", "2x8xH100", ENGINE[writer], "layout.tp=1", "layout.sp=false")
    estimate = costs.estimate(made)
    names = ("dp",) if writer == "megatron" else ("tp", "cp", "ep", "dp")
    expected = sum(float(estimate.parts[name]) for name in names)
    fake_run = at_estimated_speed(made, 40)
    for share, ids in ((0.05, []), (0.5, ["speed.slow-network"])):
        slowed = fake_run.changed(lambda one, share=share: replace(one, collectives_s=share * one.seconds))
        found = doctor.examine(doctor.read_text(LOG_WRITERS[writer](slowed), "log"), made)
        assert [finding.id for finding in found.findings] == ids
    assert found.findings[0].evidence[0].against == pytest.approx(expected)


def test_more_nodes_are_compared_with_fewer() -> None:
    small, large = case(gpus="8xH100"), case(gpus="8x8xH100")
    beside = doctor.RunStats(doctor.read_text(LOG_WRITERS["own"](at_estimated_speed(small, 40)), "small"), small)
    for slower, ids in ((1.0, []), (1.3, ["speed.slow-network"])):
        run = doctor.read_text(LOG_WRITERS["automodel"](at_estimated_speed(large, 40, slower=slower)), "log")
        found = doctor.examine(run, large, beside)
        ids_found = [finding.id for finding in found.findings if finding.id != "speed.low-mfu"]
        assert ids_found == ids


PIPELINE = ("layout.tp=8", "layout.pp=4", "layout.recompute=full")


def test_a_pipeline_bubble_is_reported_with_remedies() -> None:
    idle = ("layout.vp=1", "layout.pp_schedule=1f1b", "train.global_batch_size=16")
    made = case("llama3_70b_pretrain_config", "64xH100", "meshwright", *PIPELINE, *idle)
    found = doctor.examine(doctor.read_text(LOG_WRITERS["own"](at_estimated_speed(made, 40)), "log"), made)
    (finding,) = found.findings
    assert finding.id == "speed.bubbles"
    assert "8 micro batches over 4 stages" in finding.message
    assert finding.remedies
    for remedy in finding.remedies:
        _matches_cost_model(made, remedy)
    full = ("layout.vp=5", "layout.pp_schedule=interleaved_1f1b", "train.global_batch_size=1024")
    made = case("llama3_70b_pretrain_config", "64xH100", "meshwright", *PIPELINE, *full)
    assert doctor.examine(doctor.read_text(LOG_WRITERS["own"](at_estimated_speed(made, 40)), "log"), made).ok


OUT = (
    ("llama3_8b_pretrain_config", "8xH100", ("layout.micro_batch_size=4", "layout.recompute=none")),
    ("llama3_70b_pretrain_config", "32xH100", ("layout.recompute=none",)),
    ("qwen3_30b_a3b_pretrain_config", "8xH100", ("layout.recompute=none", "layout.micro_batch_size=4")),
    ("llama3_8b_sft_config", "2xH100", ("layout.tp=1", "layout.sp=false")),
)


@pytest.mark.parametrize(("recipe", "gpus", "changes"), OUT)
@pytest.mark.parametrize("writer", ["own", "megatron"])
def test_every_remedy_for_a_full_gpu_fits_by_the_cost_model(
    writer: str, recipe: str, gpus: str, changes: tuple[str, ...]
) -> None:
    made = case(recipe, gpus, ENGINE[writer], *changes)
    fake_run = replace(at_estimated_speed(made, 3), final_lines=("  File losses.py, in cross_entropy", OOM))
    (finding,) = doctor.examine(doctor.read_text(LOG_WRITERS[writer](fake_run), "log"), made).findings
    assert finding.id == "memory.out-of-memory"
    assert finding.severity == "error"
    assert "4.00 GiB more were requested with 77.9 of 79.1 GiB in use" in finding.message
    memory = costs.estimate(made).memory
    needed = 77.9 + 4.0 - 1.2
    offset = max(0.0, needed - float(memory.total))
    layouts = [remedy for remedy in finding.remedies if remedy.peak_gib is not None]
    assert layouts or finding.remedies[0].try_[0].startswith("meshwright recommend")
    step_ratios = [remedy.step_ratio for remedy in layouts if remedy.what == "layout" and remedy.step_ratio is not None]
    assert step_ratios == sorted(step_ratios)
    for remedy in layouts:
        assert remedy.fits
        _matches_cost_model(made, remedy, offset)


def _matches_cost_model(made: object, remedy: doctor.Remedy, offset: float = 0.0) -> None:
    """Check a remedy's figures against the cost model for the changed recipe, and that no rule is violated."""
    changed = made.rebuild(overrides.apply(made.recipe, remedy.try_))  # type: ignore[attr-defined]
    estimate = costs.estimate(changed)
    assert bool(rules.legal(changed, ignoring=set(rules.illegal_by_rule(made))))  # type: ignore[arg-type]
    assert remedy.peak_gib == pytest.approx(float(estimate.memory.total) + offset, abs=0.01)
    assert remedy.fits == (remedy.peak_gib <= float(estimate.memory.capacity) * (1 - RESERVE) + 0.01)
    if remedy.step_ratio is not None:
        before = float(costs.step_time(made).step_s)  # type: ignore[arg-type]
        assert remedy.step_ratio == pytest.approx(float(estimate.step_s) / before, abs=1e-3)


def test_fragmentation_is_fixed_first() -> None:
    words = OOM.replace("4.00 GiB", "512.00 MiB").replace("1.20 GiB is reserved", "9.00 GiB is reserved")
    fake_run = replace(at_estimated_speed(case(), 3), final_lines=(words,))
    (finding,) = doctor.examine(doctor.read_text(LOG_WRITERS["own"](fake_run), "log"), case()).findings
    assert finding.remedies[0].try_ == ("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",)


def test_out_of_memory_without_a_recipe_has_general_remedies() -> None:
    found = doctor.examine(doctor.read_text(f"some trainer\n{OLD_OOM}\n", "log"))
    (finding,) = found.findings
    assert found.kind == "torch"
    assert "0.50 GiB more were requested with 78.0 of 79.2 GiB in use" in finding.message
    assert finding.remedies[0].try_ == ("layout.recompute=selective",)
    assert finding.remedies[0].peak_gib is None


@pytest.mark.parametrize("fault", ["uneven steps", "spike", "growing memory"])
def test_other_faults_are_found_beside_an_estimate_too(fault: str) -> None:
    made = case()
    fake_run = FAULTS[fault].plant(at_estimated_speed(made, 120, 3), random.Random(3))
    found = doctor.examine(doctor.read_text(LOG_WRITERS["own"](fake_run), "log"), made)
    assert [finding.id for finding in found.findings] == [FAULTS[fault].finding]
