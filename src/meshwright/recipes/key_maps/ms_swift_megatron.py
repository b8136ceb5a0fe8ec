"""Key map of `megatron sft` of ms-swift 4: Megatron-LM's arguments with the names and defaults of its own parser."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from meshwright.errors import InputError
from meshwright.recipes.key_maps import megatron_lm
from meshwright.recipes.key_maps.key import CompositeKey, ConfigKey, MappedFields, RawValues
from meshwright.recipes.types import Recipe

NAMES: Mapping[str, str] = {
    "num_virtual_stages_per_pipeline_rank": "virtual_pipeline_model_parallel_size",
    "seq_length": "max_length",
    "num_workers": "dataloader_num_workers",
    "save_interval": "save_steps",
    "log_interval": "logging_steps",
    "eval_interval": "eval_steps",
}
"""Argument of Megatron-LM → its name in ms-swift, where that differs."""
OFF = {"recompute_granularity": "none"}  # values that turn off what is on where the argument is missing
DEFAULTS: Mapping[str, Any] = {
    "micro_batch_size": 1,
    "global_batch_size": 16,
    "max_length": msgspec.UNSET,  # that of the model
    "recompute_granularity": "selective",
    "recompute_modules": None,
    "lr_decay_style": "cosine",
    "min_lr": 0.0,
    "weight_decay": 0.1,
    "adam_beta2": 0.95,
    "calculate_per_token_loss": True,
    "seed": 42,
    "bf16": True,  # as published weights are
    "use_distributed_optimizer": True,
    "expert_tensor_parallel_size": 1,
    "attention_backend": "flash",
    "cross_entropy_loss_fusion": True,
    "moe_router_dtype": "fp32",
    "moe_token_dispatcher_type": "alltoall",
    "moe_grouped_gemm": True,
    "dataloader_num_workers": 4,
    "save_steps": 500,
    "logging_steps": 5,
    "eval_iters": -1,
}
"""Its defaults where they are not those of Megatron-LM (swift/megatron/arguments/megatron_args.py)."""
SHARED = frozenset((
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
    "expert_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel",
    "num_virtual_stages_per_pipeline_rank", "pipeline_model_parallel_layout", "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers", "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split", "cp_comm_type", "use_distributed_optimizer", "use_megatron_fsdp",
    "data_parallel_sharding_strategy", "overlap_grad_reduce", "overlap_param_gather", "tp_comm_overlap",
    "micro_batch_size", "global_batch_size", "seq_length", "train_iters", "optimizer", "lr", "min_lr",
    "lr_decay_style", "lr_warmup_iters", "lr_warmup_fraction", "lr_decay_iters", "lr_wsd_decay_iters",
    "lr_wsd_decay_style", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad", "muon_momentum",
    "muon_num_ns_steps", "calculate_per_token_loss", "seed", "bf16", "fp16", "main_grads_dtype", "main_params_dtype",
    "exp_avg_dtype", "fp8_format", "fp8_recipe", "fp8_param_gather", "fp4_format", "recompute_granularity",
    "recompute_method", "recompute_num_layers", "recompute_modules", "optimizer_cpu_offload", "attention_backend",
    "cross_entropy_loss_fusion", "cross_entropy_fusion_impl", "moe_router_load_balancing_type", "moe_aux_loss_coeff",
    "moe_z_loss_coeff", "moe_expert_capacity_factor", "moe_router_dtype", "moe_token_dispatcher_type",
    "moe_enable_deepep", "moe_grouped_gemm", "moe_shared_expert_overlap", "num_workers", "save_interval",
    "async_save", "eval_interval", "eval_iters", "log_interval",
))  # fmt: skip
"""Arguments of Megatron-LM, by its names, that ms-swift's parser has too."""


def _renamed(row: ConfigKey) -> ConfigKey:
    name = NAMES.get(row.key, row.key)
    return msgspec.structs.replace(row, key=name, default=DEFAULTS.get(name, row.default), note="", choices=())


KEYS = (
    *(_renamed(row) for row in megatron_lm.KEYS if row.key in SHARED),
    ConfigKey("num_train_epochs", "train.epochs"),
    ConfigKey("packing", "data.packing", default=False),
)
_KNOWN = {row.key: row for row in KEYS}
_THEIRS = {name: key for key, name in NAMES.items()}


def _composite(one: CompositeKey) -> CompositeKey:
    """Return arguments of Megatron-LM that are read together under ms-swift's names; what is on is written as off."""
    keys = tuple(NAMES.get(key, key) for key in one.keys if key in SHARED)

    def read(raw: RawValues, recipe: Recipe) -> MappedFields:
        return one.read({_THEIRS.get(key, key): value for key, value in raw.items()}, recipe)

    def write(recipe: Recipe) -> Mapping[str, Any]:
        written = {} if one.write is None else one.write(recipe)
        found = {NAMES.get(key, key): OFF.get(key) if value is None else value for key, value in written.items()}
        if lost := next((key for key in found if key not in _KNOWN), ""):
            raise InputError(f"ms-swift has no {lost}", field=one.fields[0])
        on = [key for key in keys if _KNOWN[key].default is True and key not in found]
        return {
            **dict.fromkeys(on, False),
            **{key: OFF[key] for key in keys if key in OFF and key not in found},
            **found,
        }

    return CompositeKey(keys, one.fields, read, None if one.write is None else write)


def _read_compute(raw: RawValues, recipe: Recipe) -> MappedFields:
    """bf16 unless fp16 is set: the weights are loaded in the dtype of the model, bf16 of nearly all."""
    is_half = raw.get("fp16", "").lower() == "true"
    return MappedFields({"precision.compute": "fp16" if is_half else "bf16"})


def _write_compute(recipe: Recipe) -> Mapping[str, Any]:
    if recipe.precision.compute == "fp32":
        raise InputError("ms-swift computes in bf16 or fp16", field="precision.compute")
    return {recipe.precision.compute: True}


COMPOSITE_KEYS: tuple[CompositeKey, ...] = (
    *(_composite(one) for one in megatron_lm.COMPOSITE_KEYS if set(one.keys) & SHARED and "bf16" not in one.keys),
    CompositeKey(("bf16", "fp16"), ("precision.compute",), _read_compute, _write_compute),
)
