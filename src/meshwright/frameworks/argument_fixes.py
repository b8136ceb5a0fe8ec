"""Fixes of fields that the training program sets: its own arguments, not keys of the config beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from meshwright import config_io
from meshwright.errors import InputError
from meshwright.frameworks.to_recipe import ImportedRecipe
from meshwright.frameworks.trainer_args import ADAPTER, ARGUMENT_FIELDS, BITS, CHATS, QUANTIZED, TRAINER
from meshwright.frameworks.trainer_fields import FROZEN, LOADED_BY_TRL, ROWS, WEIGHT_DTYPES, is_trainer
from meshwright.frameworks.types import ProgramArguments
from meshwright.frameworks.weight_loading import LOADED_BITS, is_loaded_in_code, quantizing_argument
from meshwright.recipes.key_maps import composite_keys
from meshwright.recipes.types import Recipe, field_value
from meshwright.rules import Finding

COMPUTE, MIXED_PRECISION = "precision.compute", "mixed_precision"
HALF_PRECISIONS = ("fp16", "bf16")  # switches of the Trainer


def program_fields(imported: ImportedRecipe) -> tuple[str, ...]:
    """Return the fields that arguments of the Trainer set, or would set, because no key of the config does."""
    program, keys = imported.parsed.program, imported.mapped.source_keys
    if not is_trainer(program.given):
        return ()
    fields = {*ARGUMENT_FIELDS, *program.sources}
    found = tuple(one for one in fields if keys.get(one, "--").startswith("--"))
    found = (*found, FROZEN) if FROZEN in imported.parsed.field_values else found
    if keys.get(COMPUTE) == MIXED_PRECISION and _half_precision(program):
        found = (*found, COMPUTE)
    return tuple(
        one for one in found if not (one.startswith("schedule.") and "scheduler.type" in imported.parsed.settings)
    )


def replaced_keys(imported: ImportedRecipe) -> set[str]:
    """Return the keys whose fields arguments set: of a scheduler that the config does not have, or the precision."""
    own, settings = program_fields(imported), imported.parsed.settings
    groups = [one for one in composite_keys(imported.framework.key_map) if {*own} & {*one.fields}]
    found = {key for one in groups if not any(key in settings for key in one.keys) for key in one.keys}
    return found | ({MIXED_PRECISION} if COMPUTE in own else set())


def with_arguments_changed(program: ProgramArguments, finding: Finding) -> Finding:
    """Return a finding whose fix changes the program's arguments where those fill in or repeat a key of the config."""
    if not program.fills and not program.repeats:
        return finding
    fix = tuple(text for one in finding.fix for text in _in_arguments(program, one))
    return msgspec.structs.replace(finding, fix=fix)


def _in_arguments(program: ProgramArguments, text: str) -> Iterator[str]:
    """Yield a setting of the config's JSON as the argument that fills it in, or with the argument that repeats it."""
    try:
        ((key, leaf),) = config_io.parse_leaves(f"{{{text}}}", "json", "fix").items()
    except (InputError, ValueError):  # several settings, or none
        yield text
        return
    name = program.fills.get(key) or program.repeats.get(key)
    if key not in program.fills or leaf.value == "auto":
        yield text
    if name is not None and leaf.value != "auto":
        yield from program.formatted(name, leaf.value)


def argument_changes(imported: ImportedRecipe, recipe: Recipe, changed: Recipe) -> Iterator[str]:
    """Yield the arguments that a fix changes, as the program is given them; raise InputError if one cannot be given."""
    program, own = imported.parsed.program, program_fields(imported)
    tables = {**TRAINER, **CHATS, **ADAPTER}
    written: dict[str, Any] = {}
    for field in own:
        before, after = field_value(recipe, field), field_value(changed, field)
        if before == after:
            continue
        if field == "peft.method" and {before, after} <= {"lora", *QUANTIZED}:
            yield from _bits(program, before, changed)
            continue
        if field == FROZEN:
            yield from _frozen_dtype(program)
            continue
        if field == COMPUTE:
            yield from program.formatted(_half_precision(program), None)
            yield from program.formatted(after, True) if after in HALF_PRECISIONS else ()
            continue
        name = program.sources.get(field, "")
        written |= _arguments(tables.get(field), recipe, changed, name, after)
    for argument, value in written.items():
        yield from program.formatted(argument, value)


def _half_precision(program: ProgramArguments) -> str:
    """Return the switch of the Trainer that sets the compute dtype, whatever Accelerate's config has; else empty."""
    on = (name for name in HALF_PRECISIONS if str(getattr(program.given.get(name), "value", "")).lower() == "true")
    return next(on, "")


def _frozen_dtype(program: ProgramArguments) -> Iterator[str]:
    """Yield the argument that loads frozen weights in bf16."""
    stated = next((name for name in WEIGHT_DTYPES if name in program.given), "")
    if stated or program.argv or LOADED_BY_TRL not in program.given:
        yield from program.formatted(stated or WEIGHT_DTYPES[0], "bfloat16")
    else:
        yield from program.formatted(LOADED_BY_TRL, {WEIGHT_DTYPES[0]: "bfloat16"})


def _bits(program: ProgramArguments, before: str, changed: Recipe) -> Iterator[str]:
    """Yield the arguments that load frozen weights in other bits: a number of bits, or one switch for each.

    Python code that loads the weights has neither: it gets the configuration of the quantization.
    """
    after, layout = changed.peft.method, changed.layout
    if after in QUANTIZED and is_loaded_in_code(program):
        dtype = {"bf16": "bfloat16", "fp16": "float16"}.get(changed.precision.compute, "float32")
        place = program.place_in_code(LOADED_BITS)
        text = quantizing_argument(program.given, after, dtype, layout.strategy.startswith("fsdp"))
        yield f"{place}: {text}" if place else text
        return
    number = next((key for key in BITS if key in program.written_keys), "")
    if number:
        yield from program.formatted(number, QUANTIZED.get(after))
        return
    for method, is_on in ((before, False), (after, True)):
        if method in QUANTIZED:
            yield from program.formatted(f"load_in_{QUANTIZED[method]}bit", is_on)


def _arguments(table: Any, recipe: Recipe, changed: Recipe, name: str, value: Any) -> Mapping[str, Any]:
    """Return the arguments of a field, by the name that the program uses; None for one that another replaces."""
    try:
        before, found = (dict(table(one)) if table is not None else {} for one in (recipe, changed))
    except InputError:
        return {}
    if len(before) == len(found) == 1 and before.keys() != found.keys():  # steps in place of epochs
        return {name or next(iter(before)): None, **found}
    if len(found) == 1 and name:
        return {name: next(iter(found.values()))}
    if found or not name:
        return found
    try:
        return {name: ROWS[name].to_framework_value(value) if name in ROWS else value}
    except InputError:  # a switch has no value for it
        return {}
