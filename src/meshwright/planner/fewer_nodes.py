"""Fewer nodes that train as fast: where the batch divides into few layouts of all of them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from meshwright.clusters import Cluster
from meshwright.planner.divisors import node_counts
from meshwright.planner.search import Candidate, best, choose, score
from meshwright.planner.space import NODES_SPACE
from meshwright.recipes.case import Case

FASTER = "fewer nodes are faster"
CHEAPER = "fewer nodes are as fast"
TITLES = (FASTER, CHEAPER)
MIN_GAIN = 0.05  # of the step time
SAME_TIME = 1.03  # of the step time: as fast, within the error of the comparison
MIN_SAVED = 0.1  # of the GPU-hours, if they are only as fast


class FewerNodes(NamedTuple):
    """A smaller number of the same nodes, with the best layout on them."""

    case: Case
    layout: Candidate


def is_worth(nodes: int, of: int, ratio: float) -> bool:
    """Return whether fewer nodes are worth a hint; `ratio` is their step time over that of all nodes."""
    return ratio <= 1 - MIN_GAIN or (ratio <= SAME_TIME and 1 - ratio * nodes / of >= MIN_SAVED)


def title(ratio: float) -> str:
    """Return what fewer nodes are."""
    return FASTER if ratio <= 1 - MIN_GAIN else CHEAPER


def fewer_nodes(case: Case, step_s: float, pinned: Mapping[str, Any] | None = None) -> FewerNodes | None:
    """Return fewer nodes on which the recipe is about as fast as this step time; None if there are none."""
    on, batch = case.cluster, int(case.global_batch_size)
    if on.nodes < 2 or batch % on.world == 0 or pinned:
        return None
    counts = node_counts(batch, on.nodes, on.gpus_per_node)
    cases = [case.rebuild(cluster=msgspec.structs.replace(on, nodes=nodes)) for nodes in counts]
    if len(cases) > 1:  # the fastest of a small search; its figure is of all of it
        scored = [(one.step_s, smaller) for smaller in cases if (one := _quickly(smaller)) is not None and one.fits]
        cases = [smaller for step, smaller in sorted(scored, key=lambda row: row[0])[:1] if step <= SAME_TIME * step_s]
    found = best(cases[0], {}) if cases else None
    if found is None or not found.fits or not is_worth(cases[0].cluster.nodes, on.nodes, found.step_s / step_s):
        return None
    return FewerNodes(cases[0], found)


def _quickly(case: Case) -> Candidate | None:
    return choose(list(score(case, {}, NODES_SPACE)), case)


def node_note(case: Case, step_s: float, words: Sequence[str] = ()) -> tuple[str, ...]:
    """Return a note on fewer nodes for a recipe whose layout takes this step time; `words` name it in a command."""
    found = fewer_nodes(case, step_s)
    if found is None:
        return ()
    ratio, on = found.layout.step_s / step_s, found.case.cluster
    if not is_worth(on.nodes, case.cluster.nodes, ratio):
        return ()
    planned = "" if on.racks and on.file else f"; {_command(on, words)} plans the layout there"
    return (f"{title(ratio)}: {why(case, on, step_s, found.layout.step_s)}{planned}",)


def _command(on: Cluster, words: Sequence[str]) -> str:
    """Return the command that plans the layout on fewer nodes, which is another one."""
    return f"{shlex.join(('meshwright', 'recommend', *words))} {on.nodes_setting}" if words else "meshwright recommend"


def why(case: Case, fewer: Cluster, step_s: float, other_s: float) -> str:
    """Return the figures of fewer nodes; the cost of a run is that of its GPU-hours."""
    on, ratio = case.cluster, other_s / step_s
    time = f"estimated {1 - ratio:.0%} less step time" if ratio <= 1 - MIN_GAIN else "as fast"
    return (
        f"{fewer.nodes_setting}: {time} on {fewer.nodes} of {on.nodes} nodes "
        f"({other_s:.3g} s in place of {step_s:.3g} s) at {1 - ratio * fewer.nodes / on.nodes:.0%} less cost: "
        f"{int(case.global_batch_size)} divides into few layouts of {on.world} GPUs"
    )
