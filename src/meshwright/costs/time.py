"""Seconds of one training step, by part."""

from __future__ import annotations

import msgspec
import numpy as np

from meshwright.costs.communication import cp_s, dp_s, ep_s, p2p_s, tp_s
from meshwright.costs.compute import SCANS, LayerTime, head_s, layer_time, repeated_s, stops_early, vision_s
from meshwright.costs.flops import training_factor, vision_flops
from meshwright.costs.memory import recomputed_share
from meshwright.costs.memory_constants import FROZEN_BYTES
from meshwright.costs.offload import activation_copies_s, host_update_s, state_copies_s
from meshwright.costs.parameters import RankParams, expert_parallel_ranks, layer_params, rank_adapters, stage_params
from meshwright.costs.speeds import Speeds, speeds
from meshwright.costs.stages import FIRST, LAST, MIDDLE, Stages, stages
from meshwright.costs.state import dense_ranks, expert_ranks, moment_bytes
from meshwright.costs.vectorize import BYTES, Column, larger, pick, plain, smaller, where
from meshwright.models import Layer, MoE
from meshwright.recipes.capabilities import executed, fp8_experts
from meshwright.recipes.case import Case

LEAST_BUSY_S = 1e-9  # of a stage without layers, which only a layout that cannot be built has

PARTS = ("compute", "tp", "cp", "ep", "pp_bubble", "dp", "optimizer", "other")


class StepTime(msgspec.Struct, frozen=True):
    """Seconds; the parts add up to the step."""

    compute: Column
    tp: Column
    cp: Column
    ep: Column
    pp_bubble: Column
    dp: Column
    optimizer: Column
    other: Column  # launch-bound idle time, stragglers, copies from and to the host, and the fixed cost of a step
    step_s: Column

    @property
    def parts(self) -> dict[str, Column]:
        return {name: getattr(self, name) for name in PARTS}


class MicroBatchTime(msgspec.Struct, frozen=True):
    """Seconds of one micro batch on each representative stage."""

    work: Column  # forward and backward on the GPU
    forward: Column
    tp: Column
    cp: Column
    ep: Column
    wait: Column  # idle time for token counts of experts
    launch: Column  # CPU launch time

    @property
    def busy(self) -> Column:
        """Seconds in which the GPU or its links work."""
        return self.work + self.tp + self.cp + self.ep + self.wait


def step_time(case: Case) -> StepTime:
    """Return the seconds of one optimizer step: the slowest stage's micro batches, the bubble, and per-step costs."""
    return executed(case).cached(_step_time)


def _step_time(case: Case) -> StepTime:
    pipeline, speed = stages(case), speeds(case)
    micro = _micro(case, speed, pipeline)
    slowest, idle, rest = _slowest(case, pipeline, micro, speed.engine.sharpness)
    busy, rounds = slowest.busy, case.accumulation
    bubble = case.pipeline_passes * rest * _bubble_share(case) * pick(case.pp_schedule, speed.shared.bubble)
    bubble = bubble + rounds * p2p_s(case, speed)
    params, trained = case.cached(_stage_params)
    data_parallel = dp_s(case, speed, params, trained, busy + idle, (busy + idle) * _forward_share(case))
    copies = state_copies_s(case, speed, params, trained, rounds * (busy + idle))
    copies = copies + activation_copies_s(case, speed, pipeline, rounds * (busy + idle))
    values = [
        rounds * slowest.work,
        rounds * slowest.tp,
        rounds * slowest.cp,
        rounds * slowest.ep,
        bubble,
        data_parallel,
        _optimizer_s(case, speed, trained),
        # Copies from the host and collectives use different links at the same time.
        rounds * (idle + slowest.wait) + speed.engine.step_s + larger(copies - data_parallel, 0.0),
    ]
    values[-1] = values[-1] + _stragglers(case, speed) * sum(values)
    shape = pipeline.index.shape[1:]
    parts = [plain(np.broadcast_to(value, shape) * 1.0) if shape else float(value) for value in values]
    return StepTime(**dict(zip(PARTS, parts, strict=True)), step_s=sum(parts))


def _bubble_share(case: Case) -> Column:
    """Return the bubble over that of one chunk per GPU: 1 / vp if every GPU has a micro batch.

    With fewer micro batches than stages a GPU waits in every chunk until the first of them has passed all others.
    """
    inside = smaller(case.pass_micro_batches, case.pp)
    return (case.pp - inside + (inside - 1) / case.vp) / larger(case.pp - 1, 1)


def pass_seconds(case: Case) -> list[tuple[float, float]]:
    """Return forward and backward seconds of one micro batch on every stage of one layout."""
    case = executed(case)
    pipeline = stages(case, every=True)
    micro = _micro(case, speeds(case), pipeline)
    sent = (micro.tp + micro.cp + micro.ep) / (3 if case.recompute == "full" else 2)  # equal in every pass
    forward, both = (np.broadcast_to(value, pipeline.index.shape) for value in (micro.forward + sent, micro.busy))
    return [(float(f), float(b - f)) for f, b in zip(forward, both, strict=True)]


def _micro(case: Case, speed: Speeds, pipeline: Stages) -> MicroBatchTime:
    """Return one micro batch on each stage, summed over layer types."""
    factor, again = training_factor(case), recomputed_share(case, pipeline)
    passes = 2 + (case.recompute == "full") * again
    exchanges = 2 * passes - (passes - 2 if stops_early(case) else 0)  # of tokens with experts: there and back
    launch_factor = where(case.recompute == "full", 4 / 3, 1.0) * (1 + speed.engine.launch_tp * np.log2(case.tp))
    sums: list[Column] = [0.0] * 7
    for layer, number in pipeline.layers:
        time = layer_time(case, speed, layer)
        unpack = _unpack_s(case, speed, layer)
        shares = (
            time.both(factor) + repeated_s(case, speed, pipeline, layer, time) + passes * unpack,
            time.forward + unpack,
            tp_s(case, speed, layer, passes),
            cp_s(case, speed, layer, time, passes),
            ep_s(case, speed, layer, exchanges),
            _wait_s(case, speed, layer, time),
            _launch_s(case, speed, layer) * launch_factor,
        )
        sums = [total + number * share for total, share in zip(sums, shares, strict=True)]
    head, head_forward = head_s(case, speed, pipeline)
    vision = pipeline.first * vision_s(case, speed)
    sums[-1] = sums[-1] + (case.pp > 1) * case.vp * speed.engine.p2p_s + pipeline.first * _launch_vision_s(case, speed)
    return MicroBatchTime(sums[0] + head + 3 * vision, sums[1] + head_forward + vision, *sums[2:])


def _unpack_s(case: Case, speed: Speeds, layer: Layer) -> Column:
    """Return the seconds to unpack a layer's 4-bit or 8-bit weights for one pass: codes are read, a matrix is written.

    LLM.int8 quantizes inputs in the forward pass instead; no run of it was measured, and its error band is wide.
    """
    if case.goal != "peft" or case.method not in FROZEN_BYTES:
        return 0.0
    found = layer_params(layer, case.model.hidden)
    weights = found.sharded / case.tp + found.routed / expert_parallel_ranks(case)
    return weights * (FROZEN_BYTES[case.method] + BYTES[case.compute]) / speed.hbm


def _launch_s(case: Case, speed: Speeds, layer: Layer) -> float:
    """Return the CPU seconds to launch one layer's kernels, forward and backward."""
    engine, left = speed.engine, speed.shared.graphs_left
    dense, routed = engine.launch_s, engine.launch_moe_s if isinstance(layer.ffn, MoE) else 0.0
    if layer.mixer is None or layer.ffn is None:  # layers of hybrids that are half a block
        dense = dense / 2
    dense = dense + engine.launch_scan_s.get(SCANS.get(type(layer.mixer), ""), 0.0)
    if case.capacity_factor:  # equal shapes for all experts: as few kernels as a dense block
        routed = engine.launch_s
    if case.cuda_graphs == "full_iteration":
        return 0.0
    if case.matmul != "same":
        dense, routed = dense * engine.launch_8bit, routed * (engine.launch_8bit if fp8_experts(case) else 1.0)
    if case.cuda_graphs != "none":
        return dense * left["dense"] + routed * left["moe"]
    unpacked = speed.shared.launch_nf4 if case.goal == "peft" and case.method in FROZEN_BYTES else 1.0
    return unpacked * (dense + routed) * (engine.launch_compiled if case.compile else 1.0)


def _launch_vision_s(case: Case, speed: Speeds) -> float:
    """Return the CPU seconds to launch the vision encoder's layers, if samples have images."""
    encoder = case.model.vision
    if encoder is None or not vision_flops(case) or case.cuda_graphs == "full_iteration":
        return 0.0
    return encoder.depth * speed.engine.launch_vision_s


def _wait_s(case: Case, speed: Speeds, layer: Layer, time: LayerTime) -> Column:
    """Return the seconds an MoE layer leaves the GPU idle until the CPU has the token counts of experts.

    The CPU has then launched nothing ahead: experts whose kernels are shorter than their launches wait for each.
    """
    if not isinstance(layer.ffn, MoE) or case.cuda_graphs == "full_iteration" or case.capacity_factor:
        return 0.0
    left = speed.shared.graphs_left["sync"] if case.cuda_graphs != "none" else 1.0
    launch = _expert_launch_s(case, speed, layer.ffn)
    return speed.engine.sync_moe_s * left + _soft_excess(launch, time.experts, speed.engine.sharpness)


def _expert_launch_s(case: Case, speed: Speeds, moe: MoE) -> Column:
    """Return the CPU seconds to launch the kernels of all local experts, forward and backward; no graph has them."""
    one = speed.engine.launch_expert_s * (
        speed.shared.expert_8bit if case.matmul != "same" and fp8_experts(case) else 1
    )
    return one * larger(moe.experts / case.ep, 1)


def _soft_excess(launch: Column, busy: Column, sharpness: float) -> Column:
    """Return how far launching outlasts the GPU's work; near equality each sometimes delays the other."""
    busy = larger(busy, LEAST_BUSY_S)
    return busy * ((1 + (launch / busy) ** sharpness) ** (1 / sharpness) - 1)


def _slowest(
    case: Case, pipeline: Stages, micro: MicroBatchTime, sharpness: float
) -> tuple[MicroBatchTime, Column, Column]:
    """Return the slowest stage, its GPU's idle seconds, and the seconds of all other stages, which form the bubble.

    Each stage idles by its own launches: a GPU with fewer idle seconds is never slower.
    """
    shape = pipeline.index.shape
    shares = (micro.work, micro.forward, micro.tp, micro.cp, micro.ep, micro.wait, micro.launch)
    busy = np.broadcast_to(micro.busy, shape)
    idle = np.broadcast_to(_soft_excess(micro.launch, busy, sharpness), shape)
    total = busy + idle
    at = np.argmax(total, axis=0)

    def at_slowest(share: Column) -> Column:
        if len(shape) == 1:
            return float(share[at]) if isinstance(share, np.ndarray) else share
        found: Column = np.take_along_axis(np.broadcast_to(share, shape), at[None], axis=0)[0]
        return found

    others = total[FIRST] + total[LAST] + larger(case.pp - 2, 0) * total[MIDDLE] - at_slowest(total)
    return MicroBatchTime(*map(at_slowest, shares)), at_slowest(idle), where(case.pp > 1, larger(others, 0.0), 0.0)


def _forward_share(case: Case) -> Column:
    """Return the share of a micro batch that is its forward pass.

    It does not depend on rates: a faster GPU that waits for launches does not shrink the window of collectives.
    """
    return 1 / (training_factor(case) + where(case.recompute == "full", 1, 0))


def _stage_params(case: Case) -> tuple[RankParams, RankParams]:
    """Return the parameters of the largest stage, and the trained ones among them."""
    params = _largest_stage(stage_params(case))
    trained = _largest_stage(rank_adapters(case, stages(case))) if case.goal == "peft" else params
    return params, trained


def _largest_stage(params: RankParams) -> RankParams:
    """Return the heaviest representative stage, which determines data-parallel communication."""
    parts = (params.dense, params.routed, params.ends)
    dense, routed, ends = (part.max(axis=0) if isinstance(part, np.ndarray) else part for part in parts)
    return msgspec.structs.replace(params, dense=dense, routed=routed, ends=ends)


def _stragglers(case: Case, speed: Speeds) -> Column:
    """Return the share of a step lost to the slowest of many nodes; it grows with every doubling."""
    return speed.shared.jitter * np.log2(larger(case.world / case.cluster.gpu.gpus_per_node, 1))


def _optimizer_s(case: Case, speed: Speeds, params: RankParams) -> Column:
    """Return the seconds of optimizer reads and writes at memory speed, of the GPU or, if offloaded, of the host."""
    local = (params.dense + params.ends) / dense_ranks(case) + params.routed / expert_ranks(case)
    moved = 2 * (4 + moment_bytes(case)) + 4 + 2 + 4 * speed.shared.clip_passes
    moved += speed.shared.eight_bit_bytes * (case.optimizer_name == "adamw8bit")
    return speed.engine.update * local * moved / speed.hbm + host_update_s(case, speed, trained=params)
