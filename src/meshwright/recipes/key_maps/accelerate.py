"""Key map of Hugging Face Accelerate's YAML config (1.15, 2026)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.errors import InputError, unknown
from meshwright.recipes.key_maps import shared_composite_keys as shared
from meshwright.recipes.key_maps.deepspeed import ZERO_STAGES, zero_stage
from meshwright.recipes.key_maps.key import CompositeKey, ConfigKey, MappedFields, RawValues, to_framework_name
from meshwright.recipes.types import Recipe

DISTRIBUTED_TYPES = (
    "NO", "MULTI_GPU", "FSDP", "DEEPSPEED", "MEGATRON_LM", "MULTI_CPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA",
    "MULTI_MUSA", "MULTI_XPU", "MULTI_HPU", "MULTI_NEURON", "XLA",
)  # fmt: skip
SHARDING_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
"""FSDP1's sharding strategies, in the order of their numbers from 1."""
FSDP, ZERO, MEGATRON, PARALLELISM = "fsdp_config.", "deepspeed_config.", "megatron_lm_config.", "parallelism_config."
AXIS = f"{PARALLELISM}parallelism_config_"
DYNAMO_BACKENDS = (
    "NO", "EAGER", "AOT_EAGER", "INDUCTOR", "AOT_TS_NVFUSER", "NVPRIMS_NVFUSER", "CUDAGRAPHS", "OFI", "FX2TRT",
    "ONNXRT", "TENSORRT", "AOT_TORCHXLA_TRACE_ONCE", "TORCHXLA_TRACE_ONCE", "IPEX", "TVM", "HPU_BACKEND", "NEURON",
)  # fmt: skip
FP8_BACKENDS = {"TE": "fp8_delayed", "AO": "fp8_tensor"}
FP8 = "fp8_config."
MX_SCALING, FP8_GATHER = f"{FP8}use_mxfp8_block_scaling", f"{FP8}enable_fsdp_float8_all_gather"
"""Options of Transformer Engine and of torchao; the second is on unless a config turns it off."""
CP_COMM_STRATEGIES = {"allgather": "allgather", "alltoall": "ring"}


def _bool_keys(prefix: str, names: str) -> tuple[ConfigKey, ...]:
    return tuple(ConfigKey(prefix + name, type="bool") for name in names.split())


def _untyped_keys(prefix: str, names: str) -> tuple[ConfigKey, ...]:
    return tuple(ConfigKey(prefix + name) for name in names.split())


KEYS: tuple[ConfigKey, ...] = (
    ConfigKey("compute_environment", default="LOCAL_MACHINE", choices=("LOCAL_MACHINE", "AMAZON_SAGEMAKER")),
    ConfigKey("distributed_type", choices=DISTRIBUTED_TYPES),
    ConfigKey("num_processes", type="int", note="over all machines; if unset, --num_processes is required"),
    ConfigKey("num_machines", default=1, type="int"),
    ConfigKey("machine_rank", default=0, type="int"),
    *_untyped_keys("", "main_process_ip main_process_port gpu_ids main_training_function"),
    ConfigKey("rdzv_backend", default="static", choices=("static", "c10d", "etcd", "etcd-v2")),
    *_untyped_keys("", "same_network use_cpu debug enable_cpu_affinity"),  # any text counts as true: none is refused
    ConfigKey("mixed_precision", choices=("no", "fp16", "bf16", "fp8")),
    ConfigKey("downcast_bf16", note="read on TPUs only"),
    ConfigKey("fp16", type="bool", until="0.10", note="old form of mixed_precision: fp16"),
    ConfigKey("dynamo_backend", choices=DYNAMO_BACKENDS, until="0.15", note="now in dynamo_config"),
    ConfigKey("dynamo_config.dynamo_backend", choices=DYNAMO_BACKENDS),
    ConfigKey(
        "dynamo_config.dynamo_mode",
        default="default",
        choices=("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
    ),  # torch.compile's
    *_untyped_keys("dynamo_config.", "dynamo_use_fullgraph dynamo_use_dynamic dynamo_use_regional_compilation"),
    *_untyped_keys(
        "", "tpu_name tpu_zone tpu_use_cluster tpu_use_sudo command_file commands tpu_vm tpu_env tpu_cluster"
    ),
    ConfigKey("fsdp_config.fsdp_version", default=1, choices=("1", "2"), since="1.5"),
    ConfigKey("fsdp_config.fsdp_sharding_strategy", default="FULL_SHARD"),
    ConfigKey("fsdp_config.fsdp_reshard_after_forward", default=True, since="1.5"),
    ConfigKey("fsdp_config.fsdp_offload_params", default=False, type="bool"),
    ConfigKey("fsdp_config.fsdp_activation_checkpointing", default=False, type="bool"),
    ConfigKey("fsdp_config.fsdp_activation_checkpointing_offload", default=False, type="bool", since="1.15"),
    ConfigKey(
        "fsdp_config.fsdp_auto_wrap_policy",
        default="NO_WRAP",
        choices=("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"),
    ),
    ConfigKey("fsdp_config.fsdp_transformer_layer_cls_to_wrap", note="unset: the model's _no_split_modules"),
    ConfigKey("fsdp_config.fsdp_min_num_params", default=100_000_000, type="int"),
    ConfigKey("fsdp_config.fsdp_backward_prefetch", choices=("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH", "1", "2")),
    ConfigKey(
        "fsdp_config.fsdp_state_dict_type",
        choices=("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT", "1", "2", "3"),
    ),
    ConfigKey("fsdp_config.fsdp_forward_prefetch", default=False, type="bool"),
    ConfigKey("fsdp_config.fsdp_use_orig_params", default=True, type="bool"),
    ConfigKey("fsdp_config.fsdp_sync_module_states", default=True, type="bool"),
    ConfigKey("fsdp_config.fsdp_cpu_ram_efficient_loading", default=True, type="bool"),
    ConfigKey("fsdp_config.fsdp_ignored_modules"),
    ConfigKey(
        "fsdp_config.fsdp_backward_prefetch_policy",
        status="ignored",
        until="0.24",
        note="renamed",
        replacement="fsdp_config: {fsdp_backward_prefetch: …}",
    ),
    ConfigKey(
        "fsdp_config.fsdp_cpu_offload",
        status="ignored",
        note="there is no such key; parameters stay on the GPU",
        replacement="fsdp_config: {fsdp_offload_params: …}",
    ),
    ConfigKey("deepspeed_config.zero_stage", default=2, type="int"),
    ConfigKey("deepspeed_config.gradient_accumulation_steps", type="int"),
    ConfigKey("deepspeed_config.gradient_clipping", "optimizer.clip_grad"),
    ConfigKey("deepspeed_config.offload_optimizer_device", choices=("none", "cpu", "nvme")),
    ConfigKey("deepspeed_config.offload_param_device", choices=("none", "cpu", "nvme")),
    *_untyped_keys(
        ZERO, "offload_optimizer_nvme_path offload_param_nvme_path deepspeed_config_file deepspeed_hostfile"
    ),
    ConfigKey("deepspeed_config.zero3_init_flag", type="bool"),
    ConfigKey("deepspeed_config.zero3_save_16bit_model", type="bool"),
    ConfigKey(
        "deepspeed_config.deepspeed_multinode_launcher",
        default="pdsh",
        choices=("pdsh", "standard", "openmpi", "mvapich", "mpich", "nossh", "slurm", "impi"),
    ),
    *_untyped_keys(ZERO, "deepspeed_exclusion_filter deepspeed_inclusion_filter deepspeed_moe_layer_cls_names"),
    ConfigKey("parallelism_config.parallelism_config_dp_replicate_size", type="int", default=1, since="1.10"),
    ConfigKey("parallelism_config.parallelism_config_dp_shard_size", type="int", default=1),
    ConfigKey("parallelism_config.parallelism_config_tp_size", type="int", default=1),
    ConfigKey("parallelism_config.parallelism_config_cp_size", type="int", default=1),
    ConfigKey("parallelism_config.parallelism_config_cp_backend", default="torch", choices=("torch",)),
    ConfigKey(
        "parallelism_config.parallelism_config_cp_comm_strategy", default="allgather", choices=tuple(CP_COMM_STRATEGIES)
    ),
    ConfigKey("parallelism_config.parallelism_config_sp_size", type="int", default=1, since="1.12"),
    ConfigKey("parallelism_config.parallelism_config_sp_backend", default="deepspeed", choices=("deepspeed",)),
    *_untyped_keys(AXIS, "sp_seq_length sp_seq_length_is_variable sp_attn_implementation"),
    ConfigKey("megatron_lm_config.megatron_lm_tp_degree", type="int"),
    ConfigKey("megatron_lm_config.megatron_lm_pp_degree", type="int"),
    ConfigKey("megatron_lm_config.megatron_lm_expert_model_parallel_size", type="int"),
    ConfigKey("megatron_lm_config.megatron_lm_context_parallel_size", type="int"),
    ConfigKey("megatron_lm_config.megatron_lm_sequence_parallelism", type="bool"),
    ConfigKey("megatron_lm_config.megatron_lm_use_distributed_optimizer", type="bool"),
    ConfigKey("megatron_lm_config.megatron_lm_num_micro_batches", type="int"),
    ConfigKey("megatron_lm_config.megatron_lm_gradient_clipping"),
    ConfigKey("megatron_lm_config.megatron_lm_recompute_activations", type="bool"),
    ConfigKey("fp8_config.backend", choices=("TE", "MSAMP", "AO")),
    ConfigKey("fp8_config.fp8_backend", choices=("TE", "MSAMP", "AO")),
    *_untyped_keys(
        "fp8_config.", "use_autocast_during_eval margin interval fp8_format amax_history_len amax_compute_algo"
    ),
    *_untyped_keys("fp8_config.", "override_linear_precision opt_level optimization_level pad_inner_dim"),
    *_untyped_keys("fp8_config.", "enable_fsdp_float8_all_gather use_mxfp8_block_scaling amax_compute_algorithm"),
    *_untyped_keys("mpirun_config.", "mpirun_hostfile mpirun_ccl"),
)


def distributed_type(raw: Mapping[str, Any]) -> str:
    """Return the distributed type; PyYAML reads an unquoted NO as false."""
    text = str(raw.get("distributed_type", "NO")).upper()
    return "NO" if text == "FALSE" else text


def sharding_strategy(text: str) -> str:
    """Return FSDP1's sharding strategy by name or number."""
    plain = text.strip().upper()
    if plain.isascii() and plain.isdigit() and 1 <= int(plain) <= len(SHARDING_STRATEGIES):
        return SHARDING_STRATEGIES[int(plain) - 1]
    if plain not in SHARDING_STRATEGIES:
        raise unknown("fsdp_config.fsdp_sharding_strategy", text, SHARDING_STRATEGIES)
    return plain


def _read_strategy(raw: RawValues, recipe: Recipe) -> MappedFields:
    """Return how model state is sharded; the number of replicas follows from the machines."""
    type_name = distributed_type(raw)
    if type_name not in DISTRIBUTED_TYPES or (type_name != "NO" and raw["distributed_type"] != type_name):
        raise unknown("distributed_type", raw["distributed_type"], DISTRIBUTED_TYPES)
    if type_name == "FSDP":
        strategy, reshard = _read_fsdp(raw)
    elif type_name == "DEEPSPEED":
        key = f"{ZERO}zero_stage"
        stage = shared.as_count(key, raw[key])
        if stage not in ZERO_STAGES:
            raise InputError("must be 0, 1, 2 or 3", field=key, value=stage, fix=[f"{key}=3"])
        strategy, reshard = ZERO_STAGES[stage]
    else:
        distributed_optimizer = raw.get(f"{MEGATRON}megatron_lm_use_distributed_optimizer", "").lower() == "true"
        strategy, reshard = "zero1" if type_name == "MEGATRON_LM" and distributed_optimizer else "ddp", True
    return MappedFields({"layout.strategy": strategy, "layout.reshard_after_forward": str(reshard).lower()})


def _read_fsdp(raw: RawValues) -> tuple[str, bool]:
    if raw[f"{FSDP}fsdp_version"] != "1":
        return "fsdp2", _reshards(raw)
    strategy = sharding_strategy(raw[f"{FSDP}fsdp_sharding_strategy"])
    return "ddp" if strategy == "NO_SHARD" else "fsdp2", strategy in ("FULL_SHARD", "HYBRID_SHARD", "NO_SHARD")


def _reshards(raw: RawValues) -> bool:
    key = f"{FSDP}fsdp_reshard_after_forward"
    text = raw[key].strip().lower()
    if text not in ("true", "false", "1", "0", "yes", "no", "on", "off", "y", "n", "t", "f"):
        raise InputError("must be true or false with FSDP2", field=key, value=raw[key], fix=[f"{key}=true"])
    return text in ("true", "1", "yes", "on", "y", "t")


def uses_deepspeed(recipe: Recipe) -> bool:
    """Return whether a recipe runs with DeepSpeed: it is for that engine, or shards as only DeepSpeed does here."""
    return recipe.engine == "deepspeed" or recipe.layout.strategy == "zero1"


def _write_strategy(recipe: Recipe) -> Mapping[str, Any]:
    layout = recipe.layout
    if layout.strategy == "megatron_fsdp":
        raise InputError("is not available in Accelerate", field="layout.strategy", value=layout.strategy)
    if uses_deepspeed(recipe):
        return {"distributed_type": "DEEPSPEED", f"{ZERO}zero_stage": zero_stage(recipe)}
    if layout.strategy == "fsdp2":
        return {
            "distributed_type": "FSDP",
            f"{FSDP}fsdp_version": 2,
            f"{FSDP}fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            f"{FSDP}fsdp_reshard_after_forward": layout.reshard_after_forward,
        }
    return {"distributed_type": "MULTI_GPU"}


def _read_offload(raw: RawValues, recipe: Recipe) -> MappedFields:
    type_name, stage = distributed_type(raw), raw.get(f"{ZERO}zero_stage", "2")
    if type_name == "FSDP":
        offloads = shared.as_bool(f"{FSDP}fsdp_offload_params", raw[f"{FSDP}fsdp_offload_params"])
        return MappedFields({"layout.offload": "params" if offloads else "none"})
    devices = {part: raw.get(f"{ZERO}offload_{part}_device", "none") for part in ("optimizer", "param")}
    for part, device in devices.items():
        if not shared.is_null(device) and device not in ("cpu", "nvme"):
            raise unknown(f"{ZERO}offload_{part}_device", device, ("none", "cpu", "nvme"))
    if type_name != "DEEPSPEED" or stage == "0":
        return MappedFields({"layout.offload": "none"})
    if not shared.is_null(devices["param"]) and stage == "3":
        return MappedFields({"layout.offload": "params"})
    return MappedFields({"layout.offload": "none" if shared.is_null(devices["optimizer"]) else "optimizer"})


def _write_offload(recipe: Recipe) -> Mapping[str, Any]:
    strategy_and_offload = (recipe.layout.strategy, recipe.layout.offload)
    if uses_deepspeed(recipe) and recipe.layout.offload in ("params", "optimizer"):
        parts = ("optimizer", "param") if recipe.layout.offload == "params" else ("optimizer",)
        return {f"{ZERO}offload_{part}_device": "cpu" for part in parts}
    if strategy_and_offload == ("fsdp2", "params"):
        return {f"{FSDP}fsdp_offload_params": True}
    if recipe.layout.offload != "none":
        raise InputError(f"cannot be offloaded by Accelerate with {recipe.layout.strategy}", field="layout.offload")
    return {}


def _read_precision(raw: RawValues, recipe: Recipe) -> MappedFields:
    text = raw["mixed_precision"].lower()
    if text not in ("no", "false", "fp16", "bf16", "fp8"):
        raise unknown("mixed_precision", raw["mixed_precision"], ("no", "fp16", "bf16", "fp8"))
    backend = raw.get("fp8_config.backend", raw.get("fp8_config.fp8_backend", "")).upper()
    if text == "fp8":
        scales = backend == "TE" and shared.as_bool(MX_SCALING, raw.get(MX_SCALING, "false"))
        matmul = "mxfp8" if scales else FP8_BACKENDS.get(backend, "fp8_delayed")
        gathers = backend == "AO" and distributed_type(raw) == "FSDP" and raw.get(f"{FSDP}fsdp_version") == "2"
        gathers = gathers and shared.as_bool(FP8_GATHER, raw.get(FP8_GATHER, "true"))
        fields = {"precision.compute": "bf16", "precision.matmul": matmul}
        return MappedFields({**fields, "precision.fp8_gather": str(gathers).lower()})
    if text in ("no", "false"):  # the program may still load the model in another dtype
        return MappedFields({"precision.matmul": "same"}, {"precision.compute": "fp32"})
    return MappedFields({"precision.compute": text, "precision.matmul": "same"})


def _write_precision(recipe: Recipe) -> Mapping[str, Any]:
    compute, matmul = recipe.precision.compute, recipe.precision.matmul
    if matmul == "same":
        return {"mixed_precision": "no" if compute == "fp32" else compute}
    backend = "TE" if matmul == "mxfp8" else to_framework_name(FP8_BACKENDS, matmul)
    if not backend or compute != "bf16":
        raise InputError("is not provided by Accelerate's fp8 backends", field="precision.matmul", value=matmul)
    scaling = {MX_SCALING: True} if matmul == "mxfp8" else {}
    gathers = {FP8_GATHER: recipe.precision.fp8_gather} if backend == "AO" else {}
    return {"mixed_precision": "fp8", "fp8_config.backend": backend, **scaling, **gathers}


def _write_gather(recipe: Recipe) -> Mapping[str, Any]:
    """The key is written with the backend: a gather in fp8 is an option of torchao's."""
    if recipe.precision.fp8_gather and (recipe.precision.matmul, recipe.layout.strategy) != ("fp8_tensor", "fsdp2"):
        raise InputError("needs precision.matmul=fp8_tensor (torchao) and FSDP2", field="precision.fp8_gather")
    return {}


def _read_recompute(raw: RawValues, recipe: Recipe) -> MappedFields:
    key = f"{FSDP}fsdp_activation_checkpointing"
    on = distributed_type(raw) == "FSDP" and shared.as_bool(key, raw[key])
    return MappedFields({"layout.recompute": "full"} if on else {})


def _write_recompute(recipe: Recipe) -> Mapping[str, Any]:
    layout = recipe.layout
    if layout.recompute == "full" and layout.strategy == "fsdp2" and not uses_deepspeed(recipe):
        return {f"{FSDP}fsdp_activation_checkpointing": True}
    if layout.recompute != "none":
        raise InputError("is set by the training program: --gradient_checkpointing", field="layout.recompute")
    return {}


def _read_axes(raw: RawValues, recipe: Recipe) -> MappedFields:
    field_of = {"tp": "layout.tp", "cp": "layout.cp", "dp_replicate": "layout.dp_replicate"}
    fields = {field: raw[f"{AXIS}{name}_size"] for name, field in field_of.items() if f"{AXIS}{name}_size" in raw}
    for name, degree in (("tp", "tp_degree"), ("pp", "pp_degree"), ("ep", "expert_model_parallel_size")):
        if distributed_type(raw) == "MEGATRON_LM" and f"{MEGATRON}megatron_lm_{degree}" in raw:
            fields[f"layout.{name}"] = raw[f"{MEGATRON}megatron_lm_{degree}"]
    if distributed_type(raw) == "MEGATRON_LM":
        fields["layout.cp"] = raw.get(f"{MEGATRON}megatron_lm_context_parallel_size", "1")
        fields["layout.sp"] = raw.get(f"{MEGATRON}megatron_lm_sequence_parallelism", "false")
    if fields.get("layout.cp", "1") != "1" and distributed_type(raw) != "MEGATRON_LM":
        comm = raw.get(f"{AXIS}cp_comm_strategy", "allgather").lower()
        if comm not in CP_COMM_STRATEGIES:
            raise unknown(f"{AXIS}cp_comm_strategy", comm, CP_COMM_STRATEGIES)
        fields["layout.cp_comm"] = CP_COMM_STRATEGIES[comm]
    return MappedFields({field: text for field, text in fields.items() if not shared.is_null(text)})


def _write_axes(recipe: Recipe) -> Mapping[str, Any]:
    """The shard size depends on the cluster and is written later."""
    layout = recipe.layout
    sharded_axes = layout.tp * layout.cp > 1 or layout.dp_replicate > 1
    if sharded_axes and (layout.strategy != "fsdp2" or uses_deepspeed(recipe)):
        field = "tp" if layout.tp > 1 else "cp" if layout.cp > 1 else "dp_replicate"
        raise InputError("requires FSDP2 in Accelerate", field=f"layout.{field}")
    if not sharded_axes:
        return {}
    keys = {f"{AXIS}{name}_size": getattr(layout, name) for name in ("dp_replicate", "tp", "cp")}
    if layout.cp > 1:
        comm = to_framework_name(CP_COMM_STRATEGIES, layout.cp_comm)
        if not comm:
            raise InputError(
                "must be allgather or ring: torch's context parallelism gathers or rotates", field="layout.cp_comm"
            )
        keys[f"{AXIS}cp_comm_strategy"] = comm
    return keys


def _read_compile(raw: RawValues, recipe: Recipe) -> MappedFields:
    text = raw.get("dynamo_config.dynamo_backend", raw.get("dynamo_backend", "no"))
    if text.upper() not in (*DYNAMO_BACKENDS, "FALSE"):
        raise unknown("dynamo_config.dynamo_backend", text, DYNAMO_BACKENDS)
    return MappedFields({"kernels.compile": str(text.upper() not in ("NO", "FALSE", "EAGER")).lower()})


COMPOSITE_KEYS: tuple[CompositeKey, ...] = (
    CompositeKey(("distributed_type", "fsdp_config.fsdp_version", "fsdp_config.fsdp_sharding_strategy",
        "fsdp_config.fsdp_reshard_after_forward", "deepspeed_config.zero_stage",
        "megatron_lm_config.megatron_lm_use_distributed_optimizer"),
        ("layout.strategy", "layout.reshard_after_forward"), _read_strategy, _write_strategy),
    CompositeKey(("distributed_type", "fsdp_config.fsdp_offload_params", "deepspeed_config.zero_stage",
        "deepspeed_config.offload_optimizer_device", "deepspeed_config.offload_param_device"), ("layout.offload",),
        _read_offload, _write_offload),
    CompositeKey(("mixed_precision", "fp8_config.backend", "fp8_config.fp8_backend", MX_SCALING, FP8_GATHER,
        "distributed_type", "fsdp_config.fsdp_version"),
        ("precision.compute", "precision.matmul"),
        lambda raw, recipe: _read_precision(raw, recipe) if "mixed_precision" in raw else MappedFields({}),
        _write_precision),
    CompositeKey((), ("precision.fp8_gather",), lambda raw, recipe: MappedFields({}), _write_gather),
    CompositeKey(("distributed_type", "fsdp_config.fsdp_activation_checkpointing"), ("layout.recompute",),
        _read_recompute, _write_recompute),
    CompositeKey(("distributed_type", *(f"{AXIS}{name}_size" for name in ("dp_replicate", "tp", "cp")),
        f"{AXIS}cp_comm_strategy", *(f"{MEGATRON}megatron_lm_{name}" for name in ("tp_degree", "pp_degree",
        "expert_model_parallel_size", "context_parallel_size", "sequence_parallelism", ) )),
        ("layout.tp", "layout.cp", "layout.dp_replicate", "layout.cp_comm"), _read_axes, _write_axes),
    CompositeKey(("dynamo_config.dynamo_backend", "dynamo_backend"), ("kernels.compile",), _read_compile,
        lambda recipe: {"dynamo_config.dynamo_backend": "INDUCTOR"} if recipe.kernels.compile else {}),
)  # fmt: skip
