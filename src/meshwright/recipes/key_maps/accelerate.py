"""Hugging Face Accelerate's YAML keys (1.15, 2026)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.errors import InputError, unknown
from meshwright.recipes.key_maps import composite_keys
from meshwright.recipes.key_maps.deepspeed import STAGES, stage_of
from meshwright.recipes.key_maps.key import CompositeKey, ConfigKey, MappedFields, Texts
from meshwright.recipes.types import Recipe

KINDS = (
    "NO", "MULTI_GPU", "FSDP", "DEEPSPEED", "MEGATRON_LM", "MULTI_CPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA",
    "MULTI_MUSA", "MULTI_XPU", "MULTI_HPU", "MULTI_NEURON", "XLA",
)  # fmt: skip
SHARDINGS = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
"""FSDP1's ways to share, in the order of their numbers from 1 on."""
FSDP, ZERO, MEGATRON, AXES = "fsdp_config.", "deepspeed_config.", "megatron_lm_config.", "parallelism_config."
AXIS = f"{AXES}parallelism_config_"
COMPILERS = (
    "NO", "EAGER", "AOT_EAGER", "INDUCTOR", "AOT_TS_NVFUSER", "NVPRIMS_NVFUSER", "CUDAGRAPHS", "OFI", "FX2TRT",
    "ONNXRT", "TENSORRT", "AOT_TORCHXLA_TRACE_ONCE", "TORCHXLA_TRACE_ONCE", "IPEX", "TVM", "HPU_BACKEND", "NEURON",
)  # fmt: skip
FP8 = {"TE": "fp8_delayed", "AO": "fp8_tensor"}
ROTATIONS = {"allgather": "allgather", "alltoall": "ring"}


def _truths(prefix: str, names: str) -> tuple[ConfigKey, ...]:
    return tuple(ConfigKey(prefix + name, takes="truth") for name in names.split())


def _plain(prefix: str, names: str) -> tuple[ConfigKey, ...]:
    return tuple(ConfigKey(prefix + name) for name in names.split())


WORDS: tuple[ConfigKey, ...] = (
    ConfigKey("compute_environment", default="LOCAL_MACHINE", choices=("LOCAL_MACHINE", "AMAZON_SAGEMAKER")),
    ConfigKey("distributed_type", choices=KINDS),
    ConfigKey("num_processes", takes="int", note="over all machines; unsaid: --num_processes must be given"),
    ConfigKey("num_machines", default=1, takes="int"),
    ConfigKey("machine_rank", default=0, takes="int"),
    *_plain("", "main_process_ip main_process_port gpu_ids main_training_function"),
    ConfigKey("rdzv_backend", default="static", choices=("static", "c10d", "etcd", "etcd-v2")),
    *_truths("", "same_network use_cpu debug enable_cpu_affinity"),
    ConfigKey("mixed_precision", choices=("no", "fp16", "bf16", "fp8")),
    ConfigKey("downcast_bf16", note="read on TPUs only"),
    ConfigKey("fp16", takes="truth", until="0.10", note="the old spelling of mixed_precision: fp16"),
    ConfigKey("dynamo_backend", choices=COMPILERS, until="0.15", note="today in dynamo_config"),
    ConfigKey("dynamo_config.dynamo_backend", choices=COMPILERS),
    *_plain("dynamo_config.", "dynamo_mode dynamo_use_fullgraph dynamo_use_dynamic dynamo_use_regional_compilation"),
    *_plain("", "tpu_name tpu_zone tpu_use_cluster tpu_use_sudo command_file commands tpu_vm tpu_env tpu_cluster"),
    ConfigKey("fsdp_config.fsdp_version", default=1, choices=("1", "2"), since="1.5"),
    ConfigKey("fsdp_config.fsdp_sharding_strategy", default="FULL_SHARD"),
    ConfigKey("fsdp_config.fsdp_reshard_after_forward", default=True, since="1.5"),
    ConfigKey("fsdp_config.fsdp_offload_params", default=False, takes="truth"),
    ConfigKey("fsdp_config.fsdp_activation_checkpointing", default=False, takes="truth"),
    ConfigKey("fsdp_config.fsdp_activation_checkpointing_offload", default=False, takes="truth", since="1.15"),
    ConfigKey(
        "fsdp_config.fsdp_auto_wrap_policy",
        default="NO_WRAP",
        choices=("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"),
    ),
    ConfigKey("fsdp_config.fsdp_transformer_layer_cls_to_wrap", note="unsaid: the model's own _no_split_modules"),
    ConfigKey("fsdp_config.fsdp_min_num_params", default=100_000_000, takes="int"),
    ConfigKey("fsdp_config.fsdp_backward_prefetch", choices=("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH", "1", "2")),
    ConfigKey(
        "fsdp_config.fsdp_state_dict_type",
        choices=("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT", "1", "2", "3"),
    ),
    ConfigKey("fsdp_config.fsdp_forward_prefetch", default=False, takes="truth"),
    ConfigKey("fsdp_config.fsdp_use_orig_params", default=True, takes="truth"),
    ConfigKey("fsdp_config.fsdp_sync_module_states", default=True, takes="truth"),
    ConfigKey("fsdp_config.fsdp_cpu_ram_efficient_loading", default=True, takes="truth"),
    ConfigKey("fsdp_config.fsdp_ignored_modules"),
    ConfigKey(
        "fsdp_config.fsdp_backward_prefetch_policy",
        fate="ignored",
        until="0.24",
        note="the key got a new name",
        instead="fsdp_backward_prefetch: BACKWARD_PRE",
    ),
    ConfigKey(
        "fsdp_config.fsdp_cpu_offload",
        fate="ignored",
        note="there is no such key; parameters stay on the GPU",
        instead="fsdp_offload_params: true",
    ),
    ConfigKey("deepspeed_config.zero_stage", default=2, takes="int"),
    ConfigKey("deepspeed_config.gradient_accumulation_steps", takes="int"),
    ConfigKey("deepspeed_config.gradient_clipping", "optimizer.clip_grad"),
    ConfigKey("deepspeed_config.offload_optimizer_device", choices=("none", "cpu", "nvme")),
    ConfigKey("deepspeed_config.offload_param_device", choices=("none", "cpu", "nvme")),
    *_plain(ZERO, "offload_optimizer_nvme_path offload_param_nvme_path deepspeed_config_file deepspeed_hostfile"),
    ConfigKey("deepspeed_config.zero3_init_flag", takes="truth"),
    ConfigKey("deepspeed_config.zero3_save_16bit_model", takes="truth"),
    ConfigKey(
        "deepspeed_config.deepspeed_multinode_launcher",
        default="pdsh",
        choices=("pdsh", "standard", "openmpi", "mvapich", "mpich", "nossh", "slurm", "impi"),
    ),
    *_plain(ZERO, "deepspeed_exclusion_filter deepspeed_inclusion_filter deepspeed_moe_layer_cls_names"),
    ConfigKey("parallelism_config.parallelism_config_dp_replicate_size", takes="int", default=1, since="1.10"),
    ConfigKey("parallelism_config.parallelism_config_dp_shard_size", takes="int", default=1),
    ConfigKey("parallelism_config.parallelism_config_tp_size", takes="int", default=1),
    ConfigKey("parallelism_config.parallelism_config_cp_size", takes="int", default=1),
    ConfigKey("parallelism_config.parallelism_config_cp_backend", default="torch", choices=("torch",)),
    ConfigKey("parallelism_config.parallelism_config_cp_comm_strategy", default="allgather", choices=tuple(ROTATIONS)),
    ConfigKey("parallelism_config.parallelism_config_sp_size", takes="int", default=1, since="1.12"),
    ConfigKey("parallelism_config.parallelism_config_sp_backend", default="deepspeed", choices=("deepspeed",)),
    *_plain(AXIS, "sp_seq_length sp_seq_length_is_variable sp_attn_implementation"),
    ConfigKey("megatron_lm_config.megatron_lm_tp_degree", takes="int"),
    ConfigKey("megatron_lm_config.megatron_lm_pp_degree", takes="int"),
    ConfigKey("megatron_lm_config.megatron_lm_expert_model_parallel_size", takes="int"),
    ConfigKey("megatron_lm_config.megatron_lm_context_parallel_size", takes="int"),
    ConfigKey("megatron_lm_config.megatron_lm_sequence_parallelism", takes="truth"),
    ConfigKey("megatron_lm_config.megatron_lm_use_distributed_optimizer", takes="truth"),
    ConfigKey("megatron_lm_config.megatron_lm_num_micro_batches", takes="int"),
    ConfigKey("megatron_lm_config.megatron_lm_gradient_clipping"),
    ConfigKey("megatron_lm_config.megatron_lm_recompute_activations", takes="truth"),
    ConfigKey("fp8_config.backend", choices=("TE", "MSAMP", "AO")),
    ConfigKey("fp8_config.fp8_backend", choices=("TE", "MSAMP", "AO")),
    *_plain("fp8_config.", "use_autocast_during_eval margin interval fp8_format amax_history_len amax_compute_algo"),
    *_plain("fp8_config.", "override_linear_precision opt_level optimization_level pad_inner_dim"),
    *_plain("fp8_config.", "enable_fsdp_float8_all_gather use_mxfp8_block_scaling amax_compute_algorithm"),
    *_plain("mpirun_config.", "mpirun_hostfile mpirun_ccl"),
)


def kind_of(given: Mapping[str, Any]) -> str:
    """How processes share the work; PyYAML reads an unquoted NO as false."""
    text = str(given.get("distributed_type", "NO")).upper()
    return "NO" if text == "FALSE" else text


def sharding(text: str) -> str:
    """FSDP1's way to share by its name or number."""
    plain = text.strip().upper()
    if plain.isascii() and plain.isdigit() and 1 <= int(plain) <= len(SHARDINGS):
        return SHARDINGS[int(plain) - 1]
    if plain not in SHARDINGS:
        raise unknown("fsdp_config.fsdp_sharding_strategy", text, SHARDINGS)
    return plain


def _read_strategy(given: Texts, recipe: Recipe) -> MappedFields:
    """How the state is shared; the number of full copies follows from the machines."""
    kind = kind_of(given)
    if kind not in KINDS or (kind != "NO" and given["distributed_type"] != kind):
        raise unknown("distributed_type", given["distributed_type"], KINDS)
    if kind == "FSDP":
        strategy, freed = _read_fsdp(given)
    elif kind == "DEEPSPEED":
        key = f"{ZERO}zero_stage"
        stage = composite_keys.count(key, given[key])
        if stage not in STAGES:
            raise InputError("ZeRO has the stages 0, 1, 2 and 3", field=key, value=stage, fix=[f"{key}=3"])
        strategy, freed = STAGES[stage]
    else:
        shared = given.get(f"{MEGATRON}megatron_lm_use_distributed_optimizer", "").lower() == "true"
        strategy, freed = "zero1" if kind == "MEGATRON_LM" and shared else "ddp", True
    return MappedFields({"layout.strategy": strategy, "layout.reshard_after_forward": str(freed).lower()})


def _read_fsdp(given: Texts) -> tuple[str, bool]:
    if given[f"{FSDP}fsdp_version"] != "1":
        return "fsdp2", _freed(given)
    way = sharding(given[f"{FSDP}fsdp_sharding_strategy"])
    return "ddp" if way == "NO_SHARD" else "fsdp2", way in ("FULL_SHARD", "HYBRID_SHARD", "NO_SHARD")


def _freed(given: Texts) -> bool:
    key = f"{FSDP}fsdp_reshard_after_forward"
    text = given[key].strip().lower()
    if text not in ("true", "false", "1", "0", "yes", "no", "on", "off", "y", "n", "t", "f"):
        raise InputError("FSDP2 takes true or false", field=key, value=given[key], fix=[f"{key}=true"])
    return text in ("true", "1", "yes", "on", "y", "t")


def _write_strategy(recipe: Recipe) -> Mapping[str, Any]:
    layout = recipe.layout
    if layout.strategy == "megatron_fsdp":
        raise InputError("Accelerate has no such strategy", field="layout.strategy", value=layout.strategy)
    if layout.strategy == "fsdp2":
        return {
            "distributed_type": "FSDP",
            f"{FSDP}fsdp_version": 2,
            f"{FSDP}fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            f"{FSDP}fsdp_reshard_after_forward": layout.reshard_after_forward,
        }
    if layout.strategy == "zero1":
        return {"distributed_type": "DEEPSPEED", f"{ZERO}zero_stage": stage_of(recipe)}
    return {"distributed_type": "MULTI_GPU"}


def _read_offload(given: Texts, recipe: Recipe) -> MappedFields:
    kind, stage = kind_of(given), given.get(f"{ZERO}zero_stage", "2")
    if kind == "FSDP":
        away = composite_keys.truth(f"{FSDP}fsdp_offload_params", given[f"{FSDP}fsdp_offload_params"])
        return MappedFields({"layout.offload": "params" if away else "none"})
    devices = {part: given.get(f"{ZERO}offload_{part}_device", "none") for part in ("optimizer", "param")}
    for part, device in devices.items():
        if not composite_keys.null(device) and device not in ("cpu", "nvme"):
            raise unknown(f"{ZERO}offload_{part}_device", device, ("none", "cpu", "nvme"))
    if kind != "DEEPSPEED" or stage == "0":
        return MappedFields({"layout.offload": "none"})
    if not composite_keys.null(devices["param"]) and stage == "3":
        return MappedFields({"layout.offload": "params"})
    return MappedFields({"layout.offload": "none" if composite_keys.null(devices["optimizer"]) else "optimizer"})


def _write_offload(recipe: Recipe) -> Mapping[str, Any]:
    wanted = (recipe.layout.strategy, recipe.layout.offload)
    if wanted == ("fsdp2", "params"):
        return {f"{FSDP}fsdp_offload_params": True}
    if wanted == ("zero1", "optimizer"):
        return {f"{ZERO}offload_optimizer_device": "cpu"}
    if recipe.layout.offload != "none":
        raise InputError(f"with {recipe.layout.strategy} Accelerate cannot keep it on the host", field="layout.offload")
    return {}


def _read_precision(given: Texts, recipe: Recipe) -> MappedFields:
    text = given["mixed_precision"].lower()
    if text not in ("no", "false", "fp16", "bf16", "fp8"):
        raise unknown("mixed_precision", given["mixed_precision"], ("no", "fp16", "bf16", "fp8"))
    backend = given.get("fp8_config.backend", given.get("fp8_config.fp8_backend", "")).upper()
    if text == "fp8":
        return MappedFields({"precision.compute": "bf16", "precision.matmul": FP8.get(backend, "fp8_delayed")})
    if text in ("no", "false"):  # the program may still load the model in another format
        return MappedFields({"precision.matmul": "same"}, {"precision.compute": "fp32"})
    return MappedFields({"precision.compute": text, "precision.matmul": "same"})


def _write_precision(recipe: Recipe) -> Mapping[str, Any]:
    compute, matmul = recipe.precision.compute, recipe.precision.matmul
    if matmul == "same":
        return {"mixed_precision": "no" if compute == "fp32" else compute}
    backend = next((their for their, our in FP8.items() if our == matmul), "")
    if not backend or compute != "bf16":
        raise InputError("none of its fp8 backends does it so", field="precision.matmul", value=matmul)
    return {"mixed_precision": "fp8", "fp8_config.backend": backend}


def _read_recompute(given: Texts, recipe: Recipe) -> MappedFields:
    key = f"{FSDP}fsdp_activation_checkpointing"
    on = kind_of(given) == "FSDP" and composite_keys.truth(key, given[key])
    return MappedFields({"layout.recompute": "full"} if on else {})


def _write_recompute(recipe: Recipe) -> Mapping[str, Any]:
    layout = recipe.layout
    if layout.recompute == "full" and layout.strategy == "fsdp2":
        return {f"{FSDP}fsdp_activation_checkpointing": True}
    if layout.recompute != "none":
        raise InputError("the program asks for it: --gradient_checkpointing", field="layout.recompute")
    return {}


def _read_axes(given: Texts, recipe: Recipe) -> MappedFields:
    own = {"tp": "layout.tp", "cp": "layout.cp", "dp_replicate": "layout.dp_replicate"}
    said = {ours: given[f"{AXIS}{name}_size"] for name, ours in own.items() if f"{AXIS}{name}_size" in given}
    for name, degree in (("tp", "tp_degree"), ("pp", "pp_degree"), ("ep", "expert_model_parallel_size")):
        if kind_of(given) == "MEGATRON_LM" and f"{MEGATRON}megatron_lm_{degree}" in given:
            said[f"layout.{name}"] = given[f"{MEGATRON}megatron_lm_{degree}"]
    if kind_of(given) == "MEGATRON_LM":
        said["layout.cp"] = given.get(f"{MEGATRON}megatron_lm_context_parallel_size", "1")
        said["layout.sp"] = given.get(f"{MEGATRON}megatron_lm_sequence_parallelism", "false")
    if said.get("layout.cp", "1") != "1" and kind_of(given) != "MEGATRON_LM":
        way = given.get(f"{AXIS}cp_comm_strategy", "allgather").lower()
        if way not in ROTATIONS:
            raise unknown(f"{AXIS}cp_comm_strategy", way, ROTATIONS)
        said["layout.cp_comm"] = ROTATIONS[way]
    return MappedFields({own: text for own, text in said.items() if not composite_keys.null(text)})


def _write_axes(recipe: Recipe) -> Mapping[str, Any]:
    """Which ranks share one copy is written with the number of GPUs, which only the cluster tells."""
    layout = recipe.layout
    cut = layout.tp * layout.cp > 1 or layout.dp_replicate > 1
    if cut and layout.strategy != "fsdp2":
        field = "tp" if layout.tp > 1 else "cp" if layout.cp > 1 else "dp_replicate"
        raise InputError("Accelerate combines it with FSDP2 only", field=f"layout.{field}")
    if not cut:
        return {}
    found = {f"{AXIS}{name}_size": getattr(layout, name) for name in ("dp_replicate", "tp", "cp")}
    if layout.cp > 1:
        way = next((their for their, our in ROTATIONS.items() if our == layout.cp_comm), "")
        if not way:
            raise InputError("torch's context parallelism gathers or rotates", field="layout.cp_comm")
        found[f"{AXIS}cp_comm_strategy"] = way
    return found


def _read_compile(given: Texts, recipe: Recipe) -> MappedFields:
    text = given.get("dynamo_config.dynamo_backend", given.get("dynamo_backend", "no"))
    if text.upper() not in (*COMPILERS, "FALSE"):
        raise unknown("dynamo_config.dynamo_backend", text, COMPILERS)
    return MappedFields({"kernels.compile": str(text.upper() not in ("NO", "FALSE", "EAGER")).lower()})


JOINTS: tuple[CompositeKey, ...] = (
    CompositeKey(
        (
            "distributed_type",
            "fsdp_config.fsdp_version",
            "fsdp_config.fsdp_sharding_strategy",
            "fsdp_config.fsdp_reshard_after_forward",
            "deepspeed_config.zero_stage",
            "megatron_lm_config.megatron_lm_use_distributed_optimizer",
        ),
        ("layout.strategy", "layout.reshard_after_forward"),
        _read_strategy,
        _write_strategy,
    ),
    CompositeKey(
        (
            "distributed_type",
            "fsdp_config.fsdp_offload_params",
            "deepspeed_config.zero_stage",
            "deepspeed_config.offload_optimizer_device",
            "deepspeed_config.offload_param_device",
        ),
        ("layout.offload",),
        _read_offload,
        _write_offload,
    ),
    CompositeKey(
        ("mixed_precision", "fp8_config.backend", "fp8_config.fp8_backend"),
        ("precision.compute", "precision.matmul"),
        lambda given, recipe: _read_precision(given, recipe) if "mixed_precision" in given else MappedFields({}),
        _write_precision,
    ),
    CompositeKey(
        ("distributed_type", "fsdp_config.fsdp_activation_checkpointing"),
        ("layout.recompute",),
        _read_recompute,
        _write_recompute,
    ),
    CompositeKey(
        (
            "distributed_type",
            *(f"{AXIS}{name}_size" for name in ("dp_replicate", "tp", "cp")),
            f"{AXIS}cp_comm_strategy",
            *(
                f"{MEGATRON}megatron_lm_{name}"
                for name in (
                    "tp_degree",
                    "pp_degree",
                    "expert_model_parallel_size",
                    "context_parallel_size",
                    "sequence_parallelism",
                )
            ),
        ),
        ("layout.tp", "layout.cp", "layout.dp_replicate", "layout.cp_comm"),
        _read_axes,
        _write_axes,
    ),
    CompositeKey(
        ("dynamo_config.dynamo_backend", "dynamo_backend"),
        ("kernels.compile",),
        _read_compile,
        lambda recipe: {"dynamo_config.dynamo_backend": "INDUCTOR"} if recipe.kernels.compile else {},
    ),
)
