"""A composite operation is recorded once and replayed: the log is the same as if it had run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshwright.dryrun.allocation_log import AllocationLog, Segment, SegmentKey
from meshwright.dryrun.fake_device import fake_rank
from meshwright.engine.kernels.device_caps import DECOMPOSITIONS, DRY
from meshwright.engine.kernels.state_space import state_space_scan

HEADS, WIDTH, GROUPS, STATE = 4, 16, 2, 8


def scan(tokens: int) -> None:
    """Run forward and backward of one scan; nothing of it stays allocated."""
    x = torch.empty(1, tokens, HEADS, WIDTH, device=DRY, requires_grad=True)
    dt = torch.empty(1, tokens, HEADS, device=DRY, requires_grad=True)
    a = torch.empty(HEADS, device=DRY, requires_grad=True)
    b, c = (torch.empty(1, tokens, GROUPS, STATE, device=DRY, requires_grad=True) for _ in range(2))
    state_space_scan(x, dt, a, b, c).sum().backward()


def entries(log: AllocationLog, segment: Segment) -> list[tuple[int, str, bool]]:
    """Return allocations and frees by size and operation, without block numbers."""
    return [
        (log.blocks[max(event, ~event)].bytes, log.blocks[max(event, ~event)].operation, event >= 0)
        for event in segment.events
    ]


def test_a_replayed_operation_has_the_entries_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    operation, executed = torch.ops.meshwright.state_space_scan.default, []
    steps = DECOMPOSITIONS[operation]

    def count_calls(x: torch.Tensor, *more: Any) -> Any:
        executed.append(x.shape[1])
        return steps(x, *more)

    monkeypatch.setitem(DECOMPOSITIONS, operation, count_calls)
    log = AllocationLog(capability=(9, 0))
    with fake_rank(1, 0, log.record), log.patch_torch():
        scan(512)  # libraries make their workspaces
        for number, tokens in enumerate((256, 256, 640)):
            log.begin(SegmentKey(number, "forward"))
            scan(tokens)
    assert executed == [512, 256, 640]
    first, again, longer = log.segments[-3:]
    assert entries(log, again) == entries(log, first)
    assert again.flops == first.flops
    assert sum(again.flops.values()) > 0
    assert {~event for event in again.events if event < 0} == {event for event in again.events if event >= 0}
    assert entries(log, longer) != entries(log, first)
