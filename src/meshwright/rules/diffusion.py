"""Features that diffusion models do not support."""

from __future__ import annotations

from meshwright.recipes.case import Case, Column
from meshwright.rules.precision import NO_FP8
from meshwright.rules.rule import rule
from meshwright.rules.search_values import NO_PP


@rule(
    "diffusion.pipeline",
    "error",
    "pp",
    message="a diffusion model cannot be split into pp={pp} pipeline stages",
    symptom="the model has no stage split: time and text conditioning reach every block",
    cause="the conditioning would have to be sent along with every micro batch",
    fixes=(NO_PP,),
)
def diffusion_pipelined(c: Case) -> Column:
    return c.is_diffusion & (c.pp > 1)


@rule(
    "diffusion.packing",
    "error",
    "packing",
    message="packing=true does not work for diffusion models",
    symptom="unknown data option",
    cause="each sample has its own noise level, and attention runs over the full sample",
    fixes=({"packing": [False]},),
)
def diffusion_packed(c: Case) -> Column:
    return c.is_diffusion & c.packing


@rule(
    "diffusion.adapters",
    "error",
    "method",
    engines=("meshwright", "megatron", "torchtitan", "kempnerforge", "fsdp1", "deepspeed"),  # AutoModel has adapters
    message="adapters are not implemented for diffusion models; use goal pretrain or sft",
    symptom="no recipe for this goal",
    cause="adapter targets are named after language-model layers",
)
def diffusion_adapters(c: Case) -> Column:
    return c.is_diffusion & (c.goal == "peft")


@rule(
    "diffusion.strategy",
    "error",
    "strategy",
    engines=("meshwright",),
    message="megatron_fsdp does not support diffusion models",
    symptom="rejected before training starts",
    cause="its FSDP units are the layers of language models",
    fixes=({"strategy": ["fsdp2"]},),
)
def diffusion_megatron_fsdp(c: Case) -> Column:
    return c.is_diffusion & (c.strategy == "megatron_fsdp")


@rule(
    "diffusion.low-precision",
    "error",
    "matmul",
    engines=("meshwright",),
    message="matmul={matmul} is not supported for diffusion models",
    symptom="rejected before training starts",
    cause="the FP8 kernels do not support how these layers are sharded",
    fixes=(NO_FP8,),
)
def diffusion_fp8(c: Case) -> Column:
    return c.is_diffusion & c.fp8


@rule(
    "diffusion.recompute-modules",
    "error",
    "recompute_modules",
    engines=("meshwright",),
    message="recompute_modules={recompute_modules} names modules that diffusion blocks do not have",
    symptom="rejected before training starts",
    cause="the names are those of language-model layers; ops and full recompute work for any block",
    fixes=({"recompute_modules": [()]}, {"recompute": ["full"], "recompute_modules": [()]}),
)
def diffusion_recompute_modules(c: Case) -> Column:
    return c.is_diffusion & (c.recompute == "selective") & bool(set(c.recompute_modules) - {"ops"})


@rule(
    "diffusion.z-loss",
    "error",
    "z_loss",
    engines=("meshwright",),
    message="z_loss={z_loss} does not apply to a diffusion model",
    symptom="rejected before training starts",
    cause="diffusion models train velocities with a squared error, which has no partition function",
    fixes=({"z_loss": [0.0]},),
)
def diffusion_z_loss(c: Case) -> Column:
    return c.is_diffusion & (c.z_loss > 0)
