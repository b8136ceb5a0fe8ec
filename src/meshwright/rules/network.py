"""Which ranks communicate over which links."""

from __future__ import annotations

from meshwright.recipes.capabilities import engines_with
from meshwright.recipes.case import Case, Column
from meshwright.rules.rule import rule
from meshwright.rules.search_values import divisors, one_of, smaller
from meshwright.rules.sequence import inner_ranks, inner_sizes

MAX_SHARDS = 512


@rule(
    "network.tensor-parallel-domain",
    "warning",
    "tp",
    message="tp={tp} exceeds the {nvlink_domain} GPUs that share fast links",
    symptom="throughput collapses: two collectives per layer cross the network",
    cause="tensor parallelism waits for communication in every layer, and the network is about ten times slower",
    fixes=({"tp": smaller("tp")}, {"tp": [1], "sp": [False], "tp_comm_overlap": [False]}),
)
def tp_beyond_fast_links(c: Case) -> Column:
    return c.tp > c.nvlink_domain


@rule(
    "network.tensor-parallel-straddles",
    "warning",
    "tp",
    message="tp={tp} does not divide the {nvlink_domain} GPUs of a fast-link domain, so some groups span two",
    symptom="some tensor-parallel groups are several times slower, and all others wait for them",
    cause="ranks are numbered node by node; groups that do not divide a node cross its boundary",
    fixes=({"tp": smaller("tp")}, {"tp": [1], "sp": [False], "tp_comm_overlap": [False]}),
)
def tp_groups_straddle_domains(c: Case) -> Column:
    return (c.tp <= c.nvlink_domain) & (c.world > c.nvlink_domain) & (c.nvlink_domain % c.tp != 0)


@rule(
    "network.context-domain",
    "warning",
    "cp_comm",
    message="cp_comm={cp_comm} over tp × {inner} ranks exceeds the {nvlink_domain} GPUs with fast links",
    symptom="attention waits for the network in every layer",
    cause="this collective cannot overlap with attention; the steps of a ring can",
    fixes=({"cp_comm": ["a2a+ring"], "cp_inner": inner_sizes}, {"cp_comm": ["ring"]}, {"cp": smaller("cp")}),
    values={"inner": lambda c: int(inner_ranks(c))},
)
def cp_beyond_fast_links(c: Case) -> Column:
    exposed = one_of(c.cp_comm, ("a2a", "allgather", "a2a+ring"))
    return (c.cp > 1) & exposed & (c.tp * inner_ranks(c) > c.nvlink_domain)


def _once_per_node(c: Case) -> list[str]:
    """Return the dispatchers that send a token once per node, of those that the engine executes."""
    return [one for one in ("hybridep", "deepep") if c.engine in engines_with("dispatcher", one)]


@rule(
    "network.expert-domain",
    "advice",
    "ep",
    message="ep × etp = {ep} × {etp} exceeds the {nvlink_domain} GPUs with fast links (dispatcher={dispatcher})",
    symptom="the token all-to-all takes a large part of every expert layer",
    cause="plain all-to-all sends each token once per expert over the network; deepep and hybridep once per node",
    fixes=({"dispatcher": _once_per_node}, {"ep": smaller("ep")}),
)
def ep_beyond_fast_links(c: Case) -> Column:
    return c.is_moe & (c.ep * c.etp > c.nvlink_domain) & one_of(c.dispatcher, ("alltoall", "allgather"))


@rule(
    "network.very-wide-sharding",
    "advice",
    "dp_replicate",
    engines=("meshwright", "torchtitan", "automodel", "kempnerforge"),
    message="parameters are gathered over {shard} ranks",
    symptom="all-gathers slow down as GPUs are added: small messages, long rings",
    cause="each shard gets tiny; HSDP replicas of a smaller shard group only exchange gradients",
    fixes=({"dp_replicate": lambda c: [d for d in divisors(int(c.dp)) if d > 1 and c.dp // d <= MAX_SHARDS // 4]},),
)
def sharding_too_wide(c: Case) -> Column:
    return (c.strategy == "fsdp2") & (c.shard >= MAX_SHARDS)
