"""Express a recipe as overrides of a Megatron-Bridge recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from meshwright.frameworks.mapping import relevant_fields, to_settings
from meshwright.frameworks.megatron_bridge import bridge_recipes, precision
from meshwright.frameworks.megatron_bridge.model_sizes import size_settings
from meshwright.frameworks.types import UnmappedField
from meshwright.models import ModelSpec, shipped_id
from meshwright.recipes.key_maps import config_keys
from meshwright.recipes.key_maps.megatron_bridge_composite_keys import split_keys
from meshwright.recipes.model_changes import numerics_for, published_numerics
from meshwright.recipes.types import Precision, Recipe, field_value

FORMATS = ("compute", "matmul", "reduce", "fp8_gather", "first_last_bf16")
CUSTOM_FIELDS = (*(f"precision.{name}" for name in FORMATS), "precision.grads", "peft.method", "checkpoint.pretrained")
OVERLAP = {
    "comm_overlap.tp_comm_overlap": "model.tp_comm_overlap",
    "comm_overlap.overlap_moe_expert_parallel_comm": "model.overlap_moe_expert_parallel_comm",
}
"""Keys of the optional comm_overlap section, with the equivalent keys that always exist."""
SHOWN = (
    "model.tensor_model_parallel_size", "model.pipeline_model_parallel_size", "train.global_batch_size",
    "train.micro_batch_size", "dataset.seq_length", "train.train_iters", "optimizer.lr",
)  # fmt: skip
BIAS, BALANCING_LOSS = "model.moe_router_enable_expert_bias", "model.moe_router_load_balancing_type"
ROUTER_SCORES = "model.moe_router_score_function"
BIAS_SCORES = ("sigmoid", "sqrtsoftplus")
"""Scores of a router that Megatron accepts beside a bias."""
SHOWN_IF_PARALLEL = ("model.context_parallel_size", "model.expert_model_parallel_size")
"""Keys written even if they equal the base recipe."""


class _Keys(NamedTuple):
    title: str
    key_map: str


KEYS = _Keys("Megatron-Bridge", "megatron_bridge")


class Difference(msgspec.Struct, frozen=True):
    """Overrides of a base recipe, and the fields without a key."""

    settings: Mapping[str, Any]
    unmapped: tuple[UnmappedField, ...]


def find_counterpart(recipe: Recipe, model: ModelSpec) -> bridge_recipes.BridgeRecipe | None:
    """Return the Megatron-Bridge recipe to override: by name, or by model and goal."""
    for name in (recipe.name, recipe.name.lower()):
        row = bridge_recipes.find(name)
        if row is not None and _same(row, recipe, model):
            return row
    if recipe.benchmark or not model.hf_id:
        return None
    found = [row for row in bridge_recipes.library() if row.model == shipped_id(model) and _same(row, recipe, model)]
    return min(found, key=lambda row: _distance(row, recipe), default=None)


def _distance(row: bridge_recipes.BridgeRecipe, recipe: Recipe) -> tuple[bool, bool, bool, bool]:
    """Return how far a library recipe is from what is asked: a test, another precision, a variant, another GPU."""
    return (
        "_functional_" in row.name,
        row.recipe().precision.matmul != recipe.precision.matmul,
        not row.aliases,
        row.gpu.lower() not in recipe.cluster.lower(),
    )


def _same(row: bridge_recipes.BridgeRecipe, recipe: Recipe, model: ModelSpec) -> bool:
    if row.model:
        same_model = row.model == shipped_id(model) or bridge_recipes.model_of(row) == model.name
    else:  # without a hub id, as models of one's own: the recipe's name has the model
        same_model = f"{model.name}_{row.goal}_config" in row.aliases
    return same_model and row.goal == recipe.goal and row.benchmark == recipe.benchmark and not row.raises


def with_distributed_optimizer(recipe: Recipe) -> Recipe:
    """Replace FSDP2 by Megatron's distributed optimizer."""
    if recipe.layout.strategy != "fsdp2":
        return recipe
    return msgspec.structs.replace(recipe, layout=msgspec.structs.replace(recipe.layout, strategy="zero1"))


def difference(
    recipe: Recipe, model: ModelSpec, row: bridge_recipes.BridgeRecipe | None = None, *, python: bool = False
) -> Difference:
    """Return the settings of a recipe that differ from its base, or from the common recipe."""
    base = row.recipe() if row else bridge_recipes.common(recipe.goal)
    parts = split_keys(recipe)  # no row of the key map: elsewhere, dataset.split names a split of a dataset
    custom = (*CUSTOM_FIELDS, *(["data.validation_part"] if parts else []))
    fields = [key for key in relevant_fields(recipe, model) if key not in custom]
    before, _ = to_settings(KEYS, base, fields)
    after, lost = to_settings(KEYS, recipe, fields)
    unmapped = {one.field: one for one in lost}
    if (part := unmapped.get("data.validation_part")) is not None and recipe.goal == "pretrain":
        reason = "random tokens are not split; with data.dataset=PREFIX it is written as dataset.split"
        unmapped[part.field] = msgspec.structs.replace(part, reason=reason)
    changed: dict[str, Any] = {}
    for key, value in after.items():
        field = config_keys("megatron_bridge")[key].field if key in config_keys("megatron_bridge") else ""
        choices = config_keys("megatron_bridge")[key].choices if field else ()
        if choices and value is not None and str(value) not in choices:
            unmapped[field] = UnmappedField(
                field, field_value(recipe, field), f"Megatron-Bridge supports {', '.join(choices)}"
            )
        elif before.get(key, ...) != value or key in SHOWN or (key in SHOWN_IF_PARALLEL and value != 1):
            changed[key] = value
    if BIAS in changed:  # the loss beside a bias depends on another key: it is stated
        changed[BALANCING_LOSS] = after[BALANCING_LOSS]
        if changed[BIAS] and model.moe is not None and not model.moe.balance_bias:
            changed[ROUTER_SCORES] = BIAS_SCORES[0]  # those of the recipe are a softmax, which a bias excludes
    layout_key = "model.pipeline_model_parallel_layout"
    moved = (recipe.layout.pp, recipe.layout.vp) != (base.layout.pp, base.layout.vp)
    if moved and recipe.layout.stage_layers and layout_key in after:
        changed[layout_key] = after[layout_key]  # else the runner recomputes the stage layout
    changed |= _formats(
        recipe.precision, base.precision, row is not None and row.precision_is_a_name and not python, unmapped
    )
    changed = _adjusted(changed, recipe, base, unmapped, row is not None and row.precision_aware)
    if changed.get("model.cpu_offloading"):
        changed |= _offloaded_layers(recipe, model, unmapped)
    changed |= {**size_settings(recipe, model), **parts}
    numbers = {"model.rotary_base": recipe.architecture.rope_theta}
    numbers["model.layernorm_epsilon"] = recipe.architecture.norm_eps
    changed |= {key: value for key, value in numbers.items() if value is not None}
    changed |= _rope_scaling(recipe, (bridge_recipes.model_of(row) or row.model) if row else model.name)
    if recipe.peft.method not in ("lora", "dora") and recipe.goal == "peft":
        unmapped["peft.method"] = UnmappedField(
            "peft.method", recipe.peft.method, "Megatron-Bridge supports LoRA and DoRA"
        )
    same = {field for field in unmapped if field_value(recipe, field) == field_value(base, field)}
    return Difference(changed, tuple(one for field, one in unmapped.items() if field not in same))


def _rope_scaling(recipe: Recipe, base_model: str) -> dict[str, Any]:
    """Return Llama's RoPE scaling where the model of the base has another one: sizes alone do not show it."""
    found, base = numerics_for(recipe), published_numerics(base_model)
    if found.rope_theta is None or base.rope_theta is None:  # not in the catalogue
        return {}
    ours, theirs = (
        float((one.rope_scaling or {}).get("factor", 1)) if one.scaling_type == LLAMA_SCALING else None
        for one in (found, base)
    )
    if ours == theirs:
        return {}
    return {"model.rope_scaling": False} if ours is None else {"model.rope_scaling": True, SCALING_FACTOR: ours}


LLAMA_SCALING = "llama3"
SCALING_FACTOR = "model.rope_scaling_factor"


def _formats(new: Precision, old: Precision, name_only: bool, unmapped: dict[str, UnmappedField]) -> dict[str, Any]:
    """Return the precision settings: a preset if one matches, else its single fields if the recipe has them."""
    changed: dict[str, Any] = {}
    if any(getattr(new, name) != getattr(old, name) for name in FORMATS):
        exact = [name for name, formats in precision.PRESETS.items() if _same_formats(formats, new, FORMATS)]
        near = [name for name, formats in precision.PRESETS.items() if _same_formats(formats, new, FORMATS[:2])]
        if exact:
            changed["mixed_precision"] = exact[0]
        elif not near:
            reason = f"{new.compute} with {new.matmul} GEMMs has no preset"
            unmapped["precision.matmul"] = UnmappedField("precision.matmul", new.matmul, reason)
        elif name_only:
            changed |= {"mixed_precision": near[0]} if not _same_formats(new, old, FORMATS[:2]) else {}
            taken = precision.PRESETS[near[0]] if changed else old
            unmapped |= {
                f"precision.{name}": UnmappedField(
                    f"precision.{name}", getattr(new, name), "the recipe selects its precision by preset name only"
                )
                for name in FORMATS[2:]
                if getattr(new, name) != getattr(taken, name)
            }
        else:
            changed |= _precision_fields(new)
    if new.grads != new.reduce:
        if new.grads == "fp32":
            reason = "gradients accumulate in the reduction format"
            unmapped["precision.grads"] = UnmappedField("precision.grads", new.grads, reason)
        elif old.grads == old.reduce:
            changed["optimizer.main_grads_dtype"] = "bfloat16"
    return changed


def _same_formats(one: Precision, other: Precision, names: tuple[str, ...]) -> bool:
    return all(getattr(one, name) == getattr(other, name) for name in names)


def _precision_fields(new: Precision) -> dict[str, Any]:
    fp8_recipe = precision.RECIPES.get(new.matmul)
    fields: dict[str, Any] = {
        "bf16": new.compute == "bf16",
        "fp16": new.compute == "fp16",
        "fp8": None if fp8_recipe is None else "e4m3" if fp8_recipe == "mxfp8" else "hybrid",
        "fp4": "e2m1" if new.matmul == "nvfp4" else None,
        "grad_reduce_in_fp32": new.reduce == "fp32",
        "fp8_param_gather": new.fp8_gather,
        "first_last_layers_bf16": new.first_last_bf16,
    }
    if fp8_recipe is not None:
        fields["fp8_recipe"] = fp8_recipe
        fields["reuse_grad_buf_for_mxfp8_param_ag"] = fp8_recipe == "mxfp8" and new.fp8_gather
    return {f"mixed_precision.{name}": value for name, value in fields.items()}


def _offloaded_layers(recipe: Recipe, model: ModelSpec, unmapped: dict[str, UnmappedField]) -> dict[str, Any]:
    """Return how many layers are offloaded: the default is none, and all of them are refused."""
    if recipe.layout.recompute == "none" and recipe.layout.pp == 1:
        return {"model.cpu_offloading_num_layers": model.num_layers - 1}
    reason = "activations of whole layers are offloaded: neither recompute nor a pipeline can be combined with it"
    unmapped["layout.offload"] = UnmappedField("layout.offload", "activations", reason)
    return {"model.cpu_offloading": False}


def _adjusted(
    changed: dict[str, Any], recipe: Recipe, base: Recipe, unmapped: dict[str, UnmappedField], aware: bool
) -> dict[str, Any]:
    """Adjust settings that need another setting, or have another key."""
    found = dict(changed)
    if not (base.kernels.tp_comm_overlap or base.moe.ep_overlap):  # without it there is no comm_overlap section
        found = {OVERLAP.get(key, key): value for key, value in found.items()}
    if found.get("model.recompute_modules") == []:
        found["model.recompute_modules"] = None
    if "ops" in recipe.layout.recompute_modules:
        found.pop("model.recompute_modules", None)
        unmapped["layout.recompute_modules"] = UnmappedField(
            "layout.recompute_modules",
            recipe.layout.recompute_modules,
            "Megatron-Bridge recomputes modules, not single ops",
        )
    if recipe.train.mtp_loss and not base.train.mtp_loss and "model.mtp_loss_scaling_factor" in found:
        found["model.mtp_num_layers"] = 1
    if recipe.data.packing and recipe.data.seq_length != base.data.seq_length:
        found["dataset.offline_packing_specs.packed_sequence_size"] = recipe.data.seq_length
    if recipe.precision.master == "bf16" and recipe.layout.offload != "optimizer":
        found.pop("optimizer.main_params_dtype", None)
        reason = "Transformer Engine's FusedAdam keeps master weights in fp32 or fp16: they stay in fp32"
        unmapped["precision.master"] = UnmappedField("precision.master", "bf16", reason)
    narrow = recipe.precision.moments == "bf16" or "optimizer.main_params_dtype" in found
    if (narrow or "optimizer.main_grads_dtype" in found) and not aware:
        found["optimizer.use_precision_aware_optimizer"] = True
    if recipe.checkpoint.milestone_every and "checkpoint.most_recent_k" in found:
        del found["checkpoint.most_recent_k"]
        reason = "retention is by interval or by count, not both"
        unmapped["checkpoint.keep"] = UnmappedField("checkpoint.keep", recipe.checkpoint.keep, reason)
    return found
