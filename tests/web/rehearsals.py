"""Files of rehearsals, as the command writes them."""

from __future__ import annotations

import json

from meshwright.api.rehearsal import rehearsal_response
from meshwright.api.responses import to_json
from meshwright.costs.timeline import order, schedule_timed_passes
from meshwright.rehearsal.trace_file import chrome_trace
from meshwright.rehearsal.types import CollectiveTime, RankRehearsal, Rehearsal, Span

RANKS, MICRO_BATCHES = 4, 8


def rehearsal(pp: int = RANKS) -> Rehearsal:
    """Return a rehearsal of a pipeline whose backward passes take twice the time of forward ones."""
    orders = [order("1f1b", rank, pp, 1, MICRO_BATCHES) for rank in range(pp)]
    seconds = {"F": 0.1, "B": 0.2}
    passes = schedule_timed_passes(orders, pp, lambda _, one: seconds[one.kind], 0.01) if pp > 1 else []
    step_s = max((one.end_s for one in passes), default=2.4)
    rank = RankRehearsal(
        rank=0, pp_rank=0, represents=(0,), layers=20, layers_run=20, micro_batches=MICRO_BATCHES, micro_batches_run=5,
        steps=3, busy_s=2.4, rest_s=0.0, compute_s=2.3, optimizer_s=0.0, exposed_s={"tp": 0.1}, spread_pct=0.2,
        allocated_gib=50.0, reserved_gib=55.0, wall_s=30.0,
        collectives=(CollectiveTime("tp", "all_gather", 160, 12.5, 0.4),),
        spans=tuple(Span("tp", "all_gather", 0.1, 0.1 * n, 0.1 * n + 0.02) for n in range(10)),
    )  # fmt: skip
    return Rehearsal(
        recipe="llama3_70b_pretrain_config", model="llama3_70b", cluster="64xH100", world=64, device="NVIDIA H200",
        scaled_to="H100", scale=1.02, network="the communication model", step_s=step_s,
        parts={"compute": 2.3, "tp": 0.1, "pp_bubble": step_s - 2.4}, band_pct=7.8, tokens_per_s_per_gpu=875.0,
        tflops_per_gpu=390.0, mfu=0.4, mfu_convention="model", estimate_s=2.9, allocated_gib=50.0, reserved_gib=55.0,
        capacity_gib=79.6, fits=True, limits=("kernels",), ranks=(rank,), schedule="1f1b" if pp > 1 else "",
        passes=tuple(passes), versions={}, wall_s=100.0, settings={},
    )  # fmt: skip


def response_text(pp: int = RANKS) -> str:
    """Return the file of --out."""
    return json.dumps(to_json(rehearsal_response(rehearsal(pp))))


def trace_text(pp: int = RANKS) -> str:
    """Return the file of --trace."""
    return json.dumps(chrome_trace(rehearsal(pp)))
