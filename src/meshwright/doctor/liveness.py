"""Interruptions of a run: blocking checkpoints, restarts that lose steps, and failures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import msgspec

from meshwright.display import plural
from meshwright.doctor import faults, hang, known_messages, network_ends, remedies, saved_in_time, slowdown
from meshwright.doctor.finding import Evidence, Finding, Remedy
from meshwright.doctor.run import Fault
from meshwright.doctor.run_stats import RunStats
from meshwright.doctor.thresholds import limit, share

FROM_SCRATCH = "It started again at step 1: no checkpoint was loaded, or the file holds several runs"
REQUESTED_END = ("exiting program", "interrupted", "preempted", "stopped early")
"""Ends before the last step: Megatron's at its time limit, a signal or an interval, and ours."""
SOME_LATE = "some ranks never reached it"  # in the meaning of a hang
TARGET_SHARE = 0.01  # target share of the run time for blocking checkpoints


def checkpoint_stalls(stats: RunStats) -> Iterator[Finding]:
    """Training is blocked by checkpoints."""
    blocking = [step for step in stats.run.steps if step.blocked_s > 0]
    seconds = stats.step_s
    if not blocking or seconds is None:
        return
    waited = sum(step.blocked_s for step in blocking)
    trained = sum((step.seconds or seconds) * step.covers for step in stats.run.steps)
    counted_twice = waited if stats.run.kind == "torchtitan" else 0.0  # its step times include the blocked time
    part = waited / (waited + trained - counted_twice)
    if part <= share("checkpoint_share"):
        return
    each = waited / len(blocking)
    every = max(1, round((stats.run.last_step - stats.run.steps[0].first + 1) / len(blocking)))
    longer = max(every + 1, _round_up(each * (1 - TARGET_SHARE) / (TARGET_SHARE * seconds)))
    settings = stats.case.recipe.checkpoint if stats.case is not None else None
    fixes = []
    if settings is None or not settings.async_save:
        fixes.append(
            Remedy(
                try_=("checkpoint.async_save=true",),
                what="layout",
                why="checkpoints are written while training continues",
                step_ratio=round(1 - part, 4),
            )
        )
    fixes.append(
        Remedy(
            try_=(f"checkpoint.save_every={longer}",),
            what="layout",
            why=f"{TARGET_SHARE:.0%} of the run time at {each:.3g} s each; a failure loses at most "
            f"{plural(longer, 'step')}",
            step_ratio=round((1 - part) / (1 - TARGET_SHARE), 4),
        )
    )
    fixes.append(remedies.advice("write checkpoints to a local disk or a faster file system"))
    yield Finding(
        id="run.checkpoint-stalls",
        severity="warning",
        message=f"training blocks {each:.3g} s for a checkpoint about every {plural(every, 'step')}: {part:.0%} of "
        "the run time",
        steps=(blocking[0].first, blocking[-1].step),
        lines=tuple(stats.location(step) for step in blocking[:3]),
        evidence=(
            Evidence("blocked by checkpoints", round(part, 4), "of run time", share("checkpoint_share"), "limit"),
            Evidence("one checkpoint", each, "s", seconds, "step time"),
        ),
        remedies=tuple(fixes),
    )


def stopped_early(stats: RunStats) -> Iterator[str]:
    """Yield that a log ends before the last step of its run, if no failure explains it."""
    run, total = stats.run, stats.run.header.total_steps
    if total is None and stats.case is not None and "train.steps" in run.header.file_fields:
        total = stats.case.recipe.train.steps
    if not total or not run.steps or not run.numbered or stats.fatal:
        return
    last = run.steps[-1]
    if total - last.step < max(1, last.covers):  # the rest is less than a log interval
        return
    where = f"the log ends at step {last.step:,} of {total:,}"
    if run.ending.startswith(REQUESTED_END):
        yield f"{where}: {run.ending.strip()}"
    elif not run.ending:
        seconds = stats.step_s
        pace = None if seconds is None else f"{seconds * max(1, last.covers):.3g}"
        due = f" (a line is due every {pace} s; py-spy dump --pid PID shows where)" if pace else ""
        yield (
            f"{where}, without an error or a line that says the training ended: it is still running, hangs{due}, was "
            "killed, or the log is cut; the last lines of the job's own output (sacct -j JOB, stderr) show which"
        )


def restarts(stats: RunStats) -> Iterator[Finding]:
    """The run was restarted often, or lost steps by restarting."""
    run = stats.run
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
    reasons = [fault for fault in run.faults if fault not in stats.fatal]
    gap = max(1, lost // times)
    fixes = [remedies.advice("read the log above every restart", why="it shows the cause")]
    if part > share("lost_share") and (every := max(1, gap // 5)) < gap:
        why = f"a restart loses at most {plural(every, 'step')} instead of about {gap}"
        fixes.insert(0, Remedy(try_=(f"checkpoint.save_every={every}",), what="layout", why=why))
    if any(fault.name in saved_in_time.ENDS for fault in run.faults):
        ways = saved_in_time.saving_remedies(stats)
        fixes[:0] = [one for one in ways if part <= share("lost_share") or one.what == "action"]
    yield Finding(
        id="run.restarts",
        severity="warning",
        message=f"the run was restarted {plural(times, 'time')} and repeated {plural(lost, 'step')} ({part:.0%})"
        + (f". {FROM_SCRATCH}" if any(one and one[0].first <= 1 for one in run.attempts[1:]) else ""),
        steps=(run.starts[1] if len(run.starts) > 1 else run.last_step, run.last_step),
        lines=(
            *(stats.location(attempt[0]) for attempt in run.attempts[1:4] if attempt),
            *(one.located for one in reasons[:3]),
        ),
        evidence=(
            Evidence("restarts", float(times), "", limit("restarts"), "limit"),
            Evidence("repeated steps", round(part, 4), "of all steps", share("lost_share"), "limit"),
        ),
        remedies=tuple(fixes),
    )


def failed(stats: RunStats) -> Iterator[Finding]:
    """The run ended with a failure that its log names."""
    if any(faults.pattern(fault.name).has_own_diagnosis for fault in stats.fatal):
        return  # the other ranks then report timeouts too
    sure = not stats.run.is_done
    fatal = [fault for fault in stats.fatal if sure or fault.recorded or fault.name not in faults.AMBIGUOUS]
    if not fatal:
        return
    if any(fault.name == "node_failure" for fault in fatal):
        yield _node_failure(fatal)
        return
    known = None if fatal[0].name in faults.SCHEDULER else known_messages.known_failure(stats, fatal)
    if known is not None:
        known = msgspec.structs.replace(known, message=known.message + _slower_before(stats, known.id))
        yield _with_ranks(stats, known, fatal)
        return
    vague = ("", "terminated", "error")  # a specific fault is more useful than a plain error
    fatal.sort(key=lambda fault: vague.index(fault.name) if fault.name in vague else 0)
    first = fatal[0]
    pattern = faults.pattern(first.name)
    found = Finding(
        id=f"run.failed-{first.name.replace('_', '-')}",
        severity="error",
        message=pattern.meaning
        + (f", after step {first.step}" if first.step else "")
        + (f": {first.shown}" if first.name == "error" else "")
        + _slower_before(stats, f"run.failed-{first.name}"),
        steps=None if first.step is None else (first.step, first.step),
        lines=tuple(one.located for one in fatal[:3]),
        remedies=(
            *(
                Remedy(
                    try_=(text,),
                    what="layout" if text.split("=")[0].count(".") == 1 and "=" in text else "action",
                    why="",
                )
                for text in dict.fromkeys((*first.fix, *pattern.fix))
            ),
            *(known_messages.nearest(first) if first.name == "error" else ()),
            *(saved_in_time.saving_remedies(stats) if first.name in saved_in_time.ENDS else ()),
        ),
    )
    yield _with_ranks(stats, found, fatal)


def _with_ranks(stats: RunStats, finding: Finding, fatal: list[Fault]) -> Finding:
    """Return a failure with the rank and host behind it: of a timeout, the rank that the others waited for."""
    if finding.id == "run.failed-hang":
        return _hang(stats, finding, fatal)
    ends = network_ends.ends_of(fatal, stats.run.hosts) if finding.id == "run.failed-network" else ()
    if ends:
        return _with_ends(finding, ends)
    names, own = stats.rank_names, [one for one in fatal if one.located in finding.lines]  # others are consequences
    rank = next((one.rank for one in own or fatal if one.rank is not None), stats.run.hosts.first_failed)
    if rank is None:
        return finding
    evidence = (*finding.evidence, Evidence("first rank that reports it", names.of((rank,), lower=True)))
    return msgspec.structs.replace(finding, evidence=evidence)


EXCLUDES = ("exclude the node", "exclude the node that it names")


def _with_ends(finding: Finding, ends: Sequence[network_ends.NetworkEnd]) -> Finding:
    """Return a network failure with both ends of the connection; ranks that timed out only waited for them."""
    nodes = network_ends.suspects(ends)
    shown = ends[: network_ends.MOST_NAMED]
    peers = dict.fromkeys(one.peer for one in shown if one.peer)
    exclude = f"exclude {' and '.join(nodes)}" + ("" if len(nodes) == 1 else ", one at a time: one end is enough")
    return msgspec.structs.replace(
        finding,
        evidence=(
            *finding.evidence,
            Evidence("reported by", ", ".join(dict.fromkeys(one.reporter for one in shown))),
            *((Evidence("other end of the connection", ", ".join(peers)),) if peers else ()),
        ),
        remedies=tuple(
            msgspec.structs.replace(one, try_=tuple(exclude if text in EXCLUDES else text for text in one.try_))
            for one in finding.remedies
        ),
    )


def _hang(stats: RunStats, finding: Finding, fatal: list[Fault]) -> Finding:
    """Return a timeout with the rank that the others waited for, whose lines come first."""
    names, timeouts = stats.rank_names, [one for one in fatal if one.name == "hang"]
    late = hang.behind(stats.final_collectives, names, stats.world)
    message, ranks = finding.message, () if late is None else late.ranks
    if late is not None and late.none_is_behind:
        message = message.replace(f": {SOME_LATE}", "")
    message += "" if late is None else f". {late.text}"
    first = min((one.line for one in timeouts), default=0)
    before = [one for one in fatal if one.name == "error" and one.line < first and one.file == timeouts[0].file]
    if before:
        who = "a rank" if before[0].rank is None else names.of((before[0].rank,), lower=True)
        message += f". Before it, {who} ended with an error, the likely cause: {before[0].text}"
    shown = [*before[:1], *sorted(timeouts, key=lambda one: one.rank not in ranks)]
    advice = {
        "check the rank that lags behind": f"look at {names.of(ranks, lower=True)} first: its own log, py-spy dump of "
        "its process, dmesg of its host"
    }
    if late is not None and late.none_is_behind:
        advice = {next(iter(advice)): "check the network and the GPUs: NCCL_DEBUG=INFO, dmesg for Xid, nccl-tests"}
    replaced = advice if late is not None and (ranks or late.none_is_behind) else {}
    return msgspec.structs.replace(
        finding,
        message=message,
        lines=tuple(dict.fromkeys(one.located for one in shown[:3])) or finding.lines,
        evidence=(*(() if late is None else late.evidence), *finding.evidence),
        remedies=tuple(
            msgspec.structs.replace(one, try_=(replaced.get(one.try_[0], one.try_[0]), *one.try_[1:]))
            for one in finding.remedies
        ),
    )


def _node_failure(fatal: list[Fault]) -> Finding:
    """Return the finding of a failed node; the timeouts and lost connections of the other ranks are consequences."""
    failures = [fault for fault in fatal if fault.name == "node_failure"]
    nodes, others = ",".join(faults.failed_nodes(fatal)), [fault for fault in fatal if fault.name != "node_failure"]
    peers = () if nodes else faults.lost_peers(others)
    suspect = peers[0] if len(peers) == 1 else ""
    step = next((fault.step for fault in fatal if fault.step is not None), None)
    unnamed = f"probably {suspect}, to which a connection was lost" if suspect else "the log does not name it"
    subject = f"node {nodes} failed" if nodes else f"a node failed ({unnamed})"
    text = f"{subject}, and the scheduler ended the run" + (f", after step {step}" if step else "")
    if others:
        names = dict.fromkeys(faults.pattern(one.name).meaning for one in others)
        text += f". What the other ranks report follows from it: {'; '.join(names)}"
    return Finding(
        id="run.failed-node-failure",
        severity="error",
        message=text,
        steps=None if step is None else (step, step),
        lines=tuple(one.located for one in (*failures[:2], *others[:2])),
        evidence=(Evidence("failed nodes", nodes),) if nodes else (),
        remedies=tuple(
            remedies.advice(fix.replace("NODE", nodes or suspect or "NODE"))
            for fix in faults.pattern("node_failure").fix
        ),
    )


def _slower_before(stats: RunStats, id: str) -> str:
    """Return since when steps had been slower, if ranks then timed out; empty otherwise."""
    if id not in ("run.failed-hang", "run.failed-network"):
        return ""
    found = (*stats.findings_of(slowdown.sustained_slowdown), *stats.findings_of(slowdown.slowing_down))
    slower = next((one for one in found if one.steps), None)
    if slower is None or slower.steps is None:
        return ""
    return f". Steps had been slower since step {slower.steps[0]:,} ({slower.id}): the same cause may have ended it"


def _round_up(value: float) -> int:
    """Round up to two significant digits."""
    rounded = int(value) + 1
    digits = 10 ** max(0, len(str(rounded)) - 2)
    return int(-(-rounded // digits) * digits)
