"""Fields of ours that follow from several of torchtitan's settings, from the model or from the GPUs."""

from __future__ import annotations

import re
from math import ceil
from typing import Any

import msgspec

from meshwright.clusters import Cluster
from meshwright.frameworks.common import is_int
from meshwright.frameworks.framework import ParsedConfig
from meshwright.frameworks.types import Settings, SourcedValue
from meshwright.models import ModelSpec
from meshwright.recipes.key_maps import config_keys
from meshwright.recipes.key_maps.torchtitan import LOCAL_BATCH, SCHEDULE_NAMES, STEP_TOKENS
from meshwright.recipes.types import Recipe

FOLLOWS = (
    "layout.sp", "layout.vp", "layout.stage_layers", "layout.embedding_as_layer", "layout.head_as_layer",
    "layout.strategy", "data.tokenizer",
)  # fmt: skip
"""Fields that no single key says, or that follow from others; reading back tells which of them are lost."""

ONE_STAGE = ("1f1b", "gpipe", "pipelineschedulesingle")
STAGES = {name.lower(): 1 if name.lower() in ONE_STAGE else 2 for name in SCHEDULE_NAMES}
"""Stage chunks of a rank that a schedule has where nobody says how many."""
EVERYTHING = 1_000_000  # checkpoints: as many as there will be


def own_values(settings: dict[str, SourcedValue], model: ModelSpec | None, tp_is_sp: bool) -> dict[str, Any]:
    """The values that no single setting says; settings that are only a sign for one of them are taken out."""
    own: dict[str, Any] = {}
    if tp_is_sp:
        own["layout.sp"] = number(settings, "parallelism.tensor_parallel_degree") > 1
    if model is not None and model.moe is not None:
        own["moe.balancing"] = "bias"
    return own | _betas(settings) | _saved(settings) | _stages(settings, model) | _layers_recomputed(settings, model)


def value(settings: Settings, key: str) -> Any:
    """The value of a key as said, or their default."""
    said = settings.get(key)
    if said is not None:
        return None if said.unresolved else said.value
    default = config_keys("torchtitan")[key].default
    return None if default is msgspec.UNSET else default


def number(settings: Settings, key: str, otherwise: int = 1) -> int:
    """A whole number that a key holds, or what is to be taken where it holds none."""
    found = value(settings, key)
    return found if is_int(found) else otherwise


def _betas(settings: Settings) -> dict[str, Any]:
    found = value(settings, "optimizer.param_groups.0.optimizer_kwargs.betas")
    if not isinstance(found, list) or len(found) != 2 or not all(isinstance(b, float) and 0 <= b < 1 for b in found):
        return {}
    return {"optimizer.beta1": found[0], "optimizer.beta2": found[1]}


def _saved(settings: dict[str, SourcedValue]) -> dict[str, Any]:
    """Checkpoints are off unless asked for; an interval longer than the run saves at its end only."""
    own: dict[str, Any] = {}
    never = number(settings, "checkpoint.interval", 500) > number(settings, "training.steps", 10000)
    if value(settings, "checkpoint.enable") is not True or never:
        own["checkpoint.save_every"] = 0
    if value(settings, "checkpoint.keep_latest_k") == 0:
        settings.pop("checkpoint.keep_latest_k")
        own["checkpoint.keep"] = EVERYTHING
    return own


def _stages(settings: Settings, model: ModelSpec | None) -> dict[str, Any]:
    """How the layers are cut into stages: listed, by layers per stage, or one or two chunks by the schedule."""
    pp = number(settings, "parallelism.pipeline_parallel_degree")
    if pp <= 1:
        return {}
    listed = value(settings, "parallelism.module_fqns_per_model_part")
    if isinstance(listed, list) and listed and all(isinstance(part, list) for part in listed):
        layers = tuple(sum(str(name).startswith("layers.") for name in part) for part in listed)
        return {"layout.stage_layers": layers, "layout.vp": max(1, len(listed) // pp)}
    first, last = (
        number(settings, f"parallelism.pipeline_parallel_{end}_stage_less_layers") for end in ("first", "last")
    )
    own: dict[str, Any] = {"layout.embedding_as_layer": first > 0, "layout.head_as_layer": last > 0}
    chunks = virtual_stages(settings, model)
    schedule = str(value(settings, "parallelism.pipeline_parallel_schedule")).lower()
    own["layout.vp"] = max(1, chunks // pp) if chunks else STAGES.get(schedule, 2)
    if schedule not in STAGES:  # which is told; nothing else is to follow from it
        own["layout.pp_schedule"] = "interleaved_1f1b"
    return own


def virtual_stages(settings: Settings, model: ModelSpec | None) -> int:
    """Stage chunks that pipeline_parallel_layers_per_stage makes; 0 when it is not said."""
    per_stage = number(settings, "parallelism.pipeline_parallel_layers_per_stage", 0)
    if per_stage <= 0 or model is None:
        return 0
    ends = sum(number(settings, f"parallelism.pipeline_parallel_{end}_stage_less_layers") for end in ("first", "last"))
    return ceil((model.num_layers + ends) / per_stage)


def _layers_recomputed(settings: Settings, model: ModelSpec | None) -> dict[str, Any]:
    """Selective recompute of every nth layer is full recompute of a share of them."""
    every = str(value(settings, "activation_checkpoint.selective_ac_option") or "")
    if value(settings, "activation_checkpoint.mode") != "selective" or not re.fullmatch("[0-9]{1,6}", every):
        return {}
    if model is None:
        return {}
    stages = max(1, number(settings, "parallelism.pipeline_parallel_degree"))
    return {"layout.recompute": "full", "layout.recompute_layers": ceil(model.num_layers / max(1, int(every)) / stages)}


def approximations(settings: Settings) -> list[str]:
    shape, ratio = value(settings, "lr_scheduler.decay_type"), value(settings, "lr_scheduler.decay_ratio")
    notes = ["the sqrt decay is taken for a linear one"] if shape == "sqrt" and ratio is None else []
    if value(settings, "optimizer.early_step_in_backward") is True:
        notes.append("gradients are used up in the backward pass; the estimate counts them as kept")
    return notes


def complete(recipe: Recipe, parsed: ParsedConfig, on: Cluster) -> Recipe:
    """The global batch where it is not said, and whether full copies are all there is."""
    layout, settings = recipe.layout, parsed.settings
    ranks = max(1, on.world // max(1, layout.tp * layout.pp * layout.cp))
    shard = layout.dp_shard if layout.dp_shard > 0 else ranks // layout.dp_replicate
    alone = layout.tp * layout.pp * layout.cp * layout.ep == 1
    if layout.dp_replicate == ranks > 1 and shard == 1 and alone and "config" not in settings:
        copies = msgspec.structs.replace(layout, strategy="ddp", dp_shard=-1, dp_replicate=1)
        recipe = msgspec.structs.replace(recipe, layout=copies)
    if "training.global_batch_size" in settings:
        return recipe
    batch = _rank_batch(recipe, settings) * ranks
    if STEP_TOKENS in settings:  # in whole batches of all ranks; a rule of theirs tells what is left over
        batch *= max(1, round(recipe.train.global_batch_size / batch))
    return msgspec.structs.replace(recipe, train=msgspec.structs.replace(recipe.train, global_batch_size=batch))


def _rank_batch(recipe: Recipe, settings: Settings) -> int:
    """Samples of one data-parallel rank in a step where the global batch is not said."""
    pipelined = recipe.layout.pp > 1
    if "config" in settings and LOCAL_BATCH not in settings:
        micro_batches = number(settings, "parallelism.num_pp_microbatches") if pipelined else 1
        return recipe.layout.micro_batch_size * max(1, micro_batches)
    return max(1, number(settings, LOCAL_BATCH, 8)) if pipelined else recipe.layout.micro_batch_size
