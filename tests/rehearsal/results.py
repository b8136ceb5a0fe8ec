"""A rehearsal as tests of reports and schemas need it."""

from __future__ import annotations

from meshwright.costs.timeline import ScheduledPass
from meshwright.rehearsal.types import Alternative, CollectiveTime, RankRehearsal, Rehearsal, Span


def rehearsal_result() -> Rehearsal:
    """Return a rehearsal of two pipeline ranks with an alternative."""
    ranks = tuple(
        RankRehearsal(
            rank=8 * rank,
            pp_rank=rank,
            represents=(rank,),
            layers=16,
            layers_run=8,
            micro_batches=8,
            micro_batches_run=3,
            steps=3,
            busy_s=1.5,
            rest_s=0.1,
            compute_s=1.3,
            optimizer_s=0.08,
            exposed_s={"dp": 0.2},
            spread_pct=0.4,
            allocated_gib=50.5,
            reserved_gib=55.0,
            collectives=(CollectiveTime("dp", "all_gather", 34.0, 7.5, 0.3),),
            spans=(Span("dp", "all_gather", 0.4, 0.01, 0.02),),
            wall_s=30.0,
        )
        for rank in range(2)
    )
    parts = {"compute": 1.3, "tp": 0.0, "cp": 0.0, "ep": 0.0, "dp": 0.2, "control": 0.0, "pp_bubble": 0.3}
    return Rehearsal(
        recipe="llama3_8b_pretrain_config",
        model="llama3_8b",
        cluster="2x8xH100",
        world=16,
        device="NVIDIA H200",
        scaled_to="H100",
        scale=1.066,
        network="the communication model of 2x8xH100",
        step_s=1.9,
        parts={**parts, "optimizer": 0.1, "other": 0.0},
        band_pct=7.5,
        tokens_per_s_per_gpu=6000.0,
        tflops_per_gpu=300.0,
        mfu=0.31,
        mfu_convention="causal attention counted as half",
        estimate_s=2.0,
        allocated_gib=50.5,
        reserved_gib=55.0,
        capacity_gib=80.0,
        fits=True,
        limits=("kernels: 68 % of the step",),
        ranks=ranks,
        schedule="1f1b",
        passes=(ScheduledPass(0, "F", 0, 0, 0.0, 0.1), ScheduledPass(1, "F", 1, 0, 0.1, 0.2)),
        versions={"torch": "2.11"},
        wall_s=61.0,
        settings={"name": "llama3_8b_pretrain_config"},
        notes=("3 of 8 micro batches ran",),
        alternatives=(Alternative(("layout.tp=1",), 1.7, 6700.0, 0.35, 60.0, 1.12, 7.0),),
    )
