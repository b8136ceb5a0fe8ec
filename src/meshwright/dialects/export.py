"""A recipe in another framework's words, proven by reading it back."""

from __future__ import annotations

import msgspec

from meshwright.clusters import Cluster
from meshwright.dialects.contents import content_of
from meshwright.dialects.dialect import Dialect
from meshwright.dialects.mapping import relevant, value_of
from meshwright.dialects.reading import complete, read
from meshwright.dialects.types import Unsaid, Written
from meshwright.errors import InputError
from meshwright.models import ModelSpec
from meshwright.recipes.types import Recipe, recipe_fields


def export(dialect: Dialect, recipe: Recipe, model: ModelSpec, on: Cluster) -> Written:
    """The files and the program that train this recipe there; every field that would be lost is listed."""
    if dialect.write is None:
        raise InputError(f"{dialect.title} is read, not written", field="to", value=dialect.name)
    written = dialect.write(recipe, model, on)
    listed = {one.field for one in written.unsaid}
    lost = tuple(one for one in differences(dialect, written, recipe, model, on) if one.field not in listed)
    return msgspec.structs.replace(written, unsaid=(*written.unsaid, *lost))


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
        if not _same(value_of(found, key), value_of(recipe, key)) and key in recipe_fields()
    )


def _same(one: object, other: object) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= 1e-9 * max(abs(one), abs(other))
    return one == other
