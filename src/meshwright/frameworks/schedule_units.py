"""The unit in which a file states the lengths of its schedule: steps, samples, or a share of the steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from meshwright.frameworks.types import Settings, SourcedValue, as_int
from meshwright.recipes.types import Recipe


class UnitKeys(NamedTuple):
    """A framework's keys of the same lengths: in samples, by the key in steps; and the warmup as a share."""

    samples: Mapping[str, str]
    fraction: Mapping[str, str]
    has_base: bool = False  # unset keys have the values of a recipe: the length in steps must be set to null

    @property
    def train(self) -> tuple[str, str]:
        """The keys of the whole training, in steps and in samples."""
        return next(iter(self.samples.items()))


MEGATRON_LM = UnitKeys(
    {
        "train_iters": "train_samples",
        "lr_decay_iters": "lr_decay_samples",
        "lr_warmup_iters": "lr_warmup_samples",
        "lr_wsd_decay_iters": "lr_wsd_decay_samples",
    },
    {"lr_warmup_iters": "lr_warmup_fraction"},
)
UNIT_KEYS = {
    "megatron_lm": MEGATRON_LM,
    "ms_swift_megatron": MEGATRON_LM,  # without the keys in samples
    "megatron_bridge": UnitKeys(
        {
            "train.train_iters": "train.train_samples",
            "scheduler.lr_decay_iters": "scheduler.lr_decay_samples",
            "scheduler.lr_warmup_iters": "scheduler.lr_warmup_samples",
            "scheduler.lr_wsd_decay_iters": "scheduler.lr_wsd_decay_samples",
        },
        {"scheduler.lr_warmup_iters": "scheduler.lr_warmup_fraction"},
        has_base=True,
    ),
}
"""Frameworks that refuse a schedule whose lengths have different units."""
DIGITS = 4  # of a share


class Unit(NamedTuple):
    """A key of the file, and how much of its unit one step is."""

    key: str
    per_step: float

    def value(self, steps: Any) -> Any:
        """Return a number of steps in this unit; None stays."""
        if steps is None or isinstance(steps, bool) or not isinstance(steps, int | float):
            return steps
        amount = steps * self.per_step
        return round(amount) if self.per_step >= 1 else float(f"{amount:.{DIGITS}g}")


def counts_samples(key_map: str, settings: Settings) -> bool:
    """Return whether a file states its length in samples."""
    keys = UNIT_KEYS.get(key_map)
    if keys is None or not number(settings, keys.train[1]) or number(settings, keys.train[0]):
        return False
    return not keys.has_base or keys.train[0] in settings


def file_units(key_map: str, settings: Settings, recipe: Recipe) -> dict[str, Unit]:
    """Return the keys that a file uses in place of those in steps, by the key in steps."""
    if key_map == "torchtitan":
        return _token_units(settings, recipe)
    keys = UNIT_KEYS.get(key_map)
    if keys is None:
        return {}
    batch, end = max(1, recipe.train.global_batch_size), max(1, recipe.schedule.decay_steps or recipe.train.steps)
    in_samples = counts_samples(key_map, settings)
    found = {steps: Unit(samples, batch) for steps, samples in keys.samples.items()} if in_samples else {}
    shares = {steps: share for steps, share in keys.fraction.items() if number(settings, share)}
    return found | {steps: Unit(share, 1 / end) for steps, share in shares.items()}


def _token_units(settings: Settings, recipe: Recipe) -> dict[str, Unit]:
    """Return the units of a torchtitan command for main, which counts batches in tokens; none for the 0.2 line."""
    from meshwright.recipes.key_maps.torchtitan import SAMPLE_KEYS, TOKEN_KEYS_OF  # a large table

    if "config" not in settings or any(key in settings for key in SAMPLE_KEYS):
        return {}
    return {key: Unit(tokens, max(1, recipe.data.seq_length)) for key, tokens in TOKEN_KEYS_OF.items()}


def in_file_units(key_map: str, changed: Mapping[str, Any], settings: Settings, recipe: Recipe) -> dict[str, Any]:
    """Return changed settings in the units of the file that they are for."""
    units = file_units(key_map, settings, recipe)
    return {
        units[key].key if key in units else key: units[key].value(value) if key in units else value
        for key, value in changed.items()
    }


def in_stated_units(key_map: str, changed: Mapping[str, Any], settings: Settings, recipe: Recipe) -> dict[str, Any]:
    """Return changed settings in the units of the file; a length in samples that stays the same is not rounded."""
    units = file_units(key_map, settings, recipe) if key_map in UNIT_KEYS else {}
    changed = {key: int(value) if key in units and str(value).isdigit() else value for key, value in changed.items()}

    def stays(key: str, steps: Any) -> bool:
        unit = units.get(key)
        return unit is not None and unit.per_step >= 1 and number(settings, unit.key) // unit.per_step == steps

    kept = {key: value for key, value in changed.items() if not stays(key, value)}
    return in_file_units(key_map, kept, settings, recipe) if units else kept


FIELDS = ("train.steps", "schedule.decay_steps", "schedule.warmup_steps", "schedule.wsd_decay_steps")
"""Recipe fields of the lengths, in the order of their keys."""


def length_keys(key_map: str, settings: Settings) -> dict[str, str]:
    """Return the recipe fields whose length a file states in another unit than steps, with the key that does."""
    keys = UNIT_KEYS.get(key_map)
    if keys is None:
        return {}
    pairs = zip(FIELDS, keys.samples.values(), strict=True) if counts_samples(key_map, settings) else ()
    found = {field: key for field, key in pairs if number(settings, key)}
    shares = [key for key in keys.fraction.values() if number(settings, key)]
    return found | dict.fromkeys(FIELDS[2:3], shares[0]) if shares else found


def with_lengths(key_map: str, recipe: Recipe, settings: Settings) -> Recipe:
    """Return a file's recipe with the lengths that it states in samples or as a share of the steps."""
    keys = UNIT_KEYS[key_map]
    batch, schedule = max(1, recipe.train.global_batch_size), recipe.schedule
    stated = settings if counts_samples(key_map, settings) else {}
    whole, decay, warmup, wsd = (as_int(stated.get(key), digits=15) for key in keys.samples.values())
    steps = max(1, whole // batch) if whole else recipe.train.steps
    decay_steps = decay // batch if decay else schedule.decay_steps
    (share_key,) = keys.fraction.values()
    share = number(settings, share_key)
    end = decay_steps or steps
    warmup_steps = warmup // batch if warmup else int(share * end) if share else schedule.warmup_steps
    wsd_steps = max(1, wsd // batch) if wsd and schedule.name == "wsd" else schedule.wsd_decay_steps
    changes = {"decay_steps": decay_steps, "warmup_steps": warmup_steps, "wsd_decay_steps": wsd_steps}
    return msgspec.structs.replace(
        recipe,
        train=msgspec.structs.replace(recipe.train, steps=steps),
        schedule=msgspec.structs.replace(schedule, **changes),
    )


def number(settings: Settings, key: str) -> float:
    """Return a resolved number, or 0."""
    setting: SourcedValue | None = settings.get(key)
    if setting is None or setting.unresolved or isinstance(setting.value, bool):
        return 0.0
    try:
        value = float(str(setting.value))
    except ValueError:
        return 0.0
    return value if math.isfinite(value) and value > 0 else 0.0
