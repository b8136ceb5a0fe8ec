"""A recipe in Megatron-Bridge's settings, as far as they differ from those of the recipe it starts from there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from meshwright.frameworks.mapping import relevant_fields, to_settings
from meshwright.frameworks.megatron_bridge import bridge_recipes, precision
from meshwright.frameworks.megatron_bridge.runner import SHAPES
from meshwright.frameworks.types import UnmappedField
from meshwright.models import ModelSpec
from meshwright.recipes.key_maps import config_keys
from meshwright.recipes.types import Precision, Recipe, field_value

FORMATS = ("compute", "matmul", "reduce", "fp8_gather", "first_last_bf16")
BY_HAND = (*(f"precision.{name}" for name in FORMATS), "precision.grads", "peft.method", "checkpoint.pretrained")
OVERLAP = {
    "comm_overlap.tp_comm_overlap": "model.tp_comm_overlap",
    "comm_overlap.overlap_moe_expert_parallel_comm": "model.overlap_moe_expert_parallel_comm",
}
"""Keys of a section that only exists where the recipe sets one, with those that always exist."""
SHOWN = (
    "model.tensor_model_parallel_size", "model.pipeline_model_parallel_size", "train.global_batch_size",
    "train.micro_batch_size", "dataset.seq_length", "train.train_iters", "optimizer.lr",
)  # fmt: skip
SHOWN_ABOVE_ONE = ("model.context_parallel_size", "model.expert_model_parallel_size")
"""What a reader expects to see, whether or not it differs."""


class Difference(msgspec.Struct, frozen=True):
    """What to say on top of a recipe of theirs."""

    settings: Mapping[str, Any]
    unmapped: tuple[UnmappedField, ...]


def counterpart(recipe: Recipe, model: ModelSpec) -> bridge_recipes.Upstream | None:
    """The recipe of Megatron-Bridge that one of ours is written on top of: of its name, or for its model and goal."""
    for name in (recipe.name, recipe.name.lower()):
        row = bridge_recipes.find(name)
        if row is not None and _same(row, recipe, model):
            return row
    if recipe.benchmark or not model.hf_id:
        return None
    return next(
        (row for row in bridge_recipes.library() if row.model == model.hf_id and _same(row, recipe, model)), None
    )


def _same(row: bridge_recipes.Upstream, recipe: Recipe, model: ModelSpec) -> bool:
    same_model = row.model == model.hf_id or bridge_recipes.model_of(row) == model.name
    return same_model and row.goal == recipe.goal and row.benchmark == recipe.benchmark and not row.raises


def on_megatron(recipe: Recipe) -> Recipe:
    """The recipe with its default sharding in Megatron's own kind: the distributed optimizer."""
    if recipe.layout.strategy != "fsdp2":
        return recipe
    return msgspec.structs.replace(recipe, layout=msgspec.structs.replace(recipe.layout, strategy="zero1"))


def difference(
    recipe: Recipe, model: ModelSpec, row: bridge_recipes.Upstream | None = None, *, python: bool = False
) -> Difference:
    """Every setting of a recipe that the one it starts from there, or the common one, does not have already."""
    from meshwright.frameworks.megatron_bridge import FRAMEWORK

    base = row.recipe() if row else bridge_recipes.common(recipe.goal)
    fields = [key for key in relevant_fields(recipe, model) if key not in BY_HAND]
    before, _ = to_settings(FRAMEWORK, base, fields)
    after, lost = to_settings(FRAMEWORK, recipe, fields)
    unmapped = {one.field: one for one in lost}
    setting: dict[str, Any] = {}
    for key, value in after.items():
        own = config_keys("megatron_bridge")[key].field if key in config_keys("megatron_bridge") else ""
        choices = config_keys("megatron_bridge")[key].choices if own else ()
        if choices and value is not None and str(value) not in choices:
            unmapped[own] = UnmappedField(own, field_value(recipe, own), f"Megatron-Bridge knows {', '.join(choices)}")
        elif before.get(key, ...) != value or key in SHOWN or (key in SHOWN_ABOVE_ONE and value != 1):
            setting[key] = value
    drawing = "model.pipeline_model_parallel_layout"
    moved = (recipe.layout.pp, recipe.layout.vp) != (base.layout.pp, base.layout.vp)
    if moved and recipe.layout.stage_layers and drawing in after:
        setting[drawing] = after[drawing]  # else the runner draws the stages anew
    setting |= _formats(
        recipe.precision, base.precision, row is not None and row.precision_is_a_name and not python, unmapped
    )
    setting = _fixed(setting, recipe, base, unmapped, row is not None and row.precision_aware)
    shape = {name: getattr(recipe.architecture, name) for name in SHAPES.values()}
    setting |= {key: shape[name] for key, name in SHAPES.items() if shape[name] is not None}
    if recipe.peft.method not in ("lora", "dora") and recipe.goal == "peft":
        unmapped["peft.method"] = UnmappedField("peft.method", recipe.peft.method, "Megatron-Bridge has LoRA and DoRA")
    same = {field for field in unmapped if field_value(recipe, field) == field_value(base, field)}
    return Difference(setting, tuple(one for field, one in unmapped.items() if field not in same))


def _formats(new: Precision, old: Precision, word_only: bool, unmapped: dict[str, UnmappedField]) -> dict[str, Any]:
    """The number formats: a name where one has them all, else the fields inside, where there are any."""
    setting: dict[str, Any] = {}
    if any(getattr(new, name) != getattr(old, name) for name in FORMATS):
        exact = [name for name, formats in precision.PRESETS.items() if _alike(formats, new, FORMATS)]
        near = [name for name, formats in precision.PRESETS.items() if _alike(formats, new, FORMATS[:2])]
        if exact:
            setting["mixed_precision"] = exact[0]
        elif not near:
            reason = f"{new.compute} with {new.matmul} matrix products has no name there"
            unmapped["precision.matmul"] = UnmappedField("precision.matmul", new.matmul, reason)
        elif word_only:
            setting |= {"mixed_precision": near[0]} if not _alike(new, old, FORMATS[:2]) else {}
            taken = precision.PRESETS[near[0]] if setting else old
            unmapped |= {
                f"precision.{name}": UnmappedField(
                    f"precision.{name}", getattr(new, name), "the recipe names its precision with one word"
                )
                for name in FORMATS[2:]
                if getattr(new, name) != getattr(taken, name)
            }
        else:
            setting |= _inside(new)
    if new.grads != new.reduce:
        if new.grads == "fp32":
            reason = "gradients accumulate in the format they are summed in"
            unmapped["precision.grads"] = UnmappedField("precision.grads", new.grads, reason)
        elif old.grads == old.reduce:
            setting["optimizer.main_grads_dtype"] = "bfloat16"
    return setting


def _alike(one: Precision, other: Precision, names: tuple[str, ...]) -> bool:
    return all(getattr(one, name) == getattr(other, name) for name in names)


def _inside(new: Precision) -> dict[str, Any]:
    eight = precision.RECIPES.get(new.matmul)
    fields: dict[str, Any] = {
        "bf16": new.compute == "bf16",
        "fp16": new.compute == "fp16",
        "fp8": None if eight is None else "e4m3" if eight == "mxfp8" else "hybrid",
        "fp4": "e2m1" if new.matmul == "nvfp4" else None,
        "grad_reduce_in_fp32": new.reduce == "fp32",
        "fp8_param_gather": new.fp8_gather,
        "first_last_layers_bf16": new.first_last_bf16,
    }
    if eight is not None:
        fields["fp8_recipe"] = eight
        fields["reuse_grad_buf_for_mxfp8_param_ag"] = eight == "mxfp8" and new.fp8_gather
    return {f"mixed_precision.{name}": value for name, value in fields.items()}


def _fixed(
    setting: dict[str, Any], recipe: Recipe, base: Recipe, unmapped: dict[str, UnmappedField], aware: bool
) -> dict[str, Any]:
    """Settings that only work together with another one, or in another place."""
    found = dict(setting)
    if not (base.kernels.tp_comm_overlap or base.moe.ep_overlap):  # there is no comm_overlap section then
        found = {OVERLAP.get(key, key): value for key, value in found.items()}
    if found.get("model.recompute_modules") == []:
        found["model.recompute_modules"] = None
    if "ops" in recipe.layout.recompute_modules:
        found.pop("model.recompute_modules", None)
        unmapped["layout.recompute_modules"] = UnmappedField(
            "layout.recompute_modules", recipe.layout.recompute_modules, "modules are recomputed, not operations"
        )
    if recipe.train.mtp_loss and not base.train.mtp_loss and "model.mtp_loss_scaling_factor" in found:
        found["model.mtp_num_layers"] = 1
    if recipe.data.packing and recipe.data.seq_length != base.data.seq_length:
        found["dataset.offline_packing_specs.packed_sequence_size"] = recipe.data.seq_length
    narrow = "bf16" in (recipe.precision.moments, recipe.precision.master)
    if (narrow or "optimizer.main_grads_dtype" in found) and not aware:
        found["optimizer.use_precision_aware_optimizer"] = True
    if recipe.checkpoint.milestone_every and "checkpoint.most_recent_k" in found:
        del found["checkpoint.most_recent_k"]
        reason = "checkpoints are thinned out by their interval or by their number there"
        unmapped["checkpoint.keep"] = UnmappedField("checkpoint.keep", recipe.checkpoint.keep, reason)
    return found
