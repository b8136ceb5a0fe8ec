"""Export a recipe to another framework, verified by reading it back."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import msgspec

from meshwright.choices import GOALS
from meshwright.clusters import Cluster
from meshwright.errors import InputError
from meshwright.frameworks.framework import Framework
from meshwright.frameworks.initial_weights import ENVIRONMENT, in_folder
from meshwright.frameworks.load import content_of
from meshwright.frameworks.mapping import NO_KEY, relevant_fields, same_value
from meshwright.frameworks.model_match import model_path, own_numbers
from meshwright.frameworks.run_tokenizer import without_files
from meshwright.frameworks.to_recipe import complete, import_recipe
from meshwright.frameworks.types import ExportedConfig, UnmappedField
from meshwright.models import ModelSpec
from meshwright.recipes.adapter_targets import ALL_LINEAR, as_groups
from meshwright.recipes.capabilities import FRAMEWORK_GOALS
from meshwright.recipes.format_override import format_override
from meshwright.recipes.key_maps import composite_keys, config_keys
from meshwright.recipes.key_maps.local_batch import same_passes
from meshwright.recipes.key_maps.torchtitan import DEFAULT_ASSETS
from meshwright.recipes.types import Engine, Recipe, field_value, recipe_fields


def export(framework: Framework, recipe: Recipe, model: ModelSpec, on: Cluster) -> ExportedConfig:
    """Return the files and program that train this recipe; fields that would be lost are listed."""
    require_goal(framework, recipe)  # first: no other length makes a goal trainable
    require_length(framework, recipe)
    written = write(framework, without_files(recipe, framework.key_map), model, on)
    back = read_back(framework, written, model, on)
    mapped = tuple(one for one in written.unmapped if not _is_derived(one, back))
    written = msgspec.structs.replace(written, unmapped=mapped)
    listed = {*written.in_other_files, *(one.field for one in written.unmapped)}
    numbers = lost_numbers(framework, recipe)
    lost = tuple(one for one in differences(framework, written, recipe, model, on) if one.field not in listed)
    set_later = _set_by_scripts(framework, written, recipe, model, on, [one.field for one in lost])
    lost = tuple(_with_scripts(one, written) if one.field in set_later else one for one in lost)
    written = msgspec.structs.replace(written, first_file_lacks=set_later)
    written = msgspec.structs.replace(written, notes=tuple(dict.fromkeys(written.notes)))
    without_key = tuple(_with_what_applies(framework, one) for one in written.unmapped)
    return msgspec.structs.replace(written, unmapped=(*without_key, *numbers, *lost))


def _set_by_scripts(
    framework: Framework, written: ExportedConfig, recipe: Recipe, model: ModelSpec, on: Cluster, fields: Sequence[str]
) -> tuple[str, ...]:
    """Return those fields lost in the first file of an export that the scripts for all other versions set."""
    if not fields or not written.versions:
        return ()
    others = [in_version(framework, written, one, recipe, model, on).unmapped for one in written.versions]
    lost = {one.field for found in others for one in found}
    return tuple(field for field in fields if field not in lost)


def _with_scripts(one: UnmappedField, written: ExportedConfig) -> UnmappedField:
    scripts = " and ".join(version.script for version in written.versions.values())
    reason = f"{one.reason} with {next(iter(written.files))}; {scripts} set it"
    return msgspec.structs.replace(one, reason=reason)


def _with_what_applies(framework: Framework, one: UnmappedField) -> UnmappedField:
    """Return a field without a key with what decides instead."""
    if not one.reason.endswith(NO_KEY):
        return one
    applies = "your training program decides" if framework.name in ARGUMENTS_FILE else "its own value applies"
    return msgspec.structs.replace(one, reason=f"{one.reason}: {applies}")


def in_version(
    framework: Framework, written: ExportedConfig, version: str, recipe: Recipe, model: ModelSpec, on: Cluster
) -> ExportedConfig:
    """Return an export with only the script and the program of another version, and the fields lost there."""
    other = written.versions[version]
    files = {other.script: written.files[other.script]}
    only = msgspec.structs.replace(written, files=files, program=other.program, unmapped=(), in_other_files=())
    return msgspec.structs.replace(only, unmapped=differences(framework, only, recipe, model, on))


def _is_derived(one: UnmappedField, back: Recipe) -> bool:
    """Return whether a field without a key has its value in the framework nevertheless: what its models do."""
    known = one.reason.endswith(NO_KEY) and one.field in recipe_fields()
    return known and is_same(one.field, field_value(back, one.field), one.value)


BY_OPERATION = ("ops",)
SHARDING = ("layout.strategy", "layout.dp_replicate", "layout.dp_shard")
ARGUMENTS_FILE = ("deepspeed", "accelerate")  # exports with a file of the Trainer's arguments
NAMES_A_MODEL = ("automodel",)  # and has no file for another; torchtitan's export defines a flavor
NAMED_BY_MODEL = ("checkpoint.pretrained", "data.tokenizer")  # unset, they are those of the model's hub id
GOAL_WORDS = {"pretrain": "pretraining", "sft": "fine-tuning of all weights", "peft": "fine-tuning with adapters"}


def _listed(goals: Sequence[str]) -> str:
    return " and ".join(GOAL_WORDS[goal] for goal in goals)


def covers_goal(framework: Framework, recipe: Recipe) -> bool:
    """Return whether the framework's configs can express the recipe's goal."""
    return recipe.goal in FRAMEWORK_GOALS.get(framework.name, GOALS)


def require_goal(framework: Framework, recipe: Recipe) -> None:
    """Raise InputError for a goal that the framework's configs cannot express."""
    if covers_goal(framework, recipe):
        return
    goals = FRAMEWORK_GOALS[framework.name]
    others = [name for name in ("megatron-bridge", "automodel") if name != framework.name]
    reason = f"configs of {framework.title} do not cover {GOAL_WORDS[recipe.goal]}, only {_listed(goals)}"
    fix = tuple(f"--to {name}" for name in others)
    raise InputError(reason, field="goal", value=recipe.goal, fix=fix)


def require_length(framework: Framework, recipe: Recipe) -> None:
    """Raise InputError for a recipe by epochs if the framework counts its training in steps only."""
    if not recipe.train.epochs:
        return
    composites = composite_keys(framework.key_map)
    writers = [one.write for one in composites if "train.epochs" in one.fields]
    for write_length in writers:
        if write_length is not None:
            write_length(recipe)  # raises for epochs that the framework cannot count
    if framework.name in ARGUMENTS_FILE:
        return  # the Trainer counts them
    counts_steps = any(one.field == "train.steps" for one in config_keys(framework.key_map).values())
    if not writers and (counts_steps or any("train.steps" in one.fields for one in composites)):
        reason = f"{framework.title} has no epochs here: set the length in steps (samples × epochs / global batch size)"
        raise InputError(reason, field="train.epochs", value=recipe.train.epochs, fix=("train.steps=N",))


def lost_numbers(framework: Framework, recipe: Recipe) -> tuple[UnmappedField, ...]:
    """Return the recipe's own numbers of the model that the framework takes from the published one."""
    rows = config_keys(framework.key_map).values()
    if not any(row.field.startswith("architecture.") for row in rows) and framework.name not in NAMES_A_MODEL:
        return ()  # its files do not describe the model
    mapped = {row.field for row in rows}
    return tuple(
        UnmappedField(key, value, f"{framework.title} has no key for it: {recipe.model} has {theirs or 'its own'}")
        for key, value, theirs in own_numbers(recipe)
        if key not in mapped
    )


def write(framework: Framework, recipe: Recipe, model: ModelSpec, on: Cluster) -> ExportedConfig:
    """Call the framework's writer, imported on demand."""
    found: ExportedConfig = import_module(f"meshwright.frameworks.{framework.key_map}.write").write(
        framework, recipe, model, on
    )
    return found


def read_back(framework: Framework, written: ExportedConfig, model: ModelSpec, on: Cluster) -> Recipe:
    """Return the recipe that the first file of an export describes."""
    name, text = next(iter(written.files.items()))
    return complete(import_recipe(framework, content_of(text, name, beside=written.files), model), on)


def exported_engine(framework: Framework, written: ExportedConfig, model: ModelSpec) -> Engine:
    """Return the engine that runs the first file of an export; Accelerate's depends on the file."""
    name, text = next(iter(written.files.items()))
    return import_recipe(framework, content_of(text, name, beside=written.files), model).engine


def exported_layout(
    framework: Framework, written: ExportedConfig, recipe: Recipe, model: ModelSpec, on: Cluster
) -> tuple[str, ...]:
    """Return the layout that an export writes in another way, or has no key for, as overrides: replicas as DDP."""
    listed = [key for key in SHARDING if key in written.in_other_files]
    if framework.name not in ARGUMENTS_FILE:  # whose program sets the others
        lost = (one.field for one in written.unmapped if one.field.startswith("layout."))
        listed += [key for key in dict.fromkeys(lost) if key in recipe_fields() and key not in listed]
    found = read_back(framework, written, model, on) if listed else recipe
    changed = [key for key in listed if field_value(found, key) != field_value(recipe, key)]
    return tuple(format_override(key, field_value(found, key)) for key in changed)


def exported_kernels(
    framework: Framework, written: ExportedConfig, recipe: Recipe, model: ModelSpec, on: Cluster
) -> tuple[str, ...]:
    """Return the kernels that run in place of those that an export has no key for, as overrides."""
    if framework.name in ARGUMENTS_FILE:  # whose program decides
        return ()
    lost = dict.fromkeys(one.field for one in written.unmapped if one.field.startswith("kernels."))
    found = read_back(framework, written, model, on) if lost else recipe
    changed = [key for key in lost if key in recipe_fields() and field_value(found, key) != field_value(recipe, key)]
    return tuple(format_override(key, field_value(found, key)) for key in changed)


def _is_of_environment(value: object, text: str) -> bool:
    """Return whether a value is in a script with variables of the environment, which it has only where it runs."""
    unquoted = re.sub(r":\?[^{}]*\}", "}", text.replace("'", "").replace('"', ""))  # without why it is required
    return isinstance(value, str) and bool(ENVIRONMENT.search(value)) and value in unquoted


def differences(
    framework: Framework, written: ExportedConfig, recipe: Recipe, model: ModelSpec, on: Cluster
) -> tuple[UnmappedField, ...]:
    """Return the fields whose value changes when the export is read back."""
    found = read_back(framework, written, model, on)
    text = next(iter(written.files.values()))
    own = (model.hf_id, model_path(recipe, model), recipe.checkpoint.pretrained, f"{DEFAULT_ASSETS}{model.name}")
    retained = any(one.field == "checkpoint.keep" for one in written.unmapped)  # which are kept, in place of how many
    return tuple(
        UnmappedField(key, field_value(recipe, key), f"{framework.title} would use {field_value(found, key)!r}")
        for key in relevant_fields(recipe, model)
        if not (recipe.train.epochs and key == "train.steps")
        and not (key == "train.init_std" and not recipe.train.init_std)  # the model's own, written or not
        and not (key == "train.eval_steps" and not recipe.train.eval_every)  # of no evaluation
        and not (key in KEPT and KEPT[key](recipe) == KEPT[key](found))
        and not (key == "checkpoint.milestone_every" and retained)
        and not _is_of_environment(field_value(recipe, key), text)
        and not (key == "checkpoint.folder" and (recipe.checkpoint.folder or "") in text)  # named, or chosen here
        and not (written.program.variables and key == "checkpoint.pretrained")  # a variable names the converted weights
        and not (key == "checkpoint.pretrained" and _is_to_fill_in(framework, recipe, found))
        and not (key in NAMED_BY_MODEL and not field_value(recipe, key) and field_value(found, key) in own)
        and not (key in NAMED_BY_MODEL and not field_value(found, key) and _is_of_model(key, recipe, model))
        and not (key == "layout.pp_micro_batches" and same_passes(found, recipe, on.world))
        and not is_same(key, field_value(found, key), field_value(recipe, key))
        and key in recipe_fields()
    )


def _is_of_model(key: str, recipe: Recipe, model: ModelSpec) -> bool:
    """Return whether weights or a tokenizer are those that a config of this model uses without naming them."""
    own = (model.hf_id, model_path(recipe, model))
    if key == "data.tokenizer":
        return field_value(recipe, key) in (*own, recipe.checkpoint.pretrained)
    return recipe.goal != "pretrain" and field_value(recipe, key) in own  # pretraining loads no weights by itself


def _is_to_fill_in(framework: Framework, recipe: Recipe, found: Recipe) -> bool:
    """Return whether an export has the folder to fill in of weights that have to be downloaded first."""
    return found.checkpoint.pretrained == in_folder(recipe, framework.engine).checkpoint.pretrained


def _kept(recipe: Recipe) -> int:
    """Return the checkpoints that are kept: no more than are written."""
    every = recipe.checkpoint.save_every
    return min(recipe.checkpoint.keep, recipe.train.steps // every + 1 if every else 1)


def _milestones(recipe: Recipe) -> int:
    every = recipe.checkpoint.milestone_every
    return recipe.train.steps // every if every else 0


def _interval(recipe: Recipe) -> int:
    """Return the steps between checkpoints; 0 if only the end is saved."""
    every = recipe.checkpoint.save_every
    return every if every <= recipe.train.steps else 0


KEPT = {"checkpoint.keep": _kept, "checkpoint.milestone_every": _milestones, "checkpoint.save_every": _interval}
"""Settings that mean the same if the same checkpoints are written and kept."""


def is_same(key: str, found: Any, wanted: Any) -> bool:
    """Return whether an exported value is the recipe's; adapter targets may be written as groups or as names."""
    if key == "layout.recompute_modules" and wanted == BY_OPERATION:
        return found in ((), BY_OPERATION)  # Megatron, which means its own modules by an empty list, refuses it
    if key != "peft.targets":
        return same_value(found, wanted)
    groups, theirs = as_groups(wanted), as_groups(found)
    mamba = {"mamba_in", "mamba_out"} if ALL_LINEAR in wanted else set()
    return same_value(found, wanted) or (
        groups is not None and theirs is not None and not (set(groups) ^ set(theirs)) - mamba
    )
