"""What a run of some size needs against failures: a checkpoint interval, spare nodes, replicas that fail alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import msgspec

from meshwright.planner.goodput import REPAIR_HOURS, STALL_S, Goodput, best_spares, goodput, in_repair

Measure = Callable[..., Goodput]
MOST_GPUS = 131072
MOST_REPLICAS = 16  # more only make the missing part smaller: with 16 it is below 3 % at 100,000 GPUs
REPLICA_GAIN = 0.05
"""Of the time: what replica fault tolerance must gain to pay for its all-reduce between replicas, which does not
overlap with the backward pass, and for the optimizer state that every replica holds."""


class Reliability(msgspec.Struct, frozen=True):
    """Recommended settings against failures for one GPU count, and the goodput with each."""

    gpus: int
    failures_per_day: float
    restart_s: float  # detection, replacement, start and load
    save_interval_s: float
    save_every: int  # the same in steps, at most those of the run
    share: float  # goodput with this interval and a replacement always at hand
    spare_nodes: int  # with the most training per node
    share_without_spares: float  # if every failed node has to be repaired first
    share_with_spares: float
    repair_hours: float  # assumed
    replicas: int  # that can fail alone; 1 if the model needs all GPUs
    stall_s: float  # of the other replicas after a failure
    share_with_replicas: float | None  # goodput if only the failed replica restarts
    replicas_pay: bool  # whether that gains more than it costs
    replicas_pay_from: int | None  # GPUs, for the same model; None up to MOST_GPUS


def reliability(
    gpus: int,
    node: int,
    state_gb: float,
    step_s: float,
    steps: int,
    smallest: int,
    background: bool = False,
    mtbf_hours: float | None = None,
    storage_gb_s: float | None = None,
) -> Reliability:
    """Return the settings for a run whose checkpoint has `state_gb` and whose model fits on `smallest` GPUs."""
    each = state_gb / gpus
    measure = partial(goodput, background=background, mtbf_hours=mtbf_hours, storage_gb_s=storage_gb_s)
    found = measure(gpus, each)
    every = min(max(round(found.save_interval_s / step_s), 1), max(steps, 1))
    interval = every * step_s
    nodes = max(gpus // node, 1)
    spares = best_spares(in_repair(found.failures_per_day), nodes)
    plain, none, some = (measure(gpus, each, interval, spares=count).share for count in (None, 0, spares))
    replicas, tolerant = _tolerant(gpus, state_gb, smallest, measure)
    return Reliability(
        gpus=gpus,
        failures_per_day=found.failures_per_day,
        restart_s=found.restart_s,
        save_interval_s=interval,
        save_every=every,
        share=plain,
        spare_nodes=spares,
        share_without_spares=none,
        share_with_spares=some,
        repair_hours=REPAIR_HOURS,
        replicas=replicas,
        stall_s=STALL_S,
        share_with_replicas=tolerant,
        replicas_pay=tolerant is not None and tolerant >= plain + REPLICA_GAIN,
        replicas_pay_from=next(_paying(node, state_gb, smallest, measure), None),
    )


def _tolerant(gpus: int, state_gb: float, smallest: int, measure: Measure) -> tuple[int, float | None]:
    """Return the number of replicas and the goodput if they fail alone; 1 and None if there is one."""
    replicas = min(gpus // max(smallest, 1), MOST_REPLICAS)
    if replicas < 2:
        return 1, None
    found = measure(gpus, state_gb / gpus, replicas=replicas)
    return replicas, found.share


def _paying(node: int, state_gb: float, smallest: int, measure: Measure) -> Iterator[int]:
    """Yield GPU counts, four per doubling, from which replica fault tolerance pays."""
    for count in (k * node * 2**i for i in range(15) for k in (4, 5, 6, 7)):
        if count > MOST_GPUS:
            return
        plain = measure(count, state_gb / count).share
        tolerant = _tolerant(count, state_gb, smallest, measure)[1]
        if tolerant is not None and tolerant >= plain + REPLICA_GAIN:
            yield count
