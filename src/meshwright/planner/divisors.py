"""Alternative GPU counts: those that fit, and those that divide when the requested count does not."""

from __future__ import annotations

from collections.abc import Container, Iterator
from math import gcd

import msgspec

from meshwright import rules
from meshwright.clusters import MAX_GPUS, Cluster, default_nodes
from meshwright.errors import InputError
from meshwright.planner.search import always_broken, any_legal
from meshwright.recipes.case import Case

MAX_SUGGESTED_COUNTS = 3
MAX_TRIED_COUNTS = 40
EQUAL_PARTS = 0.25  # of the batch: one that the GPUs divide is suggested up to here from it
MODEL_DEGREES = ("tp", "pp", "vp", "cp", "ep", "etp")
MIN_NODES = 0.4  # of the nodes: fewer are hardly as fast


def resize(case: Case, count: int) -> Case:
    """Return the case on another number of the same GPUs, in the same nodes."""
    cluster = case.cluster
    nodes, each = default_nodes(count, msgspec.structs.replace(cluster.gpu, gpus_per_node=_node_of(cluster)))
    return case.rebuild(cluster=msgspec.structs.replace(cluster, nodes=nodes, gpus_per_node=each))


def divided_batch(batch: int, step: int) -> int:
    """Return the largest batch up to this one that every rank gets an equal part of, in many ways.

    `step` is the number of GPUs, or of samples per accumulated micro batch; a batch that it divides stays, and of the
    others, multiples by powers of 2 and 3 allow most micro batches and layouts.
    """
    if batch < step or batch % step == 0:
        return batch
    times = batch // step
    smooth = [int(2**a * 3**b) for a in range(times.bit_length()) for b in range(times.bit_length())]
    return step * max(one for one in smooth if one <= times)


def node_counts(batch: int, nodes: int, each: int) -> list[int]:
    """Return fewer nodes that the batch divides better over, at least MIN_NODES of them.

    The part of the GPUs that does not divide the batch must be tp, pp or cp. Powers of two are all of them; an odd
    factor is only pp, whose stages idle. So the largest counts with the least odd factors are kept; where there are no
    odd factors, half of the nodes.
    """
    found, least = [], undivided_factor(batch, nodes * each)
    for fewer in range(nodes - 1, 0, -1):
        odd = undivided_factor(batch, fewer * each)
        if odd < least and fewer >= MIN_NODES * nodes:
            found.append(fewer)
            least = odd
    halved = [nodes // 2] if nodes % 2 == 0 and _not_in_batch(batch, nodes * each) > 1 else []
    return found[-2:] or halved


def _not_in_batch(batch: int, world: int) -> int:
    """Return the least degree of model parallelism with which a batch divides over the GPUs."""
    return world // gcd(batch, world)


def undivided_factor(batch: int, world: int) -> int:
    """Return the odd factor of the GPUs over which a batch does not divide: only pipeline stages can use it."""
    rest = _not_in_batch(batch, world)
    return rest // (rest & -rest)


def _node_of(cluster: Cluster) -> int:
    """Return the GPUs of a full node: the user's in several nodes, else the GPU's usual one."""
    return cluster.gpus_per_node if cluster.nodes > 1 else max(cluster.gpus_per_node, cluster.gpu.gpus_per_node)


def _text_of(cluster: Cluster) -> str:
    """Return a cluster as the shortest argument that means it."""
    usual = default_nodes(cluster.world, cluster.gpu) == (cluster.nodes, cluster.gpus_per_node)
    return f"{cluster.world}x{cluster.gpu.name}" if usual else str(cluster)


def _resizing(now: Cluster, other: Cluster) -> str:
    """Return how to get a cluster of another size: one of a file keeps the file's links."""
    if not now.file:
        return f"--gpus {_text_of(other)}"
    if other.gpus_per_node == now.gpus_per_node:
        return other.nodes_setting
    return f"nodes = {other.nodes} and gpus_per_node = {other.gpus_per_node} in {now.file}"


def nearby_counts(world: int, node: int) -> Iterator[int]:
    """Yield counts to try, nearest first: full nodes around the requested count, its neighbors, powers of two."""
    nodes = world // node
    found = {k * node for k in range(max(nodes - 8, 1), nodes + 10)} | {world + d for d in (-2, -1, 1, 2)}
    found |= {2**k for k in range(20)}
    yield from sorted((n for n in found if 1 <= n <= MAX_GPUS and n != world), key=lambda n: (abs(n - world), n))


def nearest_counts(case: Case, most: int = MAX_SUGGESTED_COUNTS, ignoring: Container[str] = ()) -> list[int]:
    """Return GPU counts near the requested one that have a layout which breaks only ignored rules."""
    found: list[int] = []
    for tried, count in enumerate(nearby_counts(case.cluster.world, _node_of(case.cluster))):
        if tried >= MAX_TRIED_COUNTS or len(found) >= most:
            break
        if any_legal(resize(case, count), ignoring):
            found.append(count)
    return sorted(found)


def nearest_batch(case: Case, ignoring: Container[str] = ()) -> int | None:
    """Return a global batch near the recipe's for which the requested count has a layout.

    One that every GPU gets an equal part of comes first, in most micro batches: others leave few layouts, slow ones.
    """
    batch, world = int(case.global_batch_size), case.cluster.world
    parts = max(batch // world, 1)
    tries = {max(round(batch / step), 1) * step for step in (world // 2 or 1, world // 4 or 1, 8)}

    def rank(other: int) -> tuple[int, int]:
        apart = abs(other - batch)
        equal = other % world == 0 and apart <= EQUAL_PARTS * batch
        return -len([size for size in range(1, 9) if other // world % size == 0]) if equal else 0, apart

    near = sorted(tries | {parts * world, (parts + 1) * world}, key=rank)
    return next((b for b in near if b != batch and any_legal(case.replace(global_batch_size=b), ignoring)), None)


def _why_none(case: Case) -> Iterator[str]:
    """Yield the factor of the GPUs that does not divide the batch, and what keeps each dimension from having it."""
    batch, world = int(case.global_batch_size), case.cluster.world
    factor = undivided_factor(batch, world)
    if factor == 1:
        return
    yield f"the factor {factor} of {world} does not divide the batch, so tp, pp or cp would have to be {factor}"
    alone = case.replace(**dict.fromkeys(MODEL_DEGREES, 1), micro_batch_size=1, dp_replicate=1, sp=False)
    for axis in ("tp", "pp", "cp"):
        errors = rules.check(alone.replace(**{axis: factor}), ("error",), fixes=False)
        about = next((one for one in errors if not one.rule.startswith(("memory.", "batch."))), None)
        if about is not None:
            yield f"{about.message} ({about.rule})"


def no_layout(case: Case, ignoring: Container[str] = ()) -> InputError:
    """Return the error for a count that no layout divides, with counts and a batch that work."""
    near, batch = nearest_counts(case, ignoring=ignoring), nearest_batch(case, ignoring)
    world = case.cluster.world
    there = sorted(near, key=lambda n: (n > world, abs(n - world)))  # the GPUs that the user has come first
    fixes = [_resizing(case.cluster, resize(case, n).cluster) for n in there]
    fixes += [f"train.global_batch_size={batch}"] if batch else []
    facts = f"global batch {case.global_batch_size}, {case.heads} heads, {case.layers} layers"
    counts = f"counts that work: {', '.join(map(str, near))}" if near else "no count near it works"
    more = f"; or change the global batch to {batch} (a new experiment)" if batch else ""
    why = "".join(f"; {text}" for text in _why_none(case))
    return InputError(
        f"no layout divides {case.cluster.world} GPUs for this recipe ({facts}){why}; {counts}{more}",
        field="gpus",
        value=str(case.cluster),
        fix=fixes,
    )


def wrong_on_every_count(case: Case) -> Iterator[str]:
    """Yield the errors that no layout resolves, and their fixes, if no count of GPUs can train the case."""
    broken = always_broken(case)
    for one in rules.check(case, ("error",)) if broken else ():
        if one.rule in broken:
            yield f"no count can train it: {one.message} ({one.rule}); {' '.join(one.fix) or one.no_fix}".rstrip("; ")
