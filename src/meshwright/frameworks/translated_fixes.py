"""Fixes of our rules in a framework's keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from meshwright.config_io.scalars import resolve
from meshwright.errors import InputError
from meshwright.frameworks.accumulation import accumulation_after, kept_accumulation
from meshwright.frameworks.argument_fixes import (
    HALF_PRECISIONS,
    MIXED_PRECISION,
    argument_changes,
    program_fields,
    replaced_keys,
)
from meshwright.frameworks.deepspeed.format_override import format_setting as in_json
from meshwright.frameworks.mapping import relevant_fields, to_settings
from meshwright.frameworks.merged_fix import program_arguments
from meshwright.frameworks.schedule_units import file_units, in_file_units
from meshwright.frameworks.to_recipe import ImportedRecipe
from meshwright.frameworks.typed_settings import removed_keys
from meshwright.frameworks.types import as_int
from meshwright.recipes import overrides as override
from meshwright.recipes.key_maps import config_keys
from meshwright.recipes.types import Recipe, field_value
from meshwright.rules import Finding

BATCH, ACCUMULATION = "train_batch_size", "gradient_accumulation_steps"
MICRO_BATCH = "per_device_train_batch_size"
GLOBAL_BATCH = "train.global_batch_size"


def in_framework_keys(imported: ImportedRecipe, recipe: Recipe, finding: Finding) -> Finding:
    field = finding.field
    key = imported.mapped.source_keys.get(field, "") or _their_key(imported, recipe, field)
    if not key and field == "layout.micro_batch_size" and MICRO_BATCH in imported.parsed.program.fills:
        key = f"--{MICRO_BATCH}"
    unit = file_units(imported.framework.key_map, imported.parsed.settings, recipe).get(key)
    key = unit.key if unit and key not in imported.parsed.settings else key
    setting = imported.parsed.settings.get(key) or imported.parsed.program.given.get(key.removeprefix("--"))
    is_of_accelerate = imported.parsed.program.is_front_end and not key.startswith("--")  # a file without such keys
    return msgspec.structs.replace(
        finding,
        field=field if is_of_accelerate else key or field,
        fix=their_fix(imported, recipe, finding.fix),
        file=setting.file if setting else imported.parsed.files[0] if imported.parsed.files else "",
        line=setting.line if setting else 0,
    )


def _their_key(imported: ImportedRecipe, recipe: Recipe, field: str) -> str:
    settings, _ = to_settings(imported.framework, recipe, [field])
    return next(iter(settings), "")


def their_fix(imported: ImportedRecipe, recipe: Recipe, fix: Sequence[str]) -> tuple[str, ...]:
    """Translate overrides to the framework's settings; empty if one has no key and is not derived."""
    framework, model = imported.framework, imported.model
    if not fix or model is None:
        return ()
    recipe = msgspec.structs.replace(recipe, engine=imported.engine)  # whose keys say where the state is offloaded
    changed = override.apply_fix(recipe, fix)
    of_program = program_fields(imported)
    fields = [one for one in relevant_fields(changed, model) if one not in of_program]
    before, _ = to_settings(framework, recipe, fields)
    after, unmapped = to_settings(framework, changed, fields)
    differing = {key: value for key, value in after.items() if before.get(key, ...) != value}
    touched = [key for key in {**before, **after} if before.get(key, ...) != after.get(key, ...)]
    differing |= dict.fromkeys(removed_keys(imported, touched, after)) | _kept_batch(imported, recipe, changed)
    instead = replaced_keys(imported) | _derived_keys(imported)
    differing = {key: value for key, value in differing.items() if key not in instead}
    differing = _without_stated_with(differing, imported.parsed.stated_with)
    stated = in_file_units(framework.key_map, differing, imported.parsed.settings, changed)
    try:
        formatted = list(_formatted(imported, stated | _batch_arguments(imported, recipe, changed), changed))
        formatted += argument_changes(imported, recipe, changed)
        formatted += _repeated(imported, formatted)
    except InputError:  # a front end has no key for it
        return ()
    lost = {one.field for one in unmapped} & {text.partition("=")[0] for text in fix} - {
        *imported.parsed.field_values,
        *framework.derived_fields,
    }
    return () if lost else tuple(formatted)


def _derived_keys(imported: ImportedRecipe) -> set[str]:
    """Return the keys that a file does not have, of fields that follow from its others; its version may have no key."""
    follows = imported.parsed.field_values.keys() & {*imported.framework.derived_fields}
    keys = config_keys(imported.framework.key_map).items()
    return {key for key, one in keys if one.field in follows and key not in imported.parsed.settings}


def _kept_batch(imported: ImportedRecipe, recipe: Recipe, changed: Recipe) -> dict[str, Any]:
    """Return the global batch of a file that does not set it, if a fix changes what it follows from."""
    theirs = imported.framework
    if theirs.accumulation_key:
        return kept_accumulation(theirs, imported.parsed.settings, recipe, changed) or {}
    follows = [one for one in theirs.batch_follows if field_value(recipe, one) != field_value(changed, one)]
    if not follows or GLOBAL_BATCH in imported.mapped.source_keys:
        return {}
    return to_settings(theirs, changed, [GLOBAL_BATCH])[0]


def _without_stated_with(differing: Mapping[str, Any], stated_with: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings of a fix that also removes the keys from which the changed ones follow."""
    found = {key: value for key, value in differing.items() if key not in stated_with or value is not None}
    for key in differing:
        if key in stated_with:
            found.setdefault(stated_with[key], None)
    return found


def _formatted(imported: ImportedRecipe, stated: Mapping[str, Any], changed: Recipe) -> Iterator[str]:
    """Yield settings where the file's value comes from: the config, an argument of the program, or both."""
    program = imported.parsed.program
    in_config = {key: value for key, value in stated.items() if key not in program.fills}
    for key, value in imported.framework.own_settings(imported.parsed, in_config, changed).items():
        yield _as_flag(key, value) if program.is_command else imported.framework.format_setting(key, value)
    for key, value in stated.items():
        if key == BATCH and ACCUMULATION in program.fills:  # the Trainer multiplies its own arguments
            continue
        if key in program.repeats and key == MIXED_PRECISION:
            yield from program.formatted(value, True) if value in HALF_PRECISIONS else ()
        elif key in program.fills or key in program.repeats:
            yield from program.formatted(program.fills.get(key) or program.repeats[key], value)


def _repeated(imported: ImportedRecipe, fix: Sequence[str]) -> Iterator[str]:
    """Yield the keys of the config, or of one that it names, that must have the value of an argument of a fix."""
    parsed, changed = imported.parsed, _changed_arguments(fix)
    for key, name in parsed.program.repeats.items():
        stated = parsed.settings.get(key)
        if name in changed and stated is not None and not stated.unresolved:
            text = imported.framework.format_setting(key, changed[name])
            yield from () if text in fix else (text,)
    for key, name in parsed.referenced.program.repeats.items() if parsed.referenced is not None else ():
        if name in changed:
            yield in_json(key, changed[name])


def _changed_arguments(fix: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of a program that a fix sets: as flags of its command, or in its code."""
    found: dict[str, str | None] = {}
    for text in fix:
        flag, _, value = text.partition(" ")
        found |= {flag.removeprefix("--"): value} if flag.startswith("--") and value else program_arguments(text)
    return {name: resolve(value) for name, value in found.items() if value is not None}


def _as_flag(key: str, value: Any) -> str:
    return f"without --{key}" if value is None else f"--{key} {str(value).lower() if value in (True, False) else value}"


def _batch_arguments(imported: ImportedRecipe, recipe: Recipe, changed: Recipe) -> dict[str, Any]:
    """Return the Trainer's micro batch of a fix, and the accumulation steps that keep its batch if they are stated."""
    program, size = imported.parsed.program, changed.layout.micro_batch_size
    by_argument = MICRO_BATCH in program.fills
    found = {MICRO_BATCH: size} if by_argument and size != recipe.layout.micro_batch_size else {}
    stated = as_int(program.given.get(ACCUMULATION)) or as_int(imported.parsed.settings.get(ACCUMULATION))
    steps = stated or (1 if by_argument else 0)
    wanted = accumulation_after(steps, recipe, changed)
    return found | ({ACCUMULATION: int(wanted)} if wanted not in (steps, 0) and wanted.denominator == 1 else {})
