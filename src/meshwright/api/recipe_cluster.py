"""The GPUs of a request about a recipe: those that are typed, or the recipe's own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from meshwright import clusters
from meshwright.errors import InputError
from meshwright.recipes.types import Recipe

if TYPE_CHECKING:
    from meshwright.frameworks.framework import Content

FIELD = "cluster"


def cluster_for(recipe: Recipe, gpus: str | int | None, content: Content | None = None) -> str:
    """Return the cluster that is typed, or the recipe's own; raise InputError if the file of that is not here.

    `content` is the recipe's file. A typed cluster replaces the recipe's before a file of that is opened.
    """
    if gpus is not None:
        return str(gpus)
    if clusters.is_missing_file(recipe.cluster):
        raise _missing(recipe.cluster, content)
    return recipe.cluster


def _missing(cluster: str, content: Content | None) -> InputError:
    """Return the error for a cluster file of another machine; one of that name beside the recipe may be it."""
    where = "the recipe" if content is None else content.path
    beside = Path(where).parent / Path(clusters.file_as_typed(cluster)).name
    fix = ["--gpus 8xH100 (any cluster, or a cluster file)", f'{FIELD} = "8xH100" in {where}']
    if content is not None and beside.is_file():
        fix = [f"--gpus {beside}", f'{FIELD} = "{beside.name}" in {where}']
    return InputError(f"{where} names a cluster file that is not on this machine", FIELD, cluster, fix)
