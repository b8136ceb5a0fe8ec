"""The local batch of frameworks whose pipeline runs once per local batch: torchtitan and AutoModel.

A rank splits its local batch into micro batches, which pass the pipeline together; a global batch of several local
batches repeats the pass, and each pass fills and drains the stages.
"""

from __future__ import annotations

from typing import Any

import msgspec

from meshwright.clusters import cluster
from meshwright.errors import InputError, MeshwrightError
from meshwright.recipes.key_maps.key import MappedFields
from meshwright.recipes.types import Recipe


def local_batch(recipe: Recipe, world: int) -> int:
    """Return the samples of one pass through the pipeline: all of a rank's step unless the layout has fewer."""
    layout, batch = recipe.layout, recipe.train.global_batch_size
    if layout.pp_micro_batches:
        return layout.micro_batch_size * layout.pp_micro_batches
    ranks = _data_ranks(recipe, world)
    return batch // ranks if batch % (ranks * layout.micro_batch_size) == 0 else layout.micro_batch_size


def local_batch_settings(recipe: Recipe, local_key: str, micro_key: str) -> dict[str, Any]:
    """Return the keys of local and micro batch; without the local batch of a pipeline if the GPUs are unknown."""
    micro = recipe.layout.micro_batch_size
    if recipe.layout.pp == 1:
        return {local_key: micro}
    world = 1 if recipe.layout.pp_micro_batches else _world(recipe)
    return {micro_key: micro, **({local_key: local_batch(recipe, world)} if world else {})}


def typed_local_batch(local: int | None, micro: int | None, recipe: Recipe, local_key: str) -> MappedFields:
    """Return the fields of a typed local batch or micro batch of a pipeline; what is not typed stays."""
    fields = {} if micro is None else {"layout.micro_batch_size": str(micro)}
    each = recipe.layout.micro_batch_size if micro is None else micro
    if local is not None:
        if local % each:
            raise InputError(f"is not a multiple of layout.micro_batch_size={each}", field=local_key, value=local)
        fields["layout.pp_micro_batches"] = str(local // each)
    return MappedFields(fields)


def with_passes(recipe: Recipe, local: int, world: int) -> Recipe:
    """Return the recipe whose pipeline runs a local batch in each pass; 0 micro batches if one pass is the step."""
    layout = recipe.layout
    count = local // layout.micro_batch_size if layout.pp > 1 else 0
    is_step = local * _data_ranks(recipe, world) == recipe.train.global_batch_size
    changed = msgspec.structs.replace(layout, pp_micro_batches=0 if is_step else count)
    return msgspec.structs.replace(recipe, layout=changed)


def same_passes(one: Recipe, other: Recipe, world: int) -> bool:
    """Return whether the pipelines of two recipes run the same number of micro batches in each pass."""
    return one.layout.pp == other.layout.pp == 1 or local_batch(one, world) == local_batch(other, world)


def _data_ranks(recipe: Recipe, world: int) -> int:
    layout = recipe.layout
    return max(1, world // (layout.tp * layout.pp * layout.cp))


def _world(recipe: Recipe) -> int:
    """Return the number of GPUs of the recipe's cluster, or 0 if it names none."""
    try:
        return cluster(recipe.cluster).world if recipe.cluster else 0
    except MeshwrightError:
        return 0
