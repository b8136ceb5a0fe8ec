"""The stable phase of a warmup-stable-decay schedule, as each framework counts it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from meshwright.errors import InputError
from meshwright.recipes.key_maps.key import MappedFields, RawValues
from meshwright.recipes.key_maps.shared_composite_keys import as_count, is_null
from meshwright.recipes.types import WSD_DECAY_SHARE, Recipe

FIELDS = ("schedule.wsd_decay_steps", "schedule.wsd_decay_style")
STYLES = ("exponential", "linear", "cosine", "minus_sqrt")
"""Shapes of the decay in Megatron-LM, Megatron-Bridge and AutoModel."""


def decay_end(recipe: Recipe) -> int:
    """Return the step at which the decay ends."""
    return recipe.schedule.decay_steps or recipe.train.steps


def ending_at(recipe: Recipe, end: int) -> Recipe:
    """Return the recipe with this end of the decay; 0 is the last step."""
    return msgspec.structs.replace(recipe, schedule=msgspec.structs.replace(recipe.schedule, decay_steps=end))


def default_steps(recipe: Recipe) -> int:
    """Return the steps of the decay where the recipe leaves them open; a warmup that never ends counts as none."""
    end, warmup = decay_end(recipe), recipe.schedule.warmup_steps
    return max(1, round(WSD_DECAY_SHARE * (end - warmup if warmup < end else end)))


def decay_length(recipe: Recipe) -> int:
    """Return the steps over which the learning rate of a wsd schedule decays."""
    return recipe.schedule.wsd_decay_steps or default_steps(recipe)


def fields_of(steps: int, style: str, recipe: Recipe) -> dict[str, str]:
    """Return the recipe fields of a decay over these steps; the usual share is left open, so that it scales."""
    kept = 0 if steps == default_steps(recipe) else steps
    return {"schedule.wsd_decay_steps": str(kept), "schedule.wsd_decay_style": style}


def style_in(recipe: Recipe, styles: Mapping[str, str]) -> str:
    """Return a framework's name of the recipe's decay style; linear if it has none, which the export then lists."""
    ours = recipe.schedule.wsd_decay_style
    return next((theirs for theirs, mapped in styles.items() if mapped == ours), "linear")


def readers(
    steps_key: str, style_key: str, default_style: str
) -> tuple[Callable[[RawValues, Recipe], MappedFields], Callable[[Recipe], Mapping[str, Any]]]:
    """Return the reader and the writer of two keys: the steps of the decay, and its style."""

    def read(raw: RawValues, recipe: Recipe) -> MappedFields:
        if recipe.schedule.name != "wsd":
            return MappedFields({})
        style = raw.get(style_key, "null").strip().lower()
        style = default_style if is_null(style) else style
        if style not in STYLES:
            raise InputError(f"allowed: {', '.join(STYLES)}", field=style_key, value=style)
        text = raw.get(steps_key, "null")
        steps = 0 if is_null(text) else as_count(steps_key, text)
        found = fields_of(steps, style, recipe)
        return MappedFields(found if steps else {FIELDS[1]: style})

    def write(recipe: Recipe) -> Mapping[str, Any]:
        if recipe.schedule.name != "wsd":
            return {}
        return {steps_key: decay_length(recipe), style_key: style_in(recipe, {name: name for name in STYLES})}

    return read, write
