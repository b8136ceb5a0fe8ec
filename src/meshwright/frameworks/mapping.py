"""Map a framework's settings to a recipe and back, by its key map."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import zip_longest
from typing import Any, Protocol

import msgspec
from msgspec import UNSET

from meshwright.errors import InputError, closest
from meshwright.frameworks.framework import Framework, ParsedConfig
from meshwright.frameworks.key_table import meant_choices
from meshwright.frameworks.schedule_units import length_keys
from meshwright.frameworks.types import Settings, SourcedValue, UnmappedField
from meshwright.models import ModelSpec
from meshwright.recipes import overrides
from meshwright.recipes.adapter_targets import FIELD as TARGETS
from meshwright.recipes.adapter_targets import is_known_target, meant_targets
from meshwright.recipes.key_maps import CompositeKey, ConfigKey, composite_keys, config_keys, override_keys
from meshwright.recipes.key_maps.key import EXACT_CASE
from meshwright.recipes.other_names import DEGREE_NAMES
from meshwright.recipes.replacements import OFF
from meshwright.recipes.types import Recipe, field_value, recipe_fields
from meshwright.recipes.values import meant_value, parse
from meshwright.rules.rule import Finding, Severity
from meshwright.similar import opposites

_NAME = re.compile(r"[\w./-]+")
_PLACEHOLDER = re.compile(r"(?<=[ =])(N|F)$|…")  # the value of a setting that moved to another key
MICRO_BATCH = "layout.micro_batch_size"  # whose 0 is corrected to our default where the framework has none
SIMILARITY = 70.0  # percent of matching characters above which an unknown key counts as a typo


STATUS_FINDINGS: Mapping[str, tuple[str, Severity, str]] = {
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
    notes = tuple(_without_unknown_targets(values, is_trainers=TARGETS in parsed.field_values))
    recipe, _ = overrides.change(start, values)
    keys = {**length_keys(framework.key_map, parsed.settings), **_argument_keys(parsed), **reader.source_keys}
    return MappedSettings(recipe, keys, tuple(reader.unresolved), tuple(reader.findings), (*reader.notes, *notes))


def _without_unknown_targets(values: dict[str, Any], is_trainers: bool) -> Iterator[str]:
    """Remove adapter targets that recipes have no name for: a model with code of its own may have such modules.

    Misspelled ones stay, which refuses the recipe; arguments of the Trainer have checks that report them.
    """
    targets = values.get(TARGETS)
    if not isinstance(targets, tuple):
        return
    meant = {one: meant_targets(one) for one in targets if not is_known_target(one)}
    removed = [one for one, near in meant.items() if is_trainers or not near]
    if not removed:
        return
    if others := ", ".join(str(one) for one in removed if not meant[one]):
        yield f"adapters on {others}: recipes have no such layers; peft skips names that the model does not have either"
    values[TARGETS] = tuple(one for one in targets if one not in removed)
    if not values[TARGETS]:
        del values[TARGETS]


def _argument_keys(parsed: ParsedConfig) -> dict[str, str]:
    """Return the recipe fields that arguments of the program set, with the argument."""
    return {field: f"--{name}" for field, name in parsed.program.sources.items() if field in parsed.field_values}


def fields_set_by(key_map: str, key: str) -> tuple[str, ...]:
    """Return the recipe fields that a framework's key sets, alone or with others."""
    composite = {one: row for row in composite_keys(key_map) for one in row.keys}.get(key)  # the last is the key's own
    if composite is not None:
        return composite.fields
    config_key = config_keys(key_map).get(key)
    return (config_key.field,) if config_key is not None and config_key.field else ()


class _Reader:
    """Collects recipe values from a framework's settings and reports all errors, not only the first."""

    def __init__(self, framework: Framework, start: Recipe, with_defaults: bool) -> None:
        self.framework, self.start = framework, start
        self.key_map = config_keys(framework.key_map)
        self.composites = composite_keys(framework.key_map)
        self.composite_of = {key: composite for composite in self.composites for key in composite.keys}
        self.values: dict[str, Any] = {}
        self.source_keys: dict[str, str] = {}
        self.unresolved: list[str] = []
        self.findings: list[Finding] = []
        self.notes: list[str] = []
        self.off: set[str] = set()  # keys that the file sets to false, 0 or none
        self.present: Settings = {}  # what the file sets
        self.refused: set[str] = set()  # keys read with others whose value their parser refuses
        self.defaults = {
            key: text_of(config_key.default)
            for key, config_key in self.key_map.items()
            if with_defaults and config_key.default is not UNSET and config_key.status == "read"
            if start.goal == "peft"
            or not config_key.field.startswith("peft.")  # without adapters they have no settings
        }

    def read(self, settings: Settings) -> None:
        """Apply the framework's defaults, then single keys, then composite keys."""
        for key, text in self.defaults.items():
            config_key = self.key_map[key]
            if config_key.field and key not in self.composite_of and not _is_model_size(config_key):
                self.values[config_key.field] = self._typed(config_key, text)
        self.present = settings
        self.off = {key for key, setting in settings.items() if not setting.unresolved and _is_off(setting.value)}
        for key, setting in settings.items():
            self._read_key(key, setting, self.key_map.get(key))
        for composite in self.composites:
            keys = [key for key in composite.keys if key in settings and key not in self.refused]
            self._read_composite(composite, {key: settings[key] for key in keys})

    def _read_key(self, key: str, setting: SourcedValue, config_key: ConfigKey | None) -> None:
        if config_key is not None and config_key.status != "read":
            self._report_status(config_key, setting)
        elif setting.unresolved and (config_key is not None or key in self.composite_of):
            self._mark_unresolved(key)
        elif key in self.composite_of:
            if config_key is not None and setting.value is not None and not self._is_allowed(config_key, setting.value):
                self.refused.add(key)
                self._check_type(config_key, setting)
        elif config_key is None:
            self._report_unknown(key, setting)
        elif config_key.field:
            self._set(config_key, setting)
        else:
            self._check_type(config_key, setting)

    def _read_composite(self, composite: CompositeKey, settings: Mapping[str, SourcedValue]) -> None:
        if any(setting.unresolved for setting in settings.values()):
            return
        defaults = {key: self.defaults[key] for key in composite.keys if key in self.defaults}
        texts = {**defaults, **{key: text_of(setting.value) for key, setting in settings.items()}}
        if not texts:
            return
        so_far, _ = overrides.change(self.start, self.values)
        fields = recipe_fields()
        try:
            mapped = composite.read(texts, so_far)
            explicit = {field: parse(fields[field], text, field) for field, text in mapped.explicit.items()}
            implied = {field: parse(fields[field], text, field) for field, text in mapped.implied.items()}
        except InputError as error:
            key = error.field if error.field in settings else next(iter(settings), "")
            if key:
                self._report_rejected(key, settings[key], error)
            return
        self.values |= {field: value for field, value in implied.items() if field not in self.source_keys} | explicit
        if settings:
            self.source_keys |= {field: next(iter(settings)) for field in explicit if field not in self.source_keys}

    def _typed(self, config_key: ConfigKey, text: str) -> Any:
        return parse(recipe_fields()[config_key.field], overrides.translate_value(config_key, text), config_key.key)

    def _set(self, config_key: ConfigKey, setting: SourcedValue) -> None:
        if isinstance(setting.value, str) and not self._is_allowed(config_key, setting.value):
            self._check_type(config_key, setting)
            return
        try:
            value = self._typed(config_key, text_of(setting.value))
        except InputError as error:
            if config_key.choices and self._is_allowed(config_key, setting.value):
                self.notes.append(
                    f"{self.framework.format_setting(config_key.key, setting.value)} has no counterpart: not modeled"
                )
                return
            error.fix = error.fix or self._in_range(config_key, setting)
            self._report_rejected(config_key.key, setting, error)
            info = recipe_fields()[config_key.field]
            meant = meant_value(info, text_of(setting.value), config_key.key)
            if meant is None:  # no default in its place: that would be another training
                self._mark_unresolved(config_key.key)
                return
            value = self._typed(config_key, meant)
        self.source_keys[config_key.field] = config_key.key
        if not _is_model_size(config_key):
            self.values[config_key.field] = value

    def _in_range(self, config_key: ConfigKey, setting: SourcedValue) -> tuple[str, ...]:
        """Return the fix of a number out of range: without its sign, else the framework's default."""
        text, info = text_of(setting.value), recipe_fields()[config_key.field]
        defaults = (config_key.default, info.default) if info.key == MICRO_BATCH else (config_key.default,)
        meant = [text[1:]] if text.startswith("-") and text != "-1" else []
        meant += [text_of(one) for one in defaults if isinstance(one, int | float) and not isinstance(one, bool)]
        for one in meant if _is_number(text) else ():
            try:
                self._typed(config_key, one)
            except InputError:
                continue
            return (f"{config_key.key}={one}",)
        return ()

    def _mark_unresolved(self, key: str) -> None:
        owned = fields_set_by(self.framework.key_map, key)
        self.unresolved += [field for field in owned if field not in self.unresolved]
        self.source_keys |= {field: key for field in owned if field not in self.source_keys}

    def _check_type(self, config_key: ConfigKey, setting: SourcedValue) -> None:
        """Check the type or choice that the framework's parser requires, for keys without a recipe field."""
        value, error = setting.value, ""
        if not self._is_allowed(config_key, value):
            error = f"allowed: {', '.join(config_key.choices)}"
        elif config_key.type == "int" and not _is_int(value):
            error = "expected an integer"
        elif config_key.type == "float" and not _is_number(value):
            error = "expected a number"
        elif config_key.type == "bool" and text_of(value).lower() not in ("true", "false"):
            error = "expected true or false"
        if error:
            near = self._closest_choices(config_key, value)
            self._report_rejected(
                config_key.key, setting, InputError(error, fix=[f"{config_key.key}={one}" for one in near])
            )

    def _is_allowed(self, config_key: ConfigKey, value: Any) -> bool:
        """Return whether the framework's parser accepts a value, or each value of a list."""
        if not config_key.choices:
            return True
        values = {text_of(one) for one in (value if isinstance(value, list) else [value])}
        if self.framework.key_map in EXACT_CASE and not config_key.any_case:
            return values <= set(config_key.choices)
        return {one.lower() for one in values} <= {choice.lower() for choice in config_key.choices}

    def _closest_choices(self, config_key: ConfigKey, value: Any) -> list[str]:
        """Return the values that a refused one may mean: a short form of one comes before a typing error of another."""
        wrong = [one for one in (value if isinstance(value, list) else [value]) if one not in config_key.choices]
        return meant_choices(text_of(wrong[0]) if wrong else "", config_key.choices)

    def _report_rejected(self, key: str, setting: SourcedValue, error: InputError) -> None:
        message = f"{self.framework.format_setting(key, setting.value)}: {error.reason}"
        fixes = tuple(self._format_fix(fix, key, isinstance(setting.value, list)) for fix in error.fix)
        self._report("value.invalid", "error", key, setting, message, tuple(fix for fix in fixes if fix))

    def _reads(self, key: str, value: str) -> bool:
        """Return whether a key that is read together with others accepts a value."""
        composite = self.composite_of.get(key)
        try:
            if composite is not None:
                found = composite.read({key: value}, self.start)
                for field, text in {**found.explicit, **found.implied}.items():
                    parse(recipe_fields()[field], text, field)
        except InputError:
            return False
        return composite is not None

    def _format_fix(self, fix: str, key: str, is_list: bool = False) -> str:
        name, equals, value = fix.partition("=")
        if not equals and _NAME.fullmatch(fix):  # one of the key's values
            return self.framework.format_setting(key, [fix] if is_list else fix)
        if equals and name in recipe_fields() and name not in self.key_map:  # a field of ours that several keys set
            return self.framework.format_setting(key, value) if self._reads(key, value) else ""
        if not equals or (name != key and name not in self.key_map):
            return fix
        typed: Any = int(value) if _is_int(value) else {"true": True, "false": False}.get(value, value)
        return self.framework.format_setting(name, [value] if is_list and name == key else typed)

    def _report_unknown(self, key: str, setting: SourcedValue) -> None:
        if self.framework.is_extra_key(key):
            return
        shown = self.framework.display_key(key)
        if (other := self._opposite_key(key, setting)) is not None:
            self._report_opposite(key, setting, other)
            return
        hint, fix = self._meant_key(key, setting)
        if self.framework.rejects_unknown(key):
            self._report("key.unknown", "error", key, setting, f"{self.framework.title} has no {shown}{hint}", fix)
        else:
            self._report(
                "key.unused", "warning", key, setting, f"{self.framework.title} does not read {shown}{hint}", fix
            )

    def _meant_key(self, key: str, setting: SourcedValue) -> tuple[str, tuple[str, ...]]:
        """Return which key an unknown one means, as the end of a message and as a fix; empty if none is like it."""
        near = self._closest_key(key)
        if near is None:
            return "", ()
        shown = self.framework.display_key(near.key)
        present = self.present.get(near.key)
        if present is not None and not present.unresolved:  # a key that is in the file twice has one value
            return f"; did you mean {shown}? It is already set to {text_of(present.value)}", (
                f"without {self.framework.display_key(key)}",
            )
        fix = (self.framework.format_setting(near.key, setting.value),) if self._accepts(near, setting) else ()
        return f"; did you mean {shown}?", fix

    def _opposite_key(self, key: str, setting: SourcedValue) -> ConfigKey | None:
        """Return the switch that an unknown switch is the opposite of; None if it is none or has none."""
        if not isinstance(setting.value, bool) or key in self.framework.other_names:
            return None
        found = opposites(key, [one.key for one in self.key_map.values() if one.status == "read" and _is_switch(one)])
        return self.key_map[found[0]] if len(found) == 1 else None

    def _report_opposite(self, key: str, setting: SourcedValue, other: ConfigKey) -> None:
        """Report an unknown switch whose opposite exists: it is what runs without that one, or its other value."""
        shown, opposite = self.framework.display_key(key), self.framework.display_key(other.key)
        is_default = bool(other.default) is (not setting.value)
        what = "that is the default" if is_default else f"{opposite} is its opposite"
        fix = f"without {shown}" if is_default else self.framework.format_setting(other.key, not setting.value)
        severity: Severity = "error" if self.framework.rejects_unknown(key) else "warning"
        verb = "has no" if severity == "error" else "does not read"
        message = f"{self.framework.title} {verb} {shown}; {what}" + (f" ({opposite} changes it)" if is_default else "")
        self._report("key.unknown" if severity == "error" else "key.unused", severity, key, setting, message, (fix,))

    def _closest_key(self, key: str) -> ConfigKey | None:
        """Return the likely intended key: similar as a whole and in its last component."""
        if key in self.framework.other_names:
            return self.key_map[self.framework.other_names[key]]
        known = tuple(config_key.key for config_key in self.key_map.values() if config_key.status == "read")
        found = _similar_key(key, known)
        return self.key_map[found] if found else self._key_of_same_field(key, known)

    def _key_of_same_field(self, key: str, known: Iterable[str]) -> ConfigKey | None:
        """Return the key of the same section whose field has this name elsewhere: learning_rate for lr."""
        section, _, name = key.rpartition(".")
        alias = override_keys().get(name)
        field = (alias.field if alias is not None else "") or DEGREE_NAMES.get(name, "")
        same = [self.key_map[one] for one in known if one.rpartition(".")[0] == section]
        found = [one for one in same if field and one.field == field]
        return found[0] if len(found) == 1 else None

    def _accepts(self, config_key: ConfigKey, setting: SourcedValue) -> bool:
        """Return whether another key accepts a value; a flag without a value is no number or name."""
        if setting.value is True and not config_key.field and not _is_switch(config_key):
            return False
        try:
            return not config_key.field or self._typed(config_key, text_of(setting.value)) is not None
        except InputError:
            return False

    def _report_status(self, config_key: ConfigKey, setting: SourcedValue) -> None:
        finding, severity, text = STATUS_FINDINGS[config_key.status]
        ended = f" (until {config_key.until})" if config_key.until else ""
        message = f"{self.framework.display_key(config_key.key)} {text}{ended}" + (
            f": {config_key.note}" if config_key.note else ""
        )
        self._report(finding, severity, config_key.key, setting, message, self._replacement(config_key, setting))

    def _replacement(self, config_key: ConfigKey, setting: SourcedValue) -> tuple[str, ...]:
        """Return what to write instead of a key, with the value that the file sets."""
        text, value = config_key.replacement, setting.value
        left_out = f"without {self.framework.display_key(config_key.key)}"
        if not text or setting.unresolved:
            return (text,) if text else ()
        if config_key.switch in self.off:
            return (left_out,)
        if "." in text and text in config_keys(self.framework.key_map):  # renamed
            return (self.framework.format_setting(text, value),)
        if (found := _PLACEHOLDER.search(text)) and not (isinstance(value, bool) and found[1]):  # a switch is no number
            return (text if isinstance(value, Mapping) else _PLACEHOLDER.sub(lambda _: text_of(value), text),)
        return (config_key.replacement_if_off or left_out,) if _is_off(value) else (text,)

    def _report(
        self, rule: str, severity: Severity, key: str, setting: SourcedValue, message: str, fix: tuple[str, ...]
    ) -> None:
        self.findings.append(Finding(rule, severity, key, message, fix, file=setting.file, line=setting.line))


def _is_off(value: Any) -> bool:
    """Return whether a value turns its key off."""
    return text_of(value).lower() in OFF and not isinstance(value, Mapping)


@lru_cache(maxsize=4096)  # every fix that is tried reads the file again, with the same unknown keys
def _similar_key(key: str, known: tuple[str, ...]) -> str:
    """Return the known key that is similar as a whole and in its last component; empty if there is none."""
    from rapidfuzz.fuzz import ratio

    def last(name: str) -> str:
        return name.rpartition(".")[2]

    short = [one for one in known if _abbreviates(one, key)]
    if len(short) == 1:
        return short[0]
    found = closest(key, known, 1)
    similar = found and min(ratio(key, found[0]), ratio(last(key), last(found[0]))) >= SIMILARITY
    return found[0] if similar else ""


def _abbreviates(one: str, other: str) -> bool:
    """Return whether two keys differ only in how far their words are written out: grad_accum, grad_accumulation."""
    pairs = list(zip_longest(re.split(r"[._]", one), re.split(r"[._]", other), fillvalue=""))
    return all(a and b and (a.startswith(b) or b.startswith(a)) and min(len(a), len(b)) > 1 for a, b in pairs)


def _is_model_size(config_key: ConfigKey) -> bool:
    """Return whether a key is a model size; the framework's reader builds the model from all of them."""
    return config_key.field.startswith("architecture.")


def _is_switch(config_key: ConfigKey) -> bool:
    return config_key.type in ("flag", "bool") or isinstance(config_key.default, bool)


def _is_int(value: Any) -> bool:
    return str(value).strip().lstrip("+-").replace("_", "").isdigit() and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    try:
        float(str(value).replace("_", ""))
    except ValueError:
        return False
    return not isinstance(value, bool)


NO_KEY = "has no key for it"
NOT_IN_PRETRAINING = ("data.columns", "data.train_on", "data.chat_template", "data.truncation", "train.per_token_loss")


def relevant_fields(recipe: Recipe, model: ModelSpec) -> tuple[str, ...]:
    """Return the recipe fields that affect this training, without the model's architecture."""
    return tuple(
        key for key in recipe_fields() if not key.startswith("architecture.") and not no_effect(key, recipe, model)
    )


RECOMPUTED_BY = {"layout.recompute_modules": "selective", "layout.recompute_layers": "full"}


def no_effect(key: str, recipe: Recipe, model: ModelSpec) -> str:
    """Return why a recipe field does not affect this training; empty if it does."""
    section = key.split(".")[0]
    if key == "data.dataset" and recipe.data.blend:
        return "the datasets of data.blend are trained on"
    if key in NOT_IN_PRETRAINING and recipe.goal == "pretrain":
        return "pretraining reads one stream of tokens, without conversations"
    if section == "peft" and recipe.goal != "peft":
        return f"goal {recipe.goal} trains no adapters"
    if section == "moe" and model.moe is None:
        return f"{model.name} has no experts"
    if key.startswith("optimizer.muon") and recipe.optimizer.name != "muon":
        return f"{recipe.optimizer.name} has no such setting"
    if key.startswith("schedule.wsd_") and recipe.schedule.name != "wsd":
        return f"a {recipe.schedule.name} schedule has no stable phase"
    if key == "layout.pp_schedule" and recipe.layout.pp == 1:
        return "without pipeline parallelism (layout.pp=1) there is no schedule of micro batches"
    if key in RECOMPUTED_BY and recipe.layout.recompute != RECOMPUTED_BY[key]:
        return f"only {RECOMPUTED_BY[key]} recompute reads it (layout.recompute={recipe.layout.recompute})"
    if key == "train.freeze" and model.vision is None:
        return f"{model.name} has no vision encoder"
    if key == "train.mtp_loss" and not model.mtp_layers:
        return f"{model.name} has no multi-token-prediction layers"
    return ""


def same_value(one: object, other: object) -> bool:
    """Return whether two values are equal; floats up to rounding."""
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= 1e-9 * max(abs(one), abs(other))
    return one == other


class KeyMap(Protocol):
    """What writing settings needs of a framework: its title and its key map; its reader is not imported."""

    @property
    def title(self) -> str: ...

    @property
    def key_map(self) -> str: ...


def to_settings(
    framework: KeyMap, recipe: Recipe, fields: Iterable[str]
) -> tuple[dict[str, Any], tuple[UnmappedField, ...]]:
    """Return the framework's settings for these recipe fields, in key-map order, and the fields without a key."""
    wanted = set(fields)
    found: dict[str, Any] = {}
    unmapped: dict[str, UnmappedField] = {}
    covered: set[str] = set()
    for composite in composite_keys(framework.key_map):
        if composite.write is not None and wanted & set(composite.fields):
            covered |= set(composite.fields)
            try:
                found |= composite.write(recipe)
            except InputError as error:
                field = error.field if error.field in composite.fields else composite.fields[0]
                unmapped[field] = UnmappedField(field, field_value(recipe, field), error.reason)
    for key, config_key in config_keys(framework.key_map).items():
        if config_key.status != "read" or config_key.field not in wanted or config_key.field in covered or key in found:
            continue
        covered.add(config_key.field)
        try:
            found[key] = config_key.to_framework_value(field_value(recipe, config_key.field))
        except InputError as error:
            unmapped[config_key.field] = UnmappedField(
                config_key.field, field_value(recipe, config_key.field), error.reason
            )
    for field in (field for field in recipe_fields() if field in wanted and field not in covered):
        if field_value(recipe, field) != recipe_fields()[field].default:
            unmapped[field] = UnmappedField(field, field_value(recipe, field), f"{framework.title} {NO_KEY}")
    order = {key: index for index, key in enumerate(config_keys(framework.key_map))}
    return dict(sorted(found.items(), key=lambda item: order.get(item[0], len(order)))), tuple(unmapped.values())


def without_defaults(framework: Framework, settings: Mapping[str, Any], keep: Container[str] = ()) -> dict[str, Any]:
    """Drop settings equal to their default, except those in `keep`."""
    table = config_keys(framework.key_map)

    def is_needed(key: str, value: Any) -> bool:
        config_key = table.get(key)
        return config_key is None or config_key.default is UNSET or config_key.default != value

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
