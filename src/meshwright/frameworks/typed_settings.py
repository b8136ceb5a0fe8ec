"""A file's settings with overrides in place of its own, as the framework's rules read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from meshwright.frameworks.framework import ParsedConfig
from meshwright.frameworks.mapping import to_settings
from meshwright.frameworks.schedule_units import in_file_units
from meshwright.frameworks.to_recipe import ImportedRecipe
from meshwright.frameworks.types import SourcedValue
from meshwright.recipes.key_maps import composite_keys
from meshwright.recipes.types import field_value


def with_typed(imported: ImportedRecipe) -> ParsedConfig:
    """Return the file with the typed overrides in its settings, which the framework's own rules read."""
    fields = [key for key, value in imported.typed.items() if field_value(imported.mapped.recipe, key) != value]
    if not fields:
        return imported.parsed
    recipes = imported.mapped.recipe, imported.recipe
    before, after = (to_settings(imported.framework, one, fields)[0] for one in recipes)
    open_keys = _keys_of_program(imported)
    touched = [
        key for key in {**before, **after} if before.get(key, ...) != after.get(key, ...) and key not in open_keys
    ]
    settings = {**imported.parsed.settings}
    for key in removed_keys(imported, touched, after):
        settings.pop(key, None)
    differing = {key: after[key] for key in touched if key in after}
    units = in_file_units(imported.framework.key_map, differing, imported.parsed.settings, imported.recipe)
    for key, value in units.items():
        old = imported.parsed.settings.get(key, SourcedValue(None, 0, ""))
        settings[key] = SourcedValue(value, old.line, old.file)
    return msgspec.structs.replace(imported.parsed, settings=settings)


def _keys_of_program(imported: ImportedRecipe) -> set[str]:
    """Return the keys that the file does not have, of typed fields that its training program sets.

    A section that the file has is the config's: its program does not build that optimizer or schedule.
    """
    parsed, sections = imported.parsed, {key.partition(".")[0] for key in imported.parsed.settings}
    found: set[str] = set()
    for field in filter(parsed.leaves_to_program, imported.typed):
        keys = to_settings(imported.framework, imported.recipe, [field])[0].keys() - parsed.settings.keys()
        found |= {key for key in keys if field in parsed.unknown_fields or key.partition(".")[0] not in sections}
    return found


def removed_keys(imported: ImportedRecipe, touched: Sequence[str], after: Mapping[str, Any]) -> list[str]:
    """Return the keys that a fix removes: those it leaves out, or what the file says the same with."""
    removed: dict[str, None] = {}
    for key in touched:
        group = next((one.keys for one in composite_keys(imported.framework.key_map) if key in one.keys), (key,))
        stated = [one for one in group if one in imported.parsed.settings and one not in after]
        switches = [one for one in stated if imported.parsed.settings[one].value is True]
        gone = [] if key in after else [key]
        if gone and key not in imported.parsed.settings:  # the file says it with a switch or in another unit
            gone = [] if switches else stated or gone
        removed |= dict.fromkeys([*switches, *gone])
    return list(removed)
