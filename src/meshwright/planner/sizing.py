"""Choose the number of GPUs: smallest that fits, most efficient, and days and cost for a token budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from meshwright import costs
from meshwright.clusters import Gpu, cluster
from meshwright.planner.baseline import Baseline, baseline_for
from meshwright.planner.goodput import Goodput, goodput
from meshwright.planner.plan import Question
from meshwright.planner.recommend import with_layout
from meshwright.planner.search import best

DAY = 86400.0
GB_PER_GIB = 1.073741824
MAX_GPUS = 131072


class Size(msgspec.Struct, frozen=True):
    """One GPU count with its best layout."""

    gpus: int
    layout: str
    fits: bool
    total_gib: float
    step_s: float
    tokens_per_s: float
    tokens_per_s_per_gpu: float
    mfu: float
    goodput: Goodput
    days: float | None = None
    cost: float | None = None


class Sizing(msgspec.Struct, frozen=True):
    """All tried counts, the smallest that fits and the most efficient."""

    sizes: tuple[Size, ...]
    smallest: Size | None
    most_efficient: Size | None


def gpu_counts(gpu: Gpu, most: int = MAX_GPUS) -> list[int]:
    """Return usual GPU counts: powers of two, and 1.5 times those in full nodes."""
    found = {2**i for i in range(18)} | {3 * 2**i * gpu.gpus_per_node for i in range(15)}
    return sorted(n for n in found if n <= most)


def size(
    question: Question,
    overrides: Sequence[str] = (),
    tokens: float | None = None,
    price: float | None = None,
    most: int = MAX_GPUS,
) -> Sizing:
    """Return sizes for a question's model, goal and GPU type; its GPU count is ignored."""
    gpu = question.cluster.gpu
    found = []
    for count in gpu_counts(gpu, most):
        baseline = baseline_for(msgspec.structs.replace(question, cluster=cluster(f"{count}x{gpu.name}")), overrides)
        sized = _size_for(baseline, tokens, price)
        if sized is not None:
            found.append(sized)
    fitting = [s for s in found if s.fits]
    below = [s for s in found if not fitting or s.gpus < fitting[0].gpus][-1:]
    return Sizing(
        sizes=(*below, *(s for s in found if fitting and s.gpus >= fitting[0].gpus)),
        smallest=fitting[0] if fitting else None,
        most_efficient=max(fitting, key=lambda s: s.tokens_per_s_per_gpu * s.goodput.share, default=None),
    )


def describe_layout(layout: dict[str, Any]) -> str:
    """Describe a layout in one line."""
    degrees = " ".join(f"{name} {layout[name]}" for name in ("tp", "pp", "cp", "ep") if layout[name] > 1)
    return f"{degrees or 'data parallel'}, micro {layout['micro_batch_size']}, recompute {layout['recompute']}"


def _size_for(baseline: Baseline, tokens: float | None, price: float | None) -> Size | None:
    chosen = best(baseline.case, baseline.pinned)
    if chosen is None:  # no layout divides this count
        return None
    case = baseline.case.rebuild(with_layout(baseline.requested, chosen.layout))
    estimate = costs.estimate(case)
    gpus = case.cluster.world
    rate = float(estimate.tokens_per_s_per_gpu)
    state = float(estimate.memory.weights + estimate.memory.optimizer) * GB_PER_GIB
    useful = goodput(gpus, state)
    days = tokens / (rate * gpus * useful.share * DAY) if tokens and useful.share > 0 and estimate.fits else None
    return Size(
        gpus=gpus,
        layout=describe_layout(chosen.layout),
        fits=bool(estimate.fits),
        total_gib=float(estimate.memory.total),
        step_s=float(estimate.step_s),
        tokens_per_s=rate * gpus,
        tokens_per_s_per_gpu=rate,
        mfu=float(estimate.mfu),
        goodput=useful,
        days=days,
        cost=days * 24 * gpus * price if days is not None and price is not None else None,
    )
