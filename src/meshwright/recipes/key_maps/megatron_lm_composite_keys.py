"""Readers and writers of Megatron-LM flags that are only meaningful together."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from meshwright.errors import InputError, unknown
from meshwright.recipes.case import model_of
from meshwright.recipes.key_maps.key import MappedFields, RawValues, to_framework_name
from meshwright.recipes.key_maps.pipeline_layout import format_pipeline_layout, parse_pipeline_layout
from meshwright.recipes.key_maps.shared_composite_keys import (
    as_bool,
    as_count,
    dispatcher_keys,
    is_null,
    recompute_keys,
)
from meshwright.recipes.types import Recipe
from meshwright.recipes.values import listed_weights

KeyValues = Mapping[str, Any]

UNMAPPED_MODULES = frozenset(("full", "gdn", "gdn_norm_out", "mhc", "attn_norm", "kda"))
"""Module names of Megatron-LM without an equivalent in recipes."""
FP8_RECIPES = {"delayed": "fp8_delayed", "tensorwise": "fp8_tensor", "blockwise": "fp8_block", "mxfp8": "mxfp8"}
FP8_FORMATS = {"fp8_delayed": "hybrid", "fp8_tensor": "hybrid", "fp8_block": "e4m3", "mxfp8": "e4m3"}
CP_COMM_TYPES = {
    "p2p": "ring",
    "all_gather": "allgather",
    "allgather": "allgather",
    "a2a": "a2a",
    "a2a+p2p": "a2a+ring",
}
BALANCING_TYPES = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")
LAYOUT_SYMBOLS = "EtmL|MA*-"  # includes the layer types of hybrid models
SHARDING_STRATEGIES = {
    "no_shard": "ddp",
    "optim": "zero1",
    "optim_grads": "zero1",
    "optim_grads_params": "megatron_fsdp",
}


def split_list(text: str) -> list[str]:
    """Split a list such as [a,b] or a,b into its items."""
    return [] if is_null(text) else [part.strip().strip("\"'") for part in text.strip().strip("[]").split(",") if part]


def _is_on(raw: RawValues, key: str) -> bool:
    return key in raw and not is_null(raw[key]) and as_bool(key, raw[key])


def _text(raw: RawValues, key: str) -> str:
    """Return the value of a key, or an empty string if it is unset or null."""
    text = raw.get(key, "")
    return "" if is_null(text) else text


def _interleaved(vp: int) -> MappedFields:
    return MappedFields({"layout.vp": str(vp), "layout.pp_schedule": "interleaved_1f1b" if vp > 1 else "1f1b"})


def read_stages(raw: RawValues, recipe: Recipe) -> MappedFields:
    """Virtual stages by count or by layout string. Given as layers per stage they need the model and are read later."""
    pipeline_layout = _text(raw, "pipeline_model_parallel_layout")
    if pipeline_layout:
        layers = parse_pipeline_layout(pipeline_layout, "pipeline_model_parallel_layout", LAYOUT_SYMBOLS)
        if len(layers) % recipe.layout.pp:
            raise InputError(
                f"has {len(layers)} stages, which is not a multiple of the pipeline size {recipe.layout.pp}",
                field="pipeline_model_parallel_layout",
                value=pipeline_layout,
            )
        fields = dict(_interleaved(len(layers) // recipe.layout.pp).explicit)
        return MappedFields({**fields, "layout.stage_layers": "[" + ",".join(map(str, layers)) + "]"})
    count = _text(raw, "num_virtual_stages_per_pipeline_rank")
    if not count:
        return MappedFields({})
    if not count.isdigit() or int(count) < 1:
        raise InputError("must be an integer of at least 1", field="num_virtual_stages_per_pipeline_rank", value=count)
    return _interleaved(int(count))


def override_stages(raw: RawValues, recipe: Recipe) -> MappedFields:
    """Layers per virtual stage as Megatron counts them: vp = layers of a pipeline rank / layers per virtual stage."""
    key = "num_layers_per_virtual_pipeline_stage"
    text = _text(raw, key)
    others = [name for name in raw if name != key and _text(raw, name)]
    if not text or others:
        if text:
            raise InputError(f"{key} and {others[0]} both set the stages; use one", field=key, value=text)
        return read_stages(raw, recipe)
    if not text.isdigit() or int(text) < 1:
        raise InputError("must be an integer of at least 1", field=key, value=text)
    layout, chunk = recipe.layout, int(text)
    if layout.pp == 1:
        raise InputError(
            "interleaved stages need a pipeline, and layout.pp is 1", field=key, value=text, fix=("layout.pp=2", "vp=1")
        )
    layers = model_of(recipe).num_layers + layout.embedding_as_layer + layout.head_as_layer
    own = layers // layout.pp
    if layers % layout.pp or own % chunk:
        fitting = [f"{key}={size}" for size in range(1, own) if layers % layout.pp == 0 and own % size == 0]
        raise InputError(
            f"{layers} layers on pp={layout.pp} pipeline ranks do not divide into stages of {chunk} layers",
            field=key,
            value=text,
            fix=tuple(fitting[:3]) or ("layout.vp=1",),
        )
    return _interleaved(own // chunk)


def write_stages(recipe: Recipe) -> KeyValues:
    layout = recipe.layout
    if layout.pp_schedule != ("interleaved_1f1b" if layout.vp > 1 else "1f1b"):
        raise InputError("is not available: Megatron-LM runs 1F1B, interleaved when vp > 1", field="layout.pp_schedule")
    if layout.stage_layers:
        return {"pipeline_model_parallel_layout": format_pipeline_layout(layout.stage_layers)}
    return {"num_virtual_stages_per_pipeline_rank": layout.vp} if layout.vp > 1 else {}


def read_context(raw: RawValues, recipe: Recipe) -> MappedFields:
    comm_types = split_list(raw.get("cp_comm_type", "p2p")) or ["p2p"]
    sizes = split_list(raw.get("hierarchical_context_parallel_sizes", "null"))
    if comm_types[0] not in CP_COMM_TYPES:
        raise unknown("cp_comm_type", comm_types[0], CP_COMM_TYPES)
    fields = {"layout.cp_comm": CP_COMM_TYPES[comm_types[0]]}
    return MappedFields({**fields, "layout.cp_inner": sizes[0]} if sizes else fields)


def write_context(recipe: Recipe) -> KeyValues:
    layout = recipe.layout
    keys: dict[str, Any] = {"cp_comm_type": to_framework_name(CP_COMM_TYPES, layout.cp_comm)}
    if layout.cp_inner > 1 and layout.cp % layout.cp_inner == 0:
        keys["hierarchical_context_parallel_sizes"] = [layout.cp_inner, layout.cp // layout.cp_inner]
    return keys


def read_strategy(raw: RawValues, recipe: Recipe) -> MappedFields:
    """The distributed optimizer shards optimizer state; Megatron-FSDP shards what its sharding strategy selects."""
    if _is_on(raw, "use_megatron_fsdp"):
        sharding = _text(raw, "data_parallel_sharding_strategy") or "optim_grads_params"
        return MappedFields({"layout.strategy": SHARDING_STRATEGIES.get(sharding, sharding)})
    if _is_on(raw, "use_torch_fsdp2"):
        return MappedFields({"layout.strategy": "fsdp2"})
    return MappedFields({"layout.strategy": "zero1" if _is_on(raw, "use_distributed_optimizer") else "ddp"})


def write_strategy(recipe: Recipe) -> KeyValues:
    flags: dict[str, dict[str, Any]] = {
        "zero1": {"use_distributed_optimizer": True},
        "fsdp2": {"use_torch_fsdp2": True},
        "megatron_fsdp": {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"},
        "ddp": {},
    }
    return flags[recipe.layout.strategy]


def read_recompute(raw: RawValues, recipe: Recipe) -> MappedFields:
    """Full recompute covers every layer (uniform, in chunks) or the first layers of each stage (block)."""
    granularity = _text(raw, "recompute_granularity")
    if _is_on(raw, "recompute_activations"):  # Megatron-LM then replaces the granularity
        granularity = "selective"
    mode = granularity or "none"
    layers = _text(raw, "recompute_num_layers")
    if layers and (not layers.isdigit() or int(layers) < 1):
        raise InputError("must be an integer of at least 1", field="recompute_num_layers", value=layers)
    block = mode == "full" and _text(raw, "recompute_method").lower() == "block"
    fields = {"layout.recompute": mode} if granularity or "recompute_granularity" in raw or mode != "none" else {}
    return MappedFields({**fields, "layout.recompute_layers": layers if block and layers else "0"})


def override_recompute(raw: RawValues, recipe: Recipe) -> MappedFields:
    """The recompute flags as Megatron validates them; a number of layers that would have no effect is refused."""
    layers, method = _text(raw, "recompute_num_layers"), _text(raw, "recompute_method").lower()
    mode = _text(raw, "recompute_granularity") or recipe.layout.recompute
    given = next((key for key in ("recompute_num_layers", "recompute_method") if _text(raw, key)), "")
    if given and mode != "full":
        raise InputError(
            f"needs recompute_granularity=full; recompute is {mode}",
            field=given,
            value=_text(raw, given),
            fix=(f"recompute_granularity=full recompute_method=block recompute_num_layers={layers or 1}",),
        )
    if layers and method not in ("uniform", "block"):
        raise InputError(
            "needs recompute_method: block recomputes the first layers of each stage, uniform all layers in groups",
            field="recompute_num_layers",
            value=layers,
            fix=(f"recompute_method=block recompute_num_layers={layers}",),
        )
    if method == "block" and not layers:
        raise InputError("block needs recompute_num_layers", field="recompute_method", value=method)
    if method == "uniform" and layers not in ("", "1"):
        raise InputError(
            "groups of several layers are not supported: one layer at a time is recomputed",
            field="recompute_num_layers",
            value=layers,
            fix=(
                "recompute_method=uniform recompute_num_layers=1",
                f"recompute_method=block recompute_num_layers={layers}",
            ),
        )
    return read_recompute(raw, recipe)


def write_recompute(recipe: Recipe) -> KeyValues:
    if recipe.layout.recompute != "full" and recipe.layout.recompute_layers:
        raise InputError("requires layout.recompute=full", field="layout.recompute_layers")
    return recompute_keys(recipe)


def read_modules(raw: RawValues, recipe: Recipe) -> MappedFields:
    (text,) = raw.values()
    return MappedFields({"layout.recompute_modules": _module_list(split_list(text))})


def write_modules(recipe: Recipe) -> KeyValues:
    if "ops" in recipe.layout.recompute_modules:
        raise InputError(
            "ops is not available: Megatron-LM recomputes modules, not single ops", field="layout.recompute_modules"
        )
    return {"recompute_modules": list(recipe.layout.recompute_modules)} if recipe.layout.recompute_modules else {}


def _module_list(names: list[str]) -> str:
    return "[" + ",".join(name for name in names if name not in UNMAPPED_MODULES) + "]"


def read_offload(raw: RawValues, recipe: Recipe) -> MappedFields:
    layers = _text(raw, "cpu_offloading_num_layers") not in ("", "0")
    activations = layers or _is_on(raw, "fine_grained_activation_offloading")
    target = "optimizer" if _is_on(raw, "optimizer_cpu_offload") else "activations" if activations else "none"
    return MappedFields({"layout.offload": target})


def write_offload(recipe: Recipe) -> KeyValues:
    if recipe.layout.offload == "params":
        raise InputError("params is not available: Megatron-LM keeps parameters on the GPU", field="layout.offload")
    flags = {"optimizer": {"optimizer_cpu_offload": True}, "activations": {"fine_grained_activation_offloading": True}}
    return flags.get(recipe.layout.offload, {})


def read_compute(raw: RawValues, recipe: Recipe) -> MappedFields:
    dtype = next((key for key in ("bf16", "fp16") if _is_on(raw, key)), "fp32")
    return MappedFields({"precision.compute": dtype})


def write_compute(recipe: Recipe) -> KeyValues:
    return {} if recipe.precision.compute == "fp32" else {recipe.precision.compute: True}


def read_matmul(raw: RawValues, recipe: Recipe) -> MappedFields:
    """The format enables FP8; the recipe selects the scaling."""
    if _text(raw, "fp4_format"):
        return MappedFields({"precision.matmul": "nvfp4"})
    formatted, scaling = (_text(raw, key) for key in ("fp8_format", "fp8_recipe"))
    alone = bool(scaling) and scaling.lower() != "false" and "fp8_format" not in raw
    if (not formatted or formatted.lower() == "false") and not alone:
        return MappedFields({"precision.matmul": "same"})
    return MappedFields({"precision.matmul": FP8_RECIPES.get(scaling or "delayed", "fp8_tensor")})


def write_matmul(recipe: Recipe) -> KeyValues:
    matmul = recipe.precision.matmul
    if matmul == "same":
        return {}
    if matmul == "nvfp4":
        return {"fp4_format": "e2m1"}
    if matmul not in FP8_FORMATS:
        raise InputError(
            f"is not available: Megatron-LM's FP8 recipes are {', '.join(FP8_RECIPES)}",
            field="precision.matmul",
            value=matmul,
        )
    return {"fp8_format": FP8_FORMATS[matmul], "fp8_recipe": to_framework_name(FP8_RECIPES, matmul)}


def read_scope(raw: RawValues, recipe: Recipe) -> MappedFields:
    names = [name for text in raw.values() for name in split_list(text)]
    return MappedFields({"kernels.cuda_graph_scope": _module_list(names)})


def write_scope(recipe: Recipe) -> KeyValues:
    scope = recipe.kernels.cuda_graph_scope
    return {"cuda_graph_modules": list(scope)} if scope else {}


def read_loss(raw: RawValues, recipe: Recipe) -> MappedFields:
    linear = _text(raw, "cross_entropy_fusion_impl") == "linear" and _is_on(raw, "cross_entropy_loss_fusion")
    return MappedFields({"kernels.loss": "fused_linear" if linear else "vocab_parallel"})


def write_loss(recipe: Recipe) -> KeyValues:
    loss = recipe.kernels.loss
    if loss == "fused_linear":
        raise InputError(
            "--cross-entropy-fusion-impl linear is in Megatron-LM's dev branch, for Blackwell GPUs: releases refuse it",
            field="kernels.loss",
            value=loss,
        )
    if loss != "vocab_parallel":
        raise InputError(
            "is not available: Megatron-LM computes a vocabulary-parallel loss", field="kernels.loss", value=loss
        )
    # The fused loss is not deterministic.
    return {} if recipe.kernels.deterministic else {"cross_entropy_loss_fusion": True}


def read_balancing(raw: RawValues, recipe: Recipe) -> MappedFields:
    """Expert bias and Sinkhorn routing balance without an auxiliary loss."""
    if _is_on(raw, "moe_router_enable_expert_bias"):
        return MappedFields({"moe.balancing": "bias"})
    types = split_list(raw.get("moe_router_load_balancing_type", "aux_loss")) or ["none"]
    if types[0] not in (*BALANCING_TYPES, "sinkhorn", "bias"):
        raise unknown("moe_router_load_balancing_type", types[0], (*BALANCING_TYPES, "sinkhorn"))
    return MappedFields({"moe.balancing": "none" if types[0] == "sinkhorn" else types[0]})


def write_balancing(recipe: Recipe) -> KeyValues:
    if recipe.moe.balancing != "bias":
        return {"moe_router_load_balancing_type": recipe.moe.balancing}
    return {
        "moe_router_load_balancing_type": "seq_aux_loss" if recipe.moe.aux_loss else "none",
        "moe_router_enable_expert_bias": True,
        "moe_router_score_function": "sigmoid",
    }


def read_dispatcher(raw: RawValues, recipe: Recipe) -> MappedFields:
    """The flex dispatcher is selected by its backend, DeepEP by default."""
    backend = _text(raw, "moe_flex_dispatcher_backend").lower()
    dispatcher_type = _text(raw, "moe_token_dispatcher_type").lower() or ("flex" if backend else "allgather")
    if dispatcher_type not in ("allgather", "alltoall", "flex"):
        raise unknown("moe_token_dispatcher_type", dispatcher_type, ("allgather", "alltoall", "flex"))
    if dispatcher_type != "flex":
        return MappedFields({"moe.dispatcher": dispatcher_type})
    return MappedFields({"moe.dispatcher": "hybridep" if backend == "hybridep" else "deepep"})


def write_dispatcher(recipe: Recipe) -> KeyValues:
    return dispatcher_keys(recipe.moe.dispatcher)


def read_mtp(raw: RawValues, recipe: Recipe) -> MappedFields:
    """The MTP loss weight applies only if there are MTP layers."""
    layers, weight = _text(raw, "mtp_num_layers"), _text(raw, "mtp_loss_scaling_factor")
    if "mtp_num_layers" not in raw:
        return MappedFields({"train.mtp_loss": weight})
    return MappedFields({"train.mtp_loss": (weight or "0.1") if layers not in ("", "0") else "0"})


def write_mtp(recipe: Recipe) -> KeyValues:
    return {"mtp_loss_scaling_factor": recipe.train.mtp_loss} if recipe.train.mtp_loss else {}


def parse_blend(paths: list[str]) -> tuple[str, dict[str, float]]:
    """Return the dataset, or the weights by path, of a --data-path list."""
    blend = listed_weights(paths)
    return ("", blend) if blend else (" ".join(paths), {})


def read_data(raw: RawValues, recipe: Recipe) -> MappedFields:
    if _is_on(raw, "mock_data"):
        return MappedFields({"data.dataset": "mock"})
    dataset, blend = parse_blend(split_list(_text(raw, "data_path") or _text(raw, "train_data_path")))
    if blend:
        return MappedFields({"data.blend": ",".join(f"{path}:{weight}" for path, weight in blend.items())})
    dataset = dataset or next(filter(None, (_text(raw, key) for key in DATA_LISTS.values())), "")
    return MappedFields({"data.dataset": dataset} if dataset else {})


DATA_LISTS = {".txt": "data_args_path", ".json": "per_split_data_args_path"}
"""Flags of files that name the token files, by suffix."""


def write_data(recipe: Recipe) -> KeyValues:
    if recipe.data.blend:
        return {"data_path": [text for path, weight in recipe.data.blend.items() for text in (repr(weight), path)]}
    dataset = recipe.data.dataset
    if (flag := DATA_LISTS.get(PurePath(dataset).suffix)) is not None:
        return {flag: dataset}
    return {"mock_data": True} if dataset == "mock" else {"data_path": [dataset]}


def split_text(validation: float) -> str:
    """Return the split into training, validation and test for a part for validation: 99,1,0."""
    held_out = f"{100 * validation:.10f}".rstrip("0").rstrip(".")
    rest = f"{100 - 100 * validation:.10f}".rstrip("0").rstrip(".")
    return f"{rest},{held_out},0"


def validation_part(split: str) -> float:
    """Return the validation fraction of a split such as 99,1,0."""
    parts = [float(part) for part in re.findall(r"\d+\.?\d*|\.\d+", split)]
    total = sum(parts)
    share = parts[1] / total if len(parts) > 1 and total > 0 else 0.0
    return share if 0 <= share < 1 else 0.0


def read_sft(raw: RawValues, recipe: Recipe) -> MappedFields:
    """The SFT dataset always packs."""
    return MappedFields({"data.packing": "true" if _is_on(raw, "sft") else "false"})


def write_sft(recipe: Recipe) -> KeyValues:
    if recipe.data.packing != (recipe.goal == "sft"):
        raise InputError(
            "must be true for SFT and false otherwise: Megatron-LM packs exactly with --sft", field="data.packing"
        )
    return {"sft": True} if recipe.goal == "sft" else {}


def read_checkpoint(raw: RawValues, recipe: Recipe) -> MappedFields:
    """Weights come from --pretrained-checkpoint, or from a --load that is not --save; --load of --save resumes."""
    save, load, finetune = _text(raw, "save"), _text(raw, "load"), _is_on(raw, "finetune")
    other = bool(load) and load != save  # its weights; every restart would load them again
    named = _text(raw, "pretrained_checkpoint")
    fields = {"checkpoint.pretrained": named or (load if finetune or (save and other) else "")}
    if not save:
        return MappedFields(fields)
    # A folder that also has the initial weights is not kept: without --finetune, they would be resumed.
    kept = "" if finetune and not other and not named else save
    resumes = "true" if load and not finetune else "false"
    return MappedFields({**fields, "checkpoint.resume": resumes, "checkpoint.folder": kept})


def write_checkpoint(recipe: Recipe) -> KeyValues:
    keys: dict[str, Any] = {}
    if recipe.checkpoint.save_every:
        keys["save"] = recipe.checkpoint.folder or f"checkpoints/{recipe.name or 'run'}"
        if recipe.checkpoint.resume:
            keys["load"] = keys["save"]
    if recipe.checkpoint.pretrained:
        keys["pretrained_checkpoint"] = recipe.checkpoint.pretrained
    return keys


def read_eval(raw: RawValues, recipe: Recipe) -> MappedFields:
    """Zero eval iterations disable evaluation."""
    every, steps = _text(raw, "eval_interval"), raw.get("eval_iters", "")
    if "eval_iters" in raw and (is_null(steps) or steps.strip() == "0" or steps.strip().startswith("-")):
        if every and not is_null(every) and not every.strip().startswith("-"):
            as_count("eval_interval", every)  # the parser reads it all the same
        return MappedFields({"train.eval_every": "0", "train.eval_steps": "0"})
    fields = {"train.eval_steps": steps} if steps else {}
    return MappedFields({**fields, "train.eval_every": every or "0"} if "eval_interval" in raw else fields)


def write_eval(recipe: Recipe) -> KeyValues:
    every, steps = recipe.train.eval_every, recipe.train.eval_steps
    # eval_steps=0 is the whole set; there, 0 turns validation off.
    return {"eval_interval": every or None, "eval_iters": steps or (None if every else 0)}
