"""GPU count and mesh axes: whether the degrees multiply to the world size."""

from __future__ import annotations

from meshwright.recipes.case import Case, Column
from meshwright.rules.rule import rule
from meshwright.rules.search_values import degrees, divisors, divisors_of, nearest_first

RECUTTING = ("meshwright", "megatron", "torchtitan", "automodel", "fsdp1", "deepspeed")


@rule(
    "topology.world",
    "error",
    "tp",
    engines=RECUTTING,
    message="{world} GPUs are not divisible by tp × pp × cp = {model_ranks}",
    symptom="world size (…) is not divisible by … when the process groups are built, on every rank",
    cause="each model replica takes tp × pp × cp ranks; the data-parallel size must be an integer",
    fixes=(
        {"cp": degrees("cp")},
        {"tp": degrees("tp")},
        {"pp": degrees("pp")},
        {"tp": degrees("tp"), "pp": degrees("pp"), "cp": [1]},
    ),
)
def world_not_divisible(c: Case) -> Column:
    return c.world % c.model_ranks != 0


@rule(
    "topology.world-with-experts",
    "error",
    "ep",
    engines=("kempnerforge",),
    message="{world} GPUs are not divisible by tp × pp × cp × ep = {model_ranks}",
    symptom="validation lists all six degrees and says that their product is not the world size",
    cause="expert parallelism is its own mesh axis in this engine, so ep multiplies the ranks of one replica",
    fixes=(
        {"ep": degrees("ep")},
        {"tp": degrees("tp")},
        {"pp": degrees("pp")},
        {"cp": degrees("cp")},
        {"tp": degrees("tp"), "pp": degrees("pp"), "cp": [1], "ep": [1]},
    ),
)
def world_not_divisible_with_experts(c: Case) -> Column:
    return c.world % c.model_ranks != 0


@rule(
    "topology.expert-mesh",
    "error",
    "ep",
    engines=RECUTTING,
    message="{world} GPUs are not divisible by ep × etp × pp = {ep} × {etp} × {pp}",
    symptom="world size is not divisible by expert_tensor_parallel × expert_model_parallel × pipeline size",
    cause="experts regroup the ranks of one pipeline stage into ep × etp groups; ep is not a mesh axis of its own",
    fixes=({"ep": degrees("ep")}, {"ep": degrees("ep"), "etp": [1]}, {"ep": [1], "etp": [1], "pp": degrees("pp")}),
)
def world_not_divisible_by_expert_mesh(c: Case) -> Column:
    return (c.ep * c.etp > 1) & (c.world % (c.ep * c.etp * c.pp) != 0)


@rule(
    "topology.expert-shard-group",
    "error",
    "ep",
    engines=("torchtitan", "meshwright"),
    message="dp_shard × cp × tp = {borrowed} ranks are not divisible by ep × etp = {ep} × {etp}",
    symptom="assertion on dp_shard × cp × tp and the expert-parallel degree when the meshes are built",
    cause="experts are spread over the ranks of one shard group; HSDP replicas do not count",
    fixes=({"ep": degrees("ep")}, {"dp_replicate": [1]}, {"ep": [1], "etp": [1]}),
    values={"borrowed": lambda c: c.shard * c.cp * c.tp},
)
def shard_group_not_divisible_by_experts(c: Case) -> Column:
    return (c.dp_replicate > 1) & (c.ep * c.etp > 1) & ((c.shard * c.cp * c.tp) % (c.ep * c.etp) != 0)


@rule(
    "topology.shard-product",
    "error",
    "dp_shard",
    message="dp_shard × dp_replicate = {dp_shard} × {dp_replicate}, but the other axes leave {dp} data-parallel ranks",
    symptom="the product of all degrees is not the world size; or the mesh silently leaves GPUs out",
    cause="dp_shard was set for another number of GPUs",
    fixes=({"dp_shard": [-1]}, {"dp_shard": [-1], "dp_replicate": [1]}),
)
def shard_product_mismatch(c: Case) -> Column:
    return (c.dp_shard != -1) & (c.dp_shard * c.dp_replicate * c.model_ranks != c.world)


@rule(
    "topology.replicas-divide",
    "error",
    "dp_replicate",
    message="{dp} data-parallel ranks are not divisible by dp_replicate={dp_replicate}",
    symptom="the data-parallel size is not a multiple of the number of replicas (HSDP)",
    cause="every replica must be sharded over the same number of ranks",
    fixes=({"dp_replicate": divisors_of("dp", "dp_replicate")},),
)
def replicas_not_divisible(c: Case) -> Column:
    return c.dp % c.dp_replicate != 0


@rule(
    "topology.pure-replication",
    "error",
    "dp_replicate",
    engines=("automodel",),
    message="dp_replicate={dp_replicate} leaves no rank to shard over ({dp} data-parallel ranks)",
    symptom="ValueError: the number of replicas must be smaller than the data-parallel size",
    cause="HSDP on this engine means replicas of a sharded model; use the ddp strategy for full replication",
    fixes=(
        {"dp_replicate": lambda c: [d for d in nearest_first(divisors(int(c.dp)), int(c.dp_replicate)) if d < c.dp]},
        {"dp_replicate": [1]},
    ),
)
def replicas_without_shards(c: Case) -> Column:
    return (c.dp_replicate > 1) & (c.dp_replicate >= c.dp)
