"""The Trainer's schedule beside a DeepSpeed config that has a scheduler: DeepSpeed's is the one that runs."""

from __future__ import annotations

from collections.abc import Iterator
from math import isclose

from meshwright.frameworks.trainer import Arguments
from meshwright.frameworks.trainer_fields import MIN_LR_SCHEDULE, ROWS, SCHEDULE, SCHEDULE_OPTIONS, argument_options
from meshwright.frameworks.types import Settings, SourcedValue
from meshwright.recipes.overrides import translate_value
from meshwright.rules.rule import Finding

SCHEDULES = {"WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}  # the others keep the rate after the warmup
MIN_RATIO, DEFAULT_RATIO = "scheduler.params.cos_min_ratio", 0.0001


def unused_schedule(settings: Settings, arguments: Arguments) -> Iterator[Finding]:
    """Yield a finding for the Trainer's schedule if the scheduler of the config is another."""
    named, ours = arguments.get(SCHEDULE), settings.get("scheduler.type")
    if named is None or named.unresolved or ours is None or ours.unresolved:
        return
    runs = SCHEDULES.get(str(ours.value), "constant")
    stated = str(named.value)
    ends_elsewhere = stated == MIN_LR_SCHEDULE and runs == "cosine"
    if ends_elsewhere and _same_end(settings, arguments):
        return
    if translate_value(ROWS[SCHEDULE], stated) == runs:
        return
    kept = "keeps the rate after the warmup" if runs == "constant" else f"is {runs}"
    if ends_elsewhere:
        ratio = _number(settings.get(MIN_RATIO), DEFAULT_RATIO)
        kept = f"ends at {ratio:g} of the learning rate (cos_min_ratio)"
    is_python = named.file.endswith(".py")
    yield Finding(
        "key.unused",
        "warning",
        SCHEDULE,
        f"{'' if is_python else '--'}{SCHEDULE} {stated} has no effect: the scheduler {ours.value} in "
        f"{ours.location} replaces it, and {kept}",
        (f"{ours.file}: without scheduler",),
        file=named.file,
        line=named.line,
    )


def _same_end(settings: Settings, arguments: Arguments) -> bool:
    """Return whether both cosines end at the same learning rate; also if one is known only when it runs."""
    given = argument_options(arguments.get(SCHEDULE_OPTIONS))
    ratio = _number(settings.get(MIN_RATIO), DEFAULT_RATIO)
    peak = _number(settings.get("optimizer.params.lr")) or _number(arguments.get("learning_rate"))
    share, end = given.get("min_lr_rate"), given.get("min_lr")
    if not isinstance(share, int | float) and isinstance(end, int | float) and peak:
        share = end / peak
    return not isinstance(share, int | float) or ratio is None or isclose(share, ratio, rel_tol=1e-6)


def _number(setting: SourcedValue | None, default: float | None = None) -> float | None:
    """Return a setting as a number, or the default of one that is not set; None if it is known only when it runs."""
    if setting is None:
        return default
    try:
        return None if setting.unresolved else float(str(setting.value))
    except ValueError:
        return None
