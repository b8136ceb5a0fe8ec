"""How a run saves before its scheduler ends it, in the keys of the framework that ran."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from meshwright.doctor.finding import Remedy
from meshwright.doctor.run_stats import RunStats
from meshwright.doctor.their_keys import framework_of, stated_settings
from meshwright.launch.other_frameworks import CHECKOUTS, SAVE_MINUTES

ENDS = ("time_limit", "terminated", "preemption")
"""Ends that a signal announces."""
SIGNAL = "#SBATCH --signal=TERM@300"
TO_RANKS = "SLURM sends SIGTERM to the ranks 300 s before the limit (B:TERM would end only the batch shell)"
LEAST_STEPS = 4  # checkpoints of a run as short as this one


class Way(NamedTuple):
    """A setting with which a framework saves before the end, and why it does."""

    key: str  # empty: it does so by itself
    written: str
    why: str
    with_signal: bool = True


_MEGATRON = "saves a checkpoint on SIGTERM and ends"
_TIMED = "saves and ends after N minutes: 10 fewer than the time limit; needs no signal"
WAYS: Mapping[str, tuple[Way, ...]] = {
    "megatron-lm": (
        Way("exit_signal_handler", "--exit-signal-handler", _MEGATRON),
        Way("exit_duration_in_mins", "--exit-duration-in-mins N", _TIMED, with_signal=False),
    ),
    "megatron-bridge": (
        Way("train.exit_signal_handler", "train.exit_signal_handler=true", _MEGATRON),
        Way("train.exit_duration_in_mins", "train.exit_duration_in_mins=N", _TIMED, with_signal=False),
    ),
    "meshwright": (Way("", "", "it saves a checkpoint on SIGTERM by itself"),),
    "automodel": (Way("", "", CHECKOUTS["automodel"].how),),
    "kempnerforge": (Way("", "", CHECKOUTS["kempnerforge"].how),),
    "transformers": (
        Way("", "enable_jit_checkpoint: true", "the Trainer of transformers 5 saves on SIGTERM; older ones do not"),
    ),
}
"""By framework; the others do not save on a signal."""


def saving_remedies(stats: RunStats) -> Iterator[Remedy]:
    """Yield what makes the run save before its next end: a signal that it handles, or a shorter interval."""
    run = stats.run
    name = "transformers" if run.kind == "transformers" else framework_of(run) or run.kind
    ways = WAYS.get(name, ())
    stated = stated_settings(run) if ways and ways[0].key else {}
    for way in ways:
        is_on = way.key in stated and str(stated[way.key].value) not in ("False", "false", "None")
        written = [] if is_on or not way.written else [way.written]
        if way.with_signal:
            why = TO_RANKS if not written and way.key else f"{way.why}; {TO_RANKS}"
            yield Remedy(try_=(*written, SIGNAL), what="action", why=why)
        elif written:
            yield Remedy(try_=tuple(written), what="action", why=way.why)
    if name == "transformers" or (name in CHECKOUTS and not CHECKOUTS[name].saves):
        yield from _interval(stats, name)
    yield Remedy(
        try_=(f"meshwright launch {'RECIPE' if name == 'meshwright' else 'FILE'} --scheduler slurm",),
        what="action",
        why="writes a job that is signaled before its limit, is requeued and resumes",
    )


def _interval(stats: RunStats, name: str) -> Iterator[Remedy]:
    """Yield a shorter interval between checkpoints, which is all that a framework without a signal has."""
    last = stats.run.last_step
    if not stats.run.numbered or last < LEAST_STEPS:
        return
    every = last // LEAST_STEPS
    if stats.step_s:
        every = min(every, max(1, round(SAVE_MINUTES * 60 / stats.step_s)))
    how = "" if name == "transformers" else f"{CHECKOUTS[name].how}: "
    why = f"{how}the end loses at most {every:,} steps"
    yield Remedy(try_=(f"checkpoint.save_every={every}",), what="layout", why=why)
