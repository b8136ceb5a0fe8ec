"""Pipeline schedules compared with torch's own, and invariants of the timeline."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from meshwright import api, costs
from meshwright.costs.timeline import ORDERS, V_SHAPED, order, schedule_passes, timeline

SHAPES = [(2, 1, 4), (2, 2, 8), (4, 1, 8), (4, 2, 8), (4, 2, 12), (4, 3, 16), (8, 2, 32), (2, 2, 3), (4, 2, 64)]
TORCH = {
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "looped_bfs": "ScheduleLoopedBFS",
    "interleaved_zero_bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipe_v": "ScheduleDualPipeV",
}


def _theirs(name: str, pp: int, vp: int, micro_batches: int) -> list[list[str]]:
    """Return torch's order of every rank as tokens like 0F1; overlapped passes are listed one after the other."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    kind = getattr(schedules, TORCH[name])
    made = kind.__new__(kind)  # only the order is needed: no process group, no stages
    rounds = max(1, micro_batches // pp)
    made.pp_group_size, made.n_local_stages, made.num_stages = pp, vp, pp * vp
    made._num_stages, made._stages, made._n_microbatches = pp * vp, [None] * vp, micro_batches
    made.number_of_rounds, made.microbatches_per_round = rounds, micro_batches // rounds
    found = []
    for rank in range(pp):
        ops = [op for op in made._calculate_single_rank_operations(rank) if op is not None]
        flat = [one for op in ops for one in (op.sub_actions or (op,))]
        found.append([re.sub(r"FULL_BACKWARD|FB", "B", str(one)) for one in flat])
    return found


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize(("pp", "vp", "micro_batches"), SHAPES)
def test_the_order_is_the_one_torch_runs(name: str, pp: int, vp: int, micro_batches: int) -> None:
    if name in V_SHAPED and vp != 2:
        pytest.skip("a V has two chunks on every rank")
    if name == "dualpipe_v" and micro_batches < 2 * pp:
        pytest.skip("dualpipe_v needs as many micro batches as chunks")
    if micro_batches % max(1, micro_batches // pp):
        pytest.skip("not complete rounds")
    ours = [[f"{p.chunk}{p.kind}{p.micro_batch}" for p in order(name, r, pp, vp, micro_batches)] for r in range(pp)]
    assert ours == _theirs(name, pp, vp, micro_batches)


def test_1f1b_and_gpipe_by_hand() -> None:
    def passes_of(name: str, rank: int) -> str:
        return " ".join(f"{p.kind}{p.micro_batch}" for p in order(name, rank, 2, 1, 4))

    assert passes_of("1f1b", 0) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert passes_of("1f1b", 1) == "F0 B0 F1 B1 F2 B2 F3 B3"
    assert passes_of("gpipe", 0) == passes_of("gpipe", 1) == "F0 F1 F2 F3 B0 B1 B2 B3"


@pytest.mark.parametrize("name", ORDERS)
def test_every_pass_runs_once_and_not_too_early(name: str) -> None:
    vp = 1 if name in ("1f1b", "gpipe") else 2
    layout = [f"layout.pp_schedule={name}", "layout.pp=4", f"layout.vp={vp}", "layout.tp=8", "layout.recompute=full"]
    plan = api.estimate(
        "llama3-70b", gpus="64xH100", goal="pretrain", overrides=[*layout, "train.global_batch_size=32"]
    )
    line = timeline(plan.case)
    assert (line.ranks, line.chunks, line.micro_batches, line.followed) == (4, vp, 16, 16)
    ends = {("I" if p.kind == "B" else p.kind, p.chunk, p.micro_batch): p for p in line.passes}
    assert len(ends) == len(line.passes)
    assert {(c, m) for kind, c, m in ends if kind == "F"} == {(c, m) for c in range(4 * vp) for m in range(16)}
    assert {(c, m) for kind, c, m in ends if kind == "I"} == {(c, m) for c in range(4 * vp) for m in range(16)}
    for (kind, chunk, micro), one in ends.items():
        if kind == "F" and chunk:
            assert one.start_s >= ends["F", chunk - 1, micro].end_s
        if kind == "I":
            assert one.start_s >= ends["F", chunk, micro].end_s
            assert chunk == 4 * vp - 1 or one.start_s >= ends["I", chunk + 1, micro].end_s
    for rank in range(4):
        mine = sorted((p for p in line.passes if p.rank == rank), key=lambda p: p.start_s)
        assert all(a.end_s <= b.start_s + 1e-9 for a, b in pairwise(mine))
    assert 0 < line.idle_share < 0.35


def test_1f1b_with_equal_stages_is_idle_as_long_as_the_textbook_says() -> None:
    passes = schedule_passes([order("1f1b", rank, 4, 1, 16) for rank in range(4)], 4, [{"F": 1.0, "B": 2.0}] * 4)
    span = max(one.end_s for one in passes)
    assert 1 - 16 * 3 / span == pytest.approx(3 / (16 + 3))


def test_a_long_step_is_simulated_in_part() -> None:
    plan = api.estimate(
        "llama3-70b", gpus="64xH100", overrides=["layout.pp=8", "layout.tp=8", "train.global_batch_size=32768"]
    )
    line = costs.timeline(plan.case)
    assert line.followed < line.micro_batches == 32768
