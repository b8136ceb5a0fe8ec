"""What diffusion models cannot use."""

from __future__ import annotations

from meshwright.recipes.case import Case, Column
from meshwright.rules.precision import NO_FP8
from meshwright.rules.rule import rule
from meshwright.rules.search_values import NO_PP


@rule(
    "diffusion.pipeline",
    "error",
    "pp",
    message="a diffusion model cannot be split over pp={pp} stages",
    symptom="the model has no stage split: time and text conditioning reach every block",
    cause="conditioning would have to travel along with every micro batch",
    fixes=(NO_PP,),
)
def diffusion_is_not_pipelined(c: Case) -> Column:
    return c.is_diffusion & (c.pp > 1)


@rule(
    "diffusion.packing",
    "error",
    "packing",
    message="samples of a diffusion model cannot be packed",
    symptom="an unknown data option",
    cause="each sample has one noise level, and attention runs over the whole sample",
    fixes=({"packing": [False]},),
)
def diffusion_is_not_packed(c: Case) -> Column:
    return c.is_diffusion & c.packing


@rule(
    "diffusion.adapters",
    "error",
    "method",
    message="there are no adapters for diffusion models here; train them with goal pretrain or sft",
    symptom="no recipe of that kind",
    cause="adapter targets are named after language-model layers",
)
def diffusion_has_no_adapters(c: Case) -> Column:
    return c.is_diffusion & (c.goal == "peft")


@rule(
    "diffusion.strategy",
    "error",
    "strategy",
    engines=("meshwright",),
    message="diffusion models are not trained with megatron_fsdp here",
    symptom="refused before training",
    cause="its units are the layers of language models",
    fixes=({"strategy": ["fsdp2"]},),
)
def diffusion_is_sharded_by_torch(c: Case) -> Column:
    return c.is_diffusion & (c.strategy == "megatron_fsdp")


@rule(
    "diffusion.low-precision",
    "error",
    "matmul",
    engines=("meshwright",),
    message="linear layers of diffusion models compute as the rest does, not in {matmul}",
    symptom="refused before training",
    cause="the layers are cut in ways that the 8-bit kernels do not know",
    fixes=(NO_FP8,),
)
def diffusion_computes_in_one_format(c: Case) -> Column:
    return c.is_diffusion & c.fp8


@rule(
    "diffusion.recompute-modules",
    "error",
    "recompute_modules",
    engines=("meshwright",),
    message="blocks of diffusion models have none of the modules in recompute_modules={recompute_modules}",
    symptom="refused before training",
    cause="the names are those of language-model layers; ops and full recompute know any block",
    fixes=({"recompute_modules": [()]}, {"recompute": ["full"], "recompute_modules": [()]}),
)
def diffusion_recomputes_operations(c: Case) -> Column:
    return c.is_diffusion & (c.recompute == "selective") & bool(set(c.recompute_modules) - {"ops"})


@rule(
    "diffusion.z-loss",
    "error",
    "z_loss",
    engines=("meshwright",),
    message="z_loss={z_loss} has no meaning for a diffusion model",
    symptom="refused before training",
    cause="velocities are trained by a squared error, which has no partition function",
    fixes=({"z_loss": [0.0]},),
)
def diffusion_has_no_partition_function(c: Case) -> Column:
    return c.is_diffusion & (c.z_loss > 0)
