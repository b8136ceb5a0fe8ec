"""A recipe in another framework's words, proven by reading it back."""

from __future__ import annotations

from importlib import import_module

import msgspec

from meshwright.clusters import Cluster
from meshwright.frameworks.framework import Framework
from meshwright.frameworks.load import content_of
from meshwright.frameworks.mapping import relevant, same, value_of
from meshwright.frameworks.to_recipe import complete, read
from meshwright.frameworks.types import UnmappedField, Written
from meshwright.models import ModelSpec
from meshwright.recipes.types import Recipe, recipe_fields


def export(dialect: Framework, recipe: Recipe, model: ModelSpec, on: Cluster) -> Written:
    """The files and the program that train this recipe there; every field that would be lost is listed."""
    written = write(dialect, recipe, model, on)
    listed = {one.field for one in written.unsaid}
    lost = tuple(one for one in differences(dialect, written, recipe, model, on) if one.field not in listed)
    return msgspec.structs.replace(written, unsaid=(*written.unsaid, *lost))


def write(dialect: Framework, recipe: Recipe, model: ModelSpec, on: Cluster) -> Written:
    """The dialect's own writer, which is loaded when something is written."""
    found: Written = import_module(f"meshwright.frameworks.{dialect.table}.write").write(dialect, recipe, model, on)
    return found


def read_back(dialect: Framework, written: Written, model: ModelSpec, on: Cluster) -> Recipe:
    """The recipe that a written config means: its first file is the one that is read."""
    name, text = next(iter(written.files.items()))
    return complete(read(dialect, content_of(text, name), model), on)


def differences(
    dialect: Framework, written: Written, recipe: Recipe, model: ModelSpec, on: Cluster
) -> tuple[UnmappedField, ...]:
    """Fields that read back otherwise than they were written."""
    found = read_back(dialect, written, model, on)
    return tuple(
        UnmappedField(key, value_of(recipe, key), f"{dialect.title} would take {value_of(found, key)!r}")
        for key in relevant(recipe, model)
        if not same(value_of(found, key), value_of(recipe, key)) and key in recipe_fields()
    )
