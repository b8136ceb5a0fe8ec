"""The learning rate that a log shows, compared with that of the file or recipe that is named as what ran."""

from __future__ import annotations

from typing import NamedTuple

from meshwright.doctor.advised_rate import LR
from meshwright.doctor.run import Run
from meshwright.doctor.run_stats import RunStats
from meshwright.recipes import index

HIGHER = 1.05  # times the stated peak; a log rounds by less
LOWER = 1.25  # times below it, after the peak: the first logged step of a decay may be past the highest one
SUSPECT = 3.0  # times the rate of a shipped recipe, of a loss that diverges; tuned rates differ by less
FIRST_STEPS = 0.1  # share of the run within which a log must start to show the peak


class OtherRate(NamedTuple):
    """A peak learning rate of a log that is not the one that was stated."""

    logged: float
    stated: float
    source: str  # file or recipe

    @property
    def text(self) -> str:
        """Both rates, as the end of a sentence."""
        times = self.logged / self.stated
        how = f"{times:.3g} times" if times > 1 else f"{1 / times:.3g} times below"
        return f"{self.logged:.3g} in the log, {how} the {self.stated:.3g} of {self.source}"


def rate_unlike_file(stats: RunStats) -> OtherRate | None:
    """Return the log's peak rate if it is not that of the user's file; a rate that still rises is not below it."""
    header, case = stats.run.header, stats.case
    if case is None or not header.file or LR not in header.file_fields:
        return None
    peak, stated = stats.run.peak_rate, case.recipe.optimizer.lr
    if peak is None or not stated or peak <= 0:
        return None
    if peak > stated * HIGHER or (peak * LOWER < stated and _shows_peak(stats.run)):
        return OtherRate(peak, stated, header.file)
    return None


def suspect_rate(stats: RunStats) -> OtherRate | None:
    """Return a rate above that of the user's file, or far above that of the case's shipped recipe."""
    found = rate_unlike_file(stats)
    if found is not None:
        return found if found.logged > found.stated else None
    case, peak = stats.case, stats.run.peak_rate
    if case is None or peak is None or stats.run.header.file or stats.run.header.recipe is not None:
        return None
    name = case.recipe.name
    usual = index.load(name).optimizer.lr if index.is_known(name) else 0.0
    return OtherRate(peak, usual, name) if usual and peak >= SUSPECT * usual else None


def _shows_peak(run: Run) -> bool:
    """Return whether a log has the first steps of its run and goes on after its highest rate."""
    rows = [step for step in run.steps if step.lr]
    highest = max(step.lr or 0.0 for step in rows)
    total = run.header.total_steps or run.last_step
    starts_early = rows[0].first <= max(1.0, FIRST_STEPS * total)
    return starts_early and sum(step.lr == highest for step in rows) + (rows[-1].lr != highest) > 1
