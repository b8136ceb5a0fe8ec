"""Invariants that hold for every model and layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright import costs
from meshwright.costs.memory import PARTS as MEMORY_PARTS
from meshwright.costs.time import PARTS as STEP_PARTS

from .helpers import case, diffusion, hybrid, llama, mixtral

MODELS = (llama(8, 2048, 8192, 16, 8, 32000), mixtral(), hybrid(), diffusion())
STATE = ("weights", "gradients", "optimizer")

layouts = st.fixed_dictionaries(
    {
        "tp": st.sampled_from([1, 2, 4]),
        "pp": st.sampled_from([1, 2, 4]),
        "vp": st.sampled_from([1, 2]),
        "cp": st.sampled_from([1, 2]),
        "ep": st.sampled_from([1, 2, 4, 8]),
        "etp": st.sampled_from([1, 2]),
        "sp": st.booleans(),
        "micro_batch_size": st.sampled_from([1, 2, 4]),
        "recompute": st.sampled_from(["none", "selective", "full"]),
        "recompute_layers": st.sampled_from([0, 1]),
        "strategy": st.sampled_from(["fsdp2", "ddp", "zero1", "megatron_fsdp"]),
        "pp_schedule": st.sampled_from(["1f1b", "gpipe", "interleaved_1f1b", "interleaved_zero_bubble", "zbv"]),
        "offload": st.sampled_from(["none", "optimizer", "activations", "params"]),
        "cp_comm": st.sampled_from(["ring", "a2a", "allgather", "a2a+ring"]),
    }
)
engines = st.sampled_from(["meshwright", "megatron", "torchtitan", "automodel", "kempnerforge", "fsdp1", "deepspeed"])
models = st.sampled_from(MODELS)
goals = st.sampled_from(["pretrain", "sft", "peft"])
precisions = st.sampled_from(["same", "fp8_tensor", "mxfp8", "nvfp4"])


def scalars(value: Any) -> float:
    assert isinstance(value, float | int), f"{value!r} is not a plain number"
    return float(value)


@settings(max_examples=75, deadline=None)
@given(models, layouts, engines, goals, precisions)
def test_parts_add_up_and_are_plain_numbers(model, layout, engine, goal, matmul):
    made = costs.estimate(case(model, "64xH100", goal, engine, matmul=matmul, mtp_loss=0.1, images=True, **layout))
    parts = [scalars(getattr(made.memory, name)) for name in MEMORY_PARTS]
    assert all(part >= 0 for part in parts)
    assert sum(parts) == pytest.approx(made.memory.total, rel=1e-12)
    seconds = [scalars(made.parts[name]) for name in STEP_PARTS]
    assert all(part >= 0 for part in seconds)
    assert sum(seconds) == pytest.approx(made.step_s, rel=1e-12)
    assert 0 < made.mfu < 1


@settings(max_examples=12, deadline=None)
@given(models, st.lists(layouts, min_size=2, max_size=6), engines, goals)
def test_columns_match_scalars(model, rows, engine, goal):
    columns = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    together = costs.estimate(case(model, "64xH100", goal, engine, **columns))
    for i, row in enumerate(rows):
        alone = costs.estimate(case(model, "64xH100", goal, engine, **row))
        for name in (*MEMORY_PARTS, "total", "fits"):
            assert np.broadcast_to(getattr(together.memory, name), len(rows))[i] == pytest.approx(
                getattr(alone.memory, name), rel=1e-9, abs=1e-12
            ), name
        for name in STEP_PARTS:
            assert together.parts[name][i] == pytest.approx(alone.parts[name], rel=1e-9, abs=1e-15), name
        assert together.mfu[i] == pytest.approx(alone.mfu)


@settings(max_examples=30, deadline=None)
@given(models, layouts, engines)
def test_more_gpus_never_have_more_state_each(model, layout, engine):
    few, many = (costs.memory_by_stage(case(model, f"{n}xH100", engine=engine, **layout)) for n in (32, 64))
    for before, after in zip(few, many, strict=True):  # the worst stage may be another one
        for name in STATE:
            if name != "gradients":  # fewer micro batches may end the deferral of their reduction, or start it
                assert getattr(after, name) <= getattr(before, name) * (1 + 1e-9)


@settings(max_examples=30, deadline=None)
@given(models, layouts, engines)
def test_more_tensor_parallelism_never_has_more_weights(model, layout, engine):
    fixed = {**layout, "strategy": "ddp"}
    one, two = (costs.memory_by_stage(case(model, "64xH100", engine=engine, **{**fixed, "tp": tp})) for tp in (1, 2))
    for before, after in zip(one, two, strict=True):  # the worst stage may be another one
        assert after.weights <= before.weights * (1 + 1e-9)
    assert costs.parameters(case(model, "64xH100", **{**fixed, "tp": 2})) <= costs.parameters(
        case(model, "64xH100", **{**fixed, "tp": 1})
    )


@settings(max_examples=30, deadline=None)
@given(models, layouts, engines)
def test_recompute_saves_activations_and_costs_time(model, layout, engine):
    fixed = {**layout, "recompute_layers": 0, "offload": "none"}  # nothing to save where activations are offloaded
    none, selective, full = (
        case(model, "64xH100", engine=engine, **{**fixed, "recompute": r}) for r in ("none", "selective", "full")
    )
    kept = [costs.memory(c).total for c in (none, selective, full)]
    assert kept[2] <= kept[1] * (1 + 1e-9)
    assert kept[1] <= kept[0] * (1 + 1e-9)
    # with the time in which GPUs wait for launches: recompute launches the same kernels again
    times = [costs.step_time(c) for c in (none, selective, full)]
    least, more, most = (time.compute + time.other for time in times)
    assert least <= more <= most * 1.0001


@settings(max_examples=30, deadline=None)
@given(models, layouts, engines)
def test_a_larger_micro_batch_needs_more_memory(model, layout, engine):
    one, two = (
        costs.memory(case(model, "64xH100", engine=engine, global_batch_size=4096, **{**layout, "micro_batch_size": m}))
        for m in (1, 2)
    )
    assert two.total >= one.total * (1 - 1e-9)


@given(models, st.sampled_from([2048, 4096, 8192]))
@settings(max_examples=10, deadline=None)
def test_the_full_convention_never_counts_less(model, seq):
    one = case(model, seq_length=seq)
    assert costs.flops_per_token(one, "full") >= costs.flops_per_token(one, "causal")
