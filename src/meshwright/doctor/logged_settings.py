"""Settings that a log states: its arguments or config as recipe fields, and where they differ from the user's file."""

from __future__ import annotations

from math import isclose
from typing import Any

import msgspec

from meshwright import frameworks
from meshwright.doctor.formats.printed_config import config_content
from meshwright.doctor.run import FieldDifference, Run
from meshwright.errors import InputError
from meshwright.frameworks.schedule_units import length_keys, with_lengths
from meshwright.frameworks.to_recipe import ImportedRecipe
from meshwright.frameworks.to_recipe import import_recipe as read_framework
from meshwright.recipes import overrides as override
from meshwright.recipes.format_override import format_override
from meshwright.recipes.key_maps import composite_keys, config_keys
from meshwright.recipes.types import Recipe, field_value, recipe_fields

INTERVALS = ("checkpoint.save_every", "checkpoint.keep", "checkpoint.milestone_every", "train.log_every")
"""Settings on which neither the training nor its memory and speed depend."""
ROUNDED = 1e-4  # relative error of a number that a log prints


def stated_fields(run: Run, extra: tuple[str, ...]) -> frozenset[str] | None:
    """Return the recipe fields that a log or the user states; None if the log has its whole recipe."""
    if run.header.recipe is not None or run.header.recipe_name:
        return None
    rate = {"optimizer.lr"} if run.peak_rate else set[str]()
    return frozenset({*stated_arguments(run), *run.header.overrides, *overridden_keys(extra), *rate})


def file_differences(run: Run, recipe: Recipe, extra: tuple[str, ...]) -> tuple[FieldDifference, ...]:
    """Return the settings whose values in a log and in the user's file differ, of all that both of them state.

    `recipe` is the file's, and a setting in `extra` is the user's own.
    """
    logged = {key: value for key, value in logged_values(run).items() if key not in overridden_keys(extra)}
    stated = [key for key in (*COMPARED, *recipe_fields()) if key in run.header.file_fields or key in EVEN_UNSET]
    if "layout.micro_batch_size" not in run.header.file_fields and "layout.micro_batch_size" in logged:
        stated = [key for key in stated if key != "train.global_batch_size"]  # the file's is made of an assumed one
    pairs = [(key, logged[key], field_value(recipe, key)) for key in dict.fromkeys(stated) if key in logged]
    return tuple(FieldDifference(*pair) for pair in pairs if pair[2] is not None and not _equal(*pair[1:]))


def text_of_differences(run: Run) -> str:
    """Return the settings that a log and the user's file state differently, as one clause; empty if there are none."""
    found, file = run.header.file_differences, run.header.file
    return f"{CONTRADICTS} {file}: {_both(found, file)}" if found else ""


def without_intervals(run: Run) -> tuple[Run, str]:
    """Return the run without differing intervals of checkpoints or log lines, and the note on them; empty if none."""
    header = run.header
    found = tuple(one for one in header.file_differences if one.field in INTERVALS)
    if not found:
        return run, ""
    others = tuple(one for one in header.file_differences if one not in found)
    note = f"{_both(found, header.file)}; a job that launch requeues saves more often than its file"
    return msgspec.structs.replace(run, header=msgspec.structs.replace(header, file_differences=others)), note


def _both(found: tuple[FieldDifference, ...], file: str) -> str:
    logged = ", ".join(format_override(one.name, one.logged) for one in found)
    theirs = ", ".join(format_override(one.name, one.stated) for one in found)
    return f"{logged} in the log, {theirs} in {file}"


def logged_values(run: Run) -> dict[str, Any]:
    """Return the values of our fields that a log states; its own recipe in a log of ours."""
    header = run.header
    if header.recipe is not None:
        own = header.recipe
        return {} if header.tiny else {key: field_value(own, key) for key in recipe_fields() if key not in MODEL}
    steps = {"train.steps": header.total_steps} if header.total_steps and run.kind != "transformers" else {}
    length = {"data.seq_length": header.seq_length} if header.seq_length else {}
    return {**steps, **length, **stated_arguments(run, with_unset=bool(header.framework)), **header.overrides}


def _equal(logged: Any, stated: Any) -> bool:
    """Return whether two values are the same; numbers may be rounded in a log, and -1 means the rest of the GPUs."""
    if isinstance(logged, (int, float)) and isinstance(stated, (int, float)):
        return stated == -1 or isclose(logged, stated, rel_tol=ROUNDED)
    return bool(logged == stated)


HOW_IT_RUNS = ("layout.", "kernels.", "precision.")
MODEL = frozenset(key for key in recipe_fields() if key.startswith("architecture."))
DEGREES = ("tp", "pp", "cp", "ep")
COMPARED = (*(f"layout.{name}" for name in DEGREES), "train.global_batch_size")
EVEN_UNSET = (*COMPARED, "layout.recompute")
"""Settings that are compared even where the file leaves them at its framework's default."""


def states_length(run: Run) -> bool:
    return run.header.seq_length is not None or "data.seq_length" in run.header.overrides


def stated_arguments(run: Run, *, with_unset: bool = True) -> dict[str, Any]:
    """Return the fields that Megatron's arguments or config set; layout and kernels as a whole, as off is no flag.

    Without `with_unset`, only those of its lines: a recipe of ours has kernels that Megatron has no flag for.
    """
    if not run.header.states_settings:
        return {}
    try:
        imported = read_settings(run, ())
    except InputError:
        return {}
    settings, keys = imported.parsed.settings, imported.mapped.source_keys
    if run.header.config:
        stated = {key for key in recipe_fields() if key in keys or (with_unset and key.startswith(HOW_IT_RUNS))}
        return {key: field_value(imported.recipe, key) for key in recipe_fields() if key in stated - MODEL}
    recipe, lengths = imported.recipe, length_keys("megatron_lm", settings)
    batch = run.header.overrides.get("train.global_batch_size")
    if "global_batch_size" in settings or batch:
        recipe = override.change(recipe, {"train.global_batch_size": batch})[0] if batch else recipe
        recipe, lengths = with_lengths("megatron_lm", recipe, settings), {}
    stated = {key for key in keys if key not in lengths}
    if missing_arguments(run) or _is_abridged(run):  # what is not in it may be on
        table, off = config_keys("megatron_lm"), {*run.header.off_arguments}
        stated |= {table[name].field for name in off if name in table}
        stated |= {field for one in composite_keys("megatron_lm") if one.keys[0] in off for field in one.fields}
    elif with_unset:
        stated |= {key for key in recipe_fields() if key.startswith(HOW_IT_RUNS)}
    return {key: field_value(recipe, key) for key in recipe_fields() if key in stated and key not in MODEL}


LACKS = "the arguments in the log lack"
CONTRADICTS = "the log contradicts"  # begins the difference of a log and the user's file
MODEL_ARGUMENTS = ("num_layers", "hidden_size", "num_attention_heads")
DUMPED = (
    *MODEL_ARGUMENTS, "ffn_hidden_size", "seq_length", "tensor_model_parallel_size", "pipeline_model_parallel_size",
    "micro_batch_size", "global_batch_size",
)  # fmt: skip
"""Arguments that every dump of Megatron-LM has: the model's, the layout's and the batch's."""
WHOLE_DUMP = 100  # arguments: Megatron-LM prints each of its several hundred, also those that are off


def missing_arguments(run: Run) -> tuple[str, ...]:
    """Return the arguments that a dump lacks because only a part of it is in the log; empty without a dump."""
    present = _dumped_arguments(run) | ({"global_batch_size"} if run.header.overrides else set())
    return tuple(name for name in DUMPED if name not in present) if run.header.arguments else ()


def _dumped_arguments(run: Run) -> set[str]:
    flags = {one.split()[0].lstrip("-").replace("-", "_") for one in run.header.arguments}
    return flags | {*run.header.off_arguments}


def _is_abridged(run: Run) -> bool:
    """Return whether a dump is an excerpt; only a user's own file then says what the other arguments were."""
    return bool(run.header.framework) and len(_dumped_arguments(run)) < WHOLE_DUMP


def read_settings(run: Run, overrides: tuple[str, ...]) -> ImportedRecipe:
    """Read the arguments or the config that a log prints as a file of its framework."""
    if run.header.config:
        content = config_content(run.header.config, run.file)
        return read_framework(frameworks.framework("megatron-bridge"), content, overrides=list(overrides))
    megatron = frameworks.framework("megatron-lm")
    content = frameworks.content_of("\n".join(run.header.arguments), f"{run.file} (arguments)", "shell")
    return read_framework(megatron, content, overrides=list(overrides))


def overridden_keys(overrides: tuple[str, ...]) -> set[str]:
    given = {text.partition("=")[0].strip() for text in overrides}
    return {override.native_key(key) or key for key in given}
