"""GPUs and mesh axes: whether the degrees multiply out."""

from __future__ import annotations

from meshwright.recipes.case import Case, Column
from meshwright.rules.domains import degrees
from meshwright.rules.rule import rule

RECUTTING = ("meshwright", "megatron", "torchtitan", "automodel", "fsdp1", "deepspeed")


@rule(
    "topology.world",
    "error",
    "tp",
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
    "topology.expert-mesh",
    "error",
    "ep",
    engines=RECUTTING,
    message="ep × etp × pp = {ep} × {etp} × {pp} does not divide {world} GPUs",
    symptom="world size is not divisible by expert_tensor_parallel × expert_model_parallel × pipeline size",
    cause="expert parallelism re-cuts the ranks of one pipeline stage into ep × etp groups; it is not a factor of its own",
    fixes=({"ep": degrees("ep")}, {"ep": degrees("ep"), "etp": [1]}),
)
def expert_mesh_divides_world(c: Case) -> Column:
    return (c.ep * c.etp > 1) & (c.world % (c.ep * c.etp * c.pp) != 0)
