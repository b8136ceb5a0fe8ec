"""Accelerate's rules on FSDP, DeepSpeed and the device mesh."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from meshwright.errors import InputError
from meshwright.frameworks.accelerate.rules.common import fsdp_version, int_value, is_enabled, type_of
from meshwright.frameworks.framework import FrameworkRule, Problem, RuleContext
from meshwright.frameworks.types import as_int
from meshwright.models.layer_classes import layer_class, wrong_layer_class
from meshwright.recipes.key_maps.accelerate import AXIS, FSDP, MEGATRON, ZERO, sharding_strategy


def _no_wrap_policy(ctx: RuleContext) -> Problem | None:
    if type_of(ctx) != "FSDP" or str(ctx.get(f"{FSDP}fsdp_auto_wrap_policy", "-")).upper() != "NO_WRAP":
        return None
    why = "" if ctx.is_set(f"{FSDP}fsdp_auto_wrap_policy") else "; the default is NO_WRAP"
    return Problem(
        f"the model is wrapped as one FSDP unit, so all parameters are gathered at once{why}",
        (ctx.written(f"{FSDP}fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"),),
        key=f"{FSDP}fsdp_auto_wrap_policy" if ctx.is_set(f"{FSDP}fsdp_auto_wrap_policy") else "distributed_type",
    )


IGNORED_BY_FSDP2: dict[str, tuple[tuple[Any, ...], str]] = {
    "fsdp_forward_prefetch": ((False,), "FSDP2 does not prefetch in the forward pass"),
    "fsdp_backward_prefetch": (("NO_PREFETCH",), "FSDP2 prefetches automatically"),
    "fsdp_use_orig_params": ((True,), "FSDP2 always keeps the original parameters"),
}
"""Keys that FSDP2 ignores, with the values that match its behavior."""


def _fsdp1_key(ctx: RuleContext) -> Iterator[Problem]:
    if type_of(ctx) != "FSDP" or fsdp_version(ctx) != "2":
        return
    key = f"{FSDP}fsdp_sharding_strategy"
    if ctx.is_set(key):
        try:
            strategy = sharding_strategy(str(ctx.get(key)))
        except InputError:
            strategy = "FULL_SHARD"
        reshard = strategy in ("FULL_SHARD", "HYBRID_SHARD")
        configured = ctx.get(f"{FSDP}fsdp_reshard_after_forward")
        if str(configured).lower() != str(reshard).lower() or strategy == "NO_SHARD" or strategy.startswith("HYBRID"):
            fix = ctx.written(f"{FSDP}fsdp_reshard_after_forward", reshard)
            if strategy.startswith("HYBRID"):
                fix = ctx.written(f"{AXIS}dp_replicate_size", int_value(ctx, "num_machines") or 2)
            yield Problem(f"fsdp_sharding_strategy={ctx.get(key)} is ignored by FSDP2", (fix,), key=key)
    for name, (harmless, why) in IGNORED_BY_FSDP2.items():
        value = ctx.get(f"{FSDP}{name}")
        if ctx.is_set(f"{FSDP}{name}") and str(value).lower() not in [str(each).lower() for each in harmless]:
            yield Problem(f"{name} is ignored: {why}", (ctx.written(f"{FSDP}{name}", None),), key=f"{FSDP}{name}")


def _fsdp2_key(ctx: RuleContext) -> Problem | None:
    """FSDP1 uses fsdp_sharding_strategy, which always has a value."""
    key = f"{FSDP}fsdp_reshard_after_forward"
    if type_of(ctx) != "FSDP" or fsdp_version(ctx) != "1" or not ctx.is_set(key):
        return None
    value = str(ctx.get(key)).upper()
    strategy = {"TRUE": "FULL_SHARD", "FALSE": "SHARD_GRAD_OP"}.get(value, value)
    try:
        if sharding_strategy(strategy) == sharding_strategy(str(ctx.get(f"{FSDP}fsdp_sharding_strategy"))):
            return None
    except InputError:
        pass
    return Problem(
        f"fsdp_reshard_after_forward={ctx.get(key)} is ignored by FSDP1; "
        f"it uses fsdp_sharding_strategy={ctx.get(f'{FSDP}fsdp_sharding_strategy')}",
        (ctx.written(f"{FSDP}fsdp_sharding_strategy", strategy),),
        key=key,
    )


def _fsdp_conflict(ctx: RuleContext) -> Iterator[Problem]:
    if type_of(ctx) != "FSDP":
        return
    if is_enabled(ctx, f"{FSDP}fsdp_cpu_ram_efficient_loading") and not is_enabled(
        ctx, f"{FSDP}fsdp_sync_module_states"
    ):
        yield Problem(
            "fsdp_cpu_ram_efficient_loading requires fsdp_sync_module_states, which sends weights to the other ranks",
            (ctx.written(f"{FSDP}fsdp_sync_module_states", True),),
            key=f"{FSDP}fsdp_sync_module_states",
        )
    offload = f"{FSDP}fsdp_activation_checkpointing_offload"
    if is_enabled(ctx, offload) and not (
        is_enabled(ctx, f"{FSDP}fsdp_activation_checkpointing") and fsdp_version(ctx) == "2"
    ):
        yield Problem(
            "fsdp_activation_checkpointing_offload requires fsdp_activation_checkpointing and fsdp_version 2",
            (ctx.written(f"{FSDP}fsdp_activation_checkpointing", True),),
            key=offload,
        )
    state = f"{FSDP}fsdp_state_dict_type"
    if fsdp_version(ctx) == "2" and str(ctx.get(state)).upper() in ("LOCAL_STATE_DICT", "2"):
        yield Problem("FSDP2 does not support LOCAL_STATE_DICT", (ctx.written(state, "SHARDED_STATE_DICT"),), key=state)
    if fsdp_version(ctx) not in ("1", "2"):
        yield Problem(
            f"fsdp_version={fsdp_version(ctx)} does not exist",
            (ctx.written(f"{FSDP}fsdp_version", 2),),
            f"{FSDP}fsdp_version",
        )


def _wrap_policy_key(ctx: RuleContext) -> Iterator[Problem]:
    policy = str(ctx.get(f"{FSDP}fsdp_auto_wrap_policy", "")).upper()
    if type_of(ctx) != "FSDP" or not policy:
        return
    for key, reader in (
        (f"{FSDP}fsdp_transformer_layer_cls_to_wrap", "TRANSFORMER_BASED_WRAP"),
        (f"{FSDP}fsdp_min_num_params", "SIZE_BASED_WRAP"),
    ):
        if ctx.is_set(key) and ctx.get(key) and policy != reader:
            name = key.removeprefix(FSDP)
            yield Problem(
                f"{name} requires fsdp_auto_wrap_policy {reader} and is ignored with {policy}",
                (ctx.written(key, None),),
                key=key,
            )


def _wrapped_class(ctx: RuleContext) -> Problem | None:
    key = f"{FSDP}fsdp_transformer_layer_cls_to_wrap"
    model = ctx.case.model if ctx.case is not None else ctx.parsed.model
    policy = str(ctx.get(f"{FSDP}fsdp_auto_wrap_policy", "")).upper()
    if type_of(ctx) != "FSDP" or policy != "TRANSFORMER_BASED_WRAP" or model is None or not ctx.get(key):
        return None
    given = ctx.get(key)
    names = [str(one).strip() for one in (given if isinstance(given, list) else str(given).split(","))]
    wrong, expected = wrong_layer_class(model, names), layer_class(model)
    if not wrong:
        return None
    kept = [one for one in names if one and one not in (wrong, expected)]
    return Problem(
        f"{model.name} has no class {wrong}: its layers are {expected}",
        (ctx.written(key, ",".join((expected, *kept))),),
        key=key,
    )


CONFIG_FILE_KEYS = (
    "gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device",
    "offload_param_device", "offload_param_nvme_path", "offload_optimizer_nvme_path", "zero3_save_16bit_model",
)  # fmt: skip


def _config_file_conflict(ctx: RuleContext) -> Problem | None:
    name = ctx.get(f"{ZERO}deepspeed_config_file")
    if type_of(ctx) != "DEEPSPEED" or not name or str(name).lower() == "none":
        return None
    conflicting = (*(f"{ZERO}{each}" for each in CONFIG_FILE_KEYS), "mixed_precision")
    keys = [key for key in conflicting if ctx.is_set(key) and ctx.parsed.settings[key].file.endswith((".yaml", ".yml"))]
    if not keys:  # command-line options do not conflict
        return None
    names = ", ".join(key.rsplit(".", 1)[-1] for key in keys)
    return Problem(
        f"{names} cannot be combined with deepspeed_config_file",
        tuple(ctx.written(key, None) for key in keys),
        key=keys[0],
    )


def _stage_too_low(ctx: RuleContext) -> Iterator[Problem]:
    stage = int_value(ctx, f"{ZERO}zero_stage")
    if type_of(ctx) != "DEEPSPEED" or ctx.get(f"{ZERO}deepspeed_config_file") or stage is None or not 0 <= stage <= 3:
        return
    if stage < 3 and is_enabled(ctx, f"{ZERO}zero3_init_flag"):
        yield Problem(
            f"zero3_init_flag is disabled with stage {stage}",
            (ctx.written(f"{ZERO}zero3_init_flag", False),),
            key=f"{ZERO}zero3_init_flag",
        )
    for part, least in (("param", 3), ("optimizer", 1)):
        key = f"{ZERO}offload_{part}_device"
        if stage < least and str(ctx.get(key, "none")).lower() not in ("none", "null"):
            yield Problem(
                f"{key.removeprefix(ZERO)} requires stage {least} or higher, not {stage}",
                (ctx.written(f"{ZERO}zero_stage", least), ctx.written(key, "none")),
                key=key,
            )


def _nvme_path_missing(ctx: RuleContext) -> Iterator[Problem]:
    if type_of(ctx) != "DEEPSPEED" or ctx.get(f"{ZERO}deepspeed_config_file"):
        return
    for part in ("param", "optimizer"):
        key = f"{ZERO}offload_{part}_"
        if ctx.get(f"{key}device") == "nvme" and not ctx.get(f"{key}nvme_path"):
            yield Problem(
                "device nvme requires nvme_path", (ctx.written(f"{key}nvme_path", "/local_nvme"),), key=f"{key}device"
            )


def _mesh(ctx: RuleContext) -> Problem | None:
    """Return the first problem of the parallelism_config sizes."""
    axes = [key for key in ctx.keys_under("parallelism_config") if key.startswith(AXIS)]
    sizes = {name: int_value(ctx, f"{AXIS}{name}_size") or 1 for name in ("dp_replicate", "dp_shard", "tp", "cp", "sp")}
    total, has_model_axes = prod(sizes.values()), sizes["tp"] * sizes["cp"] > 1
    if not axes or total == 1 or type_of(ctx) == "NO":
        return None  # valid, or ignored
    if sizes["cp"] > 1 and sizes["sp"] > 1:
        return Problem(
            "cp_size and sp_size cannot both be above 1", (ctx.written(f"{AXIS}sp_size", 1),), key=f"{AXIS}cp_size"
        )
    if has_model_axes and sizes["dp_replicate"] > 1 and sizes["dp_shard"] == 1:
        return Problem(
            "tensor and context parallelism require dp_shard_size above 1, not only replicas",
            (ctx.written(f"{AXIS}dp_shard_size", sizes["dp_replicate"]), ctx.written(f"{AXIS}dp_replicate_size", 1)),
            key=f"{AXIS}dp_replicate_size",
        )
    return _mesh_size_mismatch(ctx, axes[0], sizes, total) or _mesh_needs_fsdp2(ctx, axes[0], sizes)


def _mesh_size_mismatch(ctx: RuleContext, key: str, sizes: Mapping[str, int], total: int) -> Problem | None:
    processes = as_int(ctx.parsed.settings.get("num_processes")) or (ctx.cluster.world if ctx.cluster else None)
    if not processes or total == processes or sizes["sp"] > 1:
        return None
    rest = total // sizes["dp_shard"]
    fix = (ctx.written(f"{AXIS}dp_shard_size", processes // rest),) if processes % rest == 0 else ()
    product = " × ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    return Problem(f"{product} = {total} ranks, but num_processes is {processes}", fix, key=key)


def _mesh_needs_fsdp2(ctx: RuleContext, key: str, sizes: Mapping[str, int]) -> Problem | None:
    if type_of(ctx) == "FSDP" and fsdp_version(ctx) == "1":
        return Problem("parallelism_config requires fsdp_version 2", (ctx.written(f"{FSDP}fsdp_version", 2),), key=key)
    if type_of(ctx) == "FSDP" and sizes["dp_shard"] == sizes["cp"] == 1:
        return Problem(
            "FSDP has no ranks to shard over: dp_shard_size and cp_size are 1",
            (ctx.written(f"{AXIS}dp_shard_size", 2),),
            key=key,
        )
    if sizes["cp"] > 1 and type_of(ctx) != "FSDP":
        return Problem(
            "context parallelism requires FSDP2", (ctx.written("distributed_type", "FSDP"),), key=f"{AXIS}cp_size"
        )
    return None


def _megatron_degrees(ctx: RuleContext) -> Problem | None:
    processes = int_value(ctx, "num_processes")
    degrees = [int_value(ctx, f"{MEGATRON}megatron_lm_{name}") or 1 for name in ("tp_degree", "pp_degree")]
    ranks = degrees[0] * degrees[1]
    if type_of(ctx) != "MEGATRON_LM" or not processes or processes % ranks == 0:
        return None
    return Problem(
        f"tp {degrees[0]} × pp {degrees[1]} = {ranks} ranks per model replica do not divide num_processes={processes}",
        (ctx.written("num_processes", ranks),),
        key="num_processes",
    )


RULES = (
    FrameworkRule("accelerate.no-wrap-policy", "warning", (), _no_wrap_policy,
        symptom="the peak memory of an unsharded model: all parameters are gathered at once",
        cause="FSDP gathers one wrapped unit at a time, and without a policy the whole model is one unit"),
    FrameworkRule("accelerate.fsdp1-key", "warning", (), _fsdp1_key, symptom="none, or a warning in the log",
        cause="FSDP2 has different options than FSDP1"),
    FrameworkRule("accelerate.fsdp2-key", "error", (), _fsdp2_key,
        symptom="none: FSDP1 uses a different sharding strategy than the file suggests",
        cause="the launcher always passes a sharding strategy, which takes precedence"),
    FrameworkRule("accelerate.fsdp-conflict", "error", (), _fsdp_conflict,
        symptom="ValueError when the launcher or the FSDP plugin starts", cause="the plugin validates its options"),
    FrameworkRule("accelerate.wrap-policy-key", "warning", (), _wrap_policy_key,
        symptom="none: wrapping follows the policy", cause="each wrap policy uses its own key"),
    FrameworkRule("accelerate.wrapped-class", "error", (), _wrapped_class,
        symptom="ValueError: Could not find the transformer layer class … in the model.",
        cause="the class is looked up by its name among the modules of the model"),
    FrameworkRule("accelerate.config-file-conflict", "error", (), _config_file_conflict,
        symptom="ValueError: When using `deepspeed_config_file`, the following … variables will be ignored",
        cause="the same settings would be defined in two places"),
    FrameworkRule("accelerate.stage-too-low", "warning", (), _stage_too_low,
        symptom="none, or a warning in the log: no memory is saved",
        cause="each ZeRO stage uses only its own settings"),
    FrameworkRule("accelerate.no-nvme-path", "error", (), _nvme_path_missing,
        symptom="AssertionError about nvme_path when the model or the optimizer is initialized",
        cause="there is no default path for a local NVMe disk"),
    FrameworkRule("accelerate.mesh", "error", (), _mesh,
        symptom="ValueError: ParallelismConfig total_size does not match num_processes",
        cause="the device mesh must contain every rank exactly once",
        supersedes=("topology.world", "topology.shard-product")),
    FrameworkRule("accelerate.degrees", "error", ("num_processes",), _megatron_degrees,
        symptom="AssertionError: world size is not divisible by tp × pp",
        cause="each model replica takes tp × pp ranks", supersedes=("topology.world",)),
)  # fmt: skip
