"""What real ranks hold, against the dry run: the same trainings on forked gloo processes, byte for byte.

On CPUs nothing is left to the allocator or to libraries, so that the two may differ by a few small tensors only.
"""

from __future__ import annotations

import pytest
from benchmarks.dryrun_cpu import CASES, Case, compared, highest

from meshwright.dryrun.ledger import Block
from meshwright.dryrun.sources import Origin

QUICK = ("fsdp2 x2", "tp2 sp", "pp2 1f1b", "cp2 ring", "ep2")
AGREED = 0.03  # of what a rank really holds
BY_PART = 0.03  # the same for every part, of the whole


@pytest.mark.parametrize(
    "case", [pytest.param(one, id=one.name, marks=() if one.name in QUICK else pytest.mark.slow) for one in CASES]
)
def test_ranks_hold_what_the_dry_run_says(case: Case) -> None:
    for row in compared(case):
        for said in (row.dry, row.shortened):
            assert said.bytes == pytest.approx(row.real.bytes, rel=AGREED), row
            assert said.phases == pytest.approx(row.real.phases, rel=AGREED), row
            for part, size in row.real.parts.items():
                assert abs(said.parts[part] - size) <= BY_PART * row.real.bytes, (part, row)


def test_highest_point_counts_what_is_alive_together() -> None:
    origin = Origin("activations", "here", False)
    sizes = (512, "weights"), (1024, "logits"), (2048, "logits")
    blocks = [Block(size, part, "aten.mm", origin, 0) for size, part in sizes]
    events = [("build", 0), ("forward", 1), ("forward", ~1), ("backward", 2), ("backward", ~2)]
    found = highest(events, blocks.__getitem__)
    assert (found.bytes, found.phase) == (2560, "backward")
    assert (found.parts["weights"], found.parts["logits"]) == (512, 2048)
    by_phase = {phase: size for phase, size in found.phases.items() if size}
    assert by_phase == {"build": 512, "forward": 1536, "backward": 2560}
