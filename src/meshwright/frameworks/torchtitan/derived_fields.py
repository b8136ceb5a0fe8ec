"""Recipe fields derived from several torchtitan settings, from the model or from the GPUs."""

from __future__ import annotations

import re
from math import ceil
from typing import Any

import msgspec

from meshwright.clusters import Cluster
from meshwright.frameworks.common import KEEP_ALL, is_int
from meshwright.frameworks.framework import ParsedConfig
from meshwright.frameworks.types import Settings, SourcedValue
from meshwright.models import ModelSpec
from meshwright.recipes.key_maps import config_keys
from meshwright.recipes.key_maps.local_batch import with_passes
from meshwright.recipes.key_maps.torchtitan import LOCAL_BATCH, SCHEDULE_NAMES, STEP_TOKENS
from meshwright.recipes.types import Recipe

DERIVED_FIELDS = (
    "layout.sp", "layout.vp", "layout.stage_layers", "layout.embedding_as_layer", "layout.head_as_layer",
    "layout.strategy", "layout.pp_micro_batches", "data.tokenizer",
)  # fmt: skip
"""Fields without a single key; exports are read back to find which of them are lost."""

ONE_STAGE = ("1f1b", "gpipe", "pipelineschedulesingle")
STAGES_PER_RANK = {name.lower(): 1 if name.lower() in ONE_STAGE else 2 for name in SCHEDULE_NAMES}
"""Default stages per rank of each schedule."""


def derived_values(settings: dict[str, SourcedValue], model: ModelSpec | None, tp_is_sp: bool) -> dict[str, Any]:
    """Return derived field values. Settings that only encode one of them are removed from `settings`."""
    fields: dict[str, Any] = {}
    if tp_is_sp:
        fields["layout.sp"] = int_value(settings, "parallelism.tensor_parallel_degree") > 1
    if model is not None and model.moe is not None:
        fields |= {"moe.balancing": "bias", "moe.aux_loss": 0.0}  # it has no balancing loss
    return (
        fields
        | _betas(settings)
        | _checkpoint_fields(settings)
        | _stage_fields(settings, model)
        | _recompute_fields(settings, model)
    )


def value(settings: Settings, key: str) -> Any:
    """Return the value of a key, or torchtitan's default."""
    setting = settings.get(key)
    if setting is not None:
        return None if setting.unresolved else setting.value
    default = config_keys("torchtitan")[key].default
    return None if default is msgspec.UNSET else default


def int_value(settings: Settings, key: str, default: int = 1) -> int:
    """Return the integer value of a key, or a default if it has none."""
    number = value(settings, key)
    return number if is_int(number) else default


def _betas(settings: Settings) -> dict[str, Any]:
    found = value(settings, "optimizer.param_groups.0.optimizer_kwargs.betas")
    if not isinstance(found, list) or len(found) != 2 or not all(isinstance(b, float) and 0 <= b < 1 for b in found):
        return {}
    return {"optimizer.beta1": found[0], "optimizer.beta2": found[1]}


def _checkpoint_fields(settings: dict[str, SourcedValue]) -> dict[str, Any]:
    """Checkpoints are off by default; an interval longer than the run saves only at the end."""
    fields: dict[str, Any] = {}
    never = int_value(settings, "checkpoint.interval", 500) > int_value(settings, "training.steps", 10000)
    if value(settings, "checkpoint.enable") is not True or never:
        fields["checkpoint.save_every"] = 0
    if value(settings, "checkpoint.keep_latest_k") == 0:
        settings.pop("checkpoint.keep_latest_k")
        fields["checkpoint.keep"] = KEEP_ALL
    return fields


def _stage_fields(settings: Settings, model: ModelSpec | None) -> dict[str, Any]:
    """Return the stage split: an explicit list, layers per stage, or the schedule's default of one or two per rank."""
    pp = int_value(settings, "parallelism.pipeline_parallel_degree")
    if pp <= 1:
        return {}
    listed = value(settings, "parallelism.module_fqns_per_model_part")
    if isinstance(listed, list) and listed and all(isinstance(part, list) for part in listed):
        layers = tuple(sum(str(name).startswith("layers.") for name in part) for part in listed)
        return {"layout.stage_layers": layers, "layout.vp": max(1, len(listed) // pp)}
    first, last = (
        int_value(settings, f"parallelism.pipeline_parallel_{end}_stage_less_layers") for end in ("first", "last")
    )
    fields: dict[str, Any] = {"layout.embedding_as_layer": first > 0, "layout.head_as_layer": last > 0}
    stages = total_stages(settings, model)
    schedule = str(value(settings, "parallelism.pipeline_parallel_schedule")).lower()
    fields["layout.vp"] = max(1, stages // pp) if stages else STAGES_PER_RANK.get(schedule, 2)
    if schedule not in STAGES_PER_RANK:  # reported elsewhere; avoid follow-up findings
        fields["layout.pp_schedule"] = "interleaved_1f1b"
    return fields


def total_stages(settings: Settings, model: ModelSpec | None) -> int:
    """Return the total stages that pipeline_parallel_layers_per_stage gives, or 0 if it is unset."""
    per_stage = int_value(settings, "parallelism.pipeline_parallel_layers_per_stage", 0)
    if per_stage <= 0 or model is None:
        return 0
    ends = sum(
        int_value(settings, f"parallelism.pipeline_parallel_{end}_stage_less_layers") for end in ("first", "last")
    )
    return ceil((model.num_layers + ends) / per_stage)


def _recompute_fields(settings: Settings, model: ModelSpec | None) -> dict[str, Any]:
    """Selective recompute of every nth layer is modeled as full recompute of that fraction of layers."""
    every = str(value(settings, "activation_checkpoint.selective_ac_option") or "")
    if value(settings, "activation_checkpoint.mode") != "selective" or not re.fullmatch("[0-9]{1,6}", every):
        return {}
    if model is None:
        return {}
    stages = max(1, int_value(settings, "parallelism.pipeline_parallel_degree"))
    return {"layout.recompute": "full", "layout.recompute_layers": ceil(model.num_layers / max(1, int(every)) / stages)}


def approximations(settings: Settings) -> list[str]:
    notes = []
    if value(settings, "optimizer.early_step_in_backward") is True:
        notes.append("gradients are freed during the backward pass; the estimate counts them as kept")
    return notes


def complete(recipe: Recipe, parsed: ParsedConfig, on: Cluster) -> Recipe:
    """Derive the global batch if it is unset, and DDP if all ranks are replicas."""
    layout, settings = recipe.layout, parsed.settings
    ranks = max(1, on.world // max(1, layout.tp * layout.pp * layout.cp))
    shard = layout.dp_shard if layout.dp_shard > 0 else ranks // layout.dp_replicate
    no_other_axes = layout.tp * layout.pp * layout.cp * layout.ep == 1
    if layout.dp_replicate == ranks > 1 and shard == 1 and no_other_axes and "config" not in settings:
        ddp_layout = msgspec.structs.replace(layout, strategy="ddp", dp_shard=-1, dp_replicate=1)
        recipe = msgspec.structs.replace(recipe, layout=ddp_layout)
    if "training.global_batch_size" in settings:
        return with_passes(recipe, _rank_batch(recipe, settings), on.world)
    batch = _rank_batch(recipe, settings) * ranks
    if STEP_TOKENS in settings:  # rounded to whole batches of all ranks; a rule reports the remainder
        batch *= max(1, round(recipe.train.global_batch_size / batch))
    recipe = msgspec.structs.replace(recipe, train=msgspec.structs.replace(recipe.train, global_batch_size=batch))
    return with_passes(recipe, _rank_batch(recipe, settings), on.world)


def _rank_batch(recipe: Recipe, settings: Settings) -> int:
    """Return the local batch of a data-parallel rank, which is its step if the global batch is unset."""
    pipelined = recipe.layout.pp > 1
    if "config" in settings and LOCAL_BATCH not in settings:
        micro_batches = int_value(settings, "parallelism.num_pp_microbatches") if pipelined else 1
        return recipe.layout.micro_batch_size * max(1, micro_batches)
    return max(1, int_value(settings, LOCAL_BATCH, 8)) if pipelined else recipe.layout.micro_batch_size
