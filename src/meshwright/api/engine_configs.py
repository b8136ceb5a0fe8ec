"""The framework whose config drives an engine."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from meshwright import clusters, frameworks
from meshwright.errors import InputError
from meshwright.frameworks import ExportedConfig
from meshwright.models import ModelSpec
from meshwright.recipes.types import ENGINES, Recipe

CONFIGS: Mapping[str, str] = {
    "megatron": "megatron-lm",
    "torchtitan": "torchtitan",
    "automodel": "automodel",
    "kempnerforge": "kempnerforge",
    "fsdp1": "accelerate",
    "deepspeed": "deepspeed",
}
"""Framework whose config drives an engine; ours has recipes."""
SECOND_CONFIGS: Mapping[str, str] = {"megatron": "megatron-bridge"}
"""Another framework of an engine, for what the first one cannot express: adapters, or models by their config."""


def engine_of(name: str) -> str:
    """Return the engine that runs the files of a framework; our own for meshwright."""
    return ENGINES[0] if name == ENGINES[0] else frameworks.framework(name).engine


def exported_for(engine: str, recipe: Recipe, model: ModelSpec, on: clusters.Cluster) -> ExportedConfig:
    """Return the config that drives an engine; raise InputError of the first framework if none can express it."""
    try:
        return frameworks.export(frameworks.framework(CONFIGS[engine]), recipe, model, on)
    except InputError:
        if engine in SECOND_CONFIGS:
            with suppress(InputError):
                return frameworks.export(frameworks.framework(SECOND_CONFIGS[engine]), recipe, model, on)
        raise
