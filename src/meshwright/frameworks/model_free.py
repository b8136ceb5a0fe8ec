"""Checks that hold for every model, for files whose model is unknown: the GPU's formats, the degrees and the batch."""

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

MESH_FIELDS = ("layout.tp", "layout.pp", "layout.cp", "layout.dp_shard", "layout.dp_replicate")
BATCHES = ("train.global_batch_size", "layout.micro_batch_size")
FREE_FIELDS = ("dp_shard", "dp_replicate", "micro_batch_size", "global_batch_size")
"""Fields whose legal values do not depend on the model."""
NO_FIX = "the model is unknown: choose a divisor by hand, or pass --model"
MESH_RULES = ("topology.world", "topology.world-with-experts", "topology.shard-product", "topology.replicas-divide")
BATCH_RULES = ("batch.divides", "batch.smaller-than-data-parallel")
"""Rules that read nothing about the model; those on the batch hold for degrees that fill the GPUs."""
GPU_RULES = ("precision.bf16-gpu", "precision.fp8-gpu", "precision.block-scaled-gpu", "kernels.attention-gpu",
             "network.tensor-parallel-domain")  # fmt: skip
"""Rules that compare a setting with the GPUs and read nothing about the model."""


def model_free_findings(imported: ImportedRecipe, recipe: Recipe, on: Cluster) -> Iterator[Finding]:
    """Yield an error if the degrees do not fill the GPUs, or the batch its data-parallel ranks; fixes as overrides."""
    mapped = imported.mapped
    if any(field in mapped.unresolved for field in MESH_FIELDS):
        return
    case = case_of(recipe, any_model(), on, imported.engine)
    broken = {one.rule: one for one in rules.check(case, ("error",), fixes=False)}
    mesh = [broken[rule] for rule in MESH_RULES if rule in broken][:1]  # the others follow from the first
    stated = [field for field in BATCHES if field in mapped.source_keys]
    known = len(stated) == len(BATCHES) or (imported.parsed.base is not None and stated == [BATCHES[0]])
    if not mesh and known and not any(field in mapped.unresolved for field in BATCHES):
        mesh = [broken[rule] for rule in BATCH_RULES if rule in broken]
    for finding in mesh:
        change = rules.one_fix(rules.RULES[finding.rule], case)
        free = change and all(field in FREE_FIELDS for field in change)
        field = next((one for one in (finding.field, *MESH_FIELDS) if one in mapped.source_keys), finding.field)
        fix = as_overrides(change) if free else ()
        yield msgspec.structs.replace(finding, field=field, fix=fix, no_fix="" if fix else NO_FIX)


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
        if finding.field in MESH_FIELDS:
            yield msgspec.structs.replace(finding, no_fix=NO_FIX)
        else:
            yield msgspec.structs.replace(finding, fix=as_overrides(rules.one_fix(rules.RULES[finding.rule], case)))
