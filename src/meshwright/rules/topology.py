"""GPUs and mesh axes: whether the degrees multiply out."""

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
    message="tp × pp × cp = {model_ranks} ranks per model copy do not divide {world} GPUs",
    symptom="world size (…) is not divisible by … when the process groups are built, on every rank",
    cause="each copy of the model takes tp × pp × cp ranks; data parallelism must get a whole number of copies",
    fixes=(
        {"cp": degrees("cp")},
        {"tp": degrees("tp")},
        {"pp": degrees("pp")},
        {"tp": degrees("tp"), "pp": degrees("pp"), "cp": [1]},
    ),
)
def copies_divide_world(c: Case) -> Column:
    return c.world % c.model_ranks != 0


@rule(
    "topology.world-with-experts",
    "error",
    "ep",
    engines=("kempnerforge",),
    message="tp × pp × cp × ep = {model_ranks} ranks do not divide {world} GPUs",
    symptom="the validation lists all six factors and says that their product is not the world size",
    cause="this engine gives expert parallelism its own mesh axis, so that ep multiplies the ranks of one model copy",
    fixes=(
        {"ep": degrees("ep")},
        {"tp": degrees("tp")},
        {"pp": degrees("pp")},
        {"cp": degrees("cp")},
        {"tp": degrees("tp"), "pp": degrees("pp"), "cp": [1], "ep": [1]},
    ),
)
def copies_with_experts_divide_world(c: Case) -> Column:
    return c.world % c.model_ranks != 0


@rule(
    "topology.expert-mesh",
    "error",
    "ep",
    engines=RECUTTING,
    message="ep × etp × pp = {ep} × {etp} × {pp} does not divide {world} GPUs",
    symptom="world size is not divisible by expert_tensor_parallel × expert_model_parallel × pipeline size",
    cause="experts re-cut the ranks of one pipeline stage into ep × etp groups; ep is not a factor of its own",
    fixes=({"ep": degrees("ep")}, {"ep": degrees("ep"), "etp": [1]}, {"ep": [1], "etp": [1], "pp": degrees("pp")}),
)
def expert_mesh_divides_world(c: Case) -> Column:
    return (c.ep * c.etp > 1) & (c.world % (c.ep * c.etp * c.pp) != 0)


@rule(
    "topology.expert-shard-group",
    "error",
    "ep",
    engines=("torchtitan", "meshwright"),
    message="ep × etp = {ep} × {etp} does not divide the {borrowed} ranks (dp_shard × cp × tp) it borrows from",
    symptom="an assertion on dp_shard × cp × tp and the expert-parallel degree when the meshes are built",
    cause="experts are spread over the ranks of one sharding group; the copies of HSDP do not count",
    fixes=({"ep": degrees("ep")}, {"dp_replicate": [1]}, {"ep": [1], "etp": [1]}),
    values={"borrowed": lambda c: c.shard * c.cp * c.tp},
)
def experts_divide_shard_group(c: Case) -> Column:
    return (c.dp_replicate > 1) & (c.ep * c.etp > 1) & ((c.shard * c.cp * c.tp) % (c.ep * c.etp) != 0)


@rule(
    "topology.shard-product",
    "error",
    "dp_shard",
    message="dp_shard × dp_replicate = {dp_shard} × {dp_replicate}, but the other axes leave {dp} data-parallel ranks",
    symptom="the product of all degrees is not the world size; or a mesh that silently leaves GPUs out",
    cause="the explicit sharding degree was made for another number of GPUs",
    fixes=({"dp_shard": [-1]}, {"dp_shard": [-1], "dp_replicate": [1]}),
)
def shards_fill_data_parallel(c: Case) -> Column:
    return (c.dp_shard != -1) & (c.dp_shard * c.dp_replicate * c.model_ranks != c.world)


@rule(
    "topology.replicas-divide",
    "error",
    "dp_replicate",
    message="dp_replicate={dp_replicate} does not divide the {dp} data-parallel ranks",
    symptom="the data-parallel size is not a multiple of the number of copies (HSDP)",
    cause="every copy must be sharded over the same number of ranks",
    fixes=({"dp_replicate": divisors_of("dp", "dp_replicate")},),
)
def replicas_divide_data_parallel(c: Case) -> Column:
    return c.dp % c.dp_replicate != 0


@rule(
    "topology.pure-replication",
    "error",
    "dp_replicate",
    engines=("automodel",),
    message="dp_replicate={dp_replicate} leaves no rank to shard over ({dp} data-parallel ranks)",
    symptom="ValueError: the number of replicas must be smaller than the data-parallel size",
    cause="HSDP there means replicas of a sharded model; full replication is what the ddp strategy is for",
    fixes=(
        {"dp_replicate": lambda c: [d for d in nearest_first(divisors(int(c.dp)), int(c.dp_replicate)) if d < c.dp]},
        {"dp_replicate": [1]},
    ),
)
def replicas_leave_shards(c: Case) -> Column:
    return (c.dp_replicate > 1) & (c.dp_replicate >= c.dp)
