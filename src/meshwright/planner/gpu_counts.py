"""The numbers of GPUs that a question is asked for again: parts of a node, then whole nodes."""

from __future__ import annotations

import msgspec

from meshwright.clusters import default_nodes
from meshwright.planner.plan import Question

MAX_GPUS = 131072
EVERY_NODE = 16  # nodes up to which every number is tried; beyond, four per doubling


def gpu_count(count: int) -> str:
    """Return a number of GPUs in words."""
    return f"{count:,} GPU{'s' * (count != 1)}"


def gpu_counts(node: int, most: int = MAX_GPUS) -> list[int]:
    """Return the counts to try: every part of a node, every number of nodes up to 16, then four per doubling."""
    nodes = {k * 2**i for i in range(18) for k in (EVERY_NODE // 4 * 4, *range(EVERY_NODE, 2 * EVERY_NODE, 4))}
    found = {*range(1, node + 1), *(k * node for k in (*range(1, EVERY_NODE + 1), *nodes))}
    return sorted(n for n in found if n <= most)


def node_of(question: Question) -> int:
    """Return the GPUs of a node as the user described it; the GPU's usual node if only a count was given."""
    cluster = question.cluster
    described = cluster.nodes > 1 and not any(one.field == "nodes" for one in question.assumed)
    if question.cluster_ref or described:
        return cluster.gpus_per_node
    return cluster.gpu.gpus_per_node if cluster.nodes > 1 else max(cluster.gpus_per_node, cluster.gpu.gpus_per_node)


def resized(question: Question, count: int, node: int) -> Question:
    """Return the question on another number of the same GPUs, in nodes of this size."""
    nodes, each = default_nodes(count, msgspec.structs.replace(question.cluster.gpu, gpus_per_node=node))
    cluster = msgspec.structs.replace(question.cluster, nodes=nodes, gpus_per_node=each)
    return msgspec.structs.replace(question, cluster=cluster)
