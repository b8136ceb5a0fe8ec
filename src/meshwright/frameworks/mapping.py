"""Map a framework's settings to a recipe and back, by its key map."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any

import msgspec
from msgspec import UNSET

from meshwright.errors import InputError, closest
from meshwright.frameworks.framework import Framework, ParsedConfig
from meshwright.frameworks.types import Settings, SourcedValue, UnmappedField
from meshwright.models import ModelSpec
from meshwright.recipes import overrides
from meshwright.recipes.key_maps import CompositeKey, ConfigKey, composite_keys, config_keys
from meshwright.recipes.types import Recipe, field_value, recipe_fields
from meshwright.recipes.values import parse
from meshwright.rules.rule import Finding, Severity

SIMILARITY = 70.0  # percent of matching characters above which an unknown key counts as a typo


FATES: Mapping[str, tuple[str, Severity, str]] = {
    "removed": ("key.removed", "error", "was removed"),
    "ignored": ("key.ignored", "warning", "is accepted but ignored"),
    "overwritten": ("key.overwritten", "warning", "is overwritten by another setting"),
}
"""The finding for a key that has no effect: its id, severity and text."""


class MappedSettings(msgspec.Struct, frozen=True):
    """A framework's settings as a recipe."""

    recipe: Recipe
    source_keys: Mapping[str, str]  # recipe field → the framework's key that sets it
    unresolved: tuple[str, ...]  # recipe fields whose value is unresolved
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]  # valid settings without a counterpart here


def text_of(value: Any) -> str:
    """Format a value as in an override."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return "[" + ",".join(text_of(item) for item in value) + "]"
    if isinstance(value, dict):
        return ",".join(f"{key}:{text_of(item)}" for key, item in value.items())
    return repr(value) if isinstance(value, float) else str(value)


def map_to_recipe(framework: Framework, parsed: ParsedConfig) -> MappedSettings:
    """Return the recipe for a framework's settings, with a finding for every invalid one."""
    blank = Recipe(name=parsed.name, model=parsed.model.name if parsed.model else "", goal=parsed.goal, cluster="")
    start = msgspec.structs.replace(parsed.base, name=parsed.name) if parsed.base else blank
    reader = _Reader(framework, start, with_defaults=parsed.base is None)
    reader.read(parsed.settings if parsed.mappable is None else parsed.mappable)
    values = {**reader.values, **parsed.field_values}
    recipe, _ = overrides.change(start, values)
    return MappedSettings(
        recipe, reader.source_keys, tuple(reader.unresolved), tuple(reader.findings), tuple(reader.notes)
    )


class _Reader:
    """Collects recipe values from a framework's settings and reports all errors, not only the first."""

    def __init__(self, framework: Framework, start: Recipe, with_defaults: bool) -> None:
        self.framework, self.start = framework, start
        self.table = config_keys(framework.key_map)
        self.joints = composite_keys(framework.key_map)
        self.composite_of = {key: joint for joint in self.joints for key in joint.keys}
        self.values: dict[str, Any] = {}
        self.source_keys: dict[str, str] = {}
        self.unresolved: list[str] = []
        self.findings: list[Finding] = []
        self.notes: list[str] = []
        self.defaults = {
            key: text_of(word.default)
            for key, word in self.table.items()
            if with_defaults and word.default is not UNSET and word.status == "read"
        }

    def read(self, settings: Settings) -> None:
        """Apply the framework's defaults, then single keys, then composite keys."""
        for key, text in self.defaults.items():
            word = self.table[key]
            if word.field and key not in self.composite_of and not _is_model_size(word):
                self.values[word.field] = self._typed(word, text)
        for key, setting in settings.items():
            self._read_key(key, setting, self.table.get(key))
        for joint in self.joints:
            self._read_composite(joint, {key: settings[key] for key in joint.keys if key in settings})

    def _read_key(self, key: str, setting: SourcedValue, word: ConfigKey | None) -> None:
        if word is not None and word.status != "read":
            self._report_status(word, setting)
        elif setting.unresolved:
            self._mark_unresolved(key, word)
        elif key in self.composite_of:
            return
        elif word is None:
            self._report_unknown(key, setting)
        elif word.field:
            self._set(word, setting)
        else:
            self._check_type(word, setting)

    def _read_composite(self, joint: CompositeKey, settings: Mapping[str, SourcedValue]) -> None:
        if any(setting.unresolved for setting in settings.values()):
            return
        defaults = {key: self.defaults[key] for key in joint.keys if key in self.defaults}
        texts = {**defaults, **{key: text_of(setting.value) for key, setting in settings.items()}}
        if not texts:
            return
        so_far, _ = overrides.change(self.start, self.values)
        fields = recipe_fields()
        try:
            meaning = joint.read(texts, so_far)
            outright = {own: parse(fields[own], text, own) for own, text in meaning.explicit.items()}
            implied = {own: parse(fields[own], text, own) for own, text in meaning.implied.items()}
        except InputError as error:
            key = error.field if error.field in settings else next(iter(settings), "")
            if key:
                self._report_rejected(key, settings[key], error)
            return
        self.values |= {own: value for own, value in implied.items() if own not in self.source_keys} | outright
        if settings:
            self.source_keys |= {own: next(iter(settings)) for own in outright if own not in self.source_keys}

    def _typed(self, word: ConfigKey, text: str) -> Any:
        return parse(recipe_fields()[word.field], overrides.translate_value(word, text), word.key)

    def _set(self, word: ConfigKey, setting: SourcedValue) -> None:
        if word.choices and isinstance(setting.value, str) and not _is_choice(word, setting.value):
            self._check_type(word, setting)
            return
        try:
            value = self._typed(word, text_of(setting.value))
        except InputError as error:
            if _is_choice(word, setting.value):
                self.notes.append(
                    f"{self.framework.format_setting(word.key, setting.value)} has no counterpart here: not modeled"
                )
            else:
                self._report_rejected(word.key, setting, error)
            return
        self.source_keys[word.field] = word.key
        if not _is_model_size(word):
            self.values[word.field] = value

    def _mark_unresolved(self, key: str, word: ConfigKey | None) -> None:
        joint = self.composite_of.get(key)
        owned = joint.fields if joint else (word.field,) if word and word.field else ()
        self.unresolved += [own for own in owned if own not in self.unresolved]
        self.source_keys |= {own: key for own in owned if own not in self.source_keys}

    def _check_type(self, word: ConfigKey, setting: SourcedValue) -> None:
        """Check the type or choice that the framework's parser requires, for keys without a recipe field."""
        value, error = setting.value, ""
        if word.choices and not _is_choice(word, value):
            error = f"allowed: {', '.join(word.choices)}"
        elif word.type == "int" and not _is_int(value):
            error = "expected an integer"
        elif word.type == "float" and not _is_number(value):
            error = "expected a number"
        elif word.type == "bool" and text_of(value).lower() not in ("true", "false"):
            error = "expected true or false"
        if error:
            near = closest(str(value), word.choices, 1) if word.choices else []
            self._report_rejected(word.key, setting, InputError(error, fix=[f"{word.key}={one}" for one in near]))

    def _report_rejected(self, key: str, setting: SourcedValue, error: InputError) -> None:
        message = f"{self.framework.format_setting(key, setting.value)}: {error.reason}"
        fixes = tuple(self._format_fix(fix, key) for fix in error.fix)
        self._report("value.invalid", "error", key, setting, message, fixes)

    def _format_fix(self, fix: str, key: str) -> str:
        name, equals, value = fix.partition("=")
        return self.framework.format_setting(name, value) if equals and (name == key or name in self.table) else fix

    def _report_unknown(self, key: str, setting: SourcedValue) -> None:
        if self.framework.is_extra_key(key):
            return
        near = self._closest_key(key)
        shown = self.framework.display_key(key)
        hint = f"; did you mean {self.framework.display_key(near.key)}?" if near else ""
        fix = (self.framework.format_setting(near.key, setting.value),) if near and self._accepts(near, setting) else ()
        if self.framework.rejects_unknown(key):
            self._report("key.unknown", "error", key, setting, f"{self.framework.title} has no {shown}{hint}", fix)
        else:
            self._report(
                "key.unused", "warning", key, setting, f"{self.framework.title} does not read {shown}{hint}", fix
            )

    def _closest_key(self, key: str) -> ConfigKey | None:
        """Return the likely intended key: similar as a whole and in its last component."""
        from rapidfuzz.fuzz import ratio

        def last(name: str) -> str:
            return name.rpartition(".")[2]

        found = closest(key, [word.key for word in self.table.values() if word.status == "read"], 1)
        if not found or min(ratio(key, found[0]), ratio(last(key), last(found[0]))) < SIMILARITY:
            return None
        return self.table[found[0]]

    def _accepts(self, word: ConfigKey, setting: SourcedValue) -> bool:
        """Return whether another key accepts a value."""
        try:
            return not word.field or self._typed(word, text_of(setting.value)) is not None
        except InputError:
            return False

    def _report_status(self, word: ConfigKey, setting: SourcedValue) -> None:
        finding, severity, text = FATES[word.status]
        ended = f" (until {word.until})" if word.until else ""
        message = f"{self.framework.display_key(word.key)} {text}{ended}" + (f": {word.note}" if word.note else "")
        self._report(finding, severity, word.key, setting, message, (word.replacement,) if word.replacement else ())

    def _report(
        self, rule: str, severity: Severity, key: str, setting: SourcedValue, message: str, fix: tuple[str, ...]
    ) -> None:
        self.findings.append(Finding(rule, severity, key, message, fix, file=setting.file, line=setting.line))


def _is_model_size(word: ConfigKey) -> bool:
    """Return whether a key is a model size; the framework's reader builds the model from all of them."""
    return word.field.startswith("architecture.")


def _is_choice(word: ConfigKey, value: Any) -> bool:
    return text_of(value).lower() in {choice.lower() for choice in word.choices}


def _is_int(value: Any) -> bool:
    return str(value).strip().lstrip("+-").replace("_", "").isdigit() and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    try:
        float(str(value).replace("_", ""))
    except ValueError:
        return False
    return not isinstance(value, bool)


NOT_IN_PRETRAINING = ("data.columns", "data.train_on", "data.chat_template", "data.truncation", "train.per_token_loss")


def relevant_fields(recipe: Recipe, model: ModelSpec) -> tuple[str, ...]:
    """Return the recipe fields that affect this training, without the model's architecture."""

    def matters(key: str) -> bool:
        section = key.split(".")[0]
        if section == "architecture" or (key in NOT_IN_PRETRAINING and recipe.goal == "pretrain"):
            return False
        if section in ("peft", "moe"):
            return recipe.goal == "peft" if section == "peft" else model.moe is not None
        if key.startswith("optimizer.muon"):
            return recipe.optimizer.name == "muon"
        if key == "train.freeze":
            return model.vision is not None
        return not (key == "train.mtp_loss" and not model.mtp_layers)

    return tuple(key for key in recipe_fields() if matters(key))


def same_value(one: object, other: object) -> bool:
    """Return whether two values are equal; floats up to rounding."""
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= 1e-9 * max(abs(one), abs(other))
    return one == other


def to_settings(
    framework: Framework, recipe: Recipe, fields: Iterable[str]
) -> tuple[dict[str, Any], tuple[UnmappedField, ...]]:
    """Return the framework's settings for these recipe fields, in key-map order, and the fields without a key."""
    wanted = set(fields)
    found: dict[str, Any] = {}
    unmapped: dict[str, UnmappedField] = {}
    covered: set[str] = set()
    for joint in composite_keys(framework.key_map):
        if joint.write is not None and wanted & set(joint.fields):
            covered |= set(joint.fields)
            try:
                found |= joint.write(recipe)
            except InputError as error:
                own = error.field if error.field in joint.fields else joint.fields[0]
                unmapped[own] = UnmappedField(own, field_value(recipe, own), error.reason)
    for key, word in config_keys(framework.key_map).items():
        if word.status != "read" or word.field not in wanted or word.field in covered or key in found:
            continue
        covered.add(word.field)
        try:
            found[key] = word.to_framework_value(field_value(recipe, word.field))
        except InputError as error:
            unmapped[word.field] = UnmappedField(word.field, field_value(recipe, word.field), error.reason)
    for own in (own for own in recipe_fields() if own in wanted and own not in covered):
        if field_value(recipe, own) != recipe_fields()[own].default:
            unmapped[own] = UnmappedField(own, field_value(recipe, own), f"{framework.title} has no key for it")
    order = {key: index for index, key in enumerate(config_keys(framework.key_map))}
    return dict(sorted(found.items(), key=lambda item: order.get(item[0], len(order)))), tuple(unmapped.values())


def without_defaults(framework: Framework, settings: Mapping[str, Any], keep: Container[str] = ()) -> dict[str, Any]:
    """Drop settings equal to their default, except those in `keep`."""
    table = config_keys(framework.key_map)

    def is_needed(key: str, value: Any) -> bool:
        word = table.get(key)
        return word is None or word.default is UNSET or word.default != value

    return {key: value for key, value in settings.items() if key in keep or is_needed(key, value)}


def nest(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted keys as nested tables."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        *path, last = key.split(".")
        table = found
        for part in path:
            table = table.setdefault(part, {})
        table[last] = value
    return found
