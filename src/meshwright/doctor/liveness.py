"""How a run is kept going: checkpoints that hold it up, starts that lose steps, and what it ended of."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from meshwright.doctor import faults, remedies
from meshwright.doctor.finding import Evidence, Finding, Remedy
from meshwright.doctor.run_stats import View
from meshwright.doctor.thresholds import limit, share
from meshwright.planner.explain import pluralize

WANTED_SHARE = 0.01  # of all time, for checkpoints that wait


def checkpoint_stalls(view: View) -> Iterator[Finding]:
    """Training waits for its checkpoints."""
    waits = [step for step in view.run.steps if step.blocked_s > 0]
    seconds = view.step_s
    if not waits or seconds is None:
        return
    waited = sum(step.blocked_s for step in waits)
    trained = sum((step.seconds or seconds) * step.covers for step in view.run.steps)
    counted_twice = waited if view.run.kind == "torchtitan" else 0.0  # its step times hold what it waits
    part = waited / (waited + trained - counted_twice)
    if part <= share("checkpoint_share"):
        return
    each = waited / len(waits)
    every = max(1, round((view.run.last_step - view.run.steps[0].first + 1) / len(waits)))
    longer = max(every + 1, _round_up(each * (1 - WANTED_SHARE) / (WANTED_SHARE * seconds)))
    settings = view.case.recipe.checkpoint if view.case is not None else None
    tries = []
    if settings is None or not settings.async_save:
        tries.append(
            Remedy(
                try_=("checkpoint.async_save=true",),
                what="layout",
                why="written while training goes on",
                step_ratio=round(1 - part, 4),
            )
        )
    tries.append(
        Remedy(
            try_=(f"checkpoint.save_every={longer}",),
            what="layout",
            why=f"{WANTED_SHARE:.0%} of all time at {each:.3g} s each; a failure costs {longer} steps at most",
            step_ratio=round((1 - part) / (1 - WANTED_SHARE), 4),
        )
    )
    tries.append(remedies.plainly("write to a local disk or a faster file system"))
    yield Finding(
        id="run.checkpoint-stalls",
        severity="warning",
        message=f"training waits {each:.3g} s for a checkpoint about every {every} steps: {part:.0%} of all time",
        steps=(waits[0].first, waits[-1].step),
        lines=tuple(view.place(step) for step in waits[:3]),
        evidence=(
            Evidence("waited for checkpoints", round(part, 4), "of all time", share("checkpoint_share"), "limit"),
            Evidence("one checkpoint", each, "s", seconds, "a step"),
        ),
        remedies=tuple(tries),
    )


def restarts(view: View) -> Iterator[Finding]:
    """The run was started again often, or lost steps by it."""
    run = view.run
    times = len(run.attempts) - 1
    if times < 1:
        return
    lost = 0
    for before, after in pairwise(run.attempts):
        if before and after:
            lost += max(0, before[-1].step - after[0].first + 1)
    part = lost / max(1, run.last_step)
    if times < limit("restarts") and part <= share("lost_share"):
        return
    reasons = [fault for fault in run.faults if fault not in view.fatal]
    gap = max(1, lost // times)
    tries = [remedies.plainly("read what stands above every start in the log", why="the cause is told there")]
    if part > share("lost_share"):
        every = max(1, gap // 5)
        why = f"at most {every} steps are lost by a start, not about {gap}"
        tries.insert(0, Remedy(try_=(f"checkpoint.save_every={every}",), what="layout", why=why))
    yield Finding(
        id="run.restarts",
        severity="warning",
        message=f"the run was started again {pluralize(times, 'time')} and computed {lost} steps twice ({part:.0%})",
        steps=(run.starts[1] if len(run.starts) > 1 else run.last_step, run.last_step),
        lines=(
            *(view.place(attempt[0]) for attempt in run.attempts[1:4] if attempt),
            *(f"{one.file}:{one.line} {one.text}" for one in reasons[:3]),
        ),
        evidence=(
            Evidence("starts after the first", float(times), "", limit("restarts"), "limit"),
            Evidence("steps computed twice", round(part, 4), "of all", share("lost_share"), "limit"),
        ),
        remedies=tuple(tries),
    )


def failed(view: View) -> Iterator[Finding]:
    """The run ended of something that its log names."""
    if any(faults.sign(fault.name).told_elsewhere for fault in view.fatal):
        return  # ranks that wait for one that is gone say so as well
    sure = not view.run.is_done
    found = [fault for fault in view.fatal if sure or fault.written_down or fault.name not in faults.UNSURE]
    if not found:
        return
    found.sort(key=lambda fault: fault.name == "error")  # what has a name says more
    first = found[0]
    sign = faults.sign(first.name)
    yield Finding(
        id=f"run.failed-{first.name.replace('_', '-')}",
        severity="error",
        message=sign.meaning
        + (f", after step {first.step}" if first.step else "")
        + (f": {first.text}" if first.name == "error" else ""),
        steps=None if first.step is None else (first.step, first.step),
        lines=tuple(f"{one.file}:{one.line} {one.text}" for one in found[:3]),
        remedies=tuple(
            Remedy(
                try_=(text,), what="layout" if text.split("=")[0].count(".") == 1 and "=" in text else "action", why=""
            )
            for text in (*first.fix, *sign.fix)
        ),
    )


def _round_up(value: float) -> int:
    """A number of steps that people would choose: two digits, then zeros."""
    whole = int(value) + 1
    digits = 10 ** max(0, len(str(whole)) - 2)
    return int(-(-whole // digits) * digits)
