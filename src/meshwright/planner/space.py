"""Every layout worth pricing for a case, as numpy columns; the contract stays as it is."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import gcd
from typing import NamedTuple

import numpy as np

from meshwright.recipes.case import Case
from meshwright.rules.domains import divisors

MICRO_BATCHES = (1, 2, 4, 8)
RECOMPUTE = ("none", "selective", "full")
CHUNKS = (1, 2, 4)  # virtual stages per rank
MOST_STAGES = 64
SHORTEST_PIECE = 1024  # tokens per context-parallel rank below which ring steps cannot hide their exchange


class Axes(NamedTuple):
    """The degrees that cut the model."""

    tp: int
    pp: int
    cp: int
    ep: int


def axes(case: Case) -> Iterator[Axes]:
    """Degrees whose product divides the GPUs; tp inside the fast domain, context pieces not too short."""
    world, multiplies = case.cluster.world, case.engine == "kempnerforge"
    for tp in (d for d in divisors(world) if d <= case.nvlink_domain):
        for pp in (d for d in divisors(world // tp) if d <= min(case.layers, MOST_STAGES)):
            for cp in (d for d in divisors(world // tp // pp) if d == 1 or case.seq_length // d >= SHORTEST_PIECE):
                ranks = world // (tp * pp * cp) if multiplies else world // pp
                for ep in divisors(gcd(case.experts, ranks)) if case.is_moe else (1,):
                    yield Axes(tp, pp, cp, ep)


def balanced_stages(layers: int, chunks: int) -> tuple[int, ...]:
    """Layers per stage chunk when they do not divide: the ends, which also hold embedding and head, get the fewer."""
    low, more = divmod(layers, chunks)
    start = (chunks - more) // 2
    return tuple(low + (start <= i < start + more) for i in range(chunks))


def candidates(case: Case) -> Iterator[Case]:
    """Batches of layouts as columns: one batch for all even splits, one for each uneven number of stages."""
    found = list(axes(case))
    stages = sorted({(a.pp, vp) for a in found for vp in (CHUNKS if a.pp > 1 else (1,)) if a.pp * vp <= case.layers})
    even = [(pp, vp) for pp, vp in stages if case.layers % (pp * vp) == 0]
    yield _batch(case, found, even, ())
    for pp, vp in stages:
        if (pp, vp) not in even and vp == 1:
            yield _batch(case, found, [(pp, vp)], balanced_stages(case.layers, pp * vp))


def _batch(case: Case, found: list[Axes], stages: list[tuple[int, int]], stage_layers: tuple[int, ...]) -> Case:
    most = max(case.global_batch_size, 1)
    rows = [
        (*a, vp, micro, recompute)
        for a, (pp, vp) in product(found, stages)
        if a.pp == pp
        for micro, recompute in product((m for m in MICRO_BATCHES if m <= most), RECOMPUTE)
    ]
    tp, pp, cp, ep, vp, micro, recompute = zip(*rows, strict=True)
    tp_column, vp_column = np.array(tp), np.array(vp)
    return case.replace(
        tp=tp_column,
        pp=np.array(pp),
        cp=np.array(cp),
        ep=np.array(ep),
        vp=vp_column,
        micro_batch_size=np.array(micro),
        recompute=np.array(recompute),
        pp_schedule=np.where(vp_column > 1, "interleaved_1f1b", "1f1b"),
        sp=(tp_column > 1) & bool(case.strategy != "megatron_fsdp"),
        etp=1,
        dp_shard=-1,
        dp_replicate=1,
        stage_layers=stage_layers,
        embedding_as_layer=False,
        head_as_layer=False,
        recompute_modules=(),
        recompute_layers=0,
    )
