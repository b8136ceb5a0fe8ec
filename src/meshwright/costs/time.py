"""Seconds of one training step, by part."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.costs.columns import Column, any_of, pick, plain
from meshwright.costs.communication import cp_s, dp_s, ep_s, p2p_s, tp_s
from meshwright.costs.compute import micro_batch_s
from meshwright.costs.constants import (
    BUBBLE,
    CLIP_PASSES,
    HBM_EFFICIENCY,
    HOST_LINK_GB_S,
    LAUNCH_COMPILE,
    LAUNCH_GRAPHS,
    LAUNCH_S,
    STEP_FIXED_S,
)
from meshwright.costs.parameters import RankParams, rank_adapters, rank_params
from meshwright.costs.stages import Stages, stages
from meshwright.costs.state import dense_ranks, expert_ranks, moment_bytes
from meshwright.recipes.case import Case

PARTS = ("compute", "tp", "cp", "ep", "pp_bubble", "dp", "optimizer", "other")


@dataclass(frozen=True)
class StepTime:
    """Seconds; the parts add up to the step."""

    compute: Column
    tp: Column
    cp: Column
    ep: Column
    pp_bubble: Column
    dp: Column
    optimizer: Column
    other: Column  # launches the GPU waits for, and what a step costs however small it is
    step_s: Column

    @property
    def parts(self) -> dict[str, Column]:
        return {name: getattr(self, name) for name in PARTS}


def step_time(case: Case) -> StepTime:
    """Seconds of one optimizer step: the slowest stage's micro batches, the bubble, and what happens once a step."""
    held = stages(case)
    work, forward = micro_batch_s(case, held)
    shares = [work, forward, tp_s(case, held), cp_s(case, held), ep_s(case, held), _launch_s(case, held)]
    work, forward, tp, cp, ep, launch = _slowest(held, shares)
    busy, rounds = work + tp + cp + ep, case.accumulation
    idle = np.maximum(launch - busy, 0)  # the GPU waits for the CPU
    bubble = (case.pp - 1) / case.vp * (busy + idle) * pick(case.pp_schedule, BUBBLE) + rounds * p2p_s(case)
    params = _largest_stage(rank_params(case, held))
    trained = _largest_stage(rank_adapters(case, held)) if case.goal == "peft" else params
    values = (
        rounds * work,
        rounds * tp,
        rounds * cp,
        rounds * ep,
        bubble,
        dp_s(case, params, trained, busy + idle, forward),
        _optimizer_s(case, trained),
        rounds * idle + STEP_FIXED_S,
    )
    parts = [plain(np.broadcast_to(value, held.index.shape[1:]) * 1.0) for value in values]
    return StepTime(**dict(zip(PARTS, parts, strict=True)), step_s=sum(parts))


def _slowest(held: Stages, shares: list[Column]) -> list[Column]:
    """Each share on the stage that takes longest in all; the forward and the launches are not part of the sum."""
    arrays = [np.broadcast_to(share, held.index.shape) for share in shares]
    total = arrays[0] + arrays[2] + arrays[3] + arrays[4]
    at = np.argmax(total, axis=0)[None]
    return [np.take_along_axis(array, at, axis=0)[0] for array in arrays]


def _largest_stage(params: RankParams) -> RankParams:
    """The heaviest of the three stages, which sets the pace of data-parallel communication."""
    dense, routed, ends = (np.max(np.atleast_1d(part), axis=0) for part in (params.dense, params.routed, params.ends))
    return RankParams(dense, routed, ends, params.unit_dense, params.unit_routed)


def _launch_s(case: Case, held: Stages) -> Column:
    """CPU seconds to launch one micro batch's kernels on a stage."""
    factor = LAUNCH_GRAPHS if case.cuda_graphs != "none" else (LAUNCH_COMPILE if case.compile else 1.0)
    return held.count * LAUNCH_S * factor * np.where(case.recompute == "full", 4 / 3, 1)


def _optimizer_s(case: Case, params: RankParams) -> Column:
    """Reads and writes of weights, gradients and moments at memory speed, plus the trip to the host when offloaded."""
    own = (params.dense + params.ends) / dense_ranks(case) + params.routed / expert_ranks(case)
    moved = 2 * (4 + moment_bytes(case)) + 4 + 2 + 4 * CLIP_PASSES
    on_gpu = own * moved / (case.cluster.gpu.hbm_gb_s * 1e9 * HBM_EFFICIENCY)
    off = any_of(case.offload, "optimizer", "params")
    return on_gpu + off * own * 6 / (HOST_LINK_GB_S * 1e9)
