"""Whether a checkpoint belongs to the training that wants to go on from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from meshwright.engine.metrics.jsonl import warn
from meshwright.errors import InputError, some
from meshwright.recipes.types import Recipe, recipe_fields

SHOWN = 12
# What transformers notes in a config without it being a property of the model.
NO_PROPERTY = ("transformers_version", "_name_or_path", "architectures", "dtype", "torch_dtype", "use_cache")


def contract_of(recipe: Recipe, config: Mapping[str, Any]) -> dict[str, Any]:
    """What determines the trained weights: contract fields of the recipe and the model's config, as plain values."""
    fields = recipe_fields()
    found: dict[str, Any] = {"model": recipe.model, "goal": recipe.goal}
    for key, field in fields.items():
        if field.kind == "contract":
            section, name = key.split(".")
            found[key] = getattr(getattr(recipe, section), name)
    found |= {f"config.{key}": value for key, value in config.items() if key not in NO_PROPERTY}
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(found, enc_hook=str))
    return plain


def changed_fields(saved: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Fields that differ, with both values; one that only one side knows counts as its default."""
    fields = recipe_fields()
    found = {}
    for key in {**saved, **now}:
        if key.startswith("config.") and (key not in saved or key not in now):
            continue  # versions of transformers differ in what they write down
        default = _plain(fields[key].default) if key in fields else None
        before, after = saved.get(key, default), now.get(key, default)
        if before != after:
            found[key] = (before, after)
    return found


def check_contract(saved: Mapping[str, Any], now: Mapping[str, Any], accepted: bool, speaks: bool = True) -> None:
    """Refuses to go on from a checkpoint of another training, unless the user accepts what changed."""
    changed = changed_fields(saved, now)
    if not changed:
        return
    lines = [f"{key} was {_short(before)} and is {_short(after)}" for key, (before, after) in changed.items()]
    listed = some(lines, SHOWN, "; ")
    if accepted:
        if speaks:
            warn(f"this run goes on with a changed training: {listed}")
        return
    raise InputError(
        f"the checkpoints in the run's folder belong to another training: {listed}",
        field="--out",
        fix=("another --out", "put the fields back", "--accept-changes goes on with the new values"),
    )


def _plain(value: Any) -> Any:
    return msgspec.json.decode(msgspec.json.encode(value))


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
