"""The passes of a pipeline's step over time."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from meshwright import costs
from meshwright.api import requests
from meshwright.api.planning import estimate
from meshwright.api.responses import Response, copied
from meshwright.api.verb_function import verb
from meshwright.costs.timeline import ScheduledPass
from meshwright.errors import InputError
from meshwright.planner import Plan


@verb(requests.Schedule)
def schedule(request: requests.Schedule) -> costs.Timeline:
    """Return start and end of every pass of a pipeline's step, or of its first micro batches."""
    line = timeline(estimate.handle(request))
    if request.first is None:
        return line
    return msgspec.structs.replace(line, passes=tuple(p for p in line.passes if p.micro_batch < request.first))


def timeline(plan: Plan) -> costs.Timeline:
    """Return which micro batch every rank of a plan's pipeline works on, over one step."""
    if not plan.exists:
        errors = [one for one in plan.findings if one.severity == "error"]
        fix = plan.repair.overrides if plan.repair is not None else tuple(text for one in errors for text in one.fix)
        reason = f"cannot be built: {'; '.join(one.message for one in errors)}"
        raise InputError(reason, "layout", plan.recipe.layout.pp_schedule, (" ".join(fix),) if fix else ())
    return costs.timeline(plan.case)


class ScheduleResponse(Response, frozen=True, kw_only=True):
    """The passes of a pipeline's step over time."""

    schedule: str
    ranks: int
    chunks: int
    micro_batches: int
    followed: int
    span_s: float
    idle_share: float
    passes: Sequence[ScheduledPass]


def schedule_response(line: costs.Timeline, request: requests.Schedule | None = None) -> ScheduleResponse:
    """Return the response of schedule."""
    return copied(ScheduleResponse, line)
