"""Configs of trainers that are not read: their name, and their settings as overrides of ours."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.choices import FRAMEWORKS
from meshwright.errors import InputError, MeshwrightError
from meshwright.frameworks.framework import Content
from meshwright.frameworks.mapping import text_of
from meshwright.models import catalogue_name
from meshwright.recipes import overrides
from meshwright.recipes.key_maps import override_keys
from meshwright.recipes.types import Goal, Recipe

TRAINERS: Mapping[str, tuple[str, ...]] = {
    "Axolotl": ("base_model", "sequence_len"),
    "LLaMA-Factory": ("model_name_or_path", "finetuning_type"),
    "ms-swift": ("model", "train_type"),
    "torchtune": ("model._component_", "tokenizer._component_"),
    "NeMo": ("trainer.devices", "exp_manager"),
    "verl": ("actor_rollout_ref", "algorithm"),
}
"""Top-level or dotted keys that every config of a trainer has."""
MODELS = ("base_model", "model_name_or_path", "model")
ADAPTERS = ("lora", "qlora", "dora")
SKIPPED = ("checkpoint.pretrained", "peft.method", "data.tokenizer")


def other_trainer(content: Content) -> InputError | None:
    """Return the error for a known trainer's config, with the command that plans the same training; else None."""
    keys = {*content.settings, *content.top_level_keys()}
    title = next((name for name, needed in TRAINERS.items() if all(one in keys for one in needed)), "")
    if not title:
        return None
    reason = f"is a config of {title}, which is not read; read are configs of {', '.join(FRAMEWORKS)}"
    return InputError(reason, field="file", value=content.path, fix=_command(content))


def _command(content: Content) -> tuple[str, ...]:
    """Return the command with the model, the goal and the settings that our recipes have."""
    found = {key: setting.value for key, setting in content.settings.items() if not setting.unresolved}
    named = next((str(found[key]) for key in MODELS if key in found), "")
    try:
        model = catalogue_name(named) or named
    except MeshwrightError:
        model = named
    if not model:
        return ("meshwright recommend MODEL --goal sft --gpus 8xH100 KEY=VALUE",)
    adapter = str(found.get("adapter", found.get("finetuning_type", found.get("train_type", "")))).lower()
    goal: Goal = "peft" if adapter in ADAPTERS else "sft"
    words = [f"meshwright recommend {model} --goal {goal} --gpus 8xH100"]
    words += ["peft.method=" + adapter] if goal == "peft" else []
    return (" ".join([*words, *_overrides(found, goal)]),)


def _overrides(found: Mapping[str, object], goal: Goal) -> list[str]:
    """Return the settings that a recipe of this goal accepts, by the keys of the file."""
    blank = Recipe(name="", model="", goal=goal, cluster="8xH100")
    kept: list[str] = []
    for key, value in found.items():
        row = override_keys().get(key)
        if row is None or not row.field or row.field in SKIPPED or value is None:
            continue
        if goal != "peft" and row.field.startswith("peft."):
            continue
        text = f"{key}={text_of(value)}"
        try:
            overrides.apply(blank, [*kept, text])
        except MeshwrightError:
            continue
        kept.append(text)
    return kept
