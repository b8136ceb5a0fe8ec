"""What models that see cannot use, and which of their parts may be left out of training."""

from __future__ import annotations

from meshwright.recipes.case import Case, Column
from meshwright.rules.memory import MEMORY_FIXES
from meshwright.rules.model_families import is_gemma3, is_qwen3_vl
from meshwright.rules.rule import rule
from meshwright.rules.search_values import NO_CP, NO_PP, not_

PARTS = {"language", "vision", "projector"}
DEEP = 3  # inner layers of Qwen3-VL's tower whose features are added behind the first layers of the language model


def _sees(c: Case) -> Column:
    return c.has_vision & c.images


@rule(
    "vision.context",
    "error",
    "cp",
    engines=("meshwright",),
    message="Gemma 3's image tokens see each other both ways, which cp={cp} ranks cannot compute together",
    symptom="refused in the first forward pass",
    cause="keys and values travel for causal attention; an image may lie on several ranks",
    fixes=(NO_CP, *({**NO_CP, **room} for room in MEMORY_FIXES)),
)
def whole_images_stay_on_a_rank(c: Case) -> Column:
    return _sees(c) & is_gemma3(c) & (c.cp > 1)


@rule(
    "vision.deep-stack",
    "error",
    "pp",
    engines=("meshwright",),
    message="the vision tower feeds the first {deep} layers; the first of pp × vp = {pp} × {vp} chunks has {first}",
    symptom="refused when the model is built",
    cause="what inner layers of Qwen3-VL's tower saw is added behind the first layers; the tower is on the first stage",
    fixes=({"vp": [1], "pp_schedule": ["1f1b"], "stage_layers": [()]}, NO_PP),
    values={"first": lambda c: int(_first(c)), "deep": lambda c: DEEP},
)
def tower_and_its_layers_are_together(c: Case) -> Column:
    return _sees(c) & is_qwen3_vl(c) & (c.pp > 1) & (_first(c) < DEEP)


def _first(c: Case) -> Column:
    return c.stage_layers[0] if c.stage_layers else c.layers // c.stages


@rule(
    "vision.strategy",
    "error",
    "strategy",
    engines=("meshwright",),
    message="models that see are not trained with megatron_fsdp here",
    symptom="refused before training",
    cause="its units are the layers of language models; a vision tower would be gathered whole",
    fixes=({"strategy": ["fsdp2"]},),
)
def towers_are_sharded_by_torch(c: Case) -> Column:
    return _sees(c) & (c.strategy == "megatron_fsdp")


@rule(
    "vision.freeze-without-images",
    "error",
    "freeze",
    message="freeze names parts of a model that sees, and this one is trained on text alone",
    symptom="nothing is left out of training, though it looks so",
    cause="only models with a vision tower, trained on images, have these parts",
    fixes=({"freeze": [()]},),
)
def frozen_parts_are_there(c: Case) -> Column:
    return (len(c.freeze) > 0) & not_(_sees(c))


@rule(
    "vision.nothing-trained",
    "error",
    "freeze",
    message="the language model, the vision tower and the projector are all left out of training",
    symptom="an optimizer without parameters",
    cause="some part has to learn",
    fixes=({"freeze": [("language", "vision")]},),
)
def something_is_trained(c: Case) -> Column:
    return (set(c.freeze) == PARTS) & (c.goal != "peft")
