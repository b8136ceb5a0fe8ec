"""A recipe in another framework's words, proven by reading it back."""

from __future__ import annotations

from importlib import import_module

import msgspec

from meshwright.clusters import Cluster
from meshwright.dialects.contents import content_of
from meshwright.dialects.dialect import Dialect
from meshwright.dialects.mapping import relevant, same, value_of
from meshwright.dialects.reading import complete, read
from meshwright.dialects.types import Unsaid, Written
from meshwright.models import ModelSpec
from meshwright.recipes.types import Recipe, recipe_fields


def export(dialect: Dialect, recipe: Recipe, model: ModelSpec, on: Cluster) -> Written:
    """The files and the program that train this recipe there; every field that would be lost is listed."""
    written = write(dialect, recipe, model, on)
    listed = {one.field for one in written.unsaid}
    lost = tuple(one for one in differences(dialect, written, recipe, model, on) if one.field not in listed)
    return msgspec.structs.replace(written, unsaid=(*written.unsaid, *lost))


def write(dialect: Dialect, recipe: Recipe, model: ModelSpec, on: Cluster) -> Written:
    """The dialect's own writer, which is loaded when something is written."""
    found: Written = import_module(f"meshwright.dialects.{dialect.table}.write").write(dialect, recipe, model, on)
    return found


def read_back(dialect: Dialect, written: Written, model: ModelSpec, on: Cluster) -> Recipe:
    """The recipe that a written config means: its first file is the one that is read."""
    name, text = next(iter(written.files.items()))
    return complete(read(dialect, content_of(text, name), model), on)


def differences(
    dialect: Dialect, written: Written, recipe: Recipe, model: ModelSpec, on: Cluster
) -> tuple[Unsaid, ...]:
    """Fields that read back otherwise than they were written."""
    found = read_back(dialect, written, model, on)
    return tuple(
        Unsaid(key, value_of(recipe, key), f"{dialect.title} would take {value_of(found, key)!r}")
        for key in relevant(recipe, model)
        if not same(value_of(found, key), value_of(recipe, key)) and key in recipe_fields()
    )
