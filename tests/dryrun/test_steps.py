"""An operation of many steps is noted once and written again: the book reads as if it had been carried out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshwright.dryrun.allocation_log import AllocationLedger, Key, Segment
from meshwright.dryrun.fake_device import pretending
from meshwright.engine.kernels.device_caps import DRY, STEPS
from meshwright.engine.kernels.state_space import state_space_scan

HEADS, WIDTH, GROUPS, STATE = 4, 16, 2, 8


def scan(tokens: int) -> None:
    """Forward and backward of one scan; nothing of it is left."""
    x = torch.empty(1, tokens, HEADS, WIDTH, device=DRY, requires_grad=True)
    dt = torch.empty(1, tokens, HEADS, device=DRY, requires_grad=True)
    a = torch.empty(HEADS, device=DRY, requires_grad=True)
    b, c = (torch.empty(1, tokens, GROUPS, STATE, device=DRY, requires_grad=True) for _ in range(2))
    state_space_scan(x, dt, a, b, c).sum().backward()


def noted(ledger: AllocationLedger, segment: Segment) -> list[tuple[int, str, bool]]:
    """What comes and goes, by size and operation, whatever the blocks are called."""
    return [
        (ledger.blocks[max(event, ~event)].bytes, ledger.blocks[max(event, ~event)].operation, event >= 0)
        for event in segment.events
    ]


def test_the_second_time_reads_like_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    operation, carried_out = torch.ops.meshwright.state_space_scan.default, []
    steps = STEPS[operation]

    def counting(x: torch.Tensor, *more: Any) -> Any:
        carried_out.append(x.shape[1])
        return steps(x, *more)

    monkeypatch.setitem(STEPS, operation, counting)
    ledger = AllocationLedger(capability=(9, 0))
    with pretending(1, 0, ledger.saw), ledger.open():
        scan(512)  # libraries make their workspaces
        for number, tokens in enumerate((256, 256, 640)):
            ledger.mark(Key(number, "forward"))
            scan(tokens)
    assert carried_out == [512, 256, 640]
    first, again, longer = ledger.segments[-3:]
    assert noted(ledger, again) == noted(ledger, first)
    assert again.flops == first.flops
    assert sum(again.flops.values()) > 0
    assert {~event for event in again.events if event < 0} == {event for event in again.events if event >= 0}
    assert noted(ledger, longer) != noted(ledger, first)
