"""Seconds that a step waits for host memory: copies of offloaded state and activations, and updates on the host."""

from __future__ import annotations

import numpy as np

from meshwright.costs.memory import offloaded_per_micro_batch
from meshwright.costs.memory_profiles import memory_profile
from meshwright.costs.parameters import RankParams
from meshwright.costs.speeds import Speeds
from meshwright.costs.stages import Stages
from meshwright.costs.state import dense_ranks, expert_ranks, master_bytes, moment_bytes, reductions
from meshwright.costs.vectorize import BYTES, Column, any_of, anywhere, larger, shape_of, smaller, where
from meshwright.recipes.case import Case

UNFUSED = 4.0  # traffic of an update on the host in several passes, which mixed dtypes need, over the fused one
HIDDEN = 0.9  # share of a step's compute behind which FSDP can hide its copies from the host


def host_link(case: Case, speed: Speeds) -> float:
    """Return the bytes per second that one GPU copies from pinned host memory: over PCIe, or over NVLink-C2C."""
    known = speed.shared.host_link
    return known.get(speed.gpu.name, known.get(case.gpu_arch, speed.shared.host_gb_s)) * 1e9


def state_copies_s(case: Case, speed: Speeds, params: RankParams, trained: RankParams, compute_s: Column) -> Column:
    """Return the seconds of copies of offloaded weights and gradients that compute does not hide.

    FSDP copies a layer's shard before it gathers it, for the forward pass and again for the backward pass of every
    micro batch; gradients are copied back once reduced. Other engines keep the compute copy of the weights on the GPU
    and exchange gradients and updated weights once per step.
    """
    if not anywhere(any_of(case.offload, "optimizer", "params")):
        return 0.0
    weights_too = any_of(case.offload, "params", *(("optimizer",) if memory_profile(case).offloads_masters else ()))
    rate, rounds = host_link(case, speed), case.accumulation
    gathers = where(case.pp > 1, case.pipeline_passes, (2 if case.reshard_after_forward else 1) * rounds)
    stored = BYTES[case.compute] if case.goal == "peft" else master_bytes(case)
    down = gathers * _local(case, params) * stored
    reduced = reductions(case)
    up = reduced * _local(case, trained) * master_bytes(case)
    copies = (down + up) / rate
    # Gradients that are added to those of earlier micro batches on the host are copied synchronously.
    waits = (reduced > 1) * up / rate
    streamed = larger(copies - HIDDEN * compute_s, 0.0) + (1 - HIDDEN) * smaller(copies, HIDDEN * compute_s) + waits
    once = _local(case, trained) * 6 / rate
    return where(weights_too, streamed, any_of(case.offload, "optimizer") * once)


def host_update_s(case: Case, speed: Speeds, trained: RankParams) -> Column:
    """Return the seconds in which the host updates offloaded weights; each GPU has its share of the host's memory."""
    moved = 2 * (master_bytes(case) + moment_bytes(case)) + master_bytes(case)
    if case.moments != case.master and case.engine == "meshwright":
        moved *= UNFUSED
    offloaded = any_of(case.offload, "optimizer", "params")
    return offloaded * _local(case, trained) * moved / (speed.shared.host_update_gb_s * 1e9)


def activation_copies_s(case: Case, speed: Speeds, pipeline: Stages, compute_s: Column) -> Column:
    """Return the seconds of copies of saved activations to the host and back in one step.

    Our engine waits for every copy (torch's save_on_cpu); others hide them behind compute as far as they can.
    """
    if not anywhere(case.offload == "activations"):
        return 0.0
    saved = offloaded_per_micro_batch(case, pipeline)
    most = saved.max(axis=0) if isinstance(saved, np.ndarray) and saved.ndim > len(shape_of(case)) else saved
    copies = 2 * most * case.accumulation / host_link(case, speed)
    if case.engine != "meshwright":
        copies = larger(copies - HIDDEN * compute_s, 0.0)
    return copies


def _local(case: Case, params: RankParams) -> Column:
    """Return the parameters of this rank's shard."""
    return (params.dense + params.ends) / dense_ranks(case) + params.routed / expert_ranks(case)
