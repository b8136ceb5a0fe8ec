"""Invariants of the step time for every model, layout and calibration."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright import costs
from meshwright.clusters import Cluster, cluster
from meshwright.costs.gemm import Linear, linear_s
from meshwright.costs.speeds import speeds
from meshwright.models import find

from .helpers import case, hybrid, llama, mixtral
from .test_laws import engines, layouts

MODELS = st.sampled_from((llama(8, 2048, 8192, 16, 8, 32000), mixtral(), hybrid()))


def faster(gpus: str, **factors: float) -> Cluster:
    """Return the same cluster with some of its GPU's rates multiplied."""
    place = cluster(gpus)
    rates = {name: getattr(place.gpu, name) * factor for name, factor in factors.items()}
    return Cluster(msgspec.structs.replace(place.gpu, **rates), place.nodes, place.gpus_per_node)


@settings(max_examples=20, deadline=None)
@given(MODELS, layouts, engines, st.sampled_from(["nvlink_gb_s", "network_gb_s", "hbm_gb_s"]))
def test_faster_hardware_is_never_slower(model, layout, engine, rate):
    base = costs.step_time(case(model, "64xH100", engine=engine, **layout)).step_s
    better = costs.step_time(case(model, faster("64xH100", **{rate: 2.0}), engine=engine, **layout)).step_s
    assert better <= base * (1 + 1e-9)


@settings(max_examples=20, deadline=None)
@given(MODELS, layouts)
def test_overlap_and_graphs_never_cost_time(model, layout):
    plain = {"overlap_grad_reduce": False, "overlap_param_gather": False, "cuda_graphs": "none"}
    base = costs.step_time(case(model, "64xH100", engine="megatron", **layout, **plain))
    for names in (
        {"overlap_grad_reduce": True, "overlap_param_gather": True},
        {"cuda_graphs": "transformer_engine"},
        {"cuda_graphs": "full_iteration"},
        {"tp_comm_overlap": True},
        {"ep_overlap": True},
    ):
        better = costs.step_time(case(model, "64xH100", engine="megatron", **layout, **{**plain, **names}))
        assert better.step_s <= base.step_s * 1.001, names  # the bubble follows the stage mix


@settings(max_examples=20, deadline=None)
@given(MODELS, layouts, engines)
def test_twice_the_batch_takes_longer_but_not_twice_as_long(model, layout, engine):
    one, two = (
        costs.step_time(case(model, "64xH100", engine=engine, global_batch_size=n, **layout)).step_s
        for n in (1024, 2048)
    )
    assert one < two <= 2 * one * (1 + 1e-9)


@given(st.integers(64, 8192), st.integers(1, 128), st.integers(1, 128), st.sampled_from(["same", "fp8_tensor"]))
@settings(max_examples=25, deadline=None)
def test_a_larger_matmul_takes_longer(rows, outputs, inputs, matmul):
    speed = speeds(case(llama(), matmul=matmul))
    base = linear_s(speed, Linear(rows, 64 * outputs, 64 * inputs))
    assert linear_s(speed, Linear(rows + 1, 64 * outputs, 64 * inputs)) > base
    assert linear_s(speed, Linear(rows, 64 * (outputs + 1), 64 * inputs)) > base
    assert linear_s(speed, Linear(rows, 64 * outputs, 64 * (inputs + 1))) > base
    assert linear_s(speed, Linear(rows, 64 * outputs, 64 * inputs - 1)) >= 0.9 * base  # odd widths do not help


def test_a_matmul_stays_below_the_peak():
    speed = speeds(case(llama()))
    seconds = linear_s(speed, Linear(65536, 16384, 16384))
    reached = 2 * 65536 * 16384**2 / seconds / 989.5e12
    assert 0.5 < reached < 0.85  # power holds an H100 under full load at about three quarters of its peak


def test_small_matmuls_are_bound_by_memory():
    speed = speeds(case(llama()))
    tall = linear_s(speed, Linear(16, 8192, 8192))
    assert tall > 3 * linear_s(speed, Linear(4096, 8192, 8192)) * 16 / 4096


@pytest.mark.parametrize("ep", [8, 64])
def test_fused_dispatch_sends_less_between_nodes(ep):
    names = {"engine": "megatron", "ep": ep, "strategy": "zero1", "force_balance": True}
    plain, fused = (
        costs.step_time(case(mixtral(experts=64, topk=8), "64xH100", dispatcher=d, **names)).ep
        for d in ("alltoall", "deepep")
    )
    assert fused < plain


def test_natural_routing_is_slower_than_forced_balance():
    forced, natural = (
        costs.step_time(case(mixtral(), "8xH100", engine="megatron", ep=8, force_balance=b)).step_s
        for b in (True, False)
    )
    assert natural > forced


def test_one_gpu_alone_only_computes():
    one = costs.step_time(case(llama(8, 2048, 8192, 16, 8, 32000), "1xH100", global_batch_size=4))
    assert (one.tp, one.cp, one.ep, one.pp_bubble, one.dp) == (0, 0, 0, 0, 0)


@pytest.mark.parametrize("engine", ["meshwright", "megatron", "automodel"])
@pytest.mark.parametrize("model", ["nemotronh_4b", "qwen3_next_80b_a3b", "llama3_8b", "qwen3_30b_a3b"])
def test_newer_gpus_train_every_kind_of_model_faster(model: str, engine: str) -> None:
    """Also hybrids: scans are bound by memory, not by a share of the matrix units' peak."""
    times = [
        costs.step_time(case(find(model), f"8x{gpu}", engine=engine, micro_batch_size=1)).step_s
        for gpu in ("A100-80", "H100", "H200", "B200", "B300")
    ]
    assert all(newer <= older * 1.01 for older, newer in pairwise(times)), times
