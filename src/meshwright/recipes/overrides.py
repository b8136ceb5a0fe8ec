"""Changing a recipe with key=value: our keys, short names and other frameworks' keys, all typed, none ignored."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import msgspec

from meshwright.errors import InputError, unknown
from meshwright.recipes.build import field_locations
from meshwright.recipes.key_maps import REMOVED_KEYS, ConfigKey, override_composite_keys, override_keys
from meshwright.recipes.types import FieldKind, Recipe, recipe_fields
from meshwright.recipes.values import is_map, parse


class Change(msgspec.Struct, frozen=True):
    """One field that an override changed."""

    key: str
    old: Any
    new: Any
    kind: FieldKind


class _Setting(msgspec.Struct, frozen=True):
    """A value for one of our keys, and the words it was asked for in."""

    key: str
    value: Any
    asked: str


def apply(recipe: Recipe, overrides: Iterable[str]) -> Recipe:
    """The recipe with every `key=value` applied."""
    return apply_with_log(recipe, overrides)[0]


def apply_with_log(recipe: Recipe, overrides: Iterable[str]) -> tuple[Recipe, list[Change]]:
    """The recipe with every `key=value` applied, and what that changed."""
    return change(recipe, requested(recipe, overrides))


def requested(recipe: Recipe, overrides: Iterable[str]) -> dict[str, Any]:
    """The typed value of every key that overrides name, whether or not it differs from the recipe's."""
    return {setting.key: setting.value for setting in _settings(_split(overrides), recipe)}


def change(recipe: Recipe, values: Mapping[str, Any]) -> tuple[Recipe, list[Change]]:
    """The recipe with typed values for some of our keys, and what that changed."""
    log: list[Change] = []
    sections: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, field = key.split(".")
        old = getattr(getattr(recipe, section), field)
        if old != value or type(old) is not type(value):
            log.append(Change(key, old, value, recipe_fields()[key].kind))
            sections.setdefault(section, {})[field] = value
    replaced = {
        section: msgspec.structs.replace(getattr(recipe, section), **fields) for section, fields in sections.items()
    }
    return msgspec.structs.replace(recipe, **replaced), log


@lru_cache(maxsize=1)
def known_keys() -> tuple[str, ...]:
    """Everything that may stand before the equals sign."""
    return (*recipe_fields(), *field_locations(), *override_keys(), *override_composite_keys())


def native_key(key: str) -> str | None:
    """Our key for our own spellings of it, e.g. tp or layout.tp."""
    if key in recipe_fields():
        return key
    return ".".join(field_locations()[key]) if key in field_locations() else None


def _split(overrides: Iterable[str]) -> list[tuple[str, str]]:
    found: dict[str, str] = {}
    for text in overrides:
        key, equals, value = text.partition("=")
        key = _checked_key(key.strip(), bool(equals), text)
        if found.setdefault(key, value.strip()) != value.strip():
            raise InputError(f"is given twice, as {found[key]} and {value.strip()}", field=key)
    return list(found.items())


def _checked_key(key: str, has_value: bool, text: str) -> str:
    if key[:1] in ("+", "~") or key.startswith("--"):
        raise InputError(
            f"{text}: a prefix like + ~ or -- is not needed; every field exists, so write key=value",
            field=key,
            fix=[text.lstrip("+~-")],
        )
    if not has_value:
        raise InputError(f"{text}: an override is key=value", field=key, fix=[f"{key}=…"])
    field, _ = _item(key)
    return field.replace("-", "_") + key[len(field) :]


def _item(key: str) -> tuple[str, str]:
    """The field and the item in it that data.columns.prompt names; of other keys the item is empty."""
    section, _, rest = key.partition(".")
    name, _, item = rest.partition(".")
    info = recipe_fields().get(f"{section}.{name}".replace("-", "_"))
    return (f"{section}.{name}", item) if item and info is not None and is_map(info) else (key, "")


def _settings(pairs: list[tuple[str, str]], recipe: Recipe) -> list[_Setting]:
    """Our keys and typed values for everything asked; two different answers for one key are an error."""
    said: dict[str, _Setting] = {}
    implied: dict[str, _Setting] = {}
    groups: dict[tuple[str, ...], dict[str, str]] = {}
    items: dict[str, dict[str, str]] = {}
    for key, text in pairs:
        field, item = _item(key)
        if item:
            items.setdefault(field, {})[item] = text
        elif key in override_composite_keys():
            groups.setdefault(override_composite_keys()[key].keys, {})[key] = text
        else:
            _add(said, _plain(key, text))
    for keys, given in groups.items():
        meaning = override_composite_keys()[keys[0]].read(given, recipe)
        asked = " ".join(f"{key}={text}" for key, text in given.items())
        for own, text in meaning.explicit.items():
            _add(said, _typed(own, text, asked.split("=")[0], asked))
        for own, text in meaning.implied.items():
            implied[own] = _typed(own, text, own, asked)
    for own, given in items.items():
        said[own] = _with_items(own, given, said.get(own), recipe)
    return list({**implied, **said}.values())


def _with_items(own: str, given: dict[str, str], said: _Setting | None, recipe: Recipe) -> _Setting:
    """A field of names with some of them set one by one; the others stay as they are."""
    section, field = own.split(".")
    before = said.value if said is not None else getattr(getattr(recipe, section), field)
    new: dict[str, Any] = {}
    for item, text in given.items():
        new |= parse(recipe_fields()[own], json.dumps({item: text}), f"{own}.{item}")
    return _Setting(own, {**before, **new}, " ".join(f"{own}.{item}={text}" for item, text in given.items()))


def _plain(key: str, text: str) -> _Setting:
    own = native_key(key)
    if own is not None:
        return _typed(own, text, key, f"{key}={text}")
    if key in override_keys():
        alias = override_keys()[key]
        return _typed(alias.field, translate_value(alias, text), key, f"{key}={text}")
    if key in REMOVED_KEYS:
        reason, instead = REMOVED_KEYS[key]
        instead = instead.replace("{value}", text or "8xH100")
        raise InputError(f"{reason}; use {instead}", field=key, value=text, fix=[instead])
    raise unknown("key", key, known_keys())


def translate_value(alias: ConfigKey, text: str) -> str:
    """Their value in ours, item by item in a list."""
    if "," not in text and not text.startswith("["):
        return alias.to_recipe_value(text)
    return re.sub(r"[\w+./-]+", lambda word: alias.to_recipe_value(word[0]), text)


def _typed(own: str, text: str, key: str, asked: str) -> _Setting:
    return _Setting(own, parse(recipe_fields()[own], text, key), asked)


def _add(said: dict[str, _Setting], setting: _Setting) -> None:
    before = said.setdefault(setting.key, setting)
    if before.value != setting.value:
        raise InputError(f"{before.asked} and {setting.asked} both set {setting.key}", field=setting.key)
