"""The loss: not a number, rising, spiking or standing still; gradients that grow; a loss scale that collapses."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import median

import numpy as np
from numpy.typing import NDArray

from meshwright.doctor import remedies
from meshwright.doctor.finding import Evidence, Finding, Remedy
from meshwright.doctor.run import Step
from meshwright.doctor.run_stats import View, deviation, middle, running_median
from meshwright.doctor.thresholds import limit, share

WINDOW = 50  # lines that a running median looks back on
FEWEST = 10  # lines that it needs
BEFORE = 20  # lines before a loss that is not a number in which gradients are looked at
SHOWN = 3
TAIL = 0.1  # of the lines: the end of a run


def not_a_number(view: View) -> Iterator[Finding]:
    """Loss or gradients are not a number."""
    bad = [step for step in view.run.steps if _is_bad(view, step)]
    told = [fault for fault in view.fatal if fault.name == "loss_not_a_number"]
    if not bad and not told:
        return
    first = bad[0].step if bad else told[0].step
    before = [step for step in view.run.steps if first is None or step.step < first]
    growth = _growth(before)
    count = sum(max(step.bad, step.skipped, 1) for step in bad)
    text = f"loss or gradients are not a number{'' if first is None else f' in step {first}'}"
    text += f", and in {count} steps in all" if count > 1 else ""
    if growth is not None and growth > limit("growing_gradients"):
        text += f". The gradient norm had grown {growth:.1f} times in the {min(BEFORE, len(before))} lines before"
    yield Finding(
        id="loss.not-a-number",
        severity="error",
        message=text,
        steps=None if first is None else (first, bad[-1].step if bad else first),
        lines=(
            *(view.place(step) for step in bad[:SHOWN]),
            *(f"{one.file}:{one.line} {one.text}" for one in told[:SHOWN]),
        ),
        evidence=(
            Evidence("steps", float(max(count, 1)), "", 0.0, "limit"),
            *(() if growth is None else (Evidence("gradient norm before it, over its median", round(growth, 2), "×"),)),
        ),
        remedies=tuple(_calmer(view)),
    )


def diverging(view: View) -> Iterator[Finding]:
    """The loss rises and stays up."""
    rows = _with_loss(view)
    if len(rows) < limit("enough_for_trends") or _ended_bad(view):
        return
    best, at = _best(rows)
    tail = rows[-_tail(rows) :]
    now = median(_loss(step) for step in tail)
    noise = _noise(rows)
    if now <= best + share("diverging_share") * abs(best) or now <= best + limit("spike_sigmas") * noise:
        return
    growth = _growth(rows)
    yield Finding(
        id="loss.diverging",
        severity="error",
        message=f"the loss was {best:.3g} around step {at} and is {now:.3g} at the end",
        steps=(at, rows[-1].step),
        lines=(view.place(next(step for step in rows if step.step >= at)), view.place(rows[-1])),
        evidence=(
            Evidence("loss at the end", round(now, 4), "", round(best, 4), "the best before"),
            *(
                ()
                if growth is None
                else (Evidence("gradient norm at the end, over its median", round(growth, 2), "×"),)
            ),
        ),
        remedies=tuple(_calmer(view)),
    )


def spikes(view: View) -> Iterator[Finding]:
    """The loss jumps and comes back."""
    rows = _with_loss(view)
    if view.finds(diverging) or len(rows) < 2 * FEWEST:
        return
    if _ended_bad(view):
        rows = rows[:-BEFORE]
    jumps = _jumps(rows)
    if not jumps:
        return
    found = [step for step, _ in jumps]
    highest, usual = max(jumps, key=lambda one: _loss(one[0]))
    times = len(_groups(found))
    yield Finding(
        id="loss.spikes",
        severity="warning",
        message=f"the loss jumped {times} time{'s' * (times > 1)} and came back; in step {highest.step} from "
        f"{usual:.3g} to {_loss(highest):.3g}",
        steps=(found[0].step, found[-1].step),
        lines=tuple(view.place(step) for step in found[:SHOWN]),
        evidence=(
            Evidence("highest", round(_loss(highest), 4), "", round(usual, 4), "the median before"),
            Evidence("jumps", float(times), "", 0.0, "limit"),
        ),
        remedies=tuple(_calmer(view)),
    )


def flat(view: View) -> Iterator[Finding]:
    """The loss does not fall where it should."""
    rows = _with_loss(view)
    if view.data_is_made_up or len(rows) < FEWEST or _ended_bad(view):
        return
    rates = [step.lr for step in rows if step.lr is not None]
    covered = rows[-1].step - rows[0].first + 1
    zero = len(rates) >= FEWEST and all(rate == 0 for rate in rates)
    from_start = rows[0].first <= FEWEST
    if not zero and (not from_start or covered < limit("flat_steps") or len(rows) < limit("enough_for_trends")):
        return
    some = _tail(rows)
    first, last = (median(map(_loss, part)) for part in (rows[:some], rows[-some:]))
    first = max(first, _loss(rows[0]))
    if not zero and _noise(rows) > share("flat_drop") * abs(first) * math.sqrt(some):
        return  # so little could not be seen
    fallen = (first - last) / abs(first) if first else 0.0
    if not zero and (fallen >= share("flat_drop") or last > first * (1 + share("diverging_share"))):
        return
    text, tries = _why_flat(view, rates, zero)
    yield Finding(
        id="loss.flat",
        severity="warning",
        message=f"the loss is {last:.4g} after {covered} steps and was {first:.4g}: {text}",
        steps=(rows[0].first, rows[-1].step),
        lines=(view.place(rows[0]), view.place(rows[-1])),
        evidence=(
            Evidence("fallen", round(fallen, 4), "of the first loss", share("flat_drop"), "limit"),
            *(() if not rates else (Evidence("learning rate at the end", rates[-1]),)),
        ),
        remedies=tries,
    )


def growing_gradients(view: View) -> Iterator[Finding]:
    """Gradients grow while the loss still holds: it rarely does for long."""
    rows = [step for step in _with_loss(view) if step.grad_norm is not None]
    if len(rows) < limit("enough_for_trends") or _ended_bad(view) or view.finds(diverging):
        return
    growth = _growth(rows)
    if growth is None or growth <= limit("growing_gradients"):
        return
    yield Finding(
        id="loss.growing-gradients",
        severity="warning",
        message=f"the gradient norm at the end is {growth:.1f} times its median, though the loss still holds",
        steps=(rows[-_tail(rows)].step, rows[-1].step),
        lines=(view.place(rows[-1]),),
        evidence=(Evidence("gradient norm", round(growth, 2), "×", limit("growing_gradients"), "limit"),),
        remedies=tuple(_calmer(view)),
    )


def loss_scale(view: View) -> Iterator[Finding]:
    """The loss scale of fp16 collapses: steps are skipped because gradients do not fit the format."""
    rows = [step for step in view.run.steps if step.loss_scale is not None]
    scales = [step.loss_scale for step in rows if step.loss_scale is not None]
    if len(rows) < FEWEST or max(scales) <= 1.0:  # bf16 and fp32 have a scale of 1
        return
    later = rows[len(rows) // 2 :]
    skipped = sum(step.skipped for step in later) / sum(step.covers for step in later)
    low = scales[-1] < limit("scale_floor") and scales[-1] < max(scales)
    if not low and skipped <= share("skipped_share"):
        return
    yield Finding(
        id="loss.scale-collapsed",
        severity="error" if low else "warning",
        message=f"the loss scale fell from {max(scales):g} to {scales[-1]:g}, and {skipped:.0%} of the last half's "
        "steps were skipped",
        steps=(later[0].first, later[-1].step),
        lines=(view.place(later[0]), view.place(later[-1])),
        evidence=(
            Evidence("loss scale at the end", scales[-1], "", limit("scale_floor"), "limit"),
            Evidence("skipped steps", round(skipped, 4), "of the last half", share("skipped_share"), "limit"),
        ),
        remedies=(
            remedies.contract(view, {"precision.compute": "bf16"}, "bf16 has the range of fp32 and needs no scale"),
            *_calmer(view),
        ),
    )


def _is_bad(view: View, step: Step) -> bool:
    """Whether a step is not a number; in fp16 gradients overflow as a rule, and the loss scale answers."""
    if (step.loss_scale or 1.0) > 1.0:
        return bool(step.bad) or (step.loss is not None and not math.isfinite(step.loss))
    return not step.is_number


def _ended_bad(view: View) -> bool:
    return bool(view.finds(not_a_number))


def _with_loss(view: View) -> list[Step]:
    """The steps of the last start with a finite loss; a run that goes on repeats what it lost."""
    found: dict[int, Step] = {}
    for step in view.run.steps:
        if step.loss is not None and math.isfinite(step.loss):
            found[step.step] = step
    return [found[number] for number in sorted(found)]


def _loss(step: Step) -> float:
    return step.loss if step.loss is not None else math.nan


def _tail(rows: Sequence[Step]) -> int:
    return max(3, round(TAIL * len(rows)))


def _losses(rows: Sequence[Step]) -> NDArray[np.float64]:
    return np.array([_loss(step) for step in rows], dtype=float)


def _noise(rows: Sequence[Step]) -> float:
    """How much the loss moves from line to line, for no reason."""
    return deviation(np.diff(_losses(rows))) / math.sqrt(2) if len(rows) > 1 else 0.0


def _best(rows: Sequence[Step]) -> tuple[float, int]:
    """The lowest running median of the loss, and the step in the middle of it."""
    size = max(3, min(WINDOW, _tail(rows)))
    medians = running_median(_losses(rows), size - 1, 0)[size - 1 :]
    place = int(np.argmin(medians))
    return float(medians[place]), rows[place + size // 2].step


def _jumps(rows: Sequence[Step]) -> list[tuple[Step, float]]:
    """Steps whose loss stands out of the lines before them, with the median of those."""
    losses = _losses(rows)
    usual = np.concatenate(([np.inf] * FEWEST, running_median(losses, WINDOW - 1, 0)[FEWEST - 1 : -1]))[: len(losses)]
    height = losses - usual
    above = (height > limit("spike_sigmas") * _noise(rows)) & (height > share("spike_share") * np.abs(usual))
    return [(rows[place], float(usual[place])) for place in np.flatnonzero(above).tolist()]


def _groups(steps: Sequence[Step]) -> list[list[Step]]:
    """Steps that follow each other closely are one jump."""
    groups: list[list[Step]] = []
    for step in steps:
        if groups and step.step - groups[-1][-1].step <= FEWEST * step.covers:
            groups[-1].append(step)
        else:
            groups.append([step])
    return groups


def _growth(rows: Sequence[Step]) -> float | None:
    """The gradient norm of the last lines over its median; None where too little is told."""
    norms = [step.grad_norm for step in rows if step.grad_norm is not None and math.isfinite(step.grad_norm)]
    if len(norms) < 2 * FEWEST:
        return None
    usual, end = middle(norms), middle(norms[-max(3, round(TAIL * len(norms))) :])
    return end / usual if usual and end is not None else None


def _why_flat(view: View, rates: Sequence[float], zero: bool) -> tuple[str, tuple[Remedy, ...]]:
    recipe = view.case.recipe if view.case is not None else None
    if zero:
        why = "the learning rate is zero all along"
        lr = recipe.optimizer.lr if recipe else 3e-4
        return why, (remedies.contract(view, {"optimizer.lr": lr}, "a rate above zero"),)
    rising = len(rates) >= FEWEST and rates[-1] > rates[0] and rates[-1] == max(rates)
    if rising:
        warm = recipe.schedule.warmup_steps if recipe else 500
        shorter = max(1, min(warm // 4, view.run.last_step))
        why = f"the learning rate still warms up ({rates[-1]:.2g})"
        return why, (remedies.contract(view, {"schedule.warmup_steps": shorter}, "the peak is reached earlier"),)
    lr = recipe.optimizer.lr if recipe else (max(rates) if rates else 1e-4)
    return "nothing is learnt", (
        remedies.contract(view, {"optimizer.lr": float(f"{3 * lr:.3g}")}, "a larger step"),
        remedies.plainly("look at labels and masks of a few samples", why="tokens that do not count teach nothing"),
        remedies.plainly("see that the optimizer has the weights (nothing frozen)", why="frozen weights do not move"),
    )


def _calmer(view: View) -> Iterator[Remedy]:
    """What makes a training steadier; all of it is a new experiment, but the last is cheap to look at."""
    recipe = view.case.recipe if view.case is not None else None
    yield remedies.plainly("go on from a checkpoint before it, with other samples", why="one bad batch is passed by")
    if recipe is None:
        most = max((step.lr for step in view.run.steps if step.lr), default=None)
        lower = "a lower optimizer.lr" if most is None else f"optimizer.lr={most / 2:.3g}"
        yield remedies.plainly(lower, what="action" if most is None else "contract", why="smaller steps")
        yield remedies.plainly("a longer schedule.warmup_steps", why="a gentler start")
        yield Remedy(try_=("optimizer.clip_grad=1.0",), what="contract", why="single gradients weigh less")
        return
    if not 0 < recipe.optimizer.clip_grad <= 1:
        yield remedies.contract(view, {"optimizer.clip_grad": 1.0}, "single gradients weigh less")
    yield remedies.contract(view, {"optimizer.lr": float(f"{recipe.optimizer.lr / 2:.3g}")}, "smaller steps")
    longer = max(100, 2 * recipe.schedule.warmup_steps)
    yield remedies.contract(view, {"schedule.warmup_steps": longer}, "a gentler start")
    if recipe.precision.matmul != "same":
        yield remedies.contract(view, {"precision.matmul": "same"}, "8-bit products round more")
    if recipe.precision.compute == "fp16":
        yield remedies.contract(view, {"precision.compute": "bf16"}, "bf16 does not overflow")
    if not recipe.train.z_loss and recipe.goal == "pretrain":
        yield remedies.contract(view, {"train.z_loss": 1e-4}, "logits are kept from drifting away")
