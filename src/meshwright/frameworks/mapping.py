"""From their settings to our recipe and back, by the framework's table."""

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
from meshwright.recipes.types import Recipe, recipe_fields
from meshwright.recipes.values import parse
from meshwright.rules.rule import Finding, Severity

ALIKE = 70.0  # per cent of equal letters in two keys of which one may be meant for the other


FATES: Mapping[str, tuple[str, Severity, str]] = {
    "removed": ("key.removed", "error", "is refused today"),
    "ignored": ("key.ignored", "warning", "is accepted and read by nothing"),
    "overwritten": ("key.overwritten", "warning", "is overwritten by another setting"),
}
"""The finding for a key that no longer does what it says: its id, severity and text."""


class MappedSettings(msgspec.Struct, frozen=True):
    """Their settings as a recipe of ours."""

    recipe: Recipe
    source_keys: Mapping[str, str]  # our key → their key that says it
    unresolved: tuple[str, ...]  # our keys whose value the file leaves open
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]  # settings that are right there and that we have no counterpart for


def text_of(value: Any) -> str:
    """A plain value as it would be typed in an override."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return "[" + ",".join(text_of(item) for item in value) + "]"
    if isinstance(value, dict):
        return ",".join(f"{key}:{text_of(item)}" for key, item in value.items())
    return repr(value) if isinstance(value, float) else str(value)


def map_to_recipe(framework: Framework, parsed: ParsedConfig) -> MappedSettings:
    """The recipe that their settings mean, with a finding for every one that means nothing."""
    blank = Recipe(name=parsed.name, model=parsed.model.name if parsed.model else "", goal=parsed.goal, cluster="")
    start = msgspec.structs.replace(parsed.base, name=parsed.name) if parsed.base else blank
    reader = _Reader(framework, start, with_defaults=parsed.base is None)
    reader.read(parsed.settings if parsed.mappable is None else parsed.mappable)
    values = {**reader.values, **parsed.field_values}
    recipe, _ = overrides.change(start, values)
    return MappedSettings(recipe, reader.said, tuple(reader.unresolved), tuple(reader.findings), tuple(reader.notes))


class _Reader:
    """Collects values of ours while their settings are gone through; one mistake does not hide the next."""

    def __init__(self, framework: Framework, start: Recipe, with_defaults: bool) -> None:
        self.framework, self.start = framework, start
        self.table = config_keys(framework.key_map)
        self.joints = composite_keys(framework.key_map)
        self.together = {key: joint for joint in self.joints for key in joint.keys}
        self.values: dict[str, Any] = {}
        self.said: dict[str, str] = {}
        self.unresolved: list[str] = []
        self.findings: list[Finding] = []
        self.notes: list[str] = []
        self.defaults = {
            key: text_of(word.default)
            for key, word in self.table.items()
            if with_defaults and word.default is not UNSET and word.status == "read"
        }

    def read(self, settings: Settings) -> None:
        """Their defaults, then what the file says key by key, then what keys mean together."""
        for key, text in self.defaults.items():
            word = self.table[key]
            if word.field and key not in self.together and not _is_shape(word):
                self.values[word.field] = self._typed(word, text)
        for key, said in settings.items():
            self._read_one(key, said, self.table.get(key))
        for joint in self.joints:
            self._read_together(joint, {key: settings[key] for key in joint.keys if key in settings})

    def _read_one(self, key: str, said: SourcedValue, word: ConfigKey | None) -> None:
        if word is not None and word.status != "read":
            self._note_fate(word, said)
        elif said.unresolved:
            self._leave_open(key, word)
        elif key in self.together:
            return
        elif word is None:
            self._note_unknown(key, said)
        elif word.field:
            self._set(word, said)
        else:
            self._check_form(word, said)

    def _read_together(self, joint: CompositeKey, given: Mapping[str, SourcedValue]) -> None:
        if any(said.unresolved for said in given.values()):
            return
        defaults = {key: self.defaults[key] for key in joint.keys if key in self.defaults}
        texts = {**defaults, **{key: text_of(said.value) for key, said in given.items()}}
        if not texts:
            return
        so_far, _ = overrides.change(self.start, self.values)
        fields = recipe_fields()
        try:
            meaning = joint.read(texts, so_far)
            outright = {own: parse(fields[own], text, own) for own, text in meaning.explicit.items()}
            implied = {own: parse(fields[own], text, own) for own, text in meaning.implied.items()}
        except InputError as error:
            key = error.field if error.field in given else next(iter(given), "")
            if key:
                self._note_refused(key, given[key], error)
            return
        self.values |= {own: value for own, value in implied.items() if own not in self.said} | outright
        if given:
            self.said |= {own: next(iter(given)) for own in outright if own not in self.said}

    def _typed(self, word: ConfigKey, text: str) -> Any:
        return parse(recipe_fields()[word.field], overrides.translate_value(word, text), word.key)

    def _set(self, word: ConfigKey, said: SourcedValue) -> None:
        if word.choices and isinstance(said.value, str) and not _is_choice(word, said.value):
            self._check_form(word, said)
            return
        try:
            value = self._typed(word, text_of(said.value))
        except InputError as error:
            if _is_choice(word, said.value):
                self.notes.append(
                    f"{self.framework.format_setting(word.key, said.value)} has no counterpart here: not modelled"
                )
            else:
                self._note_refused(word.key, said, error)
            return
        self.said[word.field] = word.key
        if not _is_shape(word):
            self.values[word.field] = value

    def _leave_open(self, key: str, word: ConfigKey | None) -> None:
        joint = self.together.get(key)
        owned = joint.fields if joint else (word.field,) if word and word.field else ()
        self.unresolved += [own for own in owned if own not in self.unresolved]
        self.said |= {own: key for own in owned if own not in self.said}

    def _check_form(self, word: ConfigKey, said: SourcedValue) -> None:
        """The type or choice that their own parser asks for, of keys that mean nothing here."""
        value, wrong = said.value, ""
        if word.choices and not _is_choice(word, value):
            wrong = f"allowed: {', '.join(word.choices)}"
        elif word.type == "int" and not _is_whole(value):
            wrong = "a whole number is wanted"
        elif word.type == "float" and not _is_number(value):
            wrong = "a number is wanted"
        elif word.type == "bool" and text_of(value).lower() not in ("true", "false"):
            wrong = "true or false is wanted"
        if wrong:
            near = closest(str(value), word.choices, 1) if word.choices else []
            self._note_refused(word.key, said, InputError(wrong, fix=[f"{word.key}={one}" for one in near]))

    def _note_refused(self, key: str, said: SourcedValue, error: InputError) -> None:
        message = f"{self.framework.format_setting(key, said.value)}: {error.reason}"
        fixes = tuple(self._spelled(fix, key) for fix in error.fix)
        self._note("value.refused", "error", key, said, message, fixes)

    def _spelled(self, fix: str, key: str) -> str:
        name, equals, value = fix.partition("=")
        return self.framework.format_setting(name, value) if equals and (name == key or name in self.table) else fix

    def _note_unknown(self, key: str, said: SourcedValue) -> None:
        if self.framework.is_extra_key(key):
            return
        near = self._meant(key)
        shown = self.framework.display_key(key)
        hint = f"; did you mean {self.framework.display_key(near.key)}?" if near else ""
        fix = (self.framework.format_setting(near.key, said.value),) if near and self._takes(near, said) else ()
        if self.framework.rejects_unknown(key):
            self._note("key.unknown", "error", key, said, f"{self.framework.title} has no {shown}{hint}", fix)
        else:
            self._note("key.unread", "warning", key, said, f"{self.framework.title} reads {shown} nowhere{hint}", fix)

    def _meant(self, key: str) -> ConfigKey | None:
        """The key that was likely meant: near as a whole and in its last part."""
        from rapidfuzz.fuzz import ratio

        def last(name: str) -> str:
            return name.rpartition(".")[2]

        found = closest(key, [word.key for word in self.table.values() if word.status == "read"], 1)
        if not found or min(ratio(key, found[0]), ratio(last(key), last(found[0]))) < ALIKE:
            return None
        return self.table[found[0]]

    def _takes(self, word: ConfigKey, said: SourcedValue) -> bool:
        """Whether a value could stand for another key."""
        try:
            return not word.field or self._typed(word, text_of(said.value)) is not None
        except InputError:
            return False

    def _note_fate(self, word: ConfigKey, said: SourcedValue) -> None:
        finding, severity, text = FATES[word.status]
        ended = f" (until {word.until})" if word.until else ""
        message = f"{self.framework.display_key(word.key)} {text}{ended}" + (f": {word.note}" if word.note else "")
        self._note(finding, severity, word.key, said, message, (word.replacement,) if word.replacement else ())

    def _note(
        self, rule: str, severity: Severity, key: str, said: SourcedValue, message: str, fix: tuple[str, ...]
    ) -> None:
        self.findings.append(Finding(rule, severity, key, message, fix, file=said.file, line=said.line))


def _is_shape(word: ConfigKey) -> bool:
    """Whether a key is a size of the model, which the framework reads as a whole."""
    return word.field.startswith("architecture.")


def _is_choice(word: ConfigKey, value: Any) -> bool:
    return text_of(value).lower() in {choice.lower() for choice in word.choices}


def _is_whole(value: Any) -> bool:
    return str(value).strip().lstrip("+-").replace("_", "").isdigit() and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    try:
        float(str(value).replace("_", ""))
    except ValueError:
        return False
    return not isinstance(value, bool)


PRETRAIN_LACKS = ("data.columns", "data.train_on", "data.chat_template", "data.truncation", "train.per_token_loss")


def relevant_fields(recipe: Recipe, model: ModelSpec) -> tuple[str, ...]:
    """The fields that make a difference to this training; the shape of the model is its own matter."""

    def matters(key: str) -> bool:
        section = key.split(".")[0]
        if section == "architecture" or (key in PRETRAIN_LACKS and recipe.goal == "pretrain"):
            return False
        if section in ("peft", "moe"):
            return recipe.goal == "peft" if section == "peft" else model.moe is not None
        if key.startswith("optimizer.muon"):
            return recipe.optimizer.name == "muon"
        if key == "train.freeze":
            return model.vision is not None
        return not (key == "train.mtp_loss" and not model.mtp_layers)

    return tuple(key for key in recipe_fields() if matters(key))


def value_of(recipe: Recipe, key: str) -> Any:
    """The value of one of our fields."""
    section, field = key.split(".")
    return getattr(getattr(recipe, section), field)


def same_value(one: object, other: object) -> bool:
    """Whether two values mean the same; numbers may differ in their last digits."""
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= 1e-9 * max(abs(one), abs(other))
    return one == other


def to_settings(
    framework: Framework, recipe: Recipe, fields: Iterable[str]
) -> tuple[dict[str, Any], tuple[UnmappedField, ...]]:
    """Their settings for these fields of a recipe, in the order of their table, and what it has no words for."""
    wanted = set(fields)
    found: dict[str, Any] = {}
    unsaid: dict[str, UnmappedField] = {}
    covered: set[str] = set()
    for joint in composite_keys(framework.key_map):
        if joint.write is not None and wanted & set(joint.fields):
            covered |= set(joint.fields)
            try:
                found |= joint.write(recipe)
            except InputError as error:
                own = error.field if error.field in joint.fields else joint.fields[0]
                unsaid[own] = UnmappedField(own, value_of(recipe, own), error.reason)
    for key, word in config_keys(framework.key_map).items():
        if word.status != "read" or word.field not in wanted or word.field in covered or key in found:
            continue
        covered.add(word.field)
        try:
            found[key] = word.to_framework_value(value_of(recipe, word.field))
        except InputError as error:
            unsaid[word.field] = UnmappedField(word.field, value_of(recipe, word.field), error.reason)
    for own in (own for own in recipe_fields() if own in wanted and own not in covered):
        if value_of(recipe, own) != recipe_fields()[own].default:
            unsaid[own] = UnmappedField(own, value_of(recipe, own), f"{framework.title} has no key for it")
    order = {key: place for place, key in enumerate(config_keys(framework.key_map))}
    return dict(sorted(found.items(), key=lambda item: order.get(item[0], len(order)))), tuple(unsaid.values())


def without_defaults(framework: Framework, settings: Mapping[str, Any], keep: Container[str] = ()) -> dict[str, Any]:
    """Settings that say more than their default does, and those a reader expects to see."""
    table = config_keys(framework.key_map)

    def says_more(key: str, value: Any) -> bool:
        word = table.get(key)
        return word is None or word.default is UNSET or word.default != value

    return {key: value for key, value in settings.items() if key in keep or says_more(key, value)}


def nest(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as tables within tables."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        *path, last = key.split(".")
        table = found
        for part in path:
            table = table.setdefault(part, {})
        table[last] = value
    return found
