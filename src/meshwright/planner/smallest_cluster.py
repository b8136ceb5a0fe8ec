"""Find the smallest number of GPUs on which a training fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from meshwright.clusters import Cluster
from meshwright.costs.state import least_state_gib
from meshwright.planner.baseline import Baseline, baseline_for, baseline_recipe
from meshwright.planner.gpu_counts import gpu_counts, node_of, resized
from meshwright.planner.levers import fits_with_levers, levers_of, with_levers
from meshwright.planner.may_fit import MayFit, may_fit
from meshwright.planner.plan import Plan, Question
from meshwright.planner.search import Candidate, any_fits, any_legal, best
from meshwright.recipes.types import Recipe

MAX_SEARCHED_GPUS = 16384
FIRST_COUNTS = 10  # counts that are estimated together before they are searched; then as many again


class Smallest(NamedTuple):
    """The smallest cluster on which a training fits, with levers of layout kind as in `size`, and without offload."""

    cluster: Cluster | None = None
    without_offload: Cluster | None = None


def smallest_fit(plan: Plan, overrides: Sequence[str] = (), most: int = MAX_SEARCHED_GPUS) -> Smallest:
    """Return the smallest clusters of the same nodes on which a plan's training fits.

    It is never the cluster of a plan that does not fit: its search found no layout there.
    """
    node, found = node_of(plan.question), Smallest()
    case, recipe = plan.case, _own_recipe(plan, overrides)
    state = least_state_gib(case) * case.cluster.world  # no search finds a layout for fewer GPUs than hold it
    largest = max(case.capacity_gib, case.host_gib)
    asked = {n: resized(plan.question, n, node) for n in gpu_counts(node, most) if state / n <= largest}
    if not plan.estimate.fits:
        asked = {n: one for n, one in asked.items() if one.cluster != plan.question.cluster}

    def needs_host() -> bool:  # read while the loop runs
        return found.cluster is None

    for count, question, held in _worth_a_search(asked, overrides, needs_host, recipe):
        offloads = found.cluster is None and state / count <= case.host_gib
        if not offloads and state / count > case.capacity_gib:
            continue
        if count not in (held.with_offload if offloads else held.without_offload):
            continue
        baseline = baseline_for(question, overrides, recipe)
        cluster, offloaded = baseline.case.cluster, _needs_offload(baseline, count in held.without_offload, offloads)
        if offloaded is None:
            continue
        found = found if found.cluster else Smallest(cluster)
        if not offloaded:
            return found._replace(without_offload=cluster)
    return found


def _own_recipe(plan: Plan, overrides: Sequence[str]) -> Recipe | None:
    """Return the recipe or the file's training that the user named; None if the planner chose a recipe."""
    named = plan.question.recipe_words or plan.base != baseline_recipe(plan.question, overrides)
    return plan.base if named else None


def _needs_offload(baseline: Baseline, may_fit_without: bool, offloads: bool) -> bool | None:
    """Return whether the layout of `best_with_levers` uses host memory; None if there is none that fits."""
    case, pinned = baseline.case, baseline.pinned
    if not any_legal(case, pinned=pinned):
        return None
    if may_fit_without and (fits_with_levers(case, pinned, offloads=False) or any_fits(case, pinned)):
        return _is_faster_with_offload(baseline)
    return True if offloads and fits_with_levers(case, pinned, offloads=True) else None


def _is_faster_with_offload(baseline: Baseline) -> bool:
    """Return whether a training that fits without host memory is planned with it."""
    chosen = best_with_levers(baseline)
    return chosen is not None and "offload" in levers_of(chosen, baseline.case)


def _worth_a_search(
    asked: Mapping[int, Question], overrides: Sequence[str], offloads: Callable[[], bool], recipe: Recipe | None
) -> Iterator[tuple[int, Question, MayFit]]:
    """Yield every count with what may fit; a few counts are estimated at a time, as the smallest ones may do.

    `offloads` says whether host memory still matters: not after a count has been found that needs it.
    """
    groups: dict[str, list[int]] = {}
    for count, question in asked.items():
        base = recipe or baseline_recipe(question, overrides)
        groups.setdefault(base.name, []).append(count)
    ends = {
        name: tuple(baseline_for(asked[group[i]], overrides, recipe) for i in (0, -1)) for name, group in groups.items()
    }
    counts, start = list(asked), 0
    while start < len(counts):
        some = counts[start : start + max(FIRST_COUNTS, start)]
        start += len(some)
        without: frozenset[int] = frozenset()
        with_: frozenset[int] = frozenset()
        for name, group in groups.items():
            first, last = ends[name]
            clusters = [asked[count].cluster for count in some if count in group]
            if clusters:
                adapts = first.requested.layout != last.requested.layout
                held = may_fit(last.case, last.pinned, clusters, adapts, offloads())
                without, with_ = without | held.without_offload, with_ | held.with_offload
        for count in some:
            yield count, asked[count], MayFit(without, with_)


def best_with_levers(baseline: Baseline) -> Candidate | None:
    """Return the layout that `recommend` plans: levers are tried if nothing else leaves headroom."""
    found = best(baseline.case, baseline.pinned)
    return None if found is None else with_levers(baseline.case, baseline.pinned, found)
