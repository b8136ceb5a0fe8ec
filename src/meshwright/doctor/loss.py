"""Diagnoses of the loss: NaN, divergence, spikes, plateaus, growing gradients, a collapsing loss scale."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby, pairwise
from statistics import median

import numpy as np
from numpy.typing import NDArray

from meshwright.display import plural
from meshwright.doctor import remedies
from meshwright.doctor.advised_rate import FAR_TOO_HIGH, LR, advised_rate
from meshwright.doctor.finding import Evidence, Finding, Remedy
from meshwright.doctor.logged_rate import suspect_rate
from meshwright.doctor.nan_source import nan_source
from meshwright.doctor.run import LogFormat, Step
from meshwright.doctor.run_stats import RunStats, deviation, median_of, running_median
from meshwright.doctor.small_rate import SGD, is_plateau, stated_rate, too_small, unmoved, validation_falls
from meshwright.doctor.thresholds import limit, share
from meshwright.recipes.format_override import format_override
from meshwright.rules.learning_rate import USUAL_RATES

WINDOW = 50  # lines of a running median
MIN_LINES = 10  # minimum of lines for it
JUST_BEFORE = 5  # lines of the level from which the loss jumps
LINES_BEFORE = 20  # lines before a NaN that do not count as spikes
MAX_SHOWN = 3
CLIPPED: tuple[LogFormat, ...] = ("megatron", "nemo", "torchtitan", "automodel", "kempnerforge", "transformers")
"""Logs of trainers that clip gradients at 1.0 unless they are configured otherwise."""
TAIL = 0.1  # share of the lines that counts as the end of a run
FIT_VARIANCE = 12.0  # of the fall of a line fitted to n losses: this times their variance over n


def not_a_number(stats: RunStats) -> Iterator[Finding]:
    """Loss or gradients are NaN or infinite."""
    not_finite = [step for step in stats.run.steps if _is_not_finite(stats, step)]
    faults = [fault for fault in stats.fatal if fault.name == "loss_not_a_number"]
    if not not_finite and not faults:
        return
    not_finite = _last_stretch(stats, not_finite)
    source = nan_source(faults)
    first = not_finite[0].step if not_finite else source.step or faults[0].step
    before = [step for step in stats.run.steps if first is None or step.step < first]
    growth = _growth(before)
    count = sum(max(step.bad, step.skipped, 1) for step in not_finite)
    text = f"{_what_is_not_finite(not_finite)} NaN or infinite{'' if first is None else f' in step {first}'}"
    counted = all(step.bad or step.skipped or step.covers == 1 for step in not_finite)  # else a line is one or more
    unit = "steps" if counted else "log lines"
    text += f", in {count} {unit} overall" if count > 1 else ""
    text += source.sentence
    rising = _rising_since(before)
    if rising is not None:
        text += (
            f". The loss had been rising since step {rising.step}, from {_loss(rising):.4g} to "
            f"{_loss(_finite(before)[-1]):.4g}"
        )
    text += _without_warmup(stats, first if rising is None else rising.step)
    norm = _last_norm(before)
    if norm is not None and growth is not None and growth > limit("growing_gradients"):
        text += f". The gradient norm had grown to {norm.grad_norm:.4g} in step {norm.step} ({_typical_norm(before)})"
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
            *_norm_evidence(before),
            *_norm_jumps([step for step in before if rising is None or step.step <= rising.step]),
        ),
        remedies=(*source.remedies(), *_stabilizing_remedies(stats, rising)),
    )


def diverging(stats: RunStats) -> Iterator[Finding]:
    """The loss rises and stays high."""
    rows = _with_loss(stats)
    is_short = len(rows) < limit("enough_for_trends")
    tail = rows[-1:] if is_short else rows[-_tail(rows) :]
    now = median(_loss(step) for step in tail) if tail else math.nan
    rising = climb(rows) if is_short else _rising_since(rows, now)
    if rising is None:
        return
    best, at = _loss(rising) if is_short else _best(rows), rising.step
    yield Finding(
        id="loss.diverging",
        severity="error",
        message=f"the loss rose from {best:.4g} around step {at} to {_loss(rows[-1]):.4g} in step {rows[-1].step}"
        + (f" (median of the last {len(tail)} lines: {now:.4g})" if len(tail) > 1 else "")
        + _plateau(rows, at, now - best)
        + _without_warmup(stats, at)
        + _suspect(stats),
        steps=(at, rows[-1].step),
        lines=(stats.location(next(step for step in rows if step.step >= at)), stats.location(rows[-1])),
        evidence=(
            Evidence(
                "last loss",
                _loss(rows[-1]),
                "",
                round(best, 4),
                "lowest before" if is_short else "best before, as a median",
            ),
            *_norm_evidence(rows),
            *_norm_jumps([step for step in rows if step.step <= at]),
        ),
        remedies=tuple(_stabilizing_remedies(stats, rising)),
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
    if len(half) < MIN_LINES or not norms or max(map(_loss, half)) - min(map(_loss, half)) > share("plateau") * rise:
        return ""
    usual = median_of(step.grad_norm for step in rows if step.step <= since)
    if usual is None or median(norms) > share("plateau") * usual:
        return ""
    low = f"the gradient norm is {median(norms):.2g} there, and was {usual:.2g} before"
    return f". It no longer rises but sits on a plateau since step {half[0].step} or earlier: {low}, so it stays there"


def diverged(stats: RunStats) -> Iterator[Finding]:
    """The loss was far above its start for a sustained part of the run, even if it fell again."""
    rows = _with_loss(stats)
    if len(rows) < MIN_LINES or rows[0].first > MIN_LINES or stats.findings_of(diverging):
        return
    first = _loss(rows[0])
    least = max(limit("diverged_lines"), share("diverged_part") * len(rows))
    sigmas = limit("diverged_sigmas") * (1 if len(rows) >= limit("enough_for_trends") else 2)  # the noise is uncertain
    level = first + max(share("diverged_share") * abs(first), sigmas * _noise(rows))
    if (guess := _random_guess(stats)) is not None:  # no trained model is worse than guessing, however noisy it is
        level = min(level, max(guess, first) * (1 + share("diverged_share")))
    above = [part for part in _stretches(rows, first) if len(part) >= least and median(map(_loss, part)) > level]
    if not above:
        return
    longest = max(above, key=len)
    highest = max(longest, key=_loss)
    yield Finding(
        id="loss.diverged",
        severity="error",
        message=f"the loss was above its start ({first:.4g}) from step {longest[0].first} to step {longest[-1].step}, "
        f"up to {_loss(highest):.4g} in step {highest.step}: the updates destroy what the weights had learned"
        + _without_warmup(stats, longest[0].first)
        + _suspect(stats),
        steps=(longest[0].first, longest[-1].step),
        lines=(stats.location(rows[0]), stats.location(highest)),
        evidence=(
            Evidence("median loss of these lines", round(median(map(_loss, longest)), 4), "", round(first, 4), "start"),
            Evidence("lines above the start", round(len(longest) / len(rows), 4), "of the run"),
            *_norm_evidence(rows),
        ),
        remedies=tuple(_stabilizing_remedies(stats)),
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


def finite_losses(stats: RunStats) -> list[Step]:
    """Return the steps with a finite loss; a repeated step counts as in the latest start."""
    return _with_loss(stats)


def _stretches(rows: Sequence[Step], level: float) -> list[list[Step]]:
    """Return the unbroken stretches of lines whose loss is above a level."""
    grouped = groupby(rows, key=lambda step: _loss(step) > level)
    return [list(part) for above, part in grouped if above]


def spikes(stats: RunStats) -> Iterator[Finding]:
    """The loss jumps and recovers."""
    rows = _with_loss(stats)
    if worse := (*stats.findings_of(diverging), *stats.findings_of(diverged)):  # jumps before it count too
        onset = min(one.steps[0] for one in worse if one.steps)
        rows = [step for step in rows if step.step < onset]
    if len(rows) < 2 * MIN_LINES:
        return
    looked_at = rows[:-LINES_BEFORE] if _ended_not_finite(stats) and not worse else rows
    jumps = _recovered(rows, _jumps(looked_at), ends_well=not worse)
    if not jumps:
        return
    found, levels = [step for step, _ in jumps], {step.step: level for step, level in jumps}
    groups = _groups(found)
    highest, typical = max(
        ((max(one, key=_loss), levels[one[0].step]) for one in groups), key=lambda one: _loss(one[0])
    )
    times = len(groups)
    yield Finding(
        id="loss.spikes",
        severity="warning",
        message=f"the loss jumped {times} time{'s' * (times > 1)} and recovered; in step {highest.step} from "
        f"{typical:.3g} to {_loss(highest):.3g}",
        steps=(found[0].step, found[-1].step),
        lines=tuple(stats.location(step) for step in found[:MAX_SHOWN]),
        evidence=(
            Evidence("highest loss", round(_loss(highest), 4), "", round(typical, 4), "just before"),
            Evidence("jumps", float(times), "", 0.0, "limit"),
        ),
        remedies=tuple(_stabilizing_remedies(stats)),
    )


def flat(stats: RunStats) -> Iterator[Finding]:
    """The loss does not decrease."""
    rows = _before_nan(stats)
    if stats.uses_mock_data or len(rows) < MIN_LINES or stats.findings_of(diverged) or stats.findings_of(diverging):
        return
    if (still := unmoved(stats, rows)) is not None:
        yield still
        return
    rates = [step.lr for step in rows if step.lr is not None]
    steps_covered = rows[-1].step - rows[0].first + 1
    always_zero = _is_always_zero(rates)
    if not always_zero and flat_needs(stats):
        return
    plateau = is_plateau(stats, rows)
    first, last = _level_at_start(rows), median(map(_loss, rows[-_tail(rows) :]))
    fallen = (first - last) / abs(first) if first else 0.0
    if not always_zero and (fallen >= share("flat_drop") or last > first * (1 + share("diverging_share"))):
        return
    is_short = steps_covered < limit("flat_steps") and not plateau
    if not always_zero and is_short and (_falls(rows, share("flat_drop") * abs(first) / 10) or validation_falls(stats)):
        return  # it learns slowly: a short log need not show more
    if not always_zero and _starts_trained(stats, first):
        return  # continued pretraining: at this loss, a slow decrease is normal
    text, fixes = _why_flat(stats, rates, always_zero)
    yield Finding(
        id="loss.flat",
        severity="warning",
        message=f"the loss went from {first:.4g} to {last:.4g} in "
        + plural(steps_covered, "step" if stats.run.numbered else "log line")
        + (", and the validation loss does not move either" if plateau else "")
        + f": {text}",
        steps=(rows[0].first, rows[-1].step),
        lines=(stats.location(rows[0]), stats.location(rows[-1])),
        evidence=(
            Evidence("decrease", round(fallen, 4), "of the first loss", share("flat_drop"), "limit"),
            *(() if not rates else (Evidence("final learning rate", rates[-1]),)),
        ),
        remedies=fixes,
    )


def flat_needs(stats: RunStats) -> str:
    """Return what a log lacks to show that its loss does not decrease; empty if it shows whether it does."""
    rows = _before_nan(stats)
    rates = [step.lr for step in rows if step.lr is not None]
    if len(rows) < limit("enough_for_trends"):
        return "" if _is_always_zero(rates) else f"the loss in at least {limit('enough_for_trends'):.0f} step lines"
    first = _level_at_start(rows)
    visible, noise = share("flat_drop") * abs(first), _noise(rows)
    if _is_always_zero(rates) or is_plateau(stats, rows) or _falls(rows, visible):
        return ""
    if rows[0].first > MIN_LINES:
        return f"the log from the first step on: it starts at step {rows[0].first:,}"
    steps_covered = rows[-1].step - rows[0].first + 1
    is_short = steps_covered < limit("flat_steps")
    if is_short and (_epochs_covered(rows) < limit("flat_epochs") or _is_rising(rates)):
        found = plural(steps_covered, "step") if stats.run.numbered else f"{len(rows):,} lines without step numbers"
        return f"{limit('flat_steps'):.0f} steps, or half an epoch after the warm-up: the log has {found}"
    lines = FIT_VARIANCE * (noise / visible) ** 2 if is_short and visible else 0.0
    if noise > visible * math.sqrt(_tail(rows)) or len(rows) < lines:
        least = max(lines, (noise / visible) ** 2 / TAIL) if visible else 0.0
        drop = f"a decrease of {share('flat_drop'):.0%} is lost in the noise of the loss ({noise:.2g} between lines)"
        return f"about {math.ceil(max(least, len(rows) + 1)):,} step lines: in {len(rows):,}, {drop}"
    return ""


def _level_at_start(rows: Sequence[Step]) -> float:
    """Return the loss at the start: the median of the first lines, or the first one if it is above their noise."""
    level, first = median(map(_loss, rows[: _tail(rows)])), _loss(rows[0])
    return first if first > level + limit("unmoved_sigmas") * _noise(rows) else level


def _before_nan(stats: RunStats) -> list[Step]:
    """Return the steps with a finite loss before the first NaN."""
    bad = next((step.step for step in stats.run.steps if _is_not_finite(stats, step)), None)
    return [step for step in _with_loss(stats) if bad is None or step.step < bad]


def _is_always_zero(rates: Sequence[float]) -> bool:
    return len(rates) >= MIN_LINES and all(rate == 0 for rate in rates)


def _is_rising(rates: Sequence[float]) -> bool:
    """Return whether the learning rate is still in its warm-up at the end of a log."""
    return len(rates) >= MIN_LINES and rates[-1] > rates[0] and rates[-1] == max(rates)


def _epochs_covered(rows: Sequence[Step]) -> float:
    """Return the epochs between the first and the last line; 0 if the log has none."""
    epochs = [step.epoch for step in rows if step.epoch is not None]
    return epochs[-1] - epochs[0] if epochs else 0.0


def _falls(rows: Sequence[Step], by: float) -> bool:
    """Return whether the losses fall by more than this and than their noise."""
    error = _noise(rows) * math.sqrt(FIT_VARIANCE / len(rows))
    return _fitted_fall(rows) > max(by, limit("unmoved_sigmas") * error)


def _fitted_fall(rows: Sequence[Step]) -> float:
    """Return how far a line that is fitted to the losses falls from the first line of a log to the last."""
    slope = float(np.polyfit(np.arange(len(rows)), _losses(rows), 1)[0])
    return -slope * (len(rows) - 1)


def growing_gradients(stats: RunStats) -> Iterator[Finding]:
    """Gradients grow while the loss is still stable, which rarely lasts."""
    rows = [step for step in _with_loss(stats) if step.grad_norm is not None]
    if len(rows) < limit("enough_for_trends") or _ended_not_finite(stats) or stats.findings_of(diverging):
        return
    growth = _growth(rows)
    if growth is None or growth <= limit("growing_gradients"):
        return
    yield Finding(
        id="loss.growing-gradients",
        severity="warning",
        message=(
            f"the gradient norm is {rows[-1].grad_norm:.4g} in step {rows[-1].step}; the last {_tail(rows)} lines are "
            f"{growth:.1f} times the median of the run while the loss is still stable"
        ),
        steps=(rows[-_tail(rows)].step, rows[-1].step),
        lines=(stats.location(rows[-1]),),
        evidence=(
            *_norm_evidence(rows),
            Evidence(
                "median of the end over that of the run", round(growth, 2), "×", limit("growing_gradients"), "limit"
            ),
        ),
        remedies=tuple(_stabilizing_remedies(stats)),
    )


def zero_gradients(stats: RunStats) -> Iterator[Finding]:
    """The gradient norm is zero to the end of the run: no weight changes any more."""
    rows = [step for step in stats.run.steps if step.grad_norm is not None]
    zero: list[Step] = []
    for step in reversed(rows):
        if step.grad_norm != 0 or step.skipped:
            break
        zero.append(step)
    zero.reverse()
    if len(zero) < MIN_LINES:
        return
    yield Finding(
        id="loss.zero-gradients",
        severity="error",
        message=f"the log's gradient norm is 0 from step {zero[0].first} on: the weights do not change",
        steps=(zero[0].first, zero[-1].step),
        lines=(stats.location(zero[0]), stats.location(zero[-1])),
        evidence=(Evidence("lines with a gradient norm of 0", float(len(zero)), "", float(len(rows)), "lines"),),
        remedies=(
            remedies.advice("inspect labels and loss masks of a few samples", why="masked tokens have no gradient"),
            remedies.advice("check that weights require gradients and the loss is not detached", why="frozen weights"),
        ),
    )


def loss_scale(stats: RunStats) -> Iterator[Finding]:
    """The fp16 loss scale collapses: steps are skipped because gradients overflow."""
    rows = [step for step in stats.run.steps if step.loss_scale is not None]
    scales = [step.loss_scale for step in rows if step.loss_scale is not None]
    ended = [fault for fault in stats.fatal if fault.name == "loss_scale"]
    if ended:
        yield Finding(
            id="loss.scale-collapsed",
            severity="error",
            message="the fp16 loss scale reached its minimum, and the run ended: gradients overflow in every step",
            steps=None if ended[0].step is None else (ended[0].step, ended[0].step),
            lines=tuple(one.located for one in ended[:MAX_SHOWN]),
            remedies=tuple(_scale_remedies(stats)),
        )
        return
    if len(rows) < MIN_LINES or max(scales) <= 1.0:  # bf16 and fp32 have a constant scale of 1
        return
    later = rows[len(rows) // 2 :]
    skipped = sum(step.skipped for step in later) / sum(step.covers for step in later)
    low = scales[-1] < limit("scale_floor") and scales[-1] < max(scales)
    if not low and skipped <= share("skipped_share"):
        return
    yield Finding(
        id="loss.scale-collapsed",
        severity="error" if low else "warning",
        message=f"the loss scale fell from {max(scales):g} to {scales[-1]:g}, and {skipped:.0%} of the steps "
        "in the second half were skipped",
        steps=(later[0].first, later[-1].step),
        lines=(stats.location(later[0]), stats.location(later[-1])),
        evidence=(
            Evidence("final loss scale", scales[-1], "", limit("scale_floor"), "limit"),
            Evidence("skipped steps", round(skipped, 4), "of the second half", share("skipped_share"), "limit"),
        ),
        remedies=tuple(_scale_remedies(stats)),
    )


def _scale_remedies(stats: RunStats) -> Iterator[Remedy]:
    why = "bf16 has the range of fp32 and needs no loss scale"
    yield remedies.contract(stats, {"precision.compute": "bf16"}, why)
    yield from _stabilizing_remedies(stats)


def _is_not_finite(stats: RunStats, step: Step) -> bool:
    """Return whether a step is NaN or infinite; in fp16 gradients overflow regularly and the loss scale adapts."""
    if (step.loss_scale or 1.0) > 1.0:
        return bool(step.bad) or (step.loss is not None and not math.isfinite(step.loss))
    return not step.is_finite


def _what_is_not_finite(rows: Sequence[Step]) -> str:
    """Return what of some steps is NaN or infinite, with its verb: only the gradients, if every loss is finite."""
    if any(step.hides_nan for step in rows):
        return "loss or gradients (the Trainer logs a NaN loss as 0) are"
    if rows and all(step.loss is not None and math.isfinite(step.loss) and not step.bad for step in rows):
        return "the loss is finite, but the gradient norm is"
    return "loss or gradients are"


def _ended_not_finite(stats: RunStats) -> bool:
    return bool(stats.findings_of(not_a_number))


def _with_loss(stats: RunStats) -> list[Step]:
    """Return the steps with a finite loss; a repeated step counts as in the latest start."""
    found: dict[int, Step] = {}
    for step in stats.run.steps:
        if step.loss is not None and math.isfinite(step.loss):
            found[step.step] = step
    return [found[number] for number in sorted(found)]


def _finite(rows: Sequence[Step]) -> list[Step]:
    return [step for step in rows if step.loss is not None and math.isfinite(step.loss)]


def _last_stretch(stats: RunStats, found: list[Step]) -> list[Step]:
    """Return the NaN steps that no later start repeated: one that resumed before them got past them."""
    latest = max((step.attempt for step in stats.run.steps), default=0)
    resumed = min((step.first for step in stats.run.steps if step.attempt == latest), default=0)
    return [step for step in found if step.attempt == latest or step.step < resumed] or found


def climb(rows: Sequence[Step]) -> Step | None:
    """Return the step with the lowest loss if the lines after it climb without a break, far above it; else None.

    A log of few lines has no noise to compare with: every line must be above the one before.
    """
    rows = _finite(rows)
    if not rows:
        return None
    lowest = min(range(len(rows)), key=lambda at: (_loss(rows[at]), -at))
    losses = [_loss(step) for step in rows[lowest:]]
    is_climbing = all(later > earlier for earlier, later in pairwise(losses))
    if not is_climbing or len(losses) <= limit("climb_lines") or losses[0] <= 0:
        return None
    least = max(limit("climb_factor") * losses[0], (1 + share("diverged_share")) * _loss(rows[0]))
    return rows[lowest] if losses[-1] >= least else None


def climbs(stats: RunStats) -> bool:
    """Return whether the loss of a log of few lines climbs without a break."""
    return climb(_with_loss(stats)) is not None


def _rising_since(rows: Sequence[Step], now: float | None = None) -> Step | None:
    """Return the last step at the old level if the loss, by default the last one, is far above it; else None."""
    rows = _finite(rows)
    if len(rows) < 2 * MIN_LINES:
        return climb(rows)
    best, noise = _best(rows), _noise(rows)
    now = _loss(rows[-1]) if now is None else now
    if now <= best + share("diverging_share") * abs(best) or now <= best + limit("spike_sigmas") * noise:
        return None
    return max((step for step in rows if _loss(step) <= best + 3 * noise), key=lambda step: step.step)


def _norm_jumps(rows: Sequence[Step]) -> tuple[Evidence, ...]:
    """Return how often the gradient norm jumped above the lines before, and where first."""
    logged = [step for step in rows if step.grad_norm is not None and math.isfinite(step.grad_norm)]
    if len(logged) < 2 * MIN_LINES:
        return ()
    norms = np.array([step.grad_norm for step in logged], dtype=float)
    usual = running_median(norms, WINDOW - 1, 0)
    high = [i for i in range(MIN_LINES, len(norms)) if norms[i] > limit("norm_jump") * usual[i - 1] > 0]
    jumps = [group[0] for group in _groups([logged[i] for i in high])]
    if not jumps:
        return ()
    where = f"jumps of the gradient norm before it, the first in step {jumps[0].step} to {jumps[0].grad_norm:.4g}"
    return (Evidence(where, float(len(jumps)), "", 0.0, "limit"),)


def _loss(step: Step) -> float:
    return step.loss if step.loss is not None else math.nan


def _tail(rows: Sequence[Step]) -> int:
    return max(3, round(TAIL * len(rows)))


def _losses(rows: Sequence[Step]) -> NDArray[np.float64]:
    return np.array([_loss(step) for step in rows], dtype=float)


def _noise(rows: Sequence[Step]) -> float:
    """Return the noise of the loss between lines."""
    return deviation(np.diff(_losses(rows))) / math.sqrt(2) if len(rows) > 1 else 0.0


def _best(rows: Sequence[Step]) -> float:
    """Return the lowest running median of the loss."""
    size = max(3, min(WINDOW, _tail(rows)))
    return float(running_median(_losses(rows), size - 1, 0)[size - 1 :].min())


def _jumps(rows: Sequence[Step]) -> list[tuple[Step, float]]:
    """Return steps whose loss stands out from the lines before, with the level of those.

    The level is the median of the last lines: that of a long window lags behind a falling loss. Where those are part of
    the jump themselves, the long window's is lower.
    """
    losses = _losses(rows)
    before = np.minimum(*(running_median(losses, size - 1, 0)[MIN_LINES - 1 : -1] for size in (WINDOW, JUST_BEFORE)))
    typical = np.concatenate(([np.inf] * MIN_LINES, before))[: len(losses)]
    height = losses - typical
    above = (height > limit("spike_sigmas") * _noise(rows)) & (height > share("spike_share") * np.abs(typical))
    return [(rows[index], float(typical[index])) for index in np.flatnonzero(above).tolist()]


def _recovered(rows: Sequence[Step], jumps: Sequence[tuple[Step, float]], ends_well: bool) -> list[tuple[Step, float]]:
    """Return the jumps after which the loss came back; the run-up to a NaN or to divergence is no jump."""
    kept: list[tuple[Step, float]] = []
    by_step = {step.step: typical for step, typical in jumps}
    numbers = [step.step for step in rows]
    lowest = list(accumulate((_loss(step) for step in reversed(rows)), min))[::-1]  # from every line to the end
    for group in _groups([step for step, _ in jumps]):
        level = by_step[group[0].step]
        after = bisect_right(numbers, group[-1].step)
        height = max(_loss(step) for step in group) - level
        ended = after == len(rows)
        if (ended and ends_well) or (not ended and lowest[after] <= level + 0.5 * height):
            kept += [(step, by_step[step.step]) for step in group]
    return kept


def _groups(steps: Sequence[Step]) -> list[list[Step]]:
    """Group steps that follow each other closely into one jump."""
    groups: list[list[Step]] = []
    for step in steps:
        if groups and step.step - groups[-1][-1].step <= MIN_LINES * step.covers:
            groups[-1].append(step)
        else:
            groups.append([step])
    return groups


def _last_norm(rows: Sequence[Step]) -> Step | None:
    """Return the last step with a finite gradient norm."""
    return next((one for one in reversed(rows) if one.grad_norm is not None and math.isfinite(one.grad_norm)), None)


def _typical_norm(rows: Sequence[Step]) -> str:
    return f"median {median_of(step.grad_norm for step in rows) or 0.0:.4g}"


def _norm_evidence(rows: Sequence[Step]) -> tuple[Evidence, ...]:
    """Return the last gradient norm of the log beside its median."""
    last, typical = _last_norm(rows), median_of(step.grad_norm for step in rows)
    if last is None or last.grad_norm is None or typical is None:
        return ()
    return (Evidence(f"gradient norm in step {last.step}", last.grad_norm, "", round(typical, 6), "median"),)


def _growth(rows: Sequence[Step]) -> float | None:
    """Return the final gradient norm over its median; None if the log has too few."""
    norms = [step.grad_norm for step in rows if step.grad_norm is not None and math.isfinite(step.grad_norm)]
    if len(norms) < 2 * MIN_LINES:
        return None
    typical, end = median_of(norms), median_of(norms[-max(3, round(TAIL * len(norms))) :])
    return end / typical if typical and end is not None else None


def _starts_trained(stats: RunStats, first: float) -> bool:
    """Return whether a pretraining starts far below the loss of random weights, which is ln(vocabulary)."""
    if stats.case is None or stats.case.goal != "pretrain" or not stats.case.vocab:
        return False
    return first < share("trained_start") * math.log(float(stats.case.vocab))


def _random_guess(stats: RunStats) -> float | None:
    """Return the loss of guessing every token with the same probability; None for a model without a vocabulary."""
    return math.log(float(stats.case.vocab)) if stats.case is not None and stats.case.vocab else None


def _why_flat(stats: RunStats, rates: Sequence[float], always_zero: bool) -> tuple[str, tuple[Remedy, ...]]:
    recipe = stats.case.recipe if stats.case is not None else None
    if always_zero:
        why = "the learning rate is zero in every step"
        if recipe is None or not stats.states("optimizer.lr") or not recipe.optimizer.lr:
            return why, (remedies.advice("an optimizer.lr above zero", why="a nonzero learning rate"),)
        return why, (remedies.contract(stats, {"optimizer.lr": recipe.optimizer.lr}, "a nonzero learning rate"),)
    if _is_rising(rates):
        why = f"the learning rate is still in warm-up ({rates[-1]:.2g})"
        earlier = remedies.other_warmup(
            stats,
            lambda steps: max(1, min(steps // 4, stats.run.last_step)),
            "a shorter schedule.warmup_steps",
            "reaches the peak learning rate earlier",
        )
        return why, (earlier,)
    small = None if recipe is not None and recipe.optimizer.name == SGD else too_small(rates, stats)
    why, rate = small or ("the model does not learn", remedies.other_rate(stats, 3.0, "larger updates"))
    return why, (
        rate,
        remedies.advice("inspect labels and loss masks of a few samples", why="masked tokens have no gradient"),
        remedies.advice(
            "check that the optimizer has the weights and none are frozen", why="frozen weights do not change"
        ),
    )


def _usual_rate(stats: RunStats) -> Remedy | None:
    """Return the fix of a rule that finds the learning rate too high; half of such a rate would be too high as well."""
    if stats.case is None or not stats.states(LR):
        return _usual_logged_rate(stats)
    rate = stats.case.recipe.optimizer.lr
    _, cause = advised_rate(stats, rate, FAR_TOO_HIGH)
    if not cause:
        usual, cause = advised_rate(stats, rate)
        is_far = bool(cause) and rate >= limit("far_above_usual") * usual
        cause = f"{rate:.3g} is {rate / usual:.3g} times the usual rate: {cause}" if is_far else ""
    return remedies.other_rate(stats, 1.0, cause) if cause else None


def _usual_logged_rate(stats: RunStats) -> Remedy | None:
    """Return a usual rate if a log without a recipe shows one that is far above those of every goal."""
    highest = max((step.lr for step in stats.run.steps if step.lr), default=0.0)
    if highest < limit("far_above_usual") * max(USUAL_RATES.values()):
        return None
    usual = f"{stats.case.goal}" if stats.case is not None else ""
    rate = USUAL_RATES[usual] if usual else median_of(list(USUAL_RATES.values()))
    listed = ", ".join(f"{one:g} for {goal}" for goal, one in USUAL_RATES.items())
    why = f"{highest:g} is far above every usual learning rate: {listed}"
    return Remedy(try_=(format_override(LR, rate),), what="contract", why=why)


def _stabilizing_remedies(stats: RunStats, rising: Step | None = None) -> Iterator[Remedy]:
    """Yield remedies that stabilize training: first the rate if it is far too high, else what keeps the experiment."""
    recipe = stats.case.recipe if stats.case is not None else None
    which = "an earlier checkpoint" if rising is None else f"a checkpoint before step {rising.step}"
    why = "skips the batch that caused it" if rising is None else "the loss rises from there; later ones are damaged"
    suspect = suspect_rate(stats)
    if suspect is not None:
        yield stated_rate(stats, suspect)
    usual = None if suspect else _usual_rate(stats)  # then the rate is the cause, whatever the samples are
    lower = usual or remedies.other_rate(stats, 0.5, "smaller updates")
    if usual is not None:
        yield usual
    yield remedies.advice(f"resume from {which} with other samples", why=why)
    longer = remedies.other_warmup(
        stats, lambda steps: max(100, 2 * steps), "a longer schedule.warmup_steps", "slower warm-up"
    )
    if recipe is None:
        if usual is None:
            yield lower
        yield longer
        if stats.run.kind not in CLIPPED:
            why = "limits the effect of outlier gradients"
            yield Remedy(try_=("optimizer.clip_grad=1.0",), what="contract", why=why)
        return
    if not 0 < recipe.optimizer.clip_grad <= 1:
        yield remedies.contract(stats, {"optimizer.clip_grad": 1.0}, "limits the effect of outlier gradients")
    if usual is None and suspect is None:
        yield lower
    yield longer
    if recipe.precision.matmul != "same":
        yield remedies.contract(stats, {"precision.matmul": "same"}, "8-bit matmuls round more")
    if recipe.precision.compute == "fp16":
        yield remedies.contract(stats, {"precision.compute": "bf16"}, "bf16 has the range of fp32")
    if not recipe.train.z_loss and recipe.goal == "pretrain":
        drift = remedies.contract(stats, {"train.z_loss": 1e-4}, "keeps the logits from drifting")
        if drift.there or stats.run.kind not in CLIPPED:  # few frameworks have this loss
            yield drift
