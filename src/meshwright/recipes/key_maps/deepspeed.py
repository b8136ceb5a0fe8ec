"""DeepSpeed's JSON keys (0.19.8, 2026)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from meshwright.errors import InputError, unknown
from meshwright.recipes.key_maps import composite_keys
from meshwright.recipes.key_maps.key import CompositeKey, ConfigKey, MappedFields, Texts
from meshwright.recipes.types import Recipe

ZERO, MOVED_OPTIMIZER, MOVED_PARAMS = (
    "zero_optimization.",
    "zero_optimization.offload_optimizer.",
    "zero_optimization.offload_param.",
)
SINCE_CLIPPING = "1.0 from 0.19.7 on, no clipping before"
REMOVED = "0.19"


def _truths(prefix: str, names: str, default: bool | None = False) -> tuple[ConfigKey, ...]:
    return tuple(ConfigKey(prefix + name, default=default, takes="truth") for name in names.split())


def _several(
    prefix: str, names: str, takes: Literal["int", "float", "text", "truth", "list", "map", ""]
) -> tuple[ConfigKey, ...]:
    return tuple(ConfigKey(prefix + name, takes=takes) for name in names.split())


def _gone(key: str, note: str, instead: str = "", until: str = REMOVED) -> ConfigKey:
    return ConfigKey(key, fate="gone", until=until, note=note, instead=instead)


STAGES = {0: ("ddp", True), 1: ("zero1", True), 2: ("fsdp2", False), 3: ("fsdp2", True)}
"""ZeRO's stages as a strategy and whether gathered parameters are freed: stage 2 shares all but the parameters."""
NATIVE = ("Adam", "AdamW", "Adagrad", "Lamb", "Lion", "Muon", "MuAdam", "MuAdamW", "MuSGD")
"""Optimizers of its own, in any case of letters."""
TORCH = ("SGD", "RMSprop", "NAdam", "RAdam", "Adamax", "Adadelta", "ASGD", "Rprop", "LBFGS", "SparseAdam", "Adafactor")
"""Optimizers that it takes from torch, spelled exactly so."""
RETIRED_OPTIMIZERS = ("OneBitAdam", "OneBitLamb", "ZeroOneAdam")
OURS = {"adamw": "adamw", "adam": "adamw", "lion": "lion", "muon": "muon", "sgd": "sgd"}
SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
OTHER_SCHEDULES = ("OneCycle", "LRRangeTest")
FORMATS: Mapping[str, str] = {
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), "fp32"),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), "fp16"),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), "bf16"),
}
"""Their names of number formats."""

TRAVEL = ("bf16", "fp32", "fp16")
"""The names of formats that gradients travel in."""

WORDS: tuple[ConfigKey, ...] = (
    ConfigKey("train_batch_size", takes="int", note="micro batch × accumulation × data-parallel ranks"),
    ConfigKey("train_micro_batch_size_per_gpu", takes="int"),
    ConfigKey("gradient_accumulation_steps", takes="int"),
    ConfigKey("gradient_clipping", "optimizer.clip_grad", default=1.0, note=SINCE_CLIPPING),
    ConfigKey("steps_per_print"),
    ConfigKey("optimizer.type", takes="text"),
    ConfigKey("optimizer.params.lr", "optimizer.lr"),
    ConfigKey("optimizer.params.betas", takes="list"),
    ConfigKey("optimizer.params.eps", "optimizer.eps"),
    ConfigKey("optimizer.params.weight_decay", "optimizer.weight_decay"),
    *_truths(
        "optimizer.params.",
        "torch_adam adam_w_mode bias_correction amsgrad set_grad_none fp32_optimizer_states nesterov centered "
        "maximize foreach fused capturable differentiable decoupled_weight_decay",
        None,
    ),
    *_several("optimizer.params.", "momentum dampening alpha rho lambd t0 lr_decay max_coeff min_coeff", "float"),
    *_several("optimizer.params.", "muon_lr adam_lr initial_accumulator_value momentum_decay", "float"),
    *_several("optimizer.params.", "ns_method ns_steps etas step_sizes", ""),
    _gone("optimizer.params.max_grad_norm", "clipping is asked for at the top", '"gradient_clipping": 1.0', ""),
    ConfigKey("optimizer.legacy_fusion", default=False, takes="truth"),
    ConfigKey("scheduler.type", takes="text"),
    ConfigKey("scheduler.params.warmup_min_lr", takes="float", note="where it starts; WarmupDecayLR ends there"),
    ConfigKey("scheduler.params.warmup_max_lr", takes="float", note="the peak; it replaces the optimizer's lr"),
    ConfigKey("scheduler.params.warmup_num_steps", takes="int"),
    ConfigKey("scheduler.params.total_num_steps", takes="int"),
    ConfigKey("scheduler.params.warmup_type", default="log", choices=("log", "linear")),
    ConfigKey("scheduler.params.warmup_min_ratio", takes="float"),
    ConfigKey("scheduler.params.cos_min_ratio", takes="float"),
    ConfigKey("scheduler.params.last_batch_iteration", takes="int"),
    *_several(
        "scheduler.params.",
        "lr_range_test_min_lr lr_range_test_step_size lr_range_test_step_rate cycle_min_lr cycle_max_lr decay_lr_rate "
        "cycle_min_mom cycle_max_mom decay_mom_rate",
        "",
    ),
    *_several(
        "scheduler.params.",
        "cycle_first_step_size cycle_second_step_size cycle_first_stair_count cycle_second_stair_count decay_step_size",
        "int",
    ),
    *_truths("scheduler.params.", "lr_range_test_staircase cycle_momentum", None),
    *_truths(
        "bf16.",
        "enabled immediate_grad_update bf16_master_weights_and_grads bf16_optimizer_states",
    ),
    ConfigKey("bf16.check_grad_overflow", default=True, takes="truth", since="0.18"),
    *_truths("bfloat16.", "enabled immediate_grad_update"),
    *_truths("fp16.", "enabled auto_cast consecutive_hysteresis fp16_master_weights_and_grads"),
    ConfigKey("fp16.loss_scale", default=0, takes="float"),
    ConfigKey("fp16.initial_scale_power", default=16, takes="int"),
    ConfigKey("fp16.loss_scale_window", default=1000, takes="int"),
    ConfigKey("fp16.hysteresis", default=2, takes="int"),
    ConfigKey("fp16.min_loss_scale", default=1, takes="int"),
    ConfigKey("torch_autocast.enabled", default=False, takes="truth", since="0.16.8"),
    ConfigKey("torch_autocast.dtype", takes="text"),
    ConfigKey("torch_autocast.lower_precision_safe_modules", takes="list"),
    ConfigKey("data_types.grad_accum_dtype", takes="text", note="unsaid: that of the parameters"),
    *_several("data_types.", "param_dtype buffer_dtype keep_in_fp32_modules", ""),
    ConfigKey("communication_data_type", takes="text", note="unsaid: that of the parameters"),
    ConfigKey("seq_parallel_communication_data_type", choices=TRAVEL),
    ConfigKey("zero_optimization.stage", default=0, takes="int"),
    *_truths(ZERO, "contiguous_gradients reduce_scatter use_multi_rank_bucket_allreduce allgather_partitions", True),
    *_truths(ZERO, "load_from_fp32_weights ignore_unused_parameters memory_efficient_linear", True),
    *_truths(ZERO, "override_module_apply compute_grad_norm", True),
    ConfigKey("zero_optimization.overlap_comm", takes="truth", note="unsaid: on with stage 3 only"),
    *_truths(ZERO, "round_robin_gradients zero_quantized_weights zero_quantized_nontrainable_weights"),
    *_truths(ZERO, "zero_quantized_gradients pipeline_loading_checkpoint log_trace_cache_warnings"),
    *_truths(ZERO, "enable_sanity_checks save_muon_momentum_buffer_in_memory"),
    *_truths(ZERO, "stage3_gather_16bit_weights_on_model_save"),
    *_truths(ZERO, "gather_16bit_weights_on_model_save stage3_use_all_reduce_for_fetch_params"),
    *_truths(ZERO, "stage3_allgather_sequential allgather_sequential use_all_reduce_for_fetch_params"),
    *_several(ZERO, "reduce_bucket_size allgather_bucket_size sub_group_size zero_hpz_partition_size", "int"),
    *_several(ZERO, "stage3_prefetch_bucket_size stage3_param_persistence_threshold stage3_max_live_parameters", "int"),
    *_several(ZERO, "stage3_max_reuse_distance stage3_model_persistence_threshold prefetch_bucket_size", "int"),
    *_several(ZERO, "stage3_module_granularity_threshold", "int"),
    *_several(ZERO, "param_persistence_threshold model_persistence_threshold max_live_parameters", "int"),
    *_several(ZERO, "max_reuse_distance module_granularity_threshold", "int"),
    *_truths(ZERO, "cpu_offload cpu_offload_param", None),
    *_truths(ZERO, "stage3_gather_fp16_weights_on_model_save parameter_alignment"),
    ConfigKey("zero_optimization.elastic_checkpoint", default=False, takes="truth"),
    ConfigKey(
        "zero_optimization.cpu_offload_use_pin_memory",
        takes="truth",
        fate="ignored",
        note="its successors are pin_memory of offload_optimizer and of offload_param",
        instead='"offload_optimizer": {"pin_memory": true}',
    ),
    ConfigKey("zero_optimization.legacy_stage1", fate="gone", until="0.5.8", note="the first ZeRO-1 was taken out"),
    *_several(ZERO, "leaf_module.classes leaf_module.names leaf_module.name_suffixes", ""),
    _gone("compile.enabled", "torch.compile is asked for in the program: engine.compile()", until=""),
    _gone("compile.backend", "torch.compile is asked for in the program: engine.compile(backend=…)", until=""),
    _gone("compile.disable", "torch.compile is asked for in the program", until=""),
    _gone("zero_optimization.mics_shard_size", "MiCS was taken out; ZeRO-3 shares over all ranks"),
    _gone("zero_optimization.mics_hierarchical_params_gather", "MiCS was taken out"),
    _gone("zero_optimization.zeropp_loco_param", "LoCo was taken out of ZeRO++"),
    ConfigKey("zero_optimization.offload_optimizer.device", default="none", choices=("none", "cpu", "nvme")),
    ConfigKey("zero_optimization.offload_optimizer.nvme_path", takes="text"),
    *_several(MOVED_OPTIMIZER, "buffer_count", "int"),
    *_several(MOVED_OPTIMIZER, "ratio cpuadam_cores_perc", "float"),
    ConfigKey("zero_optimization.offload_optimizer.pin_memory", default=True, takes="truth"),
    *_truths(MOVED_OPTIMIZER, "pipeline_read pipeline_write fast_init super_offload"),
    ConfigKey("zero_optimization.offload_param.device", default="none", choices=("none", "cpu", "nvme")),
    ConfigKey("zero_optimization.offload_param.nvme_path", takes="text"),
    *_several(MOVED_PARAMS, "buffer_count buffer_size max_in_cpu", "int"),
    *_truths(MOVED_PARAMS, "pin_memory", True),
    ConfigKey("tensor_parallel.autotp_size", takes="int", default=0, since="0.16.4", note="0 and 1 do not cut"),
    ConfigKey("tensor_parallel.tp.tp_size", takes="int"),
    *_several("tensor_parallel.", "preset_model dtype vocab_parallel_ce_backend", "text"),
    *_truths("tensor_parallel.", "tp_overlap_comm keep_module_on_host replace_with_kernel_inject kernel_inject"),
    *_truths("tensor_parallel.", "vocab_parallel_lm_head", None),
    *_several("tensor_parallel.", "injection_policy_tuple", "list"),
    ConfigKey("expert_parallel.enabled", default=False, takes="truth", since="0.19"),
    ConfigKey("expert_parallel.autoep_size", default=1, takes="int"),
    ConfigKey("sequence_parallel_size", takes="int", note="Ulysses: ranks that share one sequence"),
    ConfigKey("data_parallel_size", takes="int"),
    ConfigKey("pipeline.stages", note="the program's PipelineModule decides; auto leaves it to that"),
    *_truths("pipeline.", "seed_layers", None),
    *_truths("pipeline.", "pipe_partitioned grad_partitioned", True),
    *_several("pipeline.", "partition", "text"),
    *_several("pipeline.", "activation_checkpoint_interval", "int"),
    *_truths(
        "activation_checkpointing.",
        "partition_activations cpu_checkpointing contiguous_memory_optimization profile",
    ),
    ConfigKey("activation_checkpointing.synchronize_checkpoint_boundary", default=False, takes="truth"),
    ConfigKey("activation_checkpointing.number_checkpoints", default=None),
    *_truths("", "prescale_gradients dump_state disable_allgather disable_python_gc wall_clock_breakdown"),
    *_truths("", "memory_breakdown zero_allow_untested_optimizer dataloader_drop_last"),
    *_truths("", "use_data_before_expert_parallelism"),
    *_truths("", "zero_force_ds_cpu_optimizer managed_gradient_accumulation", True),
    *_truths(
        "compile.",
        "deepcompile autoep_non_moe free_activation offload_activation offload_opt_states symmetric_memory debug_log "
        "offload_parameters sync_before_reduce sync_after_reduce sync_before_allgather sync_after_allgather "
        "keep_all_input_tensors",
    ),
    *_truths("compile.", "offload_activation_pin_memory double_buffer keep_int_input_tensors", True),
    ConfigKey("compile.free_activation_threshold", takes="int"),
    ConfigKey("compile.passes", takes="list"),
    *_truths("hybrid_engine.", "enabled release_inference_cache enable_cuda_graph"),
    ConfigKey("hybrid_engine.pin_parameters", default=True, takes="truth"),
    *_several("hybrid_engine.", "max_out_tokens inference_tp_size tp_gather_partition_size", "int"),
    *_truths("comms_logger.", "enabled verbose debug"),
    *_truths("comms_logger.", "prof_all", True),
    ConfigKey("comms_logger.prof_ops", takes="list"),
    *_truths("tensorboard.", "enabled"),
    *_several("tensorboard.", "output_path job_name", "text"),
    *_truths("csv_monitor.", "enabled"),
    *_several("csv_monitor.", "output_path job_name", "text"),
    *_truths("wandb.", "enabled"),
    *_several("wandb.", "group team project", "text"),
    *_truths("comet.", "enabled"),
    *_truths("comet.", "online", None),
    *_several("comet.", "project workspace api_key experiment_name experiment_key mode", "text"),
    ConfigKey("comet.samples_log_interval", default=100, takes="int"),
    ConfigKey("gradient_predivide_factor", default=1.0, takes="float"),
    ConfigKey("gradient_allreduce_op", default="mean", choices=("mean", "sum"), since="0.19"),
    ConfigKey("vocabulary_size", takes="int"),
    ConfigKey("log_level", takes="text"),
    ConfigKey("checkpoint.tag_validation", default="WARN", choices=("WARN", "IGNORE", "FAIL")),
    *_truths("checkpoint.", "load_universal use_node_local_storage"),
    ConfigKey("checkpoint.parallel_write.pipeline_stage", default=False, takes="truth"),
    _gone("nebula", "Nebula was taken out; checkpoints go to disk"),
    _gone("compression_training", "the compression library was taken out"),
    _gone("amp", "Apex AMP was taken out", '"bf16": {"enabled": true}'),
    _gone("quantize_training", "quantised training was taken out"),
    _gone("sparse_gradients", "gradients of embeddings made with sparse=True are sent sparse without it"),
    _gone("eigenvalue", "it went with quantised training"),
    _gone("sparse_attention", "sparse attention was taken out"),
    _gone("elasticity", "elastic training was taken out", '"train_batch_size": …'),
    _gone("graph_harvesting", "CUDA graph harvesting was taken out"),
    _gone("curriculum_learning", "it moved", '"data_efficiency": {"data_sampling": {"curriculum_learning": …}}'),
    _gone("progressive_layer_drop", "layer dropping was taken out"),
)  # fmt: skip


def _as_int(given: Texts, key: str) -> int | None:
    return None if composite_keys.null(given.get(key, "")) else composite_keys.count(key, given[key], least=1)


def _read_batch(given: Texts, recipe: Recipe) -> MappedFields:
    """What is said; what follows from the number of GPUs is filled in when that is known."""
    train, micro = _as_int(given, "train_batch_size"), _as_int(given, "train_micro_batch_size_per_gpu")
    _as_int(given, "gradient_accumulation_steps")
    said = {"train.global_batch_size": train, "layout.micro_batch_size": micro}
    return MappedFields({own: str(value) for own, value in said.items() if value})


def _write_batch(recipe: Recipe) -> Mapping[str, Any]:
    return {
        "train_batch_size": recipe.train.global_batch_size,
        "train_micro_batch_size_per_gpu": recipe.layout.micro_batch_size,
    }


def _read_stage(given: Texts, recipe: Recipe) -> MappedFields:
    key = "zero_optimization.stage"
    stage = composite_keys.count(key, given[key])
    if stage not in STAGES:
        raise InputError("ZeRO has the stages 0, 1, 2 and 3", field=key, value=stage, fix=[f"{key}=3"])
    strategy, freed = STAGES[stage]
    return MappedFields({"layout.strategy": strategy, "layout.reshard_after_forward": str(freed).lower()})


def stage_of(recipe: Recipe) -> int:
    """The ZeRO stage of a recipe."""
    wanted = (recipe.layout.strategy, recipe.layout.reshard_after_forward or recipe.layout.strategy != "fsdp2")
    found = next((stage for stage, meant in STAGES.items() if meant == wanted), None)
    if found is None:
        raise InputError("ZeRO has no stage for it", field="layout.strategy", value=recipe.layout.strategy)
    return found


def _read_offload(given: Texts, recipe: Recipe) -> MappedFields:
    """Parameters move with stage 3 only; whoever moves them is taken to move the optimizer too."""
    for part in ("offload_optimizer", "offload_param"):
        key = f"zero_optimization.{part}.device"
        if not composite_keys.null(given.get(key, "")) and given[key] not in ("cpu", "nvme"):
            raise unknown(key, given[key], ("none", "cpu", "nvme"))
    full = recipe.layout.strategy == "fsdp2" and recipe.layout.reshard_after_forward
    if full and _moves(given, "offload_param.device", "cpu_offload_param"):
        return MappedFields({"layout.offload": "params"})
    moved = recipe.layout.strategy != "ddp" and _moves(given, "offload_optimizer.device", "cpu_offload")
    return MappedFields({"layout.offload": "optimizer" if moved else "none"})


def _moves(given: Texts, key: str, old: str) -> bool:
    return given.get(ZERO + key, "none") in ("cpu", "nvme") or given.get(ZERO + old, "").lower() == "true"


def _write_offload(recipe: Recipe) -> Mapping[str, Any]:
    kind = recipe.layout.offload
    if (
        kind == "activations"
        or (kind == "params" and stage_of(recipe) < 3)
        or (kind != "none" and not stage_of(recipe))
    ):
        raise InputError(
            "ZeRO moves the optimizer from stage 1 on, and parameters with stage 3", field="layout.offload"
        )
    parts = {"none": (), "optimizer": ("optimizer",), "params": ("optimizer", "param")}[kind]
    return {f"zero_optimization.offload_{part}.device": "cpu" for part in parts}


def _read_precision(given: Texts, recipe: Recipe) -> MappedFields:
    """Gradients add up and travel in the format of the parameters unless something else is said."""
    travel = given.get("communication_data_type", "null").lower()
    if not composite_keys.null(travel) and travel not in TRAVEL:  # which knows none of the other names
        raise unknown("communication_data_type", travel, TRAVEL)
    on = {key for key, text in given.items() if key.endswith(".enabled") and composite_keys.truth(key, text)}
    compute = "bf16" if {"bf16.enabled", "bfloat16.enabled"} & on else "fp16" if "fp16.enabled" in on else "fp32"
    wanted = _named_format(given, "torch_autocast.dtype", "bf16")
    if compute == "fp32" and "torch_autocast.enabled" in on:
        return MappedFields({"precision.compute": wanted, **dict.fromkeys(SMALL, "fp32")})
    plain = "fp32" if compute == "fp32" else "bf16"  # 16 bits: there is no word of ours for gradients in fp16
    low = compute == "bf16" and given.get("bf16.bf16_master_weights_and_grads", "").lower() == "true"
    small = low and given.get("bf16.bf16_optimizer_states", "").lower() == "true"
    return MappedFields(
        {
            "precision.compute": compute,
            "precision.master": "bf16" if low else "fp32",
            "precision.moments": "bf16" if small else "fp32",
            "precision.grads": _format(given, "data_types.grad_accum_dtype", plain),
            "precision.reduce": _format(given, "communication_data_type", plain),
        }
    )


SMALL = ("precision.master", "precision.moments", "precision.grads", "precision.reduce")


def _named_format(given: Texts, key: str, otherwise: str) -> str:
    text = given.get(key, "")
    if composite_keys.null(text):
        return otherwise
    if text.lower() not in FORMATS:
        raise unknown(key, text, FORMATS)
    return FORMATS[text.lower()]


def _format(given: Texts, key: str, plain: str) -> str:
    return "fp32" if _named_format(given, key, plain) == "fp32" else "bf16"


def _reads(*own: str) -> Callable[[Texts, Recipe], MappedFields]:
    """The formats of some fields; each is written by itself, so that one without words does not cost the others."""

    def read(given: Texts, recipe: Recipe) -> MappedFields:
        try:
            found = _read_precision(given, recipe)
        except InputError:
            if "precision.compute" in own:
                raise
            return MappedFields({})  # told once is enough
        return MappedFields({key: text for key, text in found.said.items() if key in own})

    return read


def _write_compute(recipe: Recipe) -> Mapping[str, Any]:
    compute = recipe.precision.compute
    return {} if compute == "fp32" else {f"{compute}.enabled": True}


def _write_master(recipe: Recipe) -> Mapping[str, Any]:
    precision = recipe.precision
    if precision.master == "fp32":
        return {}
    if precision.compute != "bf16" or not stage_of(recipe):
        raise InputError("a master copy in bf16 needs bf16 and ZeRO", field="precision.master")
    return {"bf16.bf16_master_weights_and_grads": True}


def _write_moments(recipe: Recipe) -> Mapping[str, Any]:
    if recipe.precision.moments == "fp32":
        return {}
    if recipe.precision.master != "bf16" or not _write_master(recipe):
        raise InputError("moments in bf16 need a master copy in bf16", field="precision.moments")
    return {"bf16.bf16_optimizer_states": True}


def _write_grads(recipe: Recipe) -> Mapping[str, Any]:
    precision = recipe.precision
    same = (precision.compute == "fp32") == (precision.grads == "fp32")
    if same:
        return {}
    if precision.compute == "fp32" or not stage_of(recipe):
        raise InputError("without ZeRO gradients have the format of the parameters", field="precision.grads")
    return {"data_types.grad_accum_dtype": "fp32"}


def _write_reduce(recipe: Recipe) -> Mapping[str, Any]:
    wanted = recipe.precision.reduce
    same = (recipe.precision.compute == "fp32") == (wanted == "fp32")
    return {} if same else {"communication_data_type": wanted}


UNSAID = {
    "optimizer.lr": "0.001",
    "optimizer.weight_decay": "0",
    "optimizer.eps": "1e-8",
    "optimizer.beta1": "0.9",
    "optimizer.beta2": "0.999",
}


def _read_optimizer(given: Texts, recipe: Recipe) -> MappedFields:
    """What the optimizer would take where nothing is said of it."""
    name = given["optimizer.type"]
    if name in RETIRED_OPTIMIZERS:
        raise InputError("the optimizers with compressed traffic were taken out", field="optimizer.type", value=name)
    if name.lower() not in {each.lower() for each in NATIVE} and name not in TORCH:
        raise unknown("optimizer.type", name, (*NATIVE, *TORCH))
    ours = OURS.get(name.lower())
    said = {} if ours is None else {"optimizer.name": ours}
    return MappedFields(said, UNSAID)


def _write_optimizer(recipe: Recipe) -> Mapping[str, Any]:
    names = {"adamw": "AdamW", "lion": "Lion", "muon": "Muon", "sgd": "SGD"}
    if recipe.optimizer.name not in names:
        raise InputError("it has no such optimizer", field="optimizer.name")
    return {"optimizer.type": names[recipe.optimizer.name]}


def _read_schedule(given: Texts, recipe: Recipe) -> MappedFields:
    """The peak is the scheduler's own, except under WarmupCosineLR."""
    name = given.get("scheduler.type", "")
    params = {key.rsplit(".", 1)[1]: text for key, text in given.items()}
    if name not in SCHEDULES:
        return MappedFields({})
    said = {
        "schedule.name": SCHEDULES[name],
        "schedule.warmup_steps": params.get("warmup_num_steps", "1000"),
        "schedule.min_lr": "0",
    }
    peak = params.get("warmup_max_lr", "0.001" if name == "WarmupDecayLR" else "null")
    if name != "WarmupCosineLR" and not composite_keys.null(peak):
        said["optimizer.lr"] = peak
    if name != "WarmupLR" and "total_num_steps" in params:
        said |= {"train.steps": params["total_num_steps"], "schedule.decay_steps": "0"}
    if name == "WarmupDecayLR":
        said["schedule.min_lr"] = params.get("warmup_min_lr", "0")
    if name == "WarmupCosineLR":
        ratio = composite_keys.number("scheduler.params.cos_min_ratio", params.get("cos_min_ratio", "0.0001"))
        said["schedule.min_lr"] = repr(ratio * recipe.optimizer.lr)
    return MappedFields(said)


def _write_schedule(recipe: Recipe) -> Mapping[str, Any]:
    schedule, lr = recipe.schedule, recipe.optimizer.lr
    name = next((their for their, our in SCHEDULES.items() if our == schedule.name), "")
    if not name:
        raise InputError("its schedulers have no such shape", field="schedule.name", value=schedule.name)
    if schedule.warmup_steps < 2:
        raise InputError("its schedulers warm up for at least 2 steps", field="schedule.warmup_steps")
    if schedule.decay_steps:
        raise InputError("its decay ends with the last step", field="schedule.decay_steps")
    if schedule.min_lr and name != "WarmupCosineLR":
        raise InputError("its warm-up would start from there too", field="schedule.min_lr")
    params: dict[str, Any] = {"warmup_num_steps": schedule.warmup_steps, "warmup_type": "linear"}
    if name == "WarmupCosineLR":
        params["cos_min_ratio"] = schedule.min_lr / lr
    else:
        params |= {"warmup_min_lr": 0, "warmup_max_lr": lr}
    if name != "WarmupLR":
        params["total_num_steps"] = recipe.train.steps
    return {"scheduler.type": name, **{f"scheduler.params.{key}": value for key, value in params.items()}}


def _read_tensor(given: Texts, recipe: Recipe) -> MappedFields:
    ((key, text),) = given.items()
    return MappedFields({"layout.tp": str(max(1, composite_keys.count(key, text)))})


def _read_experts(given: Texts, recipe: Recipe) -> MappedFields:
    on = composite_keys.truth("expert_parallel.enabled", given.get("expert_parallel.enabled", "false"))
    size = composite_keys.count("expert_parallel.autoep_size", given.get("expert_parallel.autoep_size", "1"), least=1)
    return MappedFields({"layout.ep": str(size if on else 1)})


def _write_experts(recipe: Recipe) -> Mapping[str, Any]:
    size = recipe.layout.ep
    return {"expert_parallel.enabled": True, "expert_parallel.autoep_size": size} if size > 1 else {}


def _read_stages(given: Texts, recipe: Recipe) -> MappedFields:
    text = given["pipeline.stages"]
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
JOINTS: tuple[CompositeKey, ...] = (
    CompositeKey(
        ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
        ("train.global_batch_size", "layout.micro_batch_size"),
        _read_batch,
        _write_batch,
    ),
    CompositeKey(
        ("zero_optimization.stage",),
        ("layout.strategy", "layout.reshard_after_forward"),
        _read_stage,
        lambda recipe: {"zero_optimization.stage": stage_of(recipe)},
    ),
    CompositeKey(
        (
            "zero_optimization.offload_optimizer.device",
            "zero_optimization.offload_param.device",
            "zero_optimization.cpu_offload",
            "zero_optimization.cpu_offload_param",
        ),
        ("layout.offload",),
        _read_offload,
        _write_offload,
    ),
    *(
        CompositeKey(PRECISION_KEYS, (own,), _reads(own), write)
        for own, write in (
            ("precision.compute", _write_compute),
            ("precision.master", _write_master),
            ("precision.moments", _write_moments),
            ("precision.grads", _write_grads),
            ("precision.reduce", _write_reduce),
        )
    ),
    CompositeKey(("optimizer.type",), ("optimizer.name",), _read_optimizer, _write_optimizer),
    CompositeKey(
        ("optimizer.params.betas",),
        ("optimizer.beta1", "optimizer.beta2"),
        composite_keys.betas,
        _beta_keys,
    ),
    CompositeKey(
        (
            "scheduler.type",
            "scheduler.params.warmup_num_steps",
            "scheduler.params.warmup_max_lr",
            "scheduler.params.warmup_min_lr",
            "scheduler.params.total_num_steps",
            "scheduler.params.cos_min_ratio",
            "scheduler.params.warmup_type",
        ),
        (
            "schedule.name",
            "schedule.warmup_steps",
            "schedule.min_lr",
            "schedule.decay_steps",
            "train.steps",
        ),
        _read_schedule,
        _write_schedule,
    ),
    CompositeKey(
        ("tensor_parallel.autotp_size",),
        ("layout.tp",),
        _read_tensor,
        lambda recipe: {"tensor_parallel.autotp_size": recipe.layout.tp} if recipe.layout.tp > 1 else {},
    ),
    CompositeKey(
        ("expert_parallel.enabled", "expert_parallel.autoep_size"), ("layout.ep",), _read_experts, _write_experts
    ),
    CompositeKey(("pipeline.stages",), ("layout.pp",), _read_stages),
)
