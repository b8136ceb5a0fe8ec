"""The memory of real ranks compared with the dry run: the same trainings on forked gloo processes, byte for byte.

On CPUs there is no caching allocator and no library workspace, so the two may differ only by a few small tensors.
"""

from __future__ import annotations

import msgspec
import pytest
from benchmarks.dryrun_cpu import CASES, STEPPED, Case, Peak, compared, dry_rank, highest, measured, ranks_per_stage

from meshwright.dryrun.allocation_log import Block
from meshwright.dryrun.stack_origin import Origin

AGREED = 0.03  # share of a rank's real memory: in total, in every phase and in every part
BY_NAME = {one.name: one for one in CASES}


def agree(predicted: Peak, real: Peak) -> bool:
    parts = (abs(predicted.parts[name] - size) <= AGREED * real.bytes for name, size in real.parts.items())
    phases = (abs(predicted.phases[name] / real.phases[name] - 1) <= AGREED for name in STEPPED)
    return abs(predicted.bytes / real.bytes - 1) <= AGREED and all(parts) and all(phases)


def small(name: str, layers: int) -> Case:
    """Return a case with fewer layers and tokens."""
    case = BY_NAME[name]
    fewer = f"architecture.layers={layers}", "data.seq_length=128"
    return msgspec.structs.replace(case, overrides=(*case.overrides, *fewer))


@pytest.mark.parametrize(
    ("name", "layers"),
    [("tp2 sp", 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("pp2 1f1b", 2), ("ep2", 1)))],
)
def test_small_ranks_hold_what_the_dry_run_predicts(name: str, layers: int) -> None:
    case = small(name, layers)
    predicted: dict[int, Peak] = {}
    for rank, real in enumerate(measured(case)):
        first = rank - rank % ranks_per_stage(case)
        predicted[first] = predicted.get(first) or dry_rank((case, first, False))
        assert agree(predicted[first], real), (rank, predicted[first], real)


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_NAME)
def test_ranks_hold_what_both_dry_runs_predict(name: str) -> None:
    for row in compared(BY_NAME[name]):
        assert all(agree(predicted, row.real) for predicted in row.predicted), row


def test_the_peak_counts_blocks_alive_at_the_same_time() -> None:
    origin = Origin("activations", "here", False)
    sizes = (512, "weights"), (1024, "logits"), (2048, "logits")
    blocks = [Block(size, part, "aten.mm", origin, 0) for size, part in sizes]
    events = [("build", 0), ("forward", 1), ("forward", ~1), ("backward", 2), ("backward", ~2)]
    found = highest(events, blocks.__getitem__)
    assert (found.bytes, found.phase) == (2560, "backward")
    assert (found.parts["weights"], found.parts["logits"]) == (512, 2048)
    by_phase = {phase: size for phase, size in found.phases.items() if size}
    assert by_phase == {"build": 512, "forward": 1536, "backward": 2560}
