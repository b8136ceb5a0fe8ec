"""Every layout worth pricing for a case, as numpy columns; the contract stays as it is."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import gcd
from typing import Any

import msgspec
import numpy as np

from meshwright import rules
from meshwright.recipes.case import Case
from meshwright.rules.domains import divisors

MOST_STAGES = 64
SHORTEST_PIECE = 1024  # tokens per context-parallel rank below which ring steps cannot hide their exchange


class Space(msgspec.Struct, frozen=True):
    """What is tried beside the degrees tp, pp, cp and ep, which are all tried."""

    micro_batches: tuple[int, ...] = (1, 2, 4, 8)
    recompute: tuple[str, ...] = ("none", "selective", "full")
    schedules: tuple[tuple[str, int], ...] = (("1f1b", 1), ("interleaved_1f1b", 2), ("interleaved_1f1b", 4))
    cut_experts: tuple[bool, ...] = (False,)  # True: tp cuts the experts too (etp = tp)
    shard_nodes: tuple[int, ...] = (0,)  # nodes that share one copy of the state (HSDP); 0 means all of them
    strategies: tuple[str, ...] = ()  # beside the recipe's own


NEAR = Space()
"""What a recommendation weighs: the knobs a practitioner turns first."""

WHOLE = Space(
    micro_batches=(1, 2, 3, 4, 6, 8, 16),
    schedules=(
        ("1f1b", 1),
        *(("interleaved_1f1b", chunks) for chunks in (2, 3, 4, 5, 6, 8)),
        ("interleaved_zero_bubble", 2),
        ("zbv", 2),
        ("dualpipe_v", 2),
    ),
    cut_experts=(False, True),
    shard_nodes=(0, 1, 4),
    strategies=("ddp", "megatron_fsdp"),
)
"""Every value the engines know; GPipe and looped BFS are left out, which hold more and wait as long as their kin."""


class Axes(msgspec.Struct, frozen=True):
    """Degrees that cut the model, as equally long columns."""

    tp: Any
    pp: Any
    cp: Any
    ep: Any

    def at(self, rows: Any) -> Axes:
        """The chosen rows."""
        return Axes(self.tp[rows], self.pp[rows], self.cp[rows], self.ep[rows])


def axes(case: Case) -> Axes:
    """Degrees whose product divides the GPUs; tp inside the fast domain, context pieces not too short."""
    world, multiplies = case.cluster.world, case.engine == "kempnerforge"
    rows = []
    for tp in (d for d in divisors(world) if d <= case.nvlink_domain):
        for pp in (d for d in divisors(world // tp) if d <= min(case.layers, MOST_STAGES)):
            for cp in (d for d in divisors(world // tp // pp) if d == 1 or case.seq_length // d >= SHORTEST_PIECE):
                ranks = world // (tp * pp * cp) if multiplies else world // pp
                experts = divisors(gcd(case.experts, ranks)) if case.is_moe else (1,)
                rows += [(tp, pp, cp, ep) for ep in experts]
    return Axes(*np.array(rows).T)


def balanced_stages(layers: int, chunks: int) -> tuple[int, ...]:
    """Layers per stage chunk when they do not divide: the ends, which also hold embedding and head, get the fewer."""
    low, more = divmod(layers, chunks)
    start = (chunks - more) // 2
    return tuple(low + (start <= i < start + more) for i in range(chunks))


def candidates(case: Case, space: Space = NEAR) -> Iterator[Case]:
    """Batches of layouts as columns: all options for those degrees that are legal with the simplest ones."""
    for bare in degrees(case, space):
        legal = np.broadcast_to(rules.legal(bare), bare.tp.shape)
        if legal.any():
            yield from _schedules(bare, Axes(bare.tp, bare.pp, bare.cp, bare.ep).at(legal), space)


def degrees(case: Case, space: Space = NEAR) -> Iterator[Case]:
    """All degrees with the simplest options, legal or not: a batch for each strategy and way to split the layers."""
    for strategy in (case.strategy, *(s for s in space.strategies if s != case.strategy)):
        based = case.replace(**SIMPLEST, strategy=strategy)
        found = axes(based)
        even = based.layers % found.pp == 0
        yield _with_degrees(based.replace(stage_layers=()), found.at(even))
        for pp in sorted(set(found.pp[~even].tolist())):
            split = balanced_stages(based.layers, pp)
            yield _with_degrees(based.replace(stage_layers=split), found.at(found.pp == pp))


def _with_degrees(case: Case, found: Axes) -> Case:
    sp = (found.tp > 1) & (case.strategy != "megatron_fsdp")
    return case.replace(tp=found.tp, pp=found.pp, cp=found.cp, ep=found.ep, sp=sp)


SIMPLEST: dict[str, Any] = {
    "vp": 1,
    "pp_schedule": "1f1b",
    "micro_batch_size": 1,
    "recompute": "none",
    "recompute_modules": (),
    "recompute_layers": 0,
    "etp": 1,
    "dp_shard": -1,
    "dp_replicate": 1,
    "embedding_as_layer": False,
    "head_as_layer": False,
}
"""What every layout starts from: if its degrees are refused with these, no option makes them legal."""


def _schedules(case: Case, found: Axes, space: Space) -> Iterator[Case]:
    """Every schedule that these degrees can have; several chunks per stage only where the layers divide."""
    for schedule, chunks in space.schedules:
        if chunks == 1:
            yield _options(case.replace(pp_schedule=schedule), found, space)
        elif not case.stage_layers:
            divides = (found.pp > 1) & (case.layers % (found.pp * chunks) == 0)
            if divides.any():
                yield _options(case.replace(pp_schedule=schedule, vp=chunks), found.at(divides), space)


def _options(case: Case, found: Axes, space: Space) -> Case:
    """The product of these degrees with all options, as columns."""
    cut = space.cut_experts if case.is_moe else (False,)
    nodes = space.shard_nodes if case.cluster.nodes > 1 and case.strategy == "fsdp2" else (0,)
    micro = [m for m in space.micro_batches if m <= max(case.global_batch_size, 1)]
    options = list(product(micro, space.recompute, cut, nodes))
    count, many = len(found.tp), len(options)
    tp, pp, cp, ep = (np.repeat(column, many) for column in (found.tp, found.pp, found.cp, found.ep))
    micro_batch, recompute, cut_experts, shard_nodes = (
        np.tile(np.array(column), count) for column in zip(*options, strict=True)
    )
    dp = case.cluster.world // (tp * pp * cp)
    inside = np.maximum(shard_nodes * case.cluster.gpus_per_node // (tp * pp * cp), 1)
    return _with_degrees(case, Axes(tp, pp, cp, ep)).replace(
        etp=np.where(cut_experts, tp, 1),
        micro_batch_size=micro_batch,
        recompute=recompute,
        dp_replicate=np.where(shard_nodes > 0, np.maximum(dp // inside, 1), 1),
    )
