"""Key map of DeepSpeed's JSON config (0.19.8, 2026)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from meshwright.errors import InputError, unknown
from meshwright.recipes.key_maps import shared_composite_keys as shared
from meshwright.recipes.key_maps.key import CompositeKey, ConfigKey, MappedFields, RawValues, to_framework_name
from meshwright.recipes.types import Recipe

ZERO, OFFLOAD_OPTIMIZER, OFFLOAD_PARAM = (
    "zero_optimization.",
    "zero_optimization.offload_optimizer.",
    "zero_optimization.offload_param.",
)
CLIPPING_NOTE = "1.0 since 0.19.7, no clipping before"
REMOVED_IN = "0.19"


def _bool_keys(prefix: str, names: str, default: bool | None = False) -> tuple[ConfigKey, ...]:
    return tuple(ConfigKey(prefix + name, default=default, type="bool") for name in names.split())


def _typed_keys(
    prefix: str, names: str, value_type: Literal["int", "float", "str", "bool", "list", "map", ""]
) -> tuple[ConfigKey, ...]:
    return tuple(ConfigKey(prefix + name, type=value_type) for name in names.split())


def _removed(key: str, note: str, instead: str = "", until: str = REMOVED_IN) -> ConfigKey:
    return ConfigKey(key, status="removed", until=until, note=note, replacement=instead)


BF16 = ("bf16", "bfloat16")
LOSS_SCALE = ("auto_cast", "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis",
    "consecutive_hysteresis", "min_loss_scale")  # fmt: skip
"""Keys of fp16 that releases before 0.17.1 ignored in the section of bf16."""
ZERO_STAGES = {0: ("ddp", True), 1: ("zero1", True), 2: ("fsdp2", False), 3: ("fsdp2", True)}
"""ZeRO stage → (layout.strategy, reshard_after_forward): stage 2 shards everything except parameters."""
DEEPSPEED_OPTIMIZERS = ("Adam", "AdamW", "Adagrad", "Lamb", "Lion", "Muon", "MuAdam", "MuAdamW", "MuSGD")
"""DeepSpeed's own optimizers; case-insensitive."""
TORCH_OPTIMIZERS = (
    "SGD",
    "RMSprop",
    "NAdam",
    "RAdam",
    "Adamax",
    "Adadelta",
    "ASGD",
    "Rprop",
    "LBFGS",
    "SparseAdam",
    "Adafactor",
)
"""Optimizers taken from torch; case-sensitive."""
REMOVED_OPTIMIZERS = ("OneBitAdam", "OneBitLamb", "ZeroOneAdam")
OPTIMIZER_NAMES = {"adamw": "adamw", "adam": "adamw", "lion": "lion", "muon": "muon", "sgd": "sgd"}
LR_SCHEDULERS = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
UNMAPPED_LR_SCHEDULERS = ("OneCycle", "LRRangeTest")
DTYPES: Mapping[str, str] = {
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), "fp32"),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), "fp16"),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), "bf16"),
}
"""Dtype names."""

COMMUNICATION_DTYPES = ("bf16", "fp32", "fp16")
"""Dtype names accepted for communication."""

KEYS: tuple[ConfigKey, ...] = (
    ConfigKey("train_batch_size", type="int", note="micro batch × accumulation × data-parallel ranks"),
    ConfigKey("train_micro_batch_size_per_gpu", type="int"),
    ConfigKey("gradient_accumulation_steps", type="int"),
    ConfigKey("gradient_clipping", "optimizer.clip_grad", default=1.0, note=CLIPPING_NOTE),
    ConfigKey("steps_per_print"),
    ConfigKey("optimizer.type", type="str"),
    ConfigKey("optimizer.params.lr", "optimizer.lr"),
    ConfigKey("optimizer.params.betas", type="list"),
    ConfigKey("optimizer.params.eps", "optimizer.eps"),
    ConfigKey("optimizer.params.weight_decay", "optimizer.weight_decay"),
    *_bool_keys(
        "optimizer.params.",
        "torch_adam adam_w_mode bias_correction amsgrad set_grad_none fp32_optimizer_states nesterov centered "
        "maximize foreach fused capturable differentiable decoupled_weight_decay",
        None,
    ),
    *_typed_keys("optimizer.params.", "momentum dampening alpha rho lambd t0 lr_decay max_coeff min_coeff", "float"),
    *_typed_keys("optimizer.params.", "muon_lr adam_lr initial_accumulator_value momentum_decay", "float"),
    *_typed_keys("optimizer.params.", "ns_method ns_steps etas step_sizes", ""),
    _removed("optimizer.params.max_grad_norm", "clipping is set at the top level", '"gradient_clipping": …', ""),
    ConfigKey("optimizer.legacy_fusion", default=False, type="bool"),
    ConfigKey("scheduler.type", type="str"),
    ConfigKey("scheduler.params.warmup_min_lr", type="float",
              note="start of the warmup; WarmupDecayLR also ends there"),
    ConfigKey("scheduler.params.warmup_max_lr", type="float", note="the peak; overrides the optimizer's lr"),
    ConfigKey("scheduler.params.warmup_num_steps", type="int"),
    ConfigKey("scheduler.params.total_num_steps", type="int"),
    ConfigKey("scheduler.params.warmup_type", default="log", choices=("log", "linear")),
    ConfigKey("scheduler.params.warmup_min_ratio", type="float"),
    ConfigKey("scheduler.params.cos_min_ratio", type="float"),
    ConfigKey("scheduler.params.last_batch_iteration", type="int"),
    *_typed_keys(
        "scheduler.params.",
        "lr_range_test_min_lr lr_range_test_step_size lr_range_test_step_rate cycle_min_lr cycle_max_lr decay_lr_rate "
        "cycle_min_mom cycle_max_mom decay_mom_rate",
        "",
    ),
    *_typed_keys(
        "scheduler.params.",
        "cycle_first_step_size cycle_second_step_size cycle_first_stair_count cycle_second_stair_count decay_step_size",
        "int",
    ),
    *_bool_keys("scheduler.params.", "lr_range_test_staircase cycle_momentum", None),
    *_bool_keys(
        "bf16.",
        "enabled immediate_grad_update bf16_master_weights_and_grads bf16_optimizer_states",
    ),
    ConfigKey("bf16.check_grad_overflow", default=True, type="bool", since="0.18"),
    *_bool_keys("bfloat16.", "enabled immediate_grad_update"),
    *(_removed(f"{part}.{key}", "only fp16 has a loss scale", until="0.17.1") for part in BF16 for key in LOSS_SCALE),
    *_bool_keys("fp16.", "enabled auto_cast consecutive_hysteresis fp16_master_weights_and_grads"),
    ConfigKey("fp16.loss_scale", default=0, type="float"),
    ConfigKey("fp16.initial_scale_power", default=16, type="float"),
    ConfigKey("fp16.loss_scale_window", default=1000, type="float"),
    ConfigKey("fp16.hysteresis", default=2, type="float"),
    ConfigKey("fp16.min_loss_scale", default=1, type="float"),
    ConfigKey("torch_autocast.enabled", default=False, type="bool", since="0.16.8"),
    ConfigKey("torch_autocast.dtype", type="str"),
    ConfigKey("torch_autocast.lower_precision_safe_modules", type="list"),
    ConfigKey("data_types.grad_accum_dtype", type="str", note="unset: the parameter dtype"),
    *_typed_keys("data_types.", "param_dtype buffer_dtype keep_in_fp32_modules", ""),
    ConfigKey("communication_data_type", type="str", note="unset: the parameter dtype"),
    ConfigKey("seq_parallel_communication_data_type", choices=COMMUNICATION_DTYPES),
    ConfigKey("zero_optimization.stage", default=0, type="int"),
    *_bool_keys(ZERO, "contiguous_gradients reduce_scatter use_multi_rank_bucket_allreduce allgather_partitions", True),
    *_bool_keys(ZERO, "load_from_fp32_weights ignore_unused_parameters memory_efficient_linear", True),
    *_bool_keys(ZERO, "override_module_apply compute_grad_norm", True),
    ConfigKey("zero_optimization.overlap_comm", type="bool", note="unset: on with stage 3 only"),
    *_bool_keys(ZERO, "round_robin_gradients zero_quantized_weights zero_quantized_nontrainable_weights"),
    *_bool_keys(ZERO, "zero_quantized_gradients pipeline_loading_checkpoint log_trace_cache_warnings"),
    *_bool_keys(ZERO, "enable_sanity_checks save_muon_momentum_buffer_in_memory"),
    *_bool_keys(ZERO, "stage3_gather_16bit_weights_on_model_save"),
    *_bool_keys(ZERO, "gather_16bit_weights_on_model_save stage3_use_all_reduce_for_fetch_params"),
    *_bool_keys(ZERO, "stage3_allgather_sequential allgather_sequential use_all_reduce_for_fetch_params"),
    *_typed_keys(ZERO, "reduce_bucket_size allgather_bucket_size sub_group_size zero_hpz_partition_size", "int"),
    *_typed_keys(ZERO, "stage3_prefetch_bucket_size stage3_param_persistence_threshold stage3_max_live_parameters",
                 "int"),
    *_typed_keys(ZERO, "stage3_max_reuse_distance stage3_model_persistence_threshold prefetch_bucket_size", "int"),
    *_typed_keys(ZERO, "stage3_module_granularity_threshold", "int"),
    *_typed_keys(ZERO, "param_persistence_threshold model_persistence_threshold max_live_parameters", "int"),
    *_typed_keys(ZERO, "max_reuse_distance module_granularity_threshold", "int"),
    *_bool_keys(ZERO, "cpu_offload cpu_offload_param", None),
    *_bool_keys(ZERO, "stage3_gather_fp16_weights_on_model_save parameter_alignment"),
    ConfigKey("zero_optimization.elastic_checkpoint", default=False, type="bool"),
    ConfigKey(
        "zero_optimization.cpu_offload_use_pin_memory",
        type="bool",
        status="ignored",
        note="replaced by pin_memory in offload_optimizer and offload_param",
        replacement='"zero_optimization": {"offload_optimizer": {"pin_memory": …}}',
    ),
    ConfigKey("zero_optimization.legacy_stage1", status="removed", until="0.5.8",
              note="the original ZeRO-1 was removed"),
    *_typed_keys(ZERO, "leaf_module.classes leaf_module.names leaf_module.name_suffixes", ""),
    _removed("compile.enabled", "torch.compile is enabled in the program: engine.compile()", until=""),
    _removed("compile.backend", "torch.compile is enabled in the program: engine.compile(backend=…)", until=""),
    _removed("compile.disable", "torch.compile is enabled in the program", until=""),
    _removed("zero_optimization.mics_shard_size", "MiCS was removed; ZeRO-3 shards over all ranks"),
    _removed("zero_optimization.mics_hierarchical_params_gather", "MiCS was removed"),
    _removed("zero_optimization.zeropp_loco_param", "LoCo was removed from ZeRO++"),
    ConfigKey("zero_optimization.offload_optimizer.device", default="none", choices=("none", "cpu", "nvme")),
    ConfigKey("zero_optimization.offload_optimizer.nvme_path", type="str"),
    *_typed_keys(OFFLOAD_OPTIMIZER, "buffer_count", "int"),
    *_typed_keys(OFFLOAD_OPTIMIZER, "ratio cpuadam_cores_perc", "float"),
    ConfigKey("zero_optimization.offload_optimizer.pin_memory", default=True, type="bool"),
    *_bool_keys(OFFLOAD_OPTIMIZER, "pipeline_read pipeline_write fast_init super_offload"),
    ConfigKey("zero_optimization.offload_param.device", default="none", choices=("none", "cpu", "nvme")),
    ConfigKey("zero_optimization.offload_param.nvme_path", type="str"),
    *_typed_keys(OFFLOAD_PARAM, "buffer_count buffer_size max_in_cpu", "int"),
    *_bool_keys(OFFLOAD_PARAM, "pin_memory", True),
    ConfigKey("tensor_parallel.autotp_size", type="int", default=0, since="0.16.4",
              note="0 and 1: no tensor parallelism"),
    ConfigKey("tensor_parallel.tp.tp_size", type="int"),
    *_typed_keys("tensor_parallel.", "preset_model dtype vocab_parallel_ce_backend", "str"),
    *_bool_keys("tensor_parallel.", "tp_overlap_comm keep_module_on_host replace_with_kernel_inject kernel_inject"),
    *_bool_keys("tensor_parallel.", "vocab_parallel_lm_head", None),
    *_typed_keys("tensor_parallel.", "injection_policy_tuple", "list"),
    ConfigKey("expert_parallel.enabled", default=False, type="bool", since="0.19"),
    ConfigKey("expert_parallel.autoep_size", default=1, type="int"),
    ConfigKey("sequence_parallel_size", type="int", note="Ulysses: ranks per sequence"),
    ConfigKey("data_parallel_size", type="int"),
    ConfigKey("pipeline.stages", note="set by the program's PipelineModule; auto uses that"),
    *_bool_keys("pipeline.", "seed_layers", None),
    *_bool_keys("pipeline.", "pipe_partitioned grad_partitioned", True),
    *_typed_keys("pipeline.", "partition", "str"),
    *_typed_keys("pipeline.", "activation_checkpoint_interval", "int"),
    *_bool_keys(
        "activation_checkpointing.",
        "partition_activations cpu_checkpointing contiguous_memory_optimization profile",
    ),
    ConfigKey("activation_checkpointing.synchronize_checkpoint_boundary", default=False, type="bool"),
    ConfigKey("activation_checkpointing.number_checkpoints", default=None),
    *_bool_keys("", "prescale_gradients dump_state disable_allgather disable_python_gc wall_clock_breakdown"),
    *_bool_keys("", "memory_breakdown zero_allow_untested_optimizer dataloader_drop_last"),
    *_bool_keys("", "use_data_before_expert_parallelism"),
    *_bool_keys("", "zero_force_ds_cpu_optimizer managed_gradient_accumulation", True),
    *_bool_keys(
        "compile.",
        "deepcompile autoep_non_moe free_activation offload_activation offload_opt_states symmetric_memory debug_log "
        "offload_parameters sync_before_reduce sync_after_reduce sync_before_allgather sync_after_allgather "
        "keep_all_input_tensors",
    ),
    *_bool_keys("compile.", "offload_activation_pin_memory double_buffer keep_int_input_tensors", True),
    ConfigKey("compile.free_activation_threshold", type="int"),
    ConfigKey("compile.passes", type="list"),
    *_bool_keys("hybrid_engine.", "enabled release_inference_cache enable_cuda_graph"),
    ConfigKey("hybrid_engine.pin_parameters", default=True, type="bool"),
    *_typed_keys("hybrid_engine.", "max_out_tokens inference_tp_size tp_gather_partition_size", "int"),
    *_bool_keys("comms_logger.", "enabled verbose debug"),
    *_bool_keys("comms_logger.", "prof_all", True),
    ConfigKey("comms_logger.prof_ops", type="list"),
    *_bool_keys("tensorboard.", "enabled"),
    *_typed_keys("tensorboard.", "output_path job_name", "str"),
    *_bool_keys("csv_monitor.", "enabled"),
    *_typed_keys("csv_monitor.", "output_path job_name", "str"),
    *_bool_keys("wandb.", "enabled"),
    *_typed_keys("wandb.", "group team project", "str"),
    *_bool_keys("comet.", "enabled"),
    *_bool_keys("comet.", "online", None),
    *_typed_keys("comet.", "project workspace api_key experiment_name experiment_key mode", "str"),
    ConfigKey("comet.samples_log_interval", default=100, type="int"),
    ConfigKey("gradient_predivide_factor", default=1.0, type="float"),
    ConfigKey("gradient_allreduce_op", default="mean", choices=("mean", "sum"), since="0.19"),
    ConfigKey("vocabulary_size", type="int"),
    ConfigKey("log_level", type="str"),
    ConfigKey("checkpoint.tag_validation", default="WARN", choices=("WARN", "IGNORE", "FAIL")),
    *_bool_keys("checkpoint.", "load_universal use_node_local_storage"),
    ConfigKey("checkpoint.parallel_write.pipeline_stage", default=False, type="bool"),
    _removed("nebula", "Nebula was removed; checkpoints are written to disk"),
    _removed("compression_training", "the compression library was removed"),
    _removed("amp", "Apex AMP was removed", '"bf16": {"enabled": true}'),
    _removed("quantize_training", "quantized training was removed"),
    _removed("sparse_gradients", "not needed: gradients of embeddings with sparse=True are always sent sparse"),
    _removed("eigenvalue", "removed together with quantized training"),
    _removed("sparse_attention", "sparse attention was removed"),
    _removed("elasticity", "elastic training was removed", '"train_batch_size": N'),
    _removed("graph_harvesting", "CUDA graph harvesting was removed"),
    _removed("curriculum_learning", "moved to data_efficiency",
             '"data_efficiency": {"data_sampling": {"curriculum_learning": {"enabled": true}}}'),
    _removed("progressive_layer_drop", "progressive layer drop was removed"),
)  # fmt: skip


def _positive_int(raw: RawValues, key: str) -> int | None:
    return None if shared.is_null(raw.get(key, "")) else shared.as_count(key, raw[key], least=1)


def _read_batch(raw: RawValues, recipe: Recipe) -> MappedFields:
    """Explicit sizes only; sizes that depend on the number of GPUs are filled in once it is known."""
    train, micro = _positive_int(raw, "train_batch_size"), _positive_int(raw, "train_micro_batch_size_per_gpu")
    _positive_int(raw, "gradient_accumulation_steps")
    fields = {"train.global_batch_size": train, "layout.micro_batch_size": micro}
    return MappedFields({field: str(value) for field, value in fields.items() if value})


def _write_batch(recipe: Recipe) -> Mapping[str, Any]:
    return {
        "train_batch_size": recipe.train.global_batch_size,
        "train_micro_batch_size_per_gpu": recipe.layout.micro_batch_size,
    }


def _read_stage(raw: RawValues, recipe: Recipe) -> MappedFields:
    key = "zero_optimization.stage"
    stage = shared.as_count(key, raw[key])
    if stage not in ZERO_STAGES:
        raise InputError("must be 0, 1, 2 or 3", field=key, value=stage, fix=[f"{key}=3"])
    strategy, reshard = ZERO_STAGES[stage]
    return MappedFields({"layout.strategy": strategy, "layout.reshard_after_forward": str(reshard).lower()})


def zero_stage(recipe: Recipe) -> int:
    """Return the ZeRO stage of a recipe."""
    wanted = (recipe.layout.strategy, recipe.layout.reshard_after_forward or recipe.layout.strategy != "fsdp2")
    stage_number = next((stage for stage, layout in ZERO_STAGES.items() if layout == wanted), None)
    if stage_number is None:
        raise InputError("has no ZeRO stage", field="layout.strategy", value=recipe.layout.strategy)
    return stage_number


def _read_offload(raw: RawValues, recipe: Recipe) -> MappedFields:
    """Parameters are offloaded with stage 3 only; offloading them is assumed to offload the optimizer too."""
    for part in ("offload_optimizer", "offload_param"):
        key = f"zero_optimization.{part}.device"
        if not shared.is_null(raw.get(key, "")) and raw[key] not in ("cpu", "nvme"):
            raise unknown(key, raw[key], ("none", "cpu", "nvme"))
    params_offloadable = recipe.layout.strategy == "fsdp2" and recipe.layout.reshard_after_forward
    if params_offloadable and _offloads(raw, "offload_param.device", "cpu_offload_param"):
        return MappedFields({"layout.offload": "params"})
    offloaded = recipe.layout.strategy != "ddp" and _offloads(raw, "offload_optimizer.device", "cpu_offload")
    return MappedFields({"layout.offload": "optimizer" if offloaded else "none"})


def _offloads(raw: RawValues, key: str, old: str) -> bool:
    return raw.get(ZERO + key, "none") in ("cpu", "nvme") or raw.get(ZERO + old, "").lower() == "true"


def _write_offload(recipe: Recipe) -> Mapping[str, Any]:
    target = recipe.layout.offload
    if (
        target == "activations"
        or (target == "params" and zero_stage(recipe) < 3)
        or (target != "none" and not zero_stage(recipe))
    ):
        raise InputError(
            "is not available: ZeRO offloads the optimizer from stage 1, and parameters with stage 3",
            field="layout.offload",
        )
    parts = {"none": (), "optimizer": ("optimizer",), "params": ("optimizer", "param")}[target]
    return {f"zero_optimization.offload_{part}.device": "cpu" for part in parts}


def _read_precision(raw: RawValues, recipe: Recipe) -> MappedFields:
    """Gradients are accumulated and communicated in the parameter dtype unless set otherwise."""
    comm_dtype = raw.get("communication_data_type", "null").lower()
    if (
        not shared.is_null(comm_dtype) and comm_dtype not in COMMUNICATION_DTYPES
    ):  # accepts none of the other dtype names
        raise unknown("communication_data_type", comm_dtype, COMMUNICATION_DTYPES)
    on = {key for key, text in raw.items() if key.endswith(".enabled") and shared.as_bool(key, text)}
    compute = "bf16" if {"bf16.enabled", "bfloat16.enabled"} & on else "fp16" if "fp16.enabled" in on else "fp32"
    autocast_dtype = _dtype(raw, "torch_autocast.dtype", "bf16")
    if compute == "fp32" and "torch_autocast.enabled" in on:
        return MappedFields({"precision.compute": autocast_dtype, **dict.fromkeys(STATE_FIELDS, "fp32")})
    param_dtype = "fp32" if compute == "fp32" else "bf16"  # recipes have no fp16 gradients
    bf16_master = compute == "bf16" and raw.get("bf16.bf16_master_weights_and_grads", "").lower() == "true"
    bf16_moments = bf16_master and raw.get("bf16.bf16_optimizer_states", "").lower() == "true"
    return MappedFields(
        {
            "precision.compute": compute,
            "precision.master": "bf16" if bf16_master else "fp32",
            "precision.moments": "bf16" if bf16_moments else "fp32",
            "precision.grads": _grad_dtype(raw, "data_types.grad_accum_dtype", param_dtype),
            "precision.reduce": _grad_dtype(raw, "communication_data_type", param_dtype),
        }
    )


STATE_FIELDS = ("precision.master", "precision.moments", "precision.grads", "precision.reduce")


def _dtype(raw: RawValues, key: str, default: str) -> str:
    text = raw.get(key, "")
    if shared.is_null(text):
        return default
    if text.lower() not in DTYPES:
        raise unknown(key, text, DTYPES)
    return DTYPES[text.lower()]


def _grad_dtype(raw: RawValues, key: str, default: str) -> str:
    return "fp32" if _dtype(raw, key, default) == "fp32" else "bf16"


def _precision_reader(*fields: str) -> Callable[[RawValues, Recipe], MappedFields]:
    """Return a reader of some precision fields. Each is written separately, so that one failure keeps the rest."""

    def read(raw: RawValues, recipe: Recipe) -> MappedFields:
        try:
            found = _read_precision(raw, recipe)
        except InputError:
            if "precision.compute" in fields:
                raise
            return MappedFields({})  # already reported for precision.compute
        return MappedFields({key: text for key, text in found.explicit.items() if key in fields})

    return read


def _write_compute(recipe: Recipe) -> Mapping[str, Any]:
    compute = recipe.precision.compute
    return {} if compute == "fp32" else {f"{compute}.enabled": True}


def _write_master(recipe: Recipe) -> Mapping[str, Any]:
    precision = recipe.precision
    if precision.master == "fp32":
        return {}
    if precision.compute != "bf16" or not zero_stage(recipe):
        raise InputError("requires bf16 compute and ZeRO: it would stay in fp32", field="precision.master")
    return {"bf16.bf16_master_weights_and_grads": True}


def _write_moments(recipe: Recipe) -> Mapping[str, Any]:
    if recipe.precision.moments == "fp32":
        return {}
    if recipe.precision.master != "bf16" or not _write_master(recipe):
        raise InputError("requires precision.master=bf16: they would stay in fp32", field="precision.moments")
    return {"bf16.bf16_optimizer_states": True}


def _write_grads(recipe: Recipe) -> Mapping[str, Any]:
    precision = recipe.precision
    same = (precision.compute == "fp32") == (precision.grads == "fp32")
    if same:
        return {}
    if precision.compute == "fp32" or not zero_stage(recipe):
        raise InputError("must equal the parameter dtype without ZeRO", field="precision.grads")
    return {"data_types.grad_accum_dtype": "fp32"}


def _write_reduce(recipe: Recipe) -> Mapping[str, Any]:
    wanted = recipe.precision.reduce
    same = (recipe.precision.compute == "fp32") == (wanted == "fp32")
    return {} if same else {"communication_data_type": wanted}


OPTIMIZER_DEFAULTS = {
    "optimizer.lr": "0.001",
    "optimizer.weight_decay": "0",
    "optimizer.eps": "1e-8",
    "optimizer.beta1": "0.9",
    "optimizer.beta2": "0.999",
}


def _read_optimizer(raw: RawValues, recipe: Recipe) -> MappedFields:
    """Map the optimizer name; unset arguments take the optimizer's defaults."""
    name = raw["optimizer.type"]
    if name in REMOVED_OPTIMIZERS:
        raise InputError("was removed: DeepSpeed no longer has 1-bit optimizers", field="optimizer.type", value=name)
    if name.lower() not in {other.lower() for other in DEEPSPEED_OPTIMIZERS} and name not in TORCH_OPTIMIZERS:
        raise unknown("optimizer.type", name, (*DEEPSPEED_OPTIMIZERS, *TORCH_OPTIMIZERS))
    name_here = OPTIMIZER_NAMES.get(name.lower())
    fields = {} if name_here is None else {"optimizer.name": name_here}
    return MappedFields(fields, OPTIMIZER_DEFAULTS)


def _write_optimizer(recipe: Recipe) -> Mapping[str, Any]:
    names = {"adamw": "AdamW", "lion": "Lion", "muon": "Muon", "sgd": "SGD"}
    if recipe.optimizer.name not in names:
        raise InputError("is not available in DeepSpeed", field="optimizer.name")
    return {"optimizer.type": names[recipe.optimizer.name]}


def _read_schedule(raw: RawValues, recipe: Recipe) -> MappedFields:
    """The scheduler sets the peak learning rate, except WarmupCosineLR."""
    name = raw.get("scheduler.type", "")
    params = {key.rsplit(".", 1)[1]: text for key, text in raw.items()}
    if name not in LR_SCHEDULERS:
        return MappedFields({})
    fields = {
        "schedule.name": LR_SCHEDULERS[name],
        "schedule.warmup_steps": params.get("warmup_num_steps", "1000"),
        "schedule.min_lr": "0",
    }
    peak = params.get("warmup_max_lr", "0.001" if name == "WarmupDecayLR" else "null")
    if name != "WarmupCosineLR" and not shared.is_null(peak):
        fields["optimizer.lr"] = peak
    if name != "WarmupLR" and "total_num_steps" in params:
        fields |= {"train.steps": params["total_num_steps"], "schedule.decay_steps": "0"}
    if name == "WarmupDecayLR":
        fields["schedule.min_lr"] = params.get("warmup_min_lr", "0")
    if name == "WarmupCosineLR":
        ratio = shared.as_float("scheduler.params.cos_min_ratio", params.get("cos_min_ratio", "0.0001"))
        fields["schedule.min_lr"] = repr(shared.plain(ratio * recipe.optimizer.lr))
    return MappedFields(fields)


def _write_schedule(recipe: Recipe) -> Mapping[str, Any]:
    schedule, lr = recipe.schedule, recipe.optimizer.lr
    name = to_framework_name(LR_SCHEDULERS, schedule.name)
    if not name:
        raise InputError(
            "is not available: DeepSpeed has constant, linear and cosine schedulers",
            field="schedule.name",
            value=schedule.name,
        )
    if schedule.warmup_steps < 2:
        raise InputError(
            "must be at least 2: DeepSpeed's schedulers warm up for 2 steps or more", field="schedule.warmup_steps"
        )
    if schedule.decay_steps:
        raise InputError("must be 0: DeepSpeed's decay ends at the last step", field="schedule.decay_steps")
    if schedule.min_lr and name != "WarmupCosineLR":
        raise InputError("must be 0: DeepSpeed's warmup would also start at it", field="schedule.min_lr")
    params: dict[str, Any] = {"warmup_num_steps": schedule.warmup_steps, "warmup_type": "linear"}
    if name == "WarmupCosineLR":
        params["cos_min_ratio"] = float(f"{schedule.min_lr / lr:.12g}")  # 1e-6 / 1e-5 is written as 0.1
    else:
        params |= {"warmup_min_lr": 0, "warmup_max_lr": lr}
    if name != "WarmupLR":
        params["total_num_steps"] = recipe.train.steps
    return {"scheduler.type": name, **{f"scheduler.params.{key}": value for key, value in params.items()}}


def _read_tensor(raw: RawValues, recipe: Recipe) -> MappedFields:
    ((key, text),) = raw.items()
    return MappedFields({"layout.tp": str(max(1, shared.as_count(key, text)))})


def _read_experts(raw: RawValues, recipe: Recipe) -> MappedFields:
    on = shared.as_bool("expert_parallel.enabled", raw.get("expert_parallel.enabled", "false"))
    size = shared.as_count("expert_parallel.autoep_size", raw.get("expert_parallel.autoep_size", "1"), least=1)
    return MappedFields({"layout.ep": str(size if on else 1)})


def _write_experts(recipe: Recipe) -> Mapping[str, Any]:
    size = recipe.layout.ep
    return {"expert_parallel.enabled": True, "expert_parallel.autoep_size": size} if size > 1 else {}


def _read_stages(raw: RawValues, recipe: Recipe) -> MappedFields:
    text = raw["pipeline.stages"]
    return MappedFields({"layout.pp": text} if text.isascii() and text.isdigit() and int(text) else {})


def _beta_keys(recipe: Recipe) -> Mapping[str, Any]:
    if recipe.optimizer.name in ("adamw", "lion"):
        return {"optimizer.params.betas": [recipe.optimizer.beta1, recipe.optimizer.beta2]}
    return {}


PRECISION_KEYS = (
    "bf16.enabled",
    "bfloat16.enabled",
    "fp16.enabled",
    "torch_autocast.enabled",
    "torch_autocast.dtype",
    "bf16.bf16_master_weights_and_grads",
    "bf16.bf16_optimizer_states",
    "data_types.grad_accum_dtype",
    "communication_data_type",
)
COMPOSITE_KEYS: tuple[CompositeKey, ...] = (
    CompositeKey(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
        ("train.global_batch_size", "layout.micro_batch_size"), _read_batch, _write_batch),
    CompositeKey(("zero_optimization.stage",), ("layout.strategy", "layout.reshard_after_forward"), _read_stage,
        lambda recipe: {"zero_optimization.stage": zero_stage(recipe)}),
    CompositeKey(("zero_optimization.offload_optimizer.device", "zero_optimization.offload_param.device",
        "zero_optimization.cpu_offload", "zero_optimization.cpu_offload_param"), ("layout.offload",), _read_offload,
        _write_offload),
    *(
        CompositeKey(PRECISION_KEYS, (field,), _precision_reader(field), write)
        for field, write in (
            ("precision.compute", _write_compute),
            ("precision.master", _write_master),
            ("precision.moments", _write_moments),
            ("precision.grads", _write_grads),
            ("precision.reduce", _write_reduce),
        )
    ),
    CompositeKey(("optimizer.type",), ("optimizer.name",), _read_optimizer, _write_optimizer),
    CompositeKey(("optimizer.params.betas",), ("optimizer.beta1", "optimizer.beta2"), shared.betas, _beta_keys),
    CompositeKey(("scheduler.type", "scheduler.params.warmup_num_steps", "scheduler.params.warmup_max_lr",
        "scheduler.params.warmup_min_lr", "scheduler.params.total_num_steps", "scheduler.params.cos_min_ratio",
        "scheduler.params.warmup_type"),
        ("schedule.name", "schedule.warmup_steps", "schedule.min_lr", "schedule.decay_steps", "train.steps"),
        _read_schedule, _write_schedule),
    CompositeKey(("tensor_parallel.autotp_size",), ("layout.tp",), _read_tensor,
        lambda recipe: {"tensor_parallel.autotp_size": recipe.layout.tp} if recipe.layout.tp > 1 else {}),
    CompositeKey(("expert_parallel.enabled", "expert_parallel.autoep_size"), ("layout.ep",), _read_experts,
        _write_experts),
    CompositeKey(("pipeline.stages",), ("layout.pp",), _read_stages),
)  # fmt: skip
