"""Apply key=value overrides: our keys, short names and other frameworks' keys; unknown keys are errors."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from meshwright.errors import InputError
from meshwright.models import not_a_model
from meshwright.notes import no_notes, note
from meshwright.recipes.format_override import format_override
from meshwright.recipes.key_maps import (
    REMOVED_KEYS,
    CompositeKey,
    ConfigKey,
    MappedFields,
    override_composite_keys,
    override_keys,
)
from meshwright.recipes.replacements import as_share, computed_after, held_out_data, removed_key, together
from meshwright.recipes.several_datasets import several_datasets_error
from meshwright.recipes.text_data import without_images
from meshwright.recipes.types import FieldKind, Recipe, field_value, keys_by_flat_name, recipe_fields
from meshwright.recipes.unknown_keys import USUAL, unknown_key
from meshwright.recipes.values import is_map, meant_integer, parse, stated_weights

EPOCHS, STEPS = "train.epochs", "train.steps"
PRETRAINED = "checkpoint.pretrained"
VALIDATION = "data.validation"
LR, MIN_LR = "optimizer.lr", "schedule.min_lr"
RANK, ALPHA, METHOD = "peft.rank", "peft.alpha", "peft.method"
LOW_BITS = {"lora", "qlora", "lora8bit"}  # LoRA in 4 bits is QLoRA: another key says how many bits LoRA has
IMAGES, DATASET, BLEND = "data.images", "data.dataset", "data.blend"
ANNEAL_BLEND = "data.anneal_blend"
TOKENIZER = "data.tokenizer"
TOKEN_COUNTS = ("data.seq_length",)  # fields for which 8k is typed, as for --seq
IN_THOUSANDS = re.compile(r"[0-9]{1,6}[km]", re.IGNORECASE)


class Change(msgspec.Struct, frozen=True):
    """One field that an override changed."""

    key: str
    old: Any
    new: Any
    kind: FieldKind


class _Setting(msgspec.Struct, frozen=True):
    """A typed value for one of our keys, and the override it comes from."""

    key: str
    value: Any
    source: str


def apply(recipe: Recipe, overrides: Iterable[str]) -> Recipe:
    """Return the recipe with every `key=value` applied."""
    return apply_with_log(recipe, overrides)[0]


def apply_fix(recipe: Recipe, fix: Iterable[str]) -> Recipe:
    """Return the recipe with the settings of a fix and no others, without notes: nobody typed them."""
    with no_notes():
        return change(recipe, requested(recipe, fix, follows=False))[0]


def apply_with_log(recipe: Recipe, overrides: Iterable[str]) -> tuple[Recipe, list[Change]]:
    """Return the recipe with every `key=value` applied, and the changes."""
    return change(recipe, requested(recipe, overrides))


def requested(recipe: Recipe, overrides: Iterable[str], follows: bool = True) -> dict[str, Any]:
    """Return the typed value of every key in the overrides, even if it equals the recipe's, and what `follows`."""
    values = {setting.key: setting.value for setting in _settings(_split(overrides), recipe)}
    if values.get(PRETRAINED) and (error := not_a_model(values[PRETRAINED], PRETRAINED)) is not None:
        raise error
    if as_share(share := values.get(VALIDATION, "")) is not None:
        reason = "names a dataset or a split; a share of the samples is another field"
        raise InputError(reason, field=VALIDATION, value=share, fix=[held_out_data(share)])
    dataset, epochs = values.get(DATASET, ""), values.get(EPOCHS, recipe.train.epochs)
    if stated_weights(dataset) and (several := several_datasets_error(dataset, epochs)) is not None:
        raise several
    _note_scale(recipe, values)
    if STEPS in values and values.get(EPOCHS):
        raise steps_and_epochs(values[STEPS], values[EPOCHS])
    if STEPS in values and recipe.train.epochs:
        values[EPOCHS] = 0.0  # steps that a user sets replace the recipe's epochs
    if DATASET in values and BLEND not in values and (recipe.data.blend or recipe.data.anneal_blend):
        values |= {key: {} for key in (BLEND, ANNEAL_BLEND) if key not in values}  # as does a dataset its blend
        if values[DATASET] == "mock" and TOKENIZER not in values:
            values[TOKENIZER] = ""  # random tokens need none
    return values | _text_only(recipe, values) | (_following_minimum(recipe, values) if follows else {})


def _following_minimum(recipe: Recipe, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the end of the decay for a typed learning rate: the recipe's share of it, unless it is typed too."""
    typed, peak, low = values.get(LR), recipe.optimizer.lr, recipe.schedule.min_lr
    if typed is None or MIN_LR in values or typed == peak or not 0 < low <= peak:
        return {}
    follows = float(f"{typed * low / peak:.3g}")
    note(
        f"{MIN_LR}={follows:g} follows {LR}={typed:g}: {low / peak:.3g} of it, as in the recipe; "
        f"{MIN_LR}={low:g} would keep the recipe's own"
    )
    return {MIN_LR: follows}


def _note_scale(recipe: Recipe, values: Mapping[str, Any]) -> None:
    """Say that another rank alone changes how much the adapters add: they are scaled by alpha/rank."""
    rank, peft = values.get(RANK, recipe.peft.rank), recipe.peft
    if recipe.goal != "peft" or rank == peft.rank or ALPHA in values:
        return
    rooted = values.get(METHOD, peft.method) == "rslora"
    power, name = (0.5, "alpha/√rank") if rooted else (1.0, "alpha/rank")
    old, new = peft.alpha / peft.rank**power, peft.alpha / rank**power
    same = peft.alpha * (rank / peft.rank) ** power
    note(
        f"{RANK}={rank} with {ALPHA}={peft.alpha:g} changes {name}, the scale of the adapters, from {old:.3g} to "
        f"{new:.3g}; {ALPHA}={same:.4g} keeps it"
    )


def _text_only(recipe: Recipe, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return data.images=false if a recipe with images is given a dataset that has none; a note says so."""
    data = recipe.data
    if not data.images or IMAGES in values or not {DATASET, BLEND} & values.keys() or "images" in data.columns:
        return {}
    names = values.get(BLEND, data.blend) or {values.get(DATASET, data.dataset): 1.0}
    if "images" in values.get("data.columns", {}) or not without_images(names):
        return {}
    note(f"{', '.join(names)} has no images: data.images=false trains the language model of {recipe.model} on text")
    return {IMAGES: False}


def with_minimum(changes: Mapping[str, Any], recipe: Recipe) -> dict[str, Any]:
    """Return the changes that make a recipe from another, with its own min_lr, which would follow the rate."""
    low = recipe.schedule.min_lr
    return {**changes, MIN_LR: low} if LR in changes and MIN_LR not in changes and low else dict(changes)


MICRO_BATCH, AUTO = "layout.micro_batch_size", "auto"


def split_auto(overrides: Iterable[str]) -> tuple[list[str], bool]:
    """Return the overrides without micro_batch_size=auto in any framework's key, and whether it was there."""
    kept = [text for text in overrides if not _is_auto(text)]
    return kept, len(kept) < len(list(overrides))


def _is_auto(text: str) -> bool:
    value = text.partition("=")[2]
    return _own_key(text) == MICRO_BATCH and value.strip().lower() == AUTO


def _own_key(text: str) -> str:
    """Return our key of an override in any framework's words; its own if there is no single one."""
    key = text.partition("=")[0].strip().replace("-", "_")
    return native_key(key) or (override_keys()[key].field if key in override_keys() else None) or key


def merged(typed: Iterable[str], later: Sequence[str]) -> tuple[str, ...]:
    """Return the typed overrides of fields that the later ones do not set, and the later ones."""
    keys = {_own_key(text) for text in later}
    return (*(text for text in typed if _own_key(text) not in keys), *later)


def steps_and_epochs(steps: Any, epochs: Any) -> InputError:
    """Return the error for a run whose length is set twice."""
    return InputError(
        f"train.epochs={epochs:g} and train.steps={steps} both set the length of the run; use one",
        field=EPOCHS,
        value=epochs,
        fix=(f"train.epochs={epochs:g}", f"train.steps={steps}"),
    )


def change(recipe: Recipe, values: Mapping[str, Any]) -> tuple[Recipe, list[Change]]:
    """Return the recipe with typed values for some of our keys, and the changes."""
    log: list[Change] = []
    sections: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, field = key.split(".")
        old = field_value(recipe, key)
        if old != value or type(old) is not type(value):
            log.append(Change(key, old, value, recipe_fields()[key].kind))
            sections.setdefault(section, {})[field] = value
    replaced = {
        section: msgspec.structs.replace(getattr(recipe, section), **fields) for section, fields in sections.items()
    }
    return msgspec.structs.replace(recipe, **replaced), log


def native_key(key: str) -> str | None:
    """Return our full key for a key or flat name of ours, e.g. layout.tp for tp; None for others."""
    if key in recipe_fields():
        return key
    return keys_by_flat_name().get(key)


def _split(overrides: Iterable[str]) -> list[tuple[str, str]]:
    found: dict[str, str] = {}
    for text in overrides:
        key, equals, value = text.partition("=")
        key = _checked_key(key.strip(), bool(equals), text)
        if found.setdefault(key, value.strip()) != value.strip():
            raise InputError(f"is set twice, to {found[key]} and to {value.strip()}", field=key)
    return list(found.items())


def _checked_key(key: str, has_value: bool, text: str) -> str:
    if key[:1] in ("+", "~") or key.startswith("--"):
        raise InputError(
            f"{text}: remove the prefix (+, ~ or --) and write key=value; every field already exists",
            field=key,
            fix=[text.lstrip("+~-")],
        )
    if not has_value:
        raise InputError(f"{text}: an override must be key=value", field=key, fix=[f"{key}=…"])
    field, _ = _item(key)
    return field.replace("-", "_") + key[len(field) :]


def _item(key: str) -> tuple[str, str]:
    """Split data.columns.prompt into field and item; the item is empty for other keys."""
    section, _, rest = key.partition(".")
    name, _, item = rest.partition(".")
    info = recipe_fields().get(f"{section}.{name}".replace("-", "_"))
    return (f"{section}.{name}", item) if item and info is not None and is_map(info) else (key, "")


def _settings(pairs: list[tuple[str, str]], recipe: Recipe) -> list[_Setting]:
    """Return typed values by our keys; raise if two overrides set one key to different values."""
    explicit: dict[str, _Setting] = {}
    implied: dict[str, _Setting] = {}
    groups: dict[tuple[str, ...], dict[str, str]] = {}
    items: dict[str, dict[str, str]] = {}
    errors: list[InputError] = []
    removed: list[tuple[str, str]] = []
    for key, text in pairs:
        field, item = _item(key)
        if key in REMOVED_KEYS:
            removed.append((key, text))
        elif item:
            items.setdefault(field, {})[item] = text
        elif key not in recipe_fields() and key in override_composite_keys():  # ours need no other framework's keys
            groups.setdefault(override_composite_keys()[key].keys, {})[key] = text
        else:
            try:
                _add(explicit, _plain(key, text, recipe))
            except InputError as error:
                errors.append(error)
    if removed:  # what they are here may depend on fields that other overrides set
        changed = change(recipe, {setting.key: setting.value for setting in explicit.values()})[0]
        errors += _removed(removed, changed)
    if errors:
        raise together(errors)
    if groups:  # keys that are read together may depend on fields that other overrides set
        recipe = change(recipe, {setting.key: setting.value for setting in explicit.values()})[0]
    for keys, texts in groups.items():
        composite = override_composite_keys()[keys[0]]
        mapped = (composite.read_override or composite.read)(texts, recipe)
        source = " ".join(f"{key}={text}" for key, text in texts.items())
        for own, text in mapped.explicit.items():
            _add(explicit, _typed(own, text, source.split("=")[0], source, recipe))
        for own, text in mapped.implied.items():
            implied[own] = _typed(own, text, own, source, recipe)
        _refuse_no_effect(override_composite_keys()[keys[0]], texts, mapped, recipe)
    for own, texts in items.items():
        explicit[own] = _with_items(own, texts, explicit.get(own), recipe)
    return list({**implied, **explicit}.values())


def _removed(pairs: list[tuple[str, str]], recipe: Recipe) -> list[InputError]:
    """Return the errors of keys that are something else here; what replaces the others counts for each of them."""
    errors: list[InputError] = []
    for key, text in sorted(pairs, key=lambda pair: computed_after(pair[0])):
        error = removed_key(key, text, recipe, partial(accepts, recipe=recipe))
        written = error.fix[0].split() if error.fix else []
        if all("=" in one and accepts(one, recipe) for one in written):
            recipe = change(recipe, {one.key: one.value for one in _settings(_split(written), recipe)})[0]
        errors.append(error)
    return errors


OFF = ("false", "none", "null", "0", "0.0", "1", "")
"""Values that leave a technique off, so that changing nothing is what they ask for."""


def _refuse_no_effect(composite: CompositeKey, texts: Mapping[str, str], mapped: MappedFields, recipe: Recipe) -> None:
    """Raise if a key of another framework makes no difference, and does not say what the recipe has already."""
    asked = {key: text for key, text in texts.items() if text.lower() not in OFF}
    without = {key: text for key, text in texts.items() if key not in asked}
    same = [_reads(composite, others, recipe) for others in (without, {**texts, **dict.fromkeys(asked, "false")})]
    if not asked or without or ((mapped.explicit or mapped.implied) and mapped not in same):
        return
    present: dict[str, str] = {}
    with suppress(InputError):  # the framework cannot express the recipe
        present = {key: _plain_text(value) for key, value in composite.write(recipe).items()} if composite.write else {}
    if any(present.get(key) == text.lower() for key, text in asked.items()):
        return
    key, text = next(iter(asked.items()))
    for_adapters = recipe.goal != "peft" and all(field.startswith("peft.") for field in composite.fields)
    reason = f"has no effect on this {recipe.goal} recipe"
    if for_adapters:
        reason = f"needs a peft recipe: {recipe.goal} trains the weights themselves (meshwright recipes --goal peft)"
    elif others := [name for name in composite.keys if name not in texts]:
        reason += f" without other keys of its group ({', '.join(others[:3])})"
    raise InputError(reason, field=key, value=text, fix=(f"without {key}",))


def _reads(composite: CompositeKey, texts: Mapping[str, str], recipe: Recipe) -> MappedFields | None:
    """Return what other values of the keys set; None if they are invalid."""
    try:
        return composite.read(texts, recipe) if texts else None
    except (InputError, ValueError, KeyError, IndexError):
        return None


def _plain_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool | str) else json.dumps(value, default=str)


def _with_items(own: str, texts: dict[str, str], setting: _Setting | None, recipe: Recipe) -> _Setting:
    """Set single items of a mapping field; the others keep their values."""
    before = setting.value if setting is not None else field_value(recipe, own)
    new: dict[str, Any] = {}
    for item, text in texts.items():
        new |= parse(recipe_fields()[own], json.dumps({item: text}), f"{own}.{item}")
    return _Setting(own, {**before, **new}, " ".join(f"{own}.{item}={text}" for item, text in texts.items()))


def _plain(key: str, text: str, recipe: Recipe) -> _Setting:
    own = native_key(key)
    if own is not None:
        return _typed(own, text, key, f"{key}={text}", recipe)
    if key in override_keys():
        alias = override_keys()[key]
        return _typed(alias.field, translate_value(alias, text), key, f"{key}={text}", recipe)
    raise unknown_key(key, text, recipe, partial(_fields, recipe=recipe))


def _fields(key: str, text: str, recipe: Recipe) -> dict[str, Any]:
    """Return the fields of ours that a key sets, and their values; raise InputError if it cannot be set so."""
    return {setting.key: setting.value for setting in _settings([(key, text)], recipe)}


def accepts(text: str, recipe: Recipe) -> bool:
    """Return whether one override is valid for a recipe."""
    key, _, value = text.partition("=")
    try:
        return bool(_settings([(key, value)], recipe))
    except InputError:
        return False


def translate_value(alias: ConfigKey, text: str) -> str:
    """Translate a framework's value to ours, item by item in a list."""
    if "," not in text and not text.startswith("["):
        return alias.to_recipe_value(text)
    return re.sub(r"[\w+./-]+", lambda word: alias.to_recipe_value(word[0]), text)


def _typed(own: str, text: str, key: str, source: str, recipe: Recipe) -> _Setting:
    if own in TOKEN_COUNTS and IN_THOUSANDS.fullmatch(text.strip()):
        text = meant_integer(text, own) or text
    try:
        return _Setting(own, parse(recipe_fields()[own], text, key), source)
    except InputError as error:
        if error.fix:
            raise
        value = field_value(recipe, own) or USUAL.get(own, field_value(recipe, own))
        kept = format_override(own, value)  # no value is near: the recipe's own is a valid one
        raise InputError(error.reason, error.field, error.value, [kept]) from error


def _add(settings: dict[str, _Setting], setting: _Setting) -> None:
    before = settings.setdefault(setting.key, setting)
    if setting.key == METHOD and "lora" in (before.value, setting.value) and {before.value, setting.value} <= LOW_BITS:
        settings[setting.key] = before if setting.value == "lora" else setting
        return
    if before.value != setting.value:
        raise InputError(f"{before.source} and {setting.source} both set {setting.key}", field=setting.key)
