"""Diagnoses of the gradients: their norm grows or is zero, or they overflow in fp16."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.doctor import loss, remedies
from meshwright.doctor.finding import Evidence, Finding, Remedy
from meshwright.doctor.loss_curve import MIN_LINES, finite_losses, norm_evidence, norm_growth, tail_lines
from meshwright.doctor.loss_remedies import stabilizing_remedies
from meshwright.doctor.run import Step
from meshwright.doctor.run_stats import RunStats
from meshwright.doctor.thresholds import limit, share


def growing_gradients(stats: RunStats) -> Iterator[Finding]:
    """Gradients grow while the loss is still stable, which rarely lasts."""
    rows = [step for step in finite_losses(stats) if step.grad_norm is not None]
    is_unstable = any(map(stats.findings_of, (loss.not_a_number, loss.diverging)))
    if len(rows) < limit("enough_for_trends") or is_unstable:
        return
    growth = norm_growth(rows)
    if growth is None or growth <= limit("growing_gradients"):
        return
    yield Finding(
        id="loss.growing-gradients",
        severity="warning",
        message=(
            f"the gradient norm is {rows[-1].grad_norm:.4g} in step {rows[-1].step}; the last "
            f"{tail_lines(rows)} lines are {growth:.1f} times the median of the run while the loss is still stable"
        ),
        steps=(rows[-tail_lines(rows)].step, rows[-1].step),
        lines=(stats.location(rows[-1]),),
        evidence=(
            *norm_evidence(rows),
            Evidence(
                "median of the end over that of the run", round(growth, 2), "×", limit("growing_gradients"), "limit"
            ),
        ),
        remedies=tuple(stabilizing_remedies(stats, onset=rows[-tail_lines(rows)].step)),
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
            lines=tuple(one.located for one in ended[: loss.MAX_SHOWN]),
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
    yield from stabilizing_remedies(stats)
