"""Diagnoses of the loss: NaN, divergence, spikes, plateaus, growing gradients, a collapsing loss scale."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import median

from meshwright.doctor.finding import Evidence, Finding
from meshwright.doctor.logged_rate import suspect_rate
from meshwright.doctor.loss_curve import (
    MIN_LINES,
    best_level,
    climb,
    finite_losses,
    grouped,
    is_not_finite,
    last_norm,
    loss_jumps,
    loss_of,
    noise_of,
    norm_evidence,
    norm_growth,
    norm_jumps,
    recovered_jumps,
    rising_since,
    stretches_above,
    tail_lines,
    typical_norm,
    with_finite_loss,
)
from meshwright.doctor.loss_remedies import stabilizing_remedies
from meshwright.doctor.nan_source import nan_source
from meshwright.doctor.run import Step
from meshwright.doctor.run_stats import RunStats, median_of
from meshwright.doctor.thresholds import limit, share

LINES_BEFORE = 20  # lines before a NaN that do not count as spikes
MAX_SHOWN = 3


def not_a_number(stats: RunStats) -> Iterator[Finding]:
    """Loss or gradients are NaN or infinite."""
    not_finite = [step for step in stats.run.steps if is_not_finite(stats, step)]
    faults = [fault for fault in stats.fatal if fault.name == "loss_not_a_number"]
    if not not_finite and not faults:
        return
    not_finite = _last_stretch(stats, not_finite)
    source = nan_source(faults)
    first = not_finite[0].step if not_finite else source.step or faults[0].step
    before = [step for step in stats.run.steps if first is None or step.step < first]
    growth = norm_growth(before)
    count = sum(max(step.bad, step.skipped, 1) for step in not_finite)
    text = f"{_what_is_not_finite(not_finite)} NaN or infinite{'' if first is None else f' in step {first}'}"
    counted = all(step.bad or step.skipped or step.covers == 1 for step in not_finite)  # else a line is one or more
    unit = "steps" if counted else "log lines"
    text += f", in {count} {unit} overall" if count > 1 else ""
    text += source.sentence
    rising = rising_since(before)
    if rising is not None:
        text += (
            f". The loss had been rising since step {rising.step}, from {loss_of(rising):.4g} to "
            f"{loss_of(with_finite_loss(before)[-1]):.4g}"
        )
    text += _without_warmup(stats, first if rising is None else rising.step)
    norm = last_norm(before)
    if norm is not None and growth is not None and growth > limit("growing_gradients"):
        text += f". The gradient norm had grown to {norm.grad_norm:.4g} in step {norm.step} ({typical_norm(before)})"
    text += _suspect(stats)
    yield Finding(
        id="loss.not-a-number",
        severity="error",
        message=text,
        steps=None if first is None else (first, not_finite[-1].step if not_finite else first),
        lines=(
            *(stats.location(step) for step in not_finite[:MAX_SHOWN]),
            *(one.located for one in faults[:MAX_SHOWN]),
        ),
        evidence=(
            Evidence("steps", float(max(count, 1)), "", 0.0, "limit"),
            *norm_evidence(before),
            *norm_jumps([step for step in before if rising is None or step.step <= rising.step]),
        ),
        remedies=(*source.remedies(), *stabilizing_remedies(stats, rising, first)),
    )


def diverging(stats: RunStats) -> Iterator[Finding]:
    """The loss rises and stays high."""
    rows = finite_losses(stats)
    is_short = len(rows) < limit("enough_for_trends")
    tail = rows[-1:] if is_short else rows[-tail_lines(rows) :]
    now = median(loss_of(step) for step in tail) if tail else math.nan
    rising = climb(rows) if is_short else rising_since(rows, now)
    if rising is None:
        return
    best, at = loss_of(rising) if is_short else best_level(rows), rising.step
    yield Finding(
        id="loss.diverging",
        severity="error",
        message=f"the loss rose from {best:.4g} around step {at} to {loss_of(rows[-1]):.4g} in step {rows[-1].step}"
        + (f" (median of the last {len(tail)} lines: {now:.4g})" if len(tail) > 1 else "")
        + _plateau(rows, at, now - best)
        + _without_warmup(stats, at)
        + _suspect(stats),
        steps=(at, rows[-1].step),
        lines=(stats.location(next(step for step in rows if step.step >= at)), stats.location(rows[-1])),
        evidence=(
            Evidence(
                "last loss",
                loss_of(rows[-1]),
                "",
                round(best, 4),
                "lowest before" if is_short else "best before, as a median",
            ),
            *norm_evidence(rows),
            *norm_jumps([step for step in rows if step.step <= at]),
        ),
        remedies=tuple(stabilizing_remedies(stats, rising)),
    )


def _suspect(stats: RunStats) -> str:
    """Return that the learning rate is not the stated one, the first suspect of a loss that diverges; else empty."""
    rate = suspect_rate(stats)
    return f". First suspect: the learning rate reaches {rate.text}" if rate is not None else ""


def _plateau(rows: Sequence[Step], since: int, rise: float) -> str:
    """Return that the loss stays where it rose to, with gradients that no longer move it; empty if it still rises."""
    after = [step for step in rows if step.step > since]
    half = after[len(after) // 2 :]
    norms = [step.grad_norm for step in half if step.grad_norm is not None]
    if (
        len(half) < MIN_LINES
        or not norms
        or max(map(loss_of, half)) - min(map(loss_of, half)) > share("plateau") * rise
    ):
        return ""
    usual = median_of(step.grad_norm for step in rows if step.step <= since)
    if usual is None or median(norms) > share("plateau") * usual:
        return ""
    low = f"the gradient norm is {median(norms):.2g} there, and was {usual:.2g} before"
    return f". It no longer rises but sits on a plateau since step {half[0].step} or earlier: {low}, so it stays there"


def diverged(stats: RunStats) -> Iterator[Finding]:
    """The loss was far above its start for a sustained part of the run, even if it fell again."""
    rows = finite_losses(stats)
    if len(rows) < MIN_LINES or rows[0].first > MIN_LINES or stats.findings_of(diverging):
        return
    first = loss_of(rows[0])
    least = max(limit("diverged_lines"), share("diverged_part") * len(rows))
    sigmas = limit("diverged_sigmas") * (1 if len(rows) >= limit("enough_for_trends") else 2)  # the noise is uncertain
    level = first + max(share("diverged_share") * abs(first), sigmas * noise_of(rows))
    if (guess := _random_guess(stats)) is not None:  # no trained model is worse than guessing, however noisy it is
        level = min(level, max(guess, first) * (1 + share("diverged_share")))
    above = [part for part in stretches_above(rows, first) if len(part) >= least and median(map(loss_of, part)) > level]
    if not above:
        return
    longest = max(above, key=len)
    highest = max(longest, key=loss_of)
    yield Finding(
        id="loss.diverged",
        severity="error",
        message=f"the loss was above its start ({first:.4g}) from step {longest[0].first} to step {longest[-1].step}, "
        f"up to {loss_of(highest):.4g} in step {highest.step}: the updates destroy what the weights had learned"
        + _without_warmup(stats, longest[0].first)
        + _suspect(stats),
        steps=(longest[0].first, longest[-1].step),
        lines=(stats.location(rows[0]), stats.location(highest)),
        evidence=(
            Evidence(
                "median loss of these lines", round(median(map(loss_of, longest)), 4), "", round(first, 4), "start"
            ),
            Evidence("lines above the start", round(len(longest) / len(rows), 4), "of the run"),
            *norm_evidence(rows),
        ),
        remedies=tuple(stabilizing_remedies(stats, onset=longest[0].first)),
    )


def _without_warmup(stats: RunStats, onset: int | None) -> str:
    """Return that the learning rate has no warm-up, if that shows and the trouble begins early; empty otherwise."""
    run = stats.run
    early = max(10 * MIN_LINES, share("early_share") * (run.header.total_steps or run.last_step))
    if onset is None or onset > early or not run.steps or run.steps[0].first > MIN_LINES:
        return ""
    rates = [step.lr for step in run.steps if step.lr is not None]
    if rates and rates[0] >= share("no_warmup") * max(rates) > 0:
        first = run.steps[0].step
        since = "from the first step on" if first == 1 else f"in the first line, at step {first}"
        return f". The learning rate has no warm-up: it is {rates[0]:.3g} {since}"
    if not rates and run.header.overrides.get("schedule.warmup_steps", MIN_LINES) < MIN_LINES // 2:
        return f". The learning rate has no warm-up: {run.header.overrides['schedule.warmup_steps']} steps by the log"
    return ""


def spikes(stats: RunStats) -> Iterator[Finding]:
    """The loss jumps and recovers."""
    rows = finite_losses(stats)
    if worse := (*stats.findings_of(diverging), *stats.findings_of(diverged)):  # jumps before it count too
        onset = min(one.steps[0] for one in worse if one.steps)
        rows = [step for step in rows if step.step < onset]
    if len(rows) < 2 * MIN_LINES:
        return
    looked_at = rows[:-LINES_BEFORE] if stats.findings_of(not_a_number) and not worse else rows
    jumps = recovered_jumps(rows, loss_jumps(looked_at), ends_well=not worse)
    if not jumps:
        return
    found, levels = [step for step, _ in jumps], {step.step: level for step, level in jumps}
    groups = grouped(found)
    highest, typical = max(
        ((max(one, key=loss_of), levels[one[0].step]) for one in groups), key=lambda one: loss_of(one[0])
    )
    times = len(groups)
    yield Finding(
        id="loss.spikes",
        severity="warning",
        message=f"the loss jumped {times} time{'s' * (times > 1)} and recovered; in step {highest.step} from "
        f"{typical:.3g} to {loss_of(highest):.3g}",
        steps=(found[0].step, found[-1].step),
        lines=tuple(stats.location(step) for step in found[:MAX_SHOWN]),
        evidence=(
            Evidence("highest loss", round(loss_of(highest), 4), "", round(typical, 4), "just before"),
            Evidence("jumps", float(times), "", 0.0, "limit"),
        ),
        remedies=tuple(stabilizing_remedies(stats, onset=found[0].step)),
    )


def _what_is_not_finite(rows: Sequence[Step]) -> str:
    """Return what of some steps is NaN or infinite, with its verb: only the gradients, if every loss is finite."""
    if any(step.hides_nan for step in rows):
        return "loss or gradients (the Trainer logs a NaN loss as 0) are"
    if rows and all(step.loss is not None and math.isfinite(step.loss) and not step.bad for step in rows):
        return "the loss is finite, but the gradient norm is"
    return "loss or gradients are"


def _last_stretch(stats: RunStats, found: list[Step]) -> list[Step]:
    """Return the NaN steps that no later start repeated: one that resumed before them got past them."""
    latest = max((step.attempt for step in stats.run.steps), default=0)
    resumed = min((step.first for step in stats.run.steps if step.attempt == latest), default=0)
    return [step for step in found if step.attempt == latest or step.step < resumed] or found


def _random_guess(stats: RunStats) -> float | None:
    """Return the loss of guessing every token with the same probability; None for a model without a vocabulary."""
    return math.log(float(stats.case.vocab)) if stats.case is not None and stats.case.vocab else None
