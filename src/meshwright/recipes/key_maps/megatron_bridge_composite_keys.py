"""Readers and writers of Megatron-Bridge keys that are only meaningful together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.errors import InputError, unknown
from meshwright.recipes.key_maps import shared_composite_keys as shared
from meshwright.recipes.key_maps.key import MappedFields, RawValues
from meshwright.recipes.key_maps.megatron_lm_composite_keys import parse_blend, split_list, split_text
from meshwright.recipes.key_maps.pipeline_layout import format_pipeline_layout, parse_pipeline_layout
from meshwright.recipes.key_maps.shared_composite_keys import as_bool, is_null
from meshwright.recipes.key_maps.value_maps import PRECISION_NAMES
from meshwright.recipes.types import Recipe

PRETRAIN_DATASETS = ("mock", "megatron-indexed", "energon")
SFT_DATASETS = (
    "squad", "tulu3", "openmathinstruct2", "openmathinstruct2-thinking", "gsm8k", "local-jsonl", "cord-v2", "medpix",
    "raven", "rdr", "llava-video-178k", "local-vlm", "energon",
)  # fmt: skip
DATASETS = tuple(dict.fromkeys((*PRETRAIN_DATASETS, *SFT_DATASETS)))
PATH_DATASETS = ("megatron-indexed", "energon", "local-jsonl", "local-vlm")
"""Datasets that need a path."""
VLM_FILES = "dataset.source.load_kwargs.data_files.train"
RENAMED_DATASETS = {
    "llm-pretrain": "megatron-indexed",
    "llm-pretrain-mock": "mock",
    "llm-finetune": "squad",
    "llm-finetune-preloaded": "local-jsonl",
    "squad-packed": "squad",
    "vlm-energon": "energon",
    "vlm-hf": "cord-v2",
    "vlm-preloaded": "local-vlm",
    "preloaded-vlm": "local-vlm",
    "dclm": "megatron-indexed",
    "rp2": "megatron-indexed",
    "c4": "megatron-indexed",
}
"""Dataset names from older guides, with their current names."""
FREEZE_KEYS = {
    "model.freeze_language_model": "language",
    "model.freeze_vision_model": "vision",
    "model.freeze_vision_projection": "projector",
}


def virtual_stages(recipe: Recipe) -> Mapping[str, Any]:
    layout = recipe.layout
    if layout.pp_schedule != ("1f1b" if layout.vp == 1 else "interleaved_1f1b"):
        raise InputError(
            "is not available: Megatron-Bridge runs 1F1B, interleaved when vp > 1", field="layout.pp_schedule"
        )
    return {"model.virtual_pipeline_model_parallel_size": None if layout.vp == 1 else layout.vp}


def recompute(recipe: Recipe) -> Mapping[str, Any]:
    keys = dict.fromkeys(("recompute_granularity", "recompute_method", "recompute_num_layers"))
    return {f"model.{key}": value for key, value in {**keys, **shared.recompute_keys(recipe)}.items()}


def dispatcher(recipe: Recipe) -> Mapping[str, Any]:
    return {f"model.{key}": value for key, value in shared.dispatcher_keys(recipe.moe.dispatcher).items()}


def precision(recipe: Recipe) -> Mapping[str, Any]:
    pair = (recipe.precision.compute, recipe.precision.matmul)
    if pair not in PRECISION_NAMES["megatron_bridge"]:
        raise InputError(
            f"Megatron-Bridge has no mixed_precision name for {pair[0]} with {pair[1]} matmuls",
            field="precision.matmul",
        )
    return {"mixed_precision": PRECISION_NAMES["megatron_bridge"][pair]}


def offload(recipe: Recipe) -> Mapping[str, Any]:
    target = recipe.layout.offload
    if target == "params":
        raise InputError("params is not available: Megatron-Bridge does not offload parameters", field="layout.offload")
    return {"model.cpu_offloading": target == "activations", "optimizer.optimizer_cpu_offload": target == "optimizer"}


def strategy(raw: RawValues, recipe: Recipe) -> MappedFields:
    """FSDP if enabled; else the distributed optimizer, unless both of its flags are off."""
    on = {key.rsplit(".", 1)[1] for key, text in raw.items() if as_bool(key, text)}
    given_flags = {key.rsplit(".", 1)[1] for key in raw}
    if {"use_megatron_fsdp", "use_torch_fsdp2"} <= on:
        raise InputError("cannot be combined with Megatron-FSDP", field="dist.use_torch_fsdp2", value=True)
    if "use_megatron_fsdp" in on:
        return MappedFields({"layout.strategy": "megatron_fsdp"})
    if "use_torch_fsdp2" in on:
        return MappedFields({"layout.strategy": "fsdp2"})
    flags = [key for key in raw if key.endswith("use_distributed_optimizer")]
    if "use_distributed_optimizer" in on:
        return MappedFields({"layout.strategy": "zero1"})
    if len(flags) == 2 or (flags and recipe.layout.strategy == "ddp"):
        return MappedFields({"layout.strategy": "ddp"})
    if recipe.layout.strategy == "megatron_fsdp" and "use_megatron_fsdp" in given_flags:
        return MappedFields({"layout.strategy": "fsdp2"})
    return MappedFields({})


def strategy_keys(recipe: Recipe) -> Mapping[str, Any]:
    strategy = recipe.layout.strategy
    distributed_optimizer = strategy in ("zero1", "megatron_fsdp")
    return {
        "ddp.use_megatron_fsdp": strategy == "megatron_fsdp",
        "dist.use_torch_fsdp2": strategy == "fsdp2",
        "ddp.use_distributed_optimizer": distributed_optimizer,
        "optimizer.use_distributed_optimizer": distributed_optimizer,
    }


EVAL_KEYS = ("validation.eval_interval", "validation.eval_iters", "train.eval_interval", "train.eval_iters")


def evaluation(raw: RawValues, recipe: Recipe) -> MappedFields:
    """Evaluation interval and length. The older train.* keys take precedence; zero iterations disable evaluation."""
    latest: dict[str, str] = {}
    for key in EVAL_KEYS:
        name = key.split("_")[-1]
        if key in raw and not (key.startswith("train.") and is_null(raw[key])):
            latest[name] = "0" if is_null(raw[key]) else str(shared.as_count(key, raw[key]))
    fields: dict[str, str] = {}
    if latest.get("iters") == "0":
        return MappedFields({"train.eval_every": "0"})
    if "iters" in latest:
        fields["train.eval_steps"] = latest["iters"]
    if "interval" in latest:
        fields["train.eval_every"] = latest["interval"]
    return MappedFields(fields)


def evaluation_keys(recipe: Recipe) -> Mapping[str, Any]:
    if not recipe.train.eval_every:
        return {"validation.eval_iters": 0}
    steps = recipe.train.eval_steps or None  # 0, the whole set, would turn validation off there
    return {"validation.eval_interval": recipe.train.eval_every, "validation.eval_iters": steps}


def prediction(raw: RawValues, recipe: Recipe) -> MappedFields:
    """Without MTP layers there is no MTP loss; with them its default weight is 0.1."""
    layers = raw.get("model.mtp_num_layers")
    if layers is not None and (is_null(layers) or layers.strip() == "0"):
        return MappedFields({"train.mtp_loss": "0"})
    factor = raw.get("model.mtp_loss_scaling_factor", str(recipe.train.mtp_loss or 0.1))
    return MappedFields({"train.mtp_loss": "0" if is_null(factor) else factor})


def prediction_keys(recipe: Recipe) -> Mapping[str, Any]:
    weight = recipe.train.mtp_loss
    return {"model.mtp_loss_scaling_factor": weight} if weight else {"model.mtp_num_layers": None}


BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")


def balancing(raw: RawValues, recipe: Recipe) -> MappedFields:
    """A bias balances also in addition to a loss, whose weight is a key of its own."""
    balancing_type = raw.get("model.moe_router_load_balancing_type", "").strip().lower()
    bias = raw.get("model.moe_router_enable_expert_bias", "false").strip().lower() == "true"
    unset = "model.moe_router_enable_expert_bias" not in raw and recipe.moe.balancing == "bias"
    if bias or unset:  # the recipe's own bias stays with another loss
        return MappedFields({"moe.balancing": "bias"})
    if not balancing_type and recipe.moe.balancing == "bias":  # the loss of the recipe remains
        balancing_type = _loss_beside_bias(recipe)
    return MappedFields({"moe.balancing": balancing_type} if balancing_type in (*BALANCING, "bias") else {})


def _loss_beside_bias(recipe: Recipe) -> str:
    return "seq_aux_loss" if recipe.moe.aux_loss else "none"


def balancing_keys(recipe: Recipe) -> Mapping[str, Any]:
    balancing_type = recipe.moe.balancing
    if balancing_type == "bias":
        return {
            "model.moe_router_load_balancing_type": _loss_beside_bias(recipe),
            "model.moe_router_enable_expert_bias": True,
        }
    return {"model.moe_router_load_balancing_type": balancing_type, "model.moe_router_enable_expert_bias": False}


def frozen(raw: RawValues, recipe: Recipe) -> MappedFields:
    parts = set(recipe.train.freeze)
    for key, text in raw.items():
        parts = parts | {FREEZE_KEYS[key]} if as_bool(key, text) else parts - {FREEZE_KEYS[key]}  # type: ignore[arg-type]  # by name
    return MappedFields({"train.freeze": "[" + ",".join(part for part in FREEZE_KEYS.values() if part in parts) + "]"})


def frozen_keys(recipe: Recipe) -> Mapping[str, Any]:
    return {key: part in recipe.train.freeze for key, part in FREEZE_KEYS.items()}


def packing(raw: RawValues, recipe: Recipe) -> MappedFields:
    enabled = raw.get("dataset.enable_offline_packing")
    return (
        MappedFields({})
        if enabled is None
        else MappedFields({"data.packing": str(as_bool("data.packing", enabled)).lower()})
    )


def packing_keys(recipe: Recipe) -> Mapping[str, Any]:
    if recipe.data.packing:
        size = recipe.data.seq_length
        return {"dataset.enable_offline_packing": True, "dataset.offline_packing_specs.packed_sequence_size": size}
    return {"dataset.enable_offline_packing": False, "dataset.offline_packing_specs": None}


DATA_KEYS = ("--dataset", "dataset.dataset_root", "dataset.data_path", "dataset.path", VLM_FILES)


def dataset(raw: RawValues, recipe: Recipe) -> MappedFields:
    """A path takes precedence over a preset name."""
    path = next((raw[key] for key in DATA_KEYS[1:] if key in raw and not is_null(raw[key])), None)
    preset = raw.get("--dataset")
    if preset is not None and preset not in DATASETS:
        if preset in RENAMED_DATASETS:
            new = RENAMED_DATASETS[preset]
            raise InputError(f"was renamed to {new}", field="--dataset", value=preset, fix=[f"--dataset {new}"])
        raise unknown("--dataset", preset, DATASETS)
    if path is not None:
        parts = split_list(path)
        name, blend = parse_blend(parts[0].split() if len(parts) == 1 else parts)
        if blend:
            return MappedFields({"data.blend": ",".join(f"{prefix}:{weight}" for prefix, weight in blend.items())})
        return MappedFields({"data.dataset": name})
    return MappedFields({}) if preset is None else MappedFields({"data.dataset": preset})


def dataset_keys(recipe: Recipe) -> Mapping[str, Any]:
    name = recipe.data.dataset
    if recipe.benchmark:
        if name != "mock":
            raise InputError(
                "cannot be changed: Megatron-Bridge's benchmark recipes use mock data", field="data.dataset", value=name
            )
        return {}
    if recipe.data.blend and recipe.goal == "pretrain":
        weighted = " ".join(f"{weight!r} {prefix}" for prefix, weight in recipe.data.blend.items())
        return {"--dataset": "megatron-indexed", "dataset.data_path": weighted}
    if name in DATASETS:
        return {"--dataset": name}
    if recipe.data.images:
        return {"--dataset": "local-vlm", VLM_FILES: name}
    if recipe.goal == "pretrain":
        return {"--dataset": "megatron-indexed", "dataset.data_path": name}
    return {"--dataset": "local-jsonl", "dataset.dataset_root": name}


def split_keys(recipe: Recipe) -> Mapping[str, Any]:
    """Return the split of token files; random tokens and other datasets have none."""
    indexed = recipe.goal == "pretrain" and (recipe.data.blend or recipe.data.dataset not in DATASETS)
    return {"dataset.split": split_text(recipe.data.validation_part)} if indexed else {}


def stage_layers(raw: RawValues, recipe: Recipe) -> MappedFields:
    text = raw["model.pipeline_model_parallel_layout"]
    if is_null(text):
        return MappedFields({"layout.stage_layers": "[]"})
    layers = parse_pipeline_layout(text, "model.pipeline_model_parallel_layout")
    even = len(set(layers)) == 1
    return MappedFields({"layout.stage_layers": "[]" if even else "[" + ",".join(map(str, layers)) + "]"})


def stage_keys(recipe: Recipe) -> Mapping[str, Any]:
    key = "model.pipeline_model_parallel_layout"
    listed = recipe.layout.stage_layers
    if not listed:
        return {key: None}
    return {key: format_pipeline_layout(listed, 1 if recipe.train.mtp_loss else 0)}


def hierarchy(raw: RawValues, recipe: Recipe) -> MappedFields:
    ((key, text),) = raw.items()
    if is_null(text):
        return MappedFields({"layout.cp_inner": "1"})
    first = text.strip().strip("[]()").split(",")[0]
    return MappedFields({"layout.cp_inner": str(shared.as_count(key, first.strip(), 1))})


def hierarchy_keys(recipe: Recipe) -> Mapping[str, Any]:
    key, layout = "model.hierarchical_context_parallel_sizes", recipe.layout
    if layout.cp_comm != "a2a+ring":
        if layout.cp_inner != 1:
            raise InputError("requires cp_comm a2a+ring", field="layout.cp_inner", value=layout.cp_inner)
        return {key: None}
    return {key: [layout.cp_inner, max(1, layout.cp // layout.cp_inner)]}


def folder(raw: RawValues, recipe: Recipe) -> MappedFields:
    """Return the folder of the checkpoints; a --load elsewhere is listed as dropped."""
    text = raw.get("checkpoint.save", "null").strip()
    return MappedFields({} if is_null(text) else {"checkpoint.folder": text})


def folder_keys(recipe: Recipe) -> Mapping[str, Any]:
    where = recipe.checkpoint.folder
    return {"checkpoint.save": where, "checkpoint.load": where} if where else {}
