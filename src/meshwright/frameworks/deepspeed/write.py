"""Writing DeepSpeed: its JSON, and how a program around transformers' Trainer takes it."""

from __future__ import annotations

import json
from typing import Any

from meshwright.clusters import Cluster
from meshwright.errors import InputError
from meshwright.frameworks.framework import Framework
from meshwright.frameworks.mapping import nest, relevant_fields, to_settings, without_defaults
from meshwright.frameworks.types import ExportedConfig, Program
from meshwright.models import ModelSpec
from meshwright.recipes.key_maps.deepspeed import zero_stage
from meshwright.recipes.types import Recipe

FILE = "ds_config.json"
KEEP = ("gradient_clipping", "zero_optimization.stage")
ORDER = (
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping", "bf16",
    "fp16", "data_types", "communication_data_type", "zero_optimization", "tensor_parallel", "expert_parallel",
    "optimizer", "scheduler",
)  # fmt: skip


def write(framework: Framework, recipe: Recipe, model: ModelSpec, on: Cluster) -> ExportedConfig:
    zero_stage(recipe)  # a strategy without a stage is refused, not written as another
    settings, unsaid = to_settings(framework, recipe, relevant_fields(recipe, model))
    steps = _micro_batches(recipe, on)
    if recipe.layout.tp > 1:  # train_batch_size would count its ranks as well
        del settings["train_batch_size"]
        settings["gradient_accumulation_steps"] = steps
    if recipe.optimizer.name in ("sgd", "lion"):  # neither takes one
        settings.pop("optimizer.params.eps", None)
    if not settings.get("optimizer.type"):
        settings = {key: value for key, value in settings.items() if not key.startswith("optimizer.")}
    tables = nest(without_defaults(framework, settings, KEEP))
    ordered: dict[str, Any] = {key: tables[key] for key in ORDER if key in tables} | tables
    return ExportedConfig(
        framework=framework.name,
        files={FILE: json.dumps(ordered, indent=2) + "\n"},
        program=Program(argv=("train.py", "--deepspeed", FILE)),
        unmapped=unsaid,
        notes=(
            f"{FILE} says {recipe.name or 'the recipe'} for DeepSpeed {framework.version}, written by meshwright export",
            "train.py stands for your own program: one around transformers' Trainer takes the config with --deepspeed",
            "the model, the data and the sequence length are arguments of that program",
        ),
    )


def _micro_batches(recipe: Recipe, on: Cluster) -> int:
    """Micro batches of a step on one rank."""
    layout, batch = recipe.layout, recipe.train.global_batch_size
    each = layout.micro_batch_size * max(1, on.world // layout.tp)  # the config knows of no pipeline
    if batch % each:
        raise InputError(
            f"is not a multiple of {each}: micro batch × data ranks there", field="train.global_batch_size", value=batch
        )
    return batch // each
