"""Config keys of other frameworks, found by their whole name or its last parts."""

from __future__ import annotations

from functools import cache

import msgspec

from meshwright.recipes.key_maps import FRAMEWORKS, REMOVED_KEYS, ConfigKey, composite_keys, config_keys
from meshwright.recipes.types import recipe_fields

TITLES = {
    "megatron_bridge": "Megatron-Bridge",
    "megatron_lm": "Megatron-LM",
    "automodel": "NeMo AutoModel",
    "torchtitan": "torchtitan",
    "kempnerforge": "KempnerForge",
    "deepspeed": "DeepSpeed",
    "accelerate": "accelerate",
}


class TheirKey(msgspec.Struct, frozen=True):
    """A framework's key and the recipe fields that it sets; none if there is no such field."""

    framework: str
    key: ConfigKey
    fields: tuple[str, ...]

    @property
    def meaning(self) -> str:
        """What the key does, in one sentence."""
        sets = f"sets {' and '.join(self.fields)}" if self.fields else "has no recipe field"
        if self.key.status == "removed":
            sets = "was removed" + (f"; write {self.key.replacement}" if self.key.replacement else "")
        note = f"; {self.key.note}" if self.key.note else ""
        return f"key of {TITLES.get(self.framework, self.framework)}: {self.key.key} {sets}{note}"


@cache
def _by_name() -> dict[str, list[TheirKey]]:
    found: dict[str, list[TheirKey]] = {}
    for framework in FRAMEWORKS:
        fields: dict[str, tuple[str, ...]] = {}
        for composite in composite_keys(framework):
            for key in composite.keys:
                fields[key] = (*fields.get(key, ()), *composite.fields)
        for name, config_key in config_keys(framework).items():
            sets = (config_key.field,) if config_key.field else tuple(dict.fromkeys(fields.get(name, ())))
            sets = tuple(field for field in sets if field in recipe_fields())
            parts = _spelled(name).split(".")
            for first in range(len(parts)):
                found.setdefault(".".join(parts[first:]), []).append(TheirKey(framework, config_key, sets))
    return found


def _spelled(text: str) -> str:
    return text.partition("=")[0].strip().lstrip("-+~").replace("-", "_").lower()


def find(text: str) -> list[TheirKey]:
    """Return the keys that a text names, those that set a recipe field first; empty if there are none."""
    name = _spelled(text)
    found = _by_name().get(name, []) if name and " " not in name else []
    whole = [one for one in found if _spelled(one.key.key) == name]
    return sorted(whole or found, key=lambda one: (not one.fields, one.key.status == "removed", len(one.key.key)))


def removed(text: str) -> str:
    """Return why a key is not accepted and what replaces it; empty if it is not one of those."""
    reason, *choices = REMOVED_KEYS.get(_spelled(text), ("",))
    typed = text.partition("=")[2].strip() or "VALUE"
    instead = f": {choices[0].replace('{value}', typed)}" if choices else ""
    return f"{_spelled(text)} {reason}{instead}" if reason else ""
