"""Write a recipe as a DeepSpeed JSON config for a program around transformers' Trainer."""

from __future__ import annotations

import json
from typing import Any

from meshwright.clusters import Cluster
from meshwright.errors import InputError
from meshwright.frameworks.framework import Framework
from meshwright.frameworks.mapping import nest, relevant_fields, to_settings, without_defaults
from meshwright.frameworks.trainer_args import PROGRAM, file_name, program_file, program_notes
from meshwright.frameworks.trainer_program import (
    BALANCING,
    NO_DATA,
    carried_by_program,
    lost_by_program,
    program_data_notes,
    program_text,
    with_data,
    without_balancing,
    without_model,
)
from meshwright.frameworks.types import ExportedConfig, Program
from meshwright.models import ModelSpec
from meshwright.recipes.key_maps.deepspeed import zero_stage
from meshwright.recipes.types import Recipe

FILE = "ds_config.json"
KEEP = ("gradient_clipping", "zero_optimization.stage")
SCHEDULE = (
    "schedule.name", "schedule.warmup_steps", "schedule.min_lr", "schedule.wsd_decay_steps", "schedule.wsd_decay_style",
    "train.epochs", "train.steps",
)  # fmt: skip
"""Fields of the Trainer's scheduler: it counts epochs, and has decays that DeepSpeed's do not have."""
ORDER = (
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping", "bf16",
    "fp16", "data_types", "communication_data_type", "zero_optimization", "tensor_parallel", "expert_parallel",
    "optimizer", "scheduler",
)  # fmt: skip


def write(framework: Framework, recipe: Recipe, model: ModelSpec, on: Cluster) -> ExportedConfig:
    zero_stage(recipe)  # raises if the strategy has no ZeRO stage
    settings, unmapped = to_settings(framework, recipe, relevant_fields(recipe, model))
    accumulation_steps = _micro_batches(recipe, on)
    of_trainer = SCHEDULE if recipe.train.epochs or "scheduler.type" not in settings else ()
    if of_trainer:
        settings = {key: value for key, value in settings.items() if not key.startswith("scheduler.")}
        unmapped = tuple(one for one in unmapped if one.field not in of_trainer)
    if recipe.layout.tp > 1:  # train_batch_size would count tensor-parallel ranks too
        del settings["train_batch_size"]
    settings["gradient_accumulation_steps"] = accumulation_steps  # absent, Accelerate sets 1, also for the Trainer
    if recipe.optimizer.name in ("sgd", "lion"):  # neither has an eps
        settings.pop("optimizer.params.eps", None)
    if not settings.get("optimizer.type"):
        settings = {key: value for key, value in settings.items() if not key.startswith("optimizer.")}
    tables = nest(without_defaults(framework, settings, KEEP))
    ordered: dict[str, Any] = {key: tables[key] for key in ORDER if key in tables} | tables
    layout, arguments = recipe.layout, file_name(recipe)
    program = program_text(recipe, model, arguments.removesuffix(".py"))
    text, carried, lost = program_file(
        with_data(recipe) if program else recipe,
        layout.micro_batch_size,
        accumulation_steps,
        layout.recompute == "full",
        FILE,
        layout.strategy == "fsdp2",
    )
    lost = (*lost, *without_balancing(recipe, model), *(lost_by_program(recipe) if program else ()))
    carried = (*carried, *(carried_by_program(recipe) if program else ()))
    missing = {*(one.field for one in unmapped), *of_trainer}  # in the JSON file
    without = {one.field: one for one in lost if one.field in missing}
    only = tuple(one for one in lost if one.field in (*of_trainer, *NO_DATA, *({BALANCING} - missing)))
    return ExportedConfig(
        framework=framework.name,
        files={FILE: json.dumps(ordered, indent=2) + "\n", arguments: text, **({PROGRAM: program} if program else {})},
        program=Program(argv=(PROGRAM,) if program else (PROGRAM, "--deepspeed", FILE), modules=(arguments,)),
        unmapped=(
            *(() if program else without_model(recipe, model)),
            *(without.get(one.field, one) for one in unmapped if one.field not in carried),
            *only,
        ),
        in_other_files=tuple(field for field in carried if field in missing),
        notes=(
            f"{FILE}: {recipe.name or 'the recipe'} for DeepSpeed {framework.version}, written by meshwright export",
            *(
                ()
                if program
                else (
                    f"replace train.py with your program, which passes what {arguments} has to its Trainer: its own "
                    "defaults differ, and it stops where they contradict the JSON file; the model and the data are "
                    "arguments of yours",
                )
            ),
            *program_notes(recipe, bool(program)),
            *(program_data_notes(recipe) if program else ()),
        ),
    )


def _micro_batches(recipe: Recipe, on: Cluster) -> int:
    """Return the micro batches per step on one rank."""
    layout, batch = recipe.layout, recipe.train.global_batch_size
    samples_per_micro_step = layout.micro_batch_size * max(1, on.world // layout.tp)  # the config has no pipeline size
    if batch % samples_per_micro_step:
        ranks = f"its {on.world} GPUs / tp={layout.tp} are all data-parallel"
        cause = f"; a DeepSpeed config has no pipeline size, so layout.pp={layout.pp} is lost: {ranks}"
        raise InputError(
            f"is not a multiple of {samples_per_micro_step}: micro batch × data-parallel ranks"
            + cause * (layout.pp > 1),
            field="train.global_batch_size",
            value=batch,
        )
    return batch // samples_per_micro_step
