"""Errors of keys that no override has: the field that a user of another trainer, or with a typing error, means."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Literal, get_args, get_origin

from meshwright.clusters.file_keys import in_cluster_file
from meshwright.errors import InputError, closest
from meshwright.models import config_json_keys
from meshwright.recipes.format_override import format_override
from meshwright.recipes.key_maps import (
    FRAMEWORKS,
    REMOVED_KEYS,
    composite_keys,
    config_keys,
    override_composite_keys,
    override_keys,
)
from meshwright.recipes.other_names import OTHER_NAMES
from meshwright.recipes.replacements import held_out_data, names_validation_data, removed_key, sets_validation
from meshwright.recipes.types import SECTIONS, Recipe, field_value, keys_by_flat_name, recipe_fields
from meshwright.recipes.values import bare_type, is_map

VALIDATION_NAMES = ("eval", "validation", "early_stop")  # in the names of the fields that set it
TRAINER_SECTIONS = ("train", "training", "trainer")  # where users of other trainers look for all arguments
USUAL = {"train.epochs": 3, "train.eval_every": 100, "train.early_stop_patience": 3, "checkpoint.milestone_every": 1000}
"""Values to suggest for fields where 0 turns something off, which nobody means who types a wrong value."""

Read = Callable[[str, str], Mapping[str, Any]]
"""Returns the fields of ours that a key sets, and their values; raises InputError."""


@lru_cache(maxsize=1)
def known_keys() -> tuple[str, ...]:
    """Return every key that an override may use."""
    return (*recipe_fields(), *keys_by_flat_name(), *override_keys(), *override_composite_keys())


def unknown_key(key: str, text: str, recipe: Recipe, read: Read) -> InputError:
    """Return the error for an unknown key, with did-you-mean of keys that accept the value."""
    if (cluster := in_cluster_file(key, text)) is not None:
        return InputError(cluster[0], field=key, value=text, fix=[cluster[1]])
    if names_validation_data(key):
        meant = held_out_data(text)
        return InputError(f"unknown key {key}; write {meant}", field=key, value=text, fix=[meant])
    if key in SECTIONS and (values := _in_section(key, text, recipe)):
        reason = f"is a group of fields; did you mean {' or '.join(values)}?"
        return InputError(reason, field=key, value=text, fix=values)
    if (argument := _argument(key, text, recipe, read)) is not None:
        return argument
    similar = _similar_keys(key)
    if sets_validation(key):  # a field of the training with the same last name is another setting
        similar = [one for one in similar if any(word in one for word in VALIDATION_NAMES)]
    refusals = {one: _refusal(one, text, read) for one in similar}
    near = [one for one, refusal in refusals.items() if refusal is None]
    name = key.removeprefix("model.").removeprefix("architecture.")
    if not near and name in config_json_keys():
        reason = f"unknown key {key}; {name} is a key of the model's config.json: change it there and pass its path"
        return InputError(reason, field=key, value=text)
    certain = any(one.rpartition(".")[2] == key.rpartition(".")[2] for one in near) or _other_name(key) in near
    if not certain and (sets := _set_by_their_key(key)) is not None:
        return InputError(f"is a key of a framework's file, {sets}", field=key, value=text)
    if near or not similar:
        near = sorted(_one_per_field(near), key=lambda one: not _fits(one, text))
        hint = _did_you_mean(key, [*near, *(one for one in similar if one not in near)], near)
        return InputError(f"unknown key {key}; {hint}", field=key, value=text, fix=[f"{one}={text}" for one in near])
    meant = min(refusals, key=lambda one: one not in USUAL)  # the key is clear, and its value is wrong too
    refusal = refusals[meant]
    assert refusal is not None
    reason = f"unknown key {key}; did you mean {meant}? {meant}={text}: {refusal.reason}"
    return InputError(reason, field=key, value=text, fix=refusal.fix)


def _did_you_mean(key: str, similar: list[str], near: list[str]) -> str:
    """Return the question which key was meant; fields with the typed start are listed with what each is."""
    if not near:
        return "meshwright explain KEY describes a key"
    short_form = [one for one in _one_per_field(similar) if _last(one).startswith(f"{_last(key)}_")]
    described = {one: recipe_fields()[field].text for one in short_form if (field := _field(one)) in recipe_fields()}
    if len(described) < 2:
        return f"did you mean {' or '.join(near)}?"
    return f"did you mean {' or '.join(f'{one} ({meaning})' for one, meaning in described.items())}?"


def _field(key: str) -> str:
    return keys_by_flat_name().get(key, key)


def _one_per_field(keys: list[str]) -> list[str]:
    """Return the first of the names of each field."""
    first: dict[str, str] = {}
    for key in keys:
        first.setdefault(_field(key), key)
    return list(first.values())


def _fits(key: str, text: str) -> bool:
    """Return whether a number is typed as a field has it: 2 for a count, 0.01 or 1e-3 for a quantity."""
    field = recipe_fields().get(_field(key))
    return field is None or (bare_type(field.type)[0] is int) == text.isdecimal()


def _argument(key: str, text: str, recipe: Recipe, read: Read) -> InputError | None:
    """Return what another trainer's argument is here, typed with a section (train.warmup_ratio); None if it is none."""
    section, dot, name = key.rpartition(".")
    known = OTHER_NAMES.get(name, name)
    of_trainer = section in TRAINER_SECTIONS and all(_last(own) != name for own in recipe_fields())
    if known == key or (dot and not of_trainer):
        return None
    if known in REMOVED_KEYS:
        return removed_key(known, text, recipe, lambda one: _refusal(*_split(one), read) is None, typed=key)
    if known not in override_composite_keys():
        return None
    try:
        values = read(known, text)
    except InputError as error:
        return InputError(error.reason, field=key, value=text, fix=error.fix)
    meant = " ".join(format_override(own, value) for own, value in values.items())
    return InputError(f"unknown key {key}; did you mean {meant}?", field=key, value=text, fix=[meant])


def _split(override: str) -> tuple[str, str]:
    key, _, value = override.partition("=")
    return key, value


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def _other_name(key: str) -> str:
    """Return the field of ours that other trainers call so; empty if there is none."""
    found = OTHER_NAMES.get(_last(key), "")
    return found if found in recipe_fields() else ""


def _refusal(key: str, text: str, read: Read) -> InputError | None:
    """Return why a key cannot be set to a value; None if it can."""
    try:
        read(key, text)
    except InputError as error:
        return error
    return None


def _set_by_their_key(key: str) -> str | None:
    """Return what to do instead of a framework's key, whose value is not a field's alone; None if it is none."""
    names = [name for name in FRAMEWORKS if key in config_keys(name)]
    own = (config_keys(name)[key].field for name in names)
    with_others = (field for name in names for one in composite_keys(name) if key in one.keys for field in one.fields)
    fields = dict.fromkeys(field for field in (*own, *with_others) if field)
    if not names:
        return None
    return f"where it sets {', '.join(fields)}: write that here" if fields else "without a field here: change it there"


def _in_section(section: str, text: str, recipe: Recipe) -> list[str]:
    """Return what a value may set in a section: a field with choices that has it, or one that starts with it."""
    choices = {
        key: get_args(bare_type(info.type)[0])
        for key, info in recipe_fields().items()
        if key.startswith(f"{section}.") and get_origin(bare_type(info.type)[0]) is Literal
    }
    same = [f"{key}={text}" for key, known in choices.items() if text in known and text != field_value(recipe, key)]
    named = [one for one in REMOVED_KEYS.get(text.lower(), ())[1:] if one.startswith(f"{section}.")]  # fp8
    starts = [f"{key}={one}" for key, known in choices.items() for one in known if str(one).startswith(text)]
    return list(dict.fromkeys(same or [*named, *starts]))[:3]


def _similar_keys(key: str) -> list[str]:
    """Return the keys that a key may mean: of its last name in another section, else with a typing error."""
    name = key.rpartition(".")[2]
    same = [own for own in recipe_fields() if own.endswith(f".{name}")]
    if same:
        return same[:3]
    if other := _other_name(key):
        return [other]
    if "." in key and name in override_keys() and override_keys()[name].field:  # train.learning_rate
        return [override_keys()[name].field]
    if "." in key and (own := _named_by_word(name)):
        return [own]
    field, _, item = key.rpartition(".")  # data.colums.prompt: an item of a mapping
    maps = [own for own, info in recipe_fields().items() if is_map(info)]
    items = [f"{own}.{item}" for own in closest(field, maps)] if "." in field else []
    near = closest(key, known_keys()) or items or _with_similar_name(name)
    return near or (_fields_named(name) if "." in key else [])  # layout.tensor_parallel


def _fields_named(name: str) -> list[str]:
    """Return the field of ours that other frameworks call by a name like this one, without a section."""
    keys = [one for one in closest(name, override_keys()) if override_keys()[one].field]
    starting = [one for one in keys if one.rpartition(".")[2].split("_")[0] == name.split("_")[0]]
    return list(dict.fromkeys(override_keys()[one].field for one in starting))[:1]


SECTION_WORDS = {"scheduler": "schedule", "lr_scheduler": "schedule", "lr_schedule": "schedule", "optim": "optimizer"}
"""Words of other tools for a section whose `name` chooses among kinds."""


def _named_by_word(word: str) -> str:
    """Return the key that chooses a section's kind: schedule.name for optimizer.schedule; empty if there is none."""
    own = f"{SECTION_WORDS.get(word, word)}.name"
    return own if own in recipe_fields() else ""


def _with_similar_name(name: str) -> list[str]:
    """Return the keys of any section whose last name starts with a word or contains it: optimizer.warmup."""
    last = {own: own.partition(".")[2] for own in recipe_fields()}
    near = closest(name, last.values())
    return [own for own, one in last.items() if one in near][:3]
