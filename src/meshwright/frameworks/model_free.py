"""Checks that hold for every model, for files whose model is unknown: the GPU's formats, and layouts of Megatron."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from meshwright import models, rules
from meshwright.clusters import Cluster
from meshwright.frameworks.to_recipe import ImportedRecipe
from meshwright.models import ModelSpec
from meshwright.planner import as_overrides, case_of
from meshwright.recipes.types import Recipe
from meshwright.rules.rule import Finding

ENGINE = "megatron"
AXES = ("layout.tp", "layout.pp", "layout.cp")
NO_FIX = "the model is unknown: choose a divisor by hand, or pass --model"
GPU_RULES = ("precision.bf16-gpu", "precision.fp8-gpu", "precision.block-scaled-gpu", "kernels.attention-gpu",
             "network.tensor-parallel-domain")  # fmt: skip
"""Rules that compare a setting with the GPUs and read nothing about the model."""
BATCHES = ("train.global_batch_size", "layout.micro_batch_size")


def model_free_findings(imported: ImportedRecipe, recipe: Recipe, on: Cluster) -> Iterator[Finding]:
    """Yield an error if the GPUs cannot be divided by the layout, or the batch by the data-parallel ranks."""
    mapped, layout = imported.mapped, recipe.layout
    if imported.engine != ENGINE or any(field in mapped.unresolved for field in AXES):
        return
    ranks = layout.tp * layout.pp * layout.cp
    if ranks < 1 or on.world % ranks:
        message = f"{on.world} GPUs are not divisible by tp × pp × cp = {ranks}"
        stated = [field for field in AXES if field in mapped.source_keys]
        yield _finding(imported, "topology.world", stated[0] if stated else AXES[0], message)
        return
    stated = [field for field in BATCHES if field in mapped.source_keys]
    known = len(stated) == len(BATCHES) or (imported.parsed.base is not None and stated == [BATCHES[0]])
    if not known or any(field in mapped.unresolved for field in BATCHES):
        return
    batch, part = recipe.train.global_batch_size, layout.micro_batch_size * (on.world // ranks)
    if part < 1 or batch % part:
        size = f"micro_batch_size={layout.micro_batch_size} × dp={on.world // ranks}"
        yield _finding(imported, "batch.divides", BATCHES[0], f"global_batch_size={batch} is not divisible by {size}")


def _finding(imported: ImportedRecipe, rule: str, field: str, message: str) -> Finding:
    key = imported.mapped.source_keys.get(field, "")
    setting = imported.parsed.settings.get(key)
    file = setting.file if setting else imported.parsed.files[0] if imported.parsed.files else ""
    return Finding(rule, "error", key or field, message, (), file, setting.line if setting else 0, NO_FIX)


def any_model() -> ModelSpec:
    """Return the model that takes the place of an unknown one, for rules that read nothing about it."""
    return models.find("llama3_8b")


def gpu_findings(imported: ImportedRecipe, recipe: Recipe, on: Cluster) -> Iterator[Finding]:
    """Yield what the file states and the GPUs cannot do, whatever the model is, with fixes as overrides."""
    case = case_of(recipe, any_model(), on, imported.engine)
    stated = {*imported.mapped.source_keys} - {*imported.mapped.unresolved}
    for finding in rules.check(case, rules.SEVERITIES[:2], fixes=False):
        if finding.rule not in GPU_RULES or finding.field not in stated:
            continue
        if finding.field in AXES:
            yield msgspec.structs.replace(finding, no_fix=NO_FIX)
        else:
            yield msgspec.structs.replace(finding, fix=as_overrides(rules.one_fix(rules.RULES[finding.rule], case)))
