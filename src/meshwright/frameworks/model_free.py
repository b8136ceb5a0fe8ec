"""Checks of a layout that hold for every model, for files of Megatron whose model is unknown."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.clusters import Cluster
from meshwright.frameworks.to_recipe import ImportedRecipe
from meshwright.recipes.types import Recipe
from meshwright.rules.rule import Finding

ENGINE = "megatron"
AXES = ("layout.tp", "layout.pp", "layout.cp")
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
    no_fix = "the model is unknown: choose a divisor by hand, or pass --model"
    return Finding(rule, "error", key or field, message, (), file, setting.line if setting else 0, no_fix)
