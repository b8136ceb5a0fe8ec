"""Seconds of dispatching tokens to experts, of long attention and of copies to the host follow their mechanisms."""

from __future__ import annotations

import pytest

import meshwright
from meshwright import costs
from meshwright.recipes.case import Case


def moe(cluster: str, **changes: object) -> Case:
    case: Case = meshwright.estimate("qwen3_235b_a22b", cluster, "pretrain", engine="megatron").case
    return case.replace(tp=1, pp=1, vp=1, cp=1, ep=32, etp=1, dp_shard=64, dp_replicate=1, **changes)  # type: ignore[arg-type]


def seconds(case: Case, part: str) -> float:
    return float(getattr(costs.step_time(case), part))


def test_forwarding_dispatchers_send_less_over_the_network_than_an_all_to_all() -> None:
    plain, deep = (seconds(moe("8x8xH100", dispatcher=name), "ep") for name in ("alltoall", "deepep"))
    assert 0.2 * plain < deep < 0.6 * plain  # 8 copies of a token, or one to each of 4 nodes


def test_inside_a_domain_a_copy_goes_to_each_rank_that_needs_it() -> None:
    wide = moe("8x8xH100", dispatcher="deepep").replace(ep=8)
    narrow = wide.replace(ep=2)
    assert seconds(narrow, "ep") < seconds(wide, "ep")  # two ranks need at most two copies, eight about five
    assert seconds(wide, "ep") < seconds(moe("8x8xH100", dispatcher="deepep"), "ep")


@pytest.mark.parametrize("seq_length", [8192, 131072])
def test_better_attention_kernels_matter_for_long_sequences(seq_length: int) -> None:
    case = meshwright.estimate("llama31_8b", "8xH200", "pretrain", overrides=[f"data.seq_length={seq_length}"]).case
    old, new = (costs.step_time(case.replace(attention_kernel=name)).step_s for name in ("flash2", "best"))
    gain = old / new - 1
    assert 0 < gain < 0.25 if seq_length == 8192 else gain > 0.3


def test_grace_hosts_are_reached_faster_than_over_pcie() -> None:
    copies = []
    for cluster in ("8xB200", "2x4xGB200"):
        case = meshwright.estimate("llama31_8b", cluster, "pretrain", engine="megatron").case
        case = case.replace(micro_batch_size=4, recompute="none")
        without = costs.step_time(case.replace(offload="none")).step_s
        copies.append(float(costs.step_time(case.replace(offload="activations")).step_s - without))
    assert copies[1] < copies[0] / 3
