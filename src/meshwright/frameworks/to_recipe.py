"""A file read as one of our recipes, and the clusters it may be meant for."""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm
from typing import Any, Literal, get_args, get_origin

import msgspec

from meshwright.clusters import Cluster, cluster
from meshwright.frameworks.framework import Content, Framework, ParsedConfig
from meshwright.frameworks.mapping import MappedSettings, map_to_recipe
from meshwright.models import ModelSpec
from meshwright.recipes import overrides as override
from meshwright.recipes.types import Engine, Recipe, recipe_fields
from meshwright.recipes.values import bare_type

GPUS = ("H100", "A100-80", "H200", "B200", "GB200")
"""Types to try where a file does not say one: what is wrong on all of them is wrong."""
TIMES = (1, 2, 4, 8, 16, 32, 64)
NODE = 8
NUMBERS = (1, 2, 4, 8, 16, 64, 512)
LENGTHS = {"data.seq_length": (131_072,)}


class ImportedRecipe(msgspec.Struct, frozen=True):
    """A file of another framework in our words."""

    framework: Framework
    parsed: ParsedConfig
    mapped: MappedSettings
    recipe: Recipe
    model: ModelSpec | None
    unknown_fields: tuple[str, ...] = ()  # our fields that neither the file nor an override says

    @property
    def engine(self) -> Engine:
        """What runs it."""
        return self.parsed.engine or self.framework.engine


def import_recipe(
    framework: Framework, content: Content, model: ModelSpec | None = None, overrides: list[str] | None = None
) -> ImportedRecipe:
    """The recipe that a file means; `model` is for files that do not name theirs, overrides come on top."""
    if framework.formatter_for is not None:
        framework = msgspec.structs.replace(framework, format_setting=framework.formatter_for(content))
    parsed = framework.parse(content)
    found = parsed.model or model
    if model is not None:
        parsed, found = msgspec.structs.replace(parsed, model=model), model
    mapped = map_to_recipe(framework, parsed)
    asked = override.requested(mapped.recipe, overrides or [])
    recipe, _ = override.change(mapped.recipe, asked)
    left = tuple(own for own in parsed.unknown_fields if own not in asked and own not in mapped.source_keys)
    return ImportedRecipe(framework, parsed, mapped, recipe, found, left)


def complete(reading: ImportedRecipe, on: Cluster) -> Recipe:
    """The recipe on a cluster, with what follows from the number of GPUs filled in."""
    recipe = msgspec.structs.replace(reading.recipe, cluster=str(on))
    return reading.framework.complete(recipe, reading.parsed, on) if reading.framework.complete else recipe


def clusters_for(reading: ImportedRecipe, gpus: str | None) -> tuple[bool, list[Cluster]]:
    """Whether the GPUs are known, and the clusters to judge by: the one that is meant, or all that may be."""
    if gpus is not None:
        return True, [cluster(gpus)]
    asked = reading.parsed.gpu_request
    if asked.count is not None and asked.gpu:
        return True, [_cluster(asked.count, asked.gpus_per_node, asked.gpu)]
    types = (asked.gpu,) if asked.gpu else GPUS
    worlds = [asked.count] if asked.count is not None else list(_worlds(reading))
    return False, [_cluster(world, asked.gpus_per_node, gpu) for gpu in types for world in worlds]


def _worlds(reading: ImportedRecipe) -> Iterator[int]:
    layout, asked = reading.recipe.layout, reading.parsed.gpu_request
    dense = layout.tp * layout.cp * (layout.ep if reading.engine == "kempnerforge" else 1)
    least = layout.pp * lcm(dense, layout.ep * layout.etp) * layout.dp_replicate
    if layout.dp_shard > 0:
        yield max(layout.pp * dense * layout.dp_replicate * layout.dp_shard, least)
        return
    if asked.gpus_per_node and least % asked.gpus_per_node:
        least = lcm(least, asked.gpus_per_node)
    yield from (least * times for times in TIMES)


def _cluster(world: int, per_node: int | None, gpu: str) -> Cluster:
    size = per_node or NODE
    return cluster(f"{world // size}x{size}x{gpu}" if world % size == 0 and world >= size else f"{world}x{gpu}")


def alternatives(own: str) -> list[Any]:
    """Values that a field may hold when the file leaves it open."""
    kind, _ = bare_type(recipe_fields()[own].type)
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    if kind is bool:
        return [True, False]
    return [*NUMBERS, *LENGTHS.get(own, ())] if kind is int else []
