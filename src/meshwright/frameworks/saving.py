"""Report a long training that never writes a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from meshwright.costs import Estimate
from meshwright.frameworks.common import value_or_default
from meshwright.frameworks.to_recipe import ImportedRecipe
from meshwright.recipes.types import Recipe
from meshwright.rules.rule import Finding

LONG_H = 6.0  # hours whose loss hurts; benchmarks and tests are shorter
SAVE_H = 1.0  # hours between the checkpoints of the suggested fix
RULE = "saving.never"
SWITCHES: Mapping[str, tuple[str, str]] = {
    "megatron-lm": ("save", "--save checkpoints --save-interval {every}"),
    "torchtitan": ("checkpoint.enable", ""),
    "automodel": ("checkpoint.enabled", ""),
    "megatron-bridge": ("checkpoint.save", ""),
}
"""By framework: the key that turns checkpoints on, and the fix if that is not the key with true."""


def saving_findings(imported: ImportedRecipe, recipe: Recipe, estimate: Estimate | None) -> Iterator[Finding]:
    """Yield the finding for a training of hours without checkpoints, if its length is known."""
    framework, settings = imported.framework, imported.parsed.settings
    key, text = SWITCHES.get(framework.name, ("", ""))
    if not key or estimate is None or recipe.data.dataset == "mock" or recipe.benchmark:
        return
    setting = settings.get(key)
    if (setting is not None and setting.unresolved) or value_or_default(framework.key_map, settings, key):
        return
    if framework.name == "megatron-bridge" and setting is None:  # its recipes save by default
        return
    hours = recipe.train.steps * float(estimate.step_s) / 3600
    if hours < LONG_H:
        return
    every = max(1, round(SAVE_H * 3600 / float(estimate.step_s)))
    fix = text.format(every=every) if text else _turned_on(imported, key)
    missing = f"{framework.display_key(key)} is not set" if setting is None else f"{framework.display_key(key)} is off"
    yield Finding(
        RULE,
        "warning",
        key,
        f"{missing}: {recipe.train.steps:,} steps, about {hours:,.0f} hours, without a checkpoint",
        (fix,),
        file=setting.file if setting else imported.parsed.files[0] if imported.parsed.files else "",
        line=setting.line if setting else 0,
    )


def _turned_on(imported: ImportedRecipe, key: str) -> str:
    value: object = "checkpoints" if imported.framework.name == "megatron-bridge" else True
    return imported.framework.format_setting(key, value)
