"""Features that vision-language models do not support, and freezing of their modules."""

from __future__ import annotations

from meshwright.recipes.case import Case, Column
from meshwright.rules.memory import MEMORY_FIXES
from meshwright.rules.model_families import is_gemma3, is_qwen3_vl
from meshwright.rules.rule import rule
from meshwright.rules.search_values import NO_CP, NO_PP, not_

MODULES = {"language", "vision", "projector"}
DEEP = 3  # inner layers of Qwen3-VL's encoder whose features are added after the first language-model layers


def _uses_images(c: Case) -> Column:
    return c.has_vision & c.images


@rule(
    "vision.context",
    "error",
    "cp",
    engines=("meshwright",),
    message="Gemma 3 image tokens attend in both directions, which cp={cp} does not support",
    symptom="rejected in the first forward pass",
    cause="context parallelism implements causal attention, and an image may span several ranks",
    fixes=(NO_CP, *({**NO_CP, **room} for room in MEMORY_FIXES)),
)
def gemma3_images_with_cp(c: Case) -> Column:
    return _uses_images(c) & is_gemma3(c) & (c.cp > 1)


@rule(
    "vision.deep-stack",
    "error",
    "pp",
    engines=("meshwright",),
    message="the vision encoder feeds {deep} layers, but the first of pp × vp = {pp} × {vp} chunks has {first}",
    symptom="rejected when the model is built",
    cause="Qwen3-VL adds features of inner encoder layers after its first layers; the encoder is on the first stage",
    fixes=({"vp": [1], "pp_schedule": ["1f1b"], "stage_layers": [()]}, NO_PP),
    values={"first": lambda c: int(_first(c)), "deep": lambda c: DEEP},
)
def deep_stack_split(c: Case) -> Column:
    return _uses_images(c) & is_qwen3_vl(c) & (c.pp > 1) & (_first(c) < DEEP)


def _first(c: Case) -> Column:
    """Return the layers of the first chunk; a balanced one has an extra layer only if all but one have."""
    if c.stage_layers:
        return c.stage_layers[0]
    more = (c.listed_stages > 0) & (c.pp - c.layers % c.pp <= 1)
    return c.layers // c.stages + more * 1


@rule(
    "vision.strategy",
    "error",
    "strategy",
    engines=("meshwright",),
    message="megatron_fsdp does not support vision-language models",
    symptom="rejected before training starts",
    cause="its units are language-model layers; the vision encoder would be gathered as a whole",
    fixes=({"strategy": ["fsdp2"]},),
)
def vision_megatron_fsdp(c: Case) -> Column:
    return _uses_images(c) & (c.strategy == "megatron_fsdp")


@rule(
    "vision.fp8-per-tensor",
    "error",
    "matmul",
    engines=("meshwright",),
    message="compiled fp8 with one scale per tensor is not right for full training of vision-language MoE models",
    symptom="gradients of attention that are larger than the right ones, at the same loss",
    cause="measured on an H200 for GLM-4.5V (benchmarks/results/gpu_parity.json); the reason is not known",
    fixes=({"matmul": ["fp8_row"]}, {"matmul": ["same"]}, {"compile": [False]}),
)
def vision_moe_fp8_tensor(c: Case) -> Column:
    return _uses_images(c) & c.is_moe & c.compile & (c.matmul == "fp8_tensor") & (c.goal != "peft")


@rule(
    "vision.freeze-without-images",
    "error",
    "freeze",
    message="freeze names vision-language modules, but this model trains on text only",
    symptom="nothing is frozen, although it looks so",
    cause="only models with a vision encoder that train on images have these modules",
    fixes=({"freeze": [()]},),
)
def freeze_without_images(c: Case) -> Column:
    return (len(c.freeze) > 0) & not_(_uses_images(c))


@rule(
    "vision.nothing-trained",
    "error",
    "freeze",
    message="freeze covers the language model, the vision encoder and the projector: nothing is trained",
    symptom="an optimizer without parameters",
    cause="at least one module must be trainable",
    fixes=({"freeze": [("language", "vision")]},),
)
def everything_frozen(c: Case) -> Column:
    return (set(c.freeze) == MODULES) & (c.goal != "peft")
