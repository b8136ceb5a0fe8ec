"""What diffusion models cannot use."""

from __future__ import annotations

from meshwright.recipes.case import Case, Column
from meshwright.rules.domains import NO_PIPELINE
from meshwright.rules.rule import rule


@rule(
    "diffusion.pipeline",
    "error",
    "pp",
    message="a diffusion model cannot be split over pp={pp} stages",
    symptom="the model has no stage split: time and text conditioning reach every block",
    cause="conditioning would have to travel along with every micro batch",
    fixes=(NO_PIPELINE,),
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
