"""Candidate layouts of a case as numpy columns; the contract does not change."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from functools import lru_cache
from itertools import product
from typing import Any

import msgspec
import numpy as np

from meshwright import rules
from meshwright.clusters import Cluster
from meshwright.planner.odd_sizes import has_near_size, odd_micro_batches
from meshwright.recipes.capabilities import can_express
from meshwright.recipes.case import Case
from meshwright.recipes.engine_models import is_whole
from meshwright.recipes.stage_layers import BALANCED
from meshwright.rules.search_values import divisors

MAX_STAGES = 64
ALONE = -1  # in place of the nodes of an HSDP shard group: every data-parallel rank has a copy
MIN_CONTEXT_CHUNK = 1024  # tokens per cp rank below which ring steps cannot hide their communication
CHUNKS = {"1f1b": (1,), "gpipe": (1,), "zbv": (2,), "dualpipe_v": (2,)}
"""Chunks of layers per stage that a schedule supports; the others support any number from two."""


MODULE_SETS = (("layernorm", "moe_act"), ("mlp",), ("moe",), ("layernorm", "moe"))
"""Modules to recompute between every second operation and all of a layer, those that free least memory first."""
EXPERT_MODULES = frozenset(("moe", "moe_act"))


class Space(msgspec.Struct, frozen=True):
    """Values to try for each option; all degrees of tp, pp, cp and ep that may be fast are always tried."""

    micro_batches: tuple[int, ...] = (1, 2, 4, 8)
    recompute: tuple[str, ...] = ("none", "selective", "full")
    schedules: tuple[tuple[str, tuple[int, ...]], ...] = (("1f1b", (1,)), ("interleaved_1f1b", (2, 3, 4, 5, 7)))
    etps: tuple[int, ...] = (1,)  # 0 means the value of tp
    shard_nodes: tuple[int, ...] = (0,)  # nodes per HSDP shard group; 0 means all of them
    strategies: tuple[str, ...] = ()  # besides the recipe's
    offloads: tuple[str, ...] = ("none",)  # besides the recipe's
    uneven: bool = True  # whether stages may have different numbers of layers
    even: bool = True  # whether all stages may have the same number of layers
    shard: int = 0  # ranks of a shard group that the user typed (dp_shard); 0 means none
    slow: bool = False  # whether degrees that are seldom fast are tried too: tp beyond fast links, tiny cp chunks
    any_chunks: bool = False  # whether the user typed a schedule without vp; without a pipeline it has no effect
    sp: bool | None = None  # as the user typed it; None means wherever there is tensor parallelism
    replicas: bool = True  # whether adapters may be trained on a full copy of the frozen weights per rank


DEFAULT_SPACE = Space()
"""The space of `recommend`: the options practitioners change first."""

FULL_SPACE = Space(
    micro_batches=(1, 2, 3, 4, 6, 8, 16),
    schedules=(
        ("1f1b", (1,)),
        ("interleaved_1f1b", (2, 3, 4, 5, 6, 7, 8, 10)),
        ("interleaved_zero_bubble", (2,)),
        ("zbv", (2,)),
        ("dualpipe_v", (2,)),
    ),
    etps=(1, 0),
    shard_nodes=(0, 1, 4),
    strategies=("ddp", "megatron_fsdp"),
)
"""All values the engines support, except GPipe and looped BFS: same bubble as 1F1B, more memory."""

LEVER_SPACE = Space(
    micro_batches=(1, 2), recompute=("selective", "full"), schedules=(("1f1b", (1,)),), offloads=(), uneven=False
)
"""The space next to a lever that saves memory: only options that need little of it."""

GROWN_SPACE = msgspec.structs.replace(
    LEVER_SPACE, micro_batches=(*FULL_SPACE.micro_batches, 32, 64), recompute=FULL_SPACE.recompute
)
"""The space of the fastest degrees next to a lever: state in host memory is copied once per micro batch, so that large
micro batches gain more than elsewhere."""

FREE_SPACE = Space(micro_batches=(1, 2), recompute=("none",), schedules=(("1f1b", (1,)),), offloads=(), uneven=False)
"""The space of the fastest layout if memory were unlimited."""

COARSE_SPACE = msgspec.structs.replace(
    FULL_SPACE,
    micro_batches=(1, 3, 4, 8, 16),
    recompute=("none", "full"),
    schedules=(("1f1b", (1,)), ("interleaved_1f1b", (2, 5)), ("zbv", (2,))),
    shard_nodes=(0, 1),
)
"""Few options of FULL_SPACE, to find the degrees for which the others are tried."""

QUICK_SPACE = Space(micro_batches=(1, 2, 4), schedules=(("1f1b", (1,)),), uneven=False)
"""The options that decide whether another batch size would be faster."""

NODES_SPACE = Space(micro_batches=(1, 2, 4), schedules=(("1f1b", (1,)),))
"""The same for another number of nodes, over which the layers may divide unevenly."""

SIMPLEST_OPTIONS: dict[str, Any] = {
    "vp": 1,
    "pp_schedule": "1f1b",
    "micro_batch_size": 1,
    "recompute": "none",
    "recompute_modules": (),
    "recompute_layers": 0,
    "pp_micro_batches": 0,
    "etp": 1,
    "dp_shard": -1,
    "dp_replicate": 1,
    "embedding_as_layer": False,
    "head_as_layer": False,
}
"""Degrees that are illegal with these options are illegal with all others."""


ON_REQUEST = dict.fromkeys(("meshwright", "megatron"), ("megatron_fsdp",))
"""Strategies that are tried only if the user or recipe asks: for Megatron-FSDP our engine needs a package and exports
no weights, and Megatron-Bridge has no single key."""
TRIED: dict[str, tuple[str, ...]] = {"meshwright": ("fsdp2",), "deepspeed": ("zero1",)}
"""Strategies that an engine's search tries for every recipe: ZeRO-1 moves less than ZeRO-3 where its state fits."""
COPIES_AS_DDP = ("fsdp1",)
"""Engines whose FSDP needs ranks to shard over: a full copy of the weights per rank is DDP, a strategy of its own."""
DEGREES = ("tp", "pp", "cp", "ep")
SPLIT_PINS = ("dp_replicate", "stage_layers", "embedding_as_layer", "head_as_layer")
"""Pinned fields that affect whether degrees are legal."""
DETAIL_PINS = ("recompute_modules", "recompute_layers", "pp_micro_batches")
"""Pinned fields that apply to some options only."""


KEEPS_OUTPUTS = ("torchtitan",)
"""Engines that keep the logits of a pipeline pass until it ends, and may split a step into several passes."""
PASS_ROUNDS = (2, 4, 8)
"""Micro batches of one of several passes, as multiples of pp: fewer leave a bubble, more save little memory."""
BATCH_RULES = frozenset(("batch.divides", "batch.smaller-than-data-parallel"))
"""Rules that together refuse a batch which the data-parallel ranks do not divide."""


class Axes(msgspec.Struct, frozen=True):
    """Model-parallel degrees as columns of equal length."""

    tp: Any
    pp: Any
    cp: Any
    ep: Any

    def at(self, rows: Any) -> Axes:
        """Return the selected rows."""
        return Axes(self.tp[rows], self.pp[rows], self.cp[rows], self.ep[rows])


def axes(case: Case, pinned: Mapping[str, Any] | None = None, slow: bool = False) -> Axes:
    """Return degrees whose product divides the GPUs, with tp inside the fast-link domain and no tiny cp chunks."""
    return axes_of(case.cluster, case, pinned or {}, slow)


def axes_of(cluster: Cluster, case: Case, pinned: Mapping[str, Any], slow: bool = False) -> Axes:
    """Return the degrees of a case on another number of its GPUs; one that the user typed is the only one of its axis.

    The limits leave out what is slow, not what is impossible: they do not hold for typed degrees. Sequences that two
    chunks per cp rank do not divide are padded by AutoModel since 0.5; its older versions and the others refuse them.
    """
    # Stages of transformers' own forward pass have never been measured on GPUs: FSDP comes first.
    stages = 1 if case.engine == "meshwright" and is_whole(case.model) else min(int(case.layers), MAX_STAGES)
    most = (cluster.nvlink_domain, stages, int(case.seq_length) // MIN_CONTEXT_CHUNK)
    if slow:
        most = (cluster.world, min(int(case.layers), cluster.world), cluster.world)
    typed = tuple(int(pinned.get(name, 0)) for name in DEGREES)
    experts = int(case.experts) if case.is_moe else 1
    return _axes(cluster.world, most, experts, typed, case.engine == "kempnerforge", int(case.seq_length))


@lru_cache(maxsize=256)
def _axes(
    world: int, most: tuple[int, ...], experts: int, typed: tuple[int, ...], multiplies: bool, length: int
) -> Axes:
    """Return the degrees; experts are spread over the ranks of a stage, or multiply them."""
    tps, pps, cps = ([d for d in divisors(world) if d <= max(limit, 1)] for limit in most)
    usual = (tps, pps, [d for d in cps if d == 1 or length % (2 * d) == 0], divisors(experts))
    values = [[one] if one > 0 else found for one, found in zip(typed, usual, strict=True)]
    tp, pp, cp, ep = (column.ravel() for column in np.meshgrid(*values, indexing="ij"))
    ranks = world // (tp * pp * cp) if multiplies else world // pp
    divides = (world % (tp * pp * cp) == 0) & (ranks % ep == 0)
    return Axes(tp, pp, cp, ep).at(divides)


def with_pins(space: Space, case: Case, pinned: Mapping[str, Any]) -> Space:
    """Return the space with every option the user pinned reduced to that value, and the micro batches of the batch."""
    sizes = dict.fromkeys((*space.micro_batches, *odd_micro_batches(space.micro_batches, case)))
    fixed: dict[str, Any] = {"micro_batches": tuple(sizes)}
    if "micro_batch_size" in pinned:
        fixed["micro_batches"] = (pinned["micro_batch_size"],)
    if "recompute" in pinned:
        fixed["recompute"] = (pinned["recompute"],)
    if "etp" in pinned:
        fixed["etps"] = (pinned["etp"],)
    if "dp_replicate" in pinned or "dp_shard" in pinned:
        fixed |= {"shard_nodes": (0,), "replicas": False}
    if "dp_replicate" not in pinned and pinned.get("dp_shard", -1) > 0:
        fixed["shard"] = pinned["dp_shard"]
    if "sp" in pinned:
        fixed["sp"] = pinned["sp"]
    if "strategy" in pinned:
        fixed["strategies"] = ()
    if "offload" in pinned:
        fixed["offloads"] = ()
    if "vp" in pinned or "pp_schedule" in pinned:
        chunks = (pinned["vp"],) if "vp" in pinned else (2, 3, 4, 5, 6, 7, 8)
        plain = "1f1b" if chunks == (1,) else "interleaved_1f1b"
        schedule = pinned.get("pp_schedule", plain)
        fixed["schedules"] = ((schedule, chunks if "vp" in pinned else CHUNKS.get(schedule, chunks)),)
        fixed["any_chunks"] = "vp" not in pinned
    return msgspec.structs.replace(space, **fixed)


def candidates(
    case: Case, space: Space = DEFAULT_SPACE, pinned: Mapping[str, Any] | None = None, ignoring: Container[str] = ()
) -> Iterator[Case]:
    """Yield batches of layouts as columns: all options for the degrees that are legal with SIMPLEST_OPTIONS."""
    for bare in legal_degrees(case, space, pinned, ignoring):
        yield from option_batches(bare, space, pinned)


def legal_degrees(
    case: Case, space: Space = DEFAULT_SPACE, pinned: Mapping[str, Any] | None = None, ignoring: Container[str] = ()
) -> Iterator[Case]:
    """Yield the degrees that are legal with SIMPLEST_OPTIONS and have the pinned values."""
    found = False
    for bare in _legal(case, space, pinned or {}, ignoring):
        found = True
        yield bare
    if pinned and not found:  # what the user typed may only go with degrees that are usually left out
        yield from _legal(case, msgspec.structs.replace(space, slow=True), pinned, ignoring)


def _legal(case: Case, space: Space, pins: Mapping[str, Any], ignoring: Container[str]) -> Iterator[Case]:
    checks = {r.id for r in rules.applicable(case, ("error",)) if r.id not in ignoring}
    for every in degrees(case, with_pins(space, case, pins), pins):
        wanted = _wanted(every, pins, checks >= BATCH_RULES)  # far cheaper than the rules
        if not wanted.any():
            continue
        bare = every if wanted.all() else every.rows(wanted)
        legal = np.broadcast_to(rules.legal(bare, ignoring), bare.tp.shape)
        if pins.get("sp") and np.any(legal & (bare.tp > 1)):  # without tensor parallelism it would have no effect
            legal = legal & (bare.tp > 1)
        if legal.any():
            yield bare.rows(legal)


def _with_passes(batch: Case) -> Case:
    """Return the layouts with all micro batches in one pass through the pipeline, and with fewer in several passes."""
    rows, counts = [np.arange(len(batch.pp))], [np.zeros(len(batch.pp), int)]
    for rounds in PASS_ROUNDS:
        count = rounds * batch.pp
        several = (batch.pp > 1) & (count < batch.accumulation) & (batch.accumulation % count == 0)
        rows.append(np.flatnonzero(several))
        counts.append(count[several])
    if not any(len(found) for found in rows[1:]):
        return batch
    return batch.rows(np.concatenate(rows)).replace(pp_micro_batches=np.concatenate(counts))


def _wanted(bare: Case, pins: Mapping[str, Any], divided: bool) -> Any:
    """Return where degrees have the pinned values and, if they must, give every rank the same number of samples."""
    found = np.ones(bare.tp.shape, dtype=bool)
    for name in DEGREES:
        if name in pins:
            found &= getattr(bare, name) == pins[name]
    if "dp_shard" in pins and pins["dp_shard"] != -1:
        found &= bare.shard == pins["dp_shard"]
    return found & (bare.global_batch_size % bare.dp == 0) if divided else found


def with_options(bare: Case, space: Space = DEFAULT_SPACE, pinned: Mapping[str, Any] | None = None) -> Case:
    """Return legal degrees with every schedule and option of a space."""
    pins = pinned or {}
    batch = _schedules(bare, Axes(bare.tp, bare.pp, bare.cp, bare.ep), with_pins(space, bare, pins))
    if bare.engine in KEEPS_OUTPUTS and "pp_micro_batches" not in pins:
        batch = _with_passes(batch)
    return batch.replace(**{name: pins[name] for name in DETAIL_PINS if name in pins})


def option_batches(bare: Case, space: Space = DEFAULT_SPACE, pinned: Mapping[str, Any] | None = None) -> Iterator[Case]:
    """Yield `with_options`, for each set of modules if the user typed selective recompute without its modules."""
    pins = pinned or {}
    if pins.get("recompute") != "selective" or "recompute_modules" in pins:
        yield with_options(bare, space, pins)
        return
    for modules in module_sets(bare):
        yield with_options(bare, space, {**pins, "recompute_modules": modules})


def module_sets(case: Case) -> tuple[tuple[str, ...], ...]:
    """Return the sets of modules that selective recompute may have in a case: the engine's, the recipe's and others."""
    found = dict.fromkeys(((), case.recipe.layout.recompute_modules, *MODULE_SETS))
    known = (one for one in found if case.is_moe or not EXPERT_MODULES & set(one))
    return tuple(one for one in known if can_express("recompute_modules", case.engine, one))


def listed_module_sets(case: Case) -> tuple[tuple[str, ...], ...]:
    """Return those of MODULE_SETS that selective recompute may have in a case."""
    return tuple(one for one in module_sets(case) if one in MODULE_SETS)


def degrees(case: Case, space: Space = DEFAULT_SPACE, pinned: Mapping[str, Any] | None = None) -> Iterator[Case]:
    """Yield all degrees with the simplest options, legal or not, for each strategy, offload and layer split."""
    pins = pinned or {}
    simplest = {**SIMPLEST_OPTIONS, **{name: pins[name] for name in SPLIT_PINS if name in pins}}
    strategies = strategies_of(case, space)
    offloads = (case.offload, *(o for o in space.offloads if o != case.offload))
    for strategy, offload in product(strategies, offloads):
        based = case.replace(**simplest, strategy=strategy, offload=offload)
        found = axes(based, pins, space.slow)
        if any(name in pins for name in SPLIT_PINS[1:]):
            yield _with_degrees(based, found, space)
            continue
        even = based.layers % found.pp == 0
        if not space.even:
            yield _with_degrees(based.replace(stage_layers=BALANCED), found.at(~even), space)
        elif even.all() or not space.uneven:
            yield _with_degrees(based.replace(stage_layers=()), found.at(even), space)
        else:
            order = np.argsort(np.where(even, 0, found.pp), kind="stable")
            yield _with_degrees(based.replace(stage_layers=BALANCED), found.at(order), space)


def strategies_of(case: Case, space: Space) -> tuple[str, ...]:
    """Return the strategies to try: the recipe's, then the space's that the engine offers without being asked."""
    usual = TRIED.get(case.engine, ()) if space.strategies else ()
    others = dict.fromkeys((*usual, *space.strategies))
    return (case.strategy, *(s for s in others if s != case.strategy and s not in ON_REQUEST.get(case.engine, ())))


def _with_degrees(case: Case, found: Axes, space: Space) -> Case:
    usual = (found.tp > 1) & (case.strategy != "megatron_fsdp")
    sp = usual if space.sp is None else np.full(found.tp.shape, space.sp)
    batch = case.replace(tp=found.tp, pp=found.pp, cp=found.cp, ep=found.ep, sp=sp)
    if not space.shard:
        return batch
    return batch.replace(dp_replicate=np.maximum(batch.dp // space.shard, 1))  # the shard groups are replicas


def _schedules(case: Case, found: Axes, space: Space) -> Case:
    """Return every schedule these degrees support; several chunks per stage only if the layers divide."""
    rows, chunks, names = [], [], []
    for schedule, counts in space.schedules:
        for vp in counts:
            if vp == 1:
                here = np.arange(len(found.tp))
            elif case.stage_layers:
                continue
            else:
                here = np.flatnonzero((found.pp > 1) & (case.layers % (found.pp * vp) == 0))
            rows.append(here)
            chunks.append(np.full(len(here), vp))
            names.append(np.full(len(here), schedule))
    if space.any_chunks and not any(len(here) for here in rows):
        here = np.flatnonzero(found.pp == 1)
        rows, chunks, names = [here], [np.ones(len(here), int)], [np.full(len(here), space.schedules[0][0])]
    at = np.concatenate(rows) if rows else np.zeros(0, int)
    if not rows:
        chunks, names = [np.ones(0, int)], [np.full(0, "1f1b")]
    return _options(case, found.at(at), np.concatenate(chunks), np.concatenate(names), space)


def _options(case: Case, found: Axes, vp: Any, schedule: Any, space: Space) -> Case:
    """Return the product of these degrees and schedules with all options, as columns."""
    etps = space.etps if case.is_moe else (1,)
    nodes = space.shard_nodes if case.cluster.nodes > 1 and case.strategy == "fsdp2" else (0,)
    copies = space.replicas and case.engine not in COPIES_AS_DDP
    if copies and case.goal == "peft" and case.strategy == "fsdp2" and case.cluster.world > 1:
        nodes = (*nodes, ALONE)  # only adapters are reduced: frozen weights that are not sharded cost no communication
    options = list(product(space.micro_batches, space.recompute, etps, nodes))
    count, many = len(found.tp), len(options)
    tp, pp, cp, ep, chunks = (np.repeat(column, many) for column in (found.tp, found.pp, found.cp, found.ep, vp))
    micro_batch, recompute, etp, shard_nodes = (
        np.tile(np.array(column), count) for column in zip(*options, strict=True)
    )
    ranks = tp * pp * cp
    expert_parts = np.where(etp == 0, tp, etp)
    # A shard group has at least the data-parallel ranks of an expert group.
    needed = np.where(shard_nodes > 0, np.maximum(-(-ep * expert_parts // (tp * cp)), 1), 1)
    inside = np.maximum(shard_nodes * case.cluster.gpus_per_node // ranks, needed)
    replicas = np.where(
        shard_nodes != 0, np.maximum(case.cluster.world // ranks // inside, 1), 1 if space.shard else case.dp_replicate
    )
    degrees = _with_degrees(case, Axes(tp, pp, cp, ep), space)
    batch = degrees.replace(
        vp=chunks,
        pp_schedule=np.repeat(schedule, many),
        etp=expert_parts,
        micro_batch_size=micro_batch,
        recompute=recompute,
        dp_replicate=degrees.dp_replicate if space.shard else replicas,
    )
    again = ((etp == 0) & (tp == 1) & (1 in etps)) | (shard_nodes != 0) & (
        replicas == (1 if space.shard else case.dp_replicate)
    ) & (0 in nodes)
    again |= (shard_nodes > 1) & (inside == needed) & (1 in nodes)  # as with one node
    divides = batch.global_batch_size % (micro_batch * batch.dp) == 0  # most rows do not, and rules cost more than this
    divides &= ~has_near_size(batch, space.micro_batches)
    return batch.rows(~again & divides if (~again & divides).any() else ~again)
