"""What Accelerate refuses, replaces or never reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from msgspec import UNSET

from meshwright.errors import InputError
from meshwright.frameworks.accelerate.keys import READS, spell
from meshwright.frameworks.accelerate.parse import GPU_KINDS
from meshwright.frameworks.common import as_int, is_int
from meshwright.frameworks.framework import FrameworkRule, Problem, RuleContext
from meshwright.recipes.key_maps.accelerate import (
    AXIS,
    DISTRIBUTED_TYPES,
    FSDP,
    MEGATRON,
    ZERO,
    distributed_type,
    sharding_strategy,
)

SAGEMAKER = "AMAZON_SAGEMAKER"


def _kind(ctx: RuleContext) -> str:
    return distributed_type({"distributed_type": ctx.get("distributed_type", "NO")})


def _is_on(ctx: RuleContext, key: str) -> bool:
    return str(ctx.get(key, False)).lower() in ("true", "1", "yes", "on")


def _as_int(ctx: RuleContext, key: str) -> int | None:
    found = ctx.get(key)
    return found if is_int(found) else None


def _version(ctx: RuleContext) -> str:
    return str(ctx.get(f"{FSDP}fsdp_version"))


def _from_command(ctx: RuleContext) -> bool:
    """Whether the command line is known too; a file alone may be completed by one."""
    return any(not said.file.endswith((".yaml", ".yml", ".json")) for said in ctx.parsed.settings.values())


# Processes and machines.


def _no_kind(ctx: RuleContext) -> Problem | None:
    if ctx.is_set("distributed_type") or _from_command(ctx):
        return None
    return Problem("a config says its distributed_type", ("distributed_type: MULTI_GPU",), key="distributed_type")


def _machines(ctx: RuleContext) -> Iterator[Problem]:
    processes, machines = _as_int(ctx, "num_processes"), _as_int(ctx, "num_machines") or 1
    rank = _as_int(ctx, "machine_rank")
    if processes and machines > 0 and processes % machines:
        each = processes // machines
        yield Problem(
            f"num_processes={processes} counts all machines and does not divide over {machines}: "
            f"{each} would start on each, {each * machines} in all",
            (spell("num_processes", max(1, each) * machines),),
            key="num_processes",
        )
    if rank is not None and not 0 <= rank < machines:
        yield Problem(
            f"machine_rank={rank} is not one of {machines} machines, which count from 0",
            (spell("machine_rank", 0),),
            key="machine_rank",
        )


def _nobody_to_meet(ctx: RuleContext) -> Problem | None:
    machines = _as_int(ctx, "num_machines") or 1
    by_hosts = _kind(ctx) == "DEEPSPEED" and ctx.get(f"{ZERO}deepspeed_multinode_launcher") != "standard"
    if machines < 2 or ctx.is_set("main_process_ip") or by_hosts or _kind(ctx) not in DISTRIBUTED_TYPES[:5]:
        return None
    known = _from_command(ctx)
    return Problem(
        f"{machines} machines do not know where to meet: main_process_ip is unsaid"
        + ("" if known else ", and the command line must give it"),
        (spell("main_process_ip", "10.0.0.1"),),
        "num_machines",
        "error" if known else "warning",
    )


def _how_many(ctx: RuleContext) -> Iterator[Problem]:
    kind, processes = _kind(ctx), _as_int(ctx, "num_processes")
    said = ctx.parsed.settings.get("distributed_type")
    in_file = said is not None and said.file.endswith((".yaml", ".yml"))
    if in_file and _from_command(ctx) and not ctx.is_set("num_processes") and kind in DISTRIBUTED_TYPES[1:5]:
        yield Problem("num_processes is said nowhere", (spell("num_processes", 8),), key="distributed_type")
    if said is not None and kind == "NO" and processes is not None and processes > 1:
        yield Problem(
            f"distributed_type NO starts one process, not num_processes={processes}",
            (spell("distributed_type", "MULTI_GPU"), spell("num_processes", 1)),
            "num_processes",
            "warning",
        )
    if ctx.cluster is not None and processes and kind in GPU_KINDS[1:]:
        world = ctx.cluster.world
        if processes > world:
            yield Problem(f"{processes} processes on {world} GPUs", (spell("num_processes", world),), "num_processes")
        elif processes < world:
            yield Problem(
                f"{processes} processes leave {world - processes} of {world} GPUs idle",
                (spell("num_processes", world),),
                "num_processes",
                "warning",
            )


def _named_gpus(ctx: RuleContext) -> Problem | None:
    ids, processes, machines = ctx.get("gpu_ids"), _as_int(ctx, "num_processes"), _as_int(ctx, "num_machines") or 1
    if ids in (None, "all") or not processes or _kind(ctx) not in GPU_KINDS[1:]:
        return None
    named = len([one for one in str(ids).split(",") if one.strip()])
    if named >= processes // machines:
        return None
    return Problem(
        f"gpu_ids names {named} GPUs for {processes // machines} processes on each machine",
        (spell("num_processes", named * machines), spell("gpu_ids", "all")),
        key="gpu_ids",
    )


def _unquoted(ctx: RuleContext) -> Iterator[Problem]:
    for key in ("mixed_precision", "dynamo_backend", "dynamo_config.dynamo_backend"):
        said = ctx.parsed.settings.get(key)
        if said is not None and said.pyyaml is not UNSET and said.pyyaml is False:
            name = key.rsplit(".", 1)[-1]
            yield Problem(f"{name}: {said.value} without quotes is the truth value false", (f"{name}: 'no'",), key=key)


def _quoted(ctx: RuleContext) -> Iterator[Problem]:
    """Numbers as texts: compared or divided when there are several machines."""
    for key in ("num_machines", "num_processes"):
        said = ctx.parsed.settings.get(key)
        several = key == "num_machines" or (_as_int(ctx, "num_machines") or 1) > 1
        if said is None or not several or not said.file.endswith((".yaml", ".yml")):
            continue
        if isinstance(said.value, str) and as_int(said) is not None:
            yield Problem(f'{key} is the text "{said.value}", not a number', (f"{key}: {said.value}",), key=key)


# Sections.


def _unused_section(ctx: RuleContext) -> Iterator[Problem]:
    kind = _kind(ctx)
    for owner, section in READS.items():
        keys = [key for key in ctx.keys_under(section) if key != section]
        if keys and kind != owner and kind in DISTRIBUTED_TYPES:
            yield Problem(
                f"distributed_type {kind} reads nothing of {section}", (spell("distributed_type", owner),), key=keys[0]
            )
    for section, without in (("parallelism_config", "NO"), ("dynamo_config", "DEEPSPEED")):
        keys = [key for key in ctx.keys_under(section) if key != section]
        if keys and kind == without:
            yield Problem(f"distributed_type {kind} reads nothing of {section}", key=keys[0])
    keys = [key for key in ctx.keys_under("fp8_config") if key != "fp8_config"]
    if keys and str(ctx.get("mixed_precision", "no")).lower() != "fp8":
        yield Problem(
            "fp8_config is read with mixed_precision fp8 only", (spell("mixed_precision", "fp8"),), key=keys[0]
        )


def _which_fp8(ctx: RuleContext) -> Problem | None:
    if str(ctx.get("mixed_precision", "no")).lower() != "fp8" or ctx.keys_under("fp8_config"):
        return None
    return Problem(
        "fp8 without fp8_config takes whichever of torchao, Transformer Engine and MS-AMP is installed",
        (spell("fp8_config.backend", "TE"),),
        key="mixed_precision",
    )


# FSDP.


def _one_unit(ctx: RuleContext) -> Problem | None:
    if _kind(ctx) != "FSDP" or str(ctx.get(f"{FSDP}fsdp_auto_wrap_policy", "-")).upper() != "NO_WRAP":
        return None
    why = "" if ctx.is_set(f"{FSDP}fsdp_auto_wrap_policy") else "; unsaid, that is NO_WRAP"
    return Problem(
        f"the model is wrapped as one unit, which is gathered whole{why}",
        (spell(f"{FSDP}fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"),),
        key=f"{FSDP}fsdp_auto_wrap_policy" if ctx.is_set(f"{FSDP}fsdp_auto_wrap_policy") else "distributed_type",
    )


OBSOLETE: dict[str, tuple[tuple[Any, ...], str]] = {
    "fsdp_forward_prefetch": ((False,), "FSDP2 does not prefetch in the forward pass"),
    "fsdp_backward_prefetch": (("NO_PREFETCH",), "FSDP2 prefetches by itself"),
    "fsdp_use_orig_params": ((True,), "FSDP2 always keeps the original parameters"),
}
"""Keys that FSDP2 never reads, with the values that it acts by all the same."""


def _of_fsdp1(ctx: RuleContext) -> Iterator[Problem]:
    if _kind(ctx) != "FSDP" or _version(ctx) != "2":
        return
    key = f"{FSDP}fsdp_sharding_strategy"
    if ctx.is_set(key):
        try:
            way = sharding_strategy(str(ctx.get(key)))
        except InputError:
            way = "FULL_SHARD"
        freed = way in ("FULL_SHARD", "HYBRID_SHARD")
        meant = ctx.get(f"{FSDP}fsdp_reshard_after_forward")
        if str(meant).lower() != str(freed).lower() or way == "NO_SHARD" or way.startswith("HYBRID"):
            fix = spell(f"{FSDP}fsdp_reshard_after_forward", freed)
            if way.startswith("HYBRID"):
                fix = spell(f"{AXIS}dp_replicate_size", _as_int(ctx, "num_machines") or 2)
            yield Problem(f"fsdp_sharding_strategy {ctx.get(key)} is not read by FSDP2", (fix,), key=key)
    for name, (same, why) in OBSOLETE.items():
        said = ctx.get(f"{FSDP}{name}")
        if ctx.is_set(f"{FSDP}{name}") and str(said).lower() not in [str(each).lower() for each in same]:
            yield Problem(f"{name} is not read: {why}", (spell(f"{FSDP}{name}", None),), key=f"{FSDP}{name}")


def _of_fsdp2(ctx: RuleContext) -> Problem | None:
    """FSDP1 takes the way to share from fsdp_sharding_strategy, which is never unsaid."""
    key = f"{FSDP}fsdp_reshard_after_forward"
    if _kind(ctx) != "FSDP" or _version(ctx) != "1" or not ctx.is_set(key):
        return None
    said = str(ctx.get(key)).upper()
    meant = {"TRUE": "FULL_SHARD", "FALSE": "SHARD_GRAD_OP"}.get(said, said)
    try:
        if sharding_strategy(meant) == sharding_strategy(str(ctx.get(f"{FSDP}fsdp_sharding_strategy"))):
            return None
    except InputError:
        pass
    return Problem(
        f"fsdp_reshard_after_forward={ctx.get(key)} is not read by FSDP1; "
        f"it shares by {ctx.get(f'{FSDP}fsdp_sharding_strategy')}",
        (spell(f"{FSDP}fsdp_sharding_strategy", meant), spell(f"{FSDP}fsdp_version", 2)),
        key=key,
    )


def _fsdp_refuses(ctx: RuleContext) -> Iterator[Problem]:
    if _kind(ctx) != "FSDP":
        return
    if _is_on(ctx, f"{FSDP}fsdp_cpu_ram_efficient_loading") and not _is_on(ctx, f"{FSDP}fsdp_sync_module_states"):
        yield Problem(
            "fsdp_cpu_ram_efficient_loading needs fsdp_sync_module_states: the other ranks get their weights so",
            (spell(f"{FSDP}fsdp_sync_module_states", True),),
            key=f"{FSDP}fsdp_sync_module_states",
        )
    offload = f"{FSDP}fsdp_activation_checkpointing_offload"
    if _is_on(ctx, offload) and not (_is_on(ctx, f"{FSDP}fsdp_activation_checkpointing") and _version(ctx) == "2"):
        yield Problem(
            "offloaded checkpoints need fsdp_activation_checkpointing and fsdp_version 2",
            (spell(f"{FSDP}fsdp_activation_checkpointing", True),),
            key=offload,
        )
    state = f"{FSDP}fsdp_state_dict_type"
    if _version(ctx) == "2" and str(ctx.get(state)).upper() in ("LOCAL_STATE_DICT", "2"):
        yield Problem("FSDP2 has no LOCAL_STATE_DICT", (spell(state, "SHARDED_STATE_DICT"),), key=state)
    if _version(ctx) not in ("1", "2"):
        yield Problem(f"there is no FSDP {_version(ctx)}", (spell(f"{FSDP}fsdp_version", 2),), f"{FSDP}fsdp_version")


def _other_policy(ctx: RuleContext) -> Iterator[Problem]:
    policy = str(ctx.get(f"{FSDP}fsdp_auto_wrap_policy", "")).upper()
    if _kind(ctx) != "FSDP" or not policy:
        return
    for key, reader in (
        (f"{FSDP}fsdp_transformer_layer_cls_to_wrap", "TRANSFORMER_BASED_WRAP"),
        (f"{FSDP}fsdp_min_num_params", "SIZE_BASED_WRAP"),
    ):
        if ctx.is_set(key) and ctx.get(key) and policy != reader:
            name = key.removeprefix(FSDP)
            yield Problem(f"{name} is read by {reader} only, not by {policy}", (spell(key, None),), key=key)


# DeepSpeed.


IN_FILE = (
    "gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device",
    "offload_param_device", "offload_param_nvme_path", "offload_optimizer_nvme_path", "zero3_save_16bit_model",
)  # fmt: skip


def _file_and_more(ctx: RuleContext) -> Problem | None:
    name = ctx.get(f"{ZERO}deepspeed_config_file")
    if _kind(ctx) != "DEEPSPEED" or not name or str(name).lower() == "none":
        return None
    named = (*(f"{ZERO}{each}" for each in IN_FILE), "mixed_precision")
    keys = [key for key in named if ctx.is_set(key) and ctx.parsed.settings[key].file.endswith((".yaml", ".yml"))]
    if not keys:  # options of the command line do no harm
        return None
    names = ", ".join(key.rsplit(".", 1)[-1] for key in keys)
    return Problem(
        f"deepspeed_config_file says everything: {names} beside it {'are' if len(keys) > 1 else 'is'} refused",
        tuple(spell(key, None) for key in keys),
        key=keys[0],
    )


def _beyond_stage(ctx: RuleContext) -> Iterator[Problem]:
    stage = _as_int(ctx, f"{ZERO}zero_stage")
    if _kind(ctx) != "DEEPSPEED" or ctx.get(f"{ZERO}deepspeed_config_file") or stage is None or not 0 <= stage <= 3:
        return
    if stage < 3 and _is_on(ctx, f"{ZERO}zero3_init_flag"):
        yield Problem(
            f"zero3_init_flag is turned off with stage {stage}",
            (spell(f"{ZERO}zero3_init_flag", False),),
            key=f"{ZERO}zero3_init_flag",
        )
    for part, least in (("param", 3), ("optimizer", 1)):
        key = f"{ZERO}offload_{part}_device"
        if stage < least and str(ctx.get(key, "none")).lower() not in ("none", "null"):
            yield Problem(
                f"{key.removeprefix(ZERO)} is read from stage {least} on, not with {stage}",
                (spell(f"{ZERO}zero_stage", least), spell(key, "none")),
                key=key,
            )


def _no_path(ctx: RuleContext) -> Iterator[Problem]:
    if _kind(ctx) != "DEEPSPEED" or ctx.get(f"{ZERO}deepspeed_config_file"):
        return
    for part in ("param", "optimizer"):
        key = f"{ZERO}offload_{part}_"
        if ctx.get(f"{key}device") == "nvme" and not ctx.get(f"{key}nvme_path"):
            yield Problem("device nvme needs its path", (spell(f"{key}nvme_path", "/local_nvme"),), key=f"{key}device")


# Mesh.


def _mesh(ctx: RuleContext) -> Problem | None:
    """The first thing that is wrong with the axes."""
    axes = [key for key in ctx.keys_under("parallelism_config") if key.startswith(AXIS)]
    sizes = {name: _as_int(ctx, f"{AXIS}{name}_size") or 1 for name in ("dp_replicate", "dp_shard", "tp", "cp", "sp")}
    total, cut = prod(sizes.values()), sizes["tp"] * sizes["cp"] > 1
    if not axes or total == 1 or _kind(ctx) == "NO":
        return None  # right, or read by nothing
    if sizes["cp"] > 1 and sizes["sp"] > 1:
        return Problem("cp and sp exclude each other", (spell(f"{AXIS}sp_size", 1),), key=f"{AXIS}cp_size")
    if cut and sizes["dp_replicate"] > 1 and sizes["dp_shard"] == 1:
        return Problem(
            "tensor and context parallelism are combined with sharding, not with copies alone",
            (spell(f"{AXIS}dp_shard_size", sizes["dp_replicate"]), spell(f"{AXIS}dp_replicate_size", 1)),
            key=f"{AXIS}dp_replicate_size",
        )
    return _wrong_product(ctx, axes[0], sizes, total) or _wrong_kind(ctx, axes[0], sizes)


def _wrong_product(ctx: RuleContext, key: str, sizes: Mapping[str, int], total: int) -> Problem | None:
    processes = as_int(ctx.parsed.settings.get("num_processes")) or (ctx.cluster.world if ctx.cluster else None)
    if not processes or total == processes or sizes["sp"] > 1:
        return None
    rest = total // sizes["dp_shard"]
    fix = (spell(f"{AXIS}dp_shard_size", processes // rest),) if processes % rest == 0 else ()
    product = " × ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    return Problem(f"{product} = {total} ranks, but num_processes is {processes}", fix, key=key)


def _wrong_kind(ctx: RuleContext, key: str, sizes: Mapping[str, int]) -> Problem | None:
    if _kind(ctx) == "FSDP" and _version(ctx) == "1":
        return Problem("parallelism_config needs fsdp_version 2", (spell(f"{FSDP}fsdp_version", 2),), key=key)
    if _kind(ctx) == "FSDP" and sizes["dp_shard"] == sizes["cp"] == 1:
        return Problem("FSDP has no ranks to share over", (spell(f"{AXIS}dp_shard_size", 2),), key=key)
    if sizes["cp"] > 1 and _kind(ctx) != "FSDP":
        return Problem("context parallelism needs FSDP2", (spell("distributed_type", "FSDP"),), key=f"{AXIS}cp_size")
    return None


def _degrees(ctx: RuleContext) -> Problem | None:
    processes = _as_int(ctx, "num_processes")
    degrees = [_as_int(ctx, f"{MEGATRON}megatron_lm_{name}") or 1 for name in ("tp_degree", "pp_degree")]
    ranks = degrees[0] * degrees[1]
    if _kind(ctx) != "MEGATRON_LM" or not processes or processes % ranks == 0:
        return None
    return Problem(
        f"tp {degrees[0]} × pp {degrees[1]} = {ranks} ranks per model copy do not divide {processes} processes",
        (spell("num_processes", ranks),),
        key="num_processes",
    )


RULES = (
    FrameworkRule(
        "accelerate.no-kind",
        "error",
        ("distributed_type",),
        _no_kind,
        symptom="ValueError: A `distributed_type` must be specified in the config file",
        cause="everything else depends on it",
    ),
    FrameworkRule(
        "accelerate.machines",
        "error",
        ("num_processes", "machine_rank"),
        _machines,
        symptom="fewer processes than asked for, or a start that waits for machines which never come",
        cause="processes are counted over all machines and divided rounding down",
    ),
    FrameworkRule(
        "accelerate.nobody-to-meet",
        "warning",
        ("num_machines",),
        _nobody_to_meet,
        symptom="a start that waits for the address None and ends after its timeout",
        cause="machines find each other at the address of the first",
    ),
    FrameworkRule(
        "accelerate.processes",
        "error",
        ("num_processes",),
        _how_many,
        symptom="invalid device ordinal, or GPUs that stay idle",
        cause="one process drives one GPU",
        supersedes=("topology.world",),
    ),
    FrameworkRule(
        "accelerate.named-gpus",
        "error",
        ("gpu_ids",),
        _named_gpus,
        symptom="invalid device ordinal",
        cause="only the named GPUs are visible to the processes",
    ),
    FrameworkRule(
        "accelerate.unquoted-no",
        "error",
        ("mixed_precision",),
        _unquoted,
        symptom="AttributeError: 'bool' object has no attribute 'lower'",
        cause="PyYAML reads a bare no as false, and the launcher expects a text",
    ),
    FrameworkRule(
        "accelerate.quoted",
        "error",
        ("num_processes",),
        _quoted,
        symptom="TypeError: '>' not supported between instances of 'str' and 'int'",
        cause="the number is used as it stands",
    ),
    FrameworkRule(
        "accelerate.unused-section",
        "warning",
        (),
        _unused_section,
        symptom="none: the section is read and handed to nobody",
        cause="distributed_type chooses which section counts",
    ),
    FrameworkRule(
        "accelerate.which-fp8",
        "warning",
        ("mixed_precision",),
        _which_fp8,
        symptom="another number format on another machine, or no fp8 at all",
        cause="the backend follows from the packages that are installed",
    ),
    FrameworkRule(
        "accelerate.one-unit",
        "warning",
        (),
        _one_unit,
        symptom="memory as without sharding: all parameters are gathered at once",
        cause="FSDP gathers unit by unit, and without a policy the model is one",
    ),
    FrameworkRule(
        "accelerate.of-fsdp1",
        "warning",
        (),
        _of_fsdp1,
        symptom="none, or one line in the log",
        cause="FSDP2 has other switches than FSDP1",
    ),
    FrameworkRule(
        "accelerate.of-fsdp2",
        "error",
        (),
        _of_fsdp2,
        symptom="none: FSDP1 shares by another way than the file seems to say",
        cause="the launcher always hands over a sharding strategy, which comes first",
    ),
    FrameworkRule(
        "accelerate.fsdp-refuses",
        "error",
        (),
        _fsdp_refuses,
        symptom="ValueError when the launcher or the plugin starts",
        cause="the plugin checks its own switches",
    ),
    FrameworkRule(
        "accelerate.other-policy",
        "warning",
        (),
        _other_policy,
        symptom="none: the units are those of the policy",
        cause="each wrap policy reads its own key",
    ),
    FrameworkRule(
        "accelerate.file-and-more",
        "error",
        (),
        _file_and_more,
        symptom="ValueError: When using `deepspeed_config_file`, the following … variables will be ignored",
        cause="two places would say the same",
    ),
    FrameworkRule(
        "accelerate.beyond-its-stage",
        "warning",
        (),
        _beyond_stage,
        symptom="none, or one line in the log: memory is as without it",
        cause="each ZeRO stage reads its own settings",
    ),
    FrameworkRule(
        "accelerate.no-nvme-path",
        "error",
        (),
        _no_path,
        symptom="an assertion about nvme_path when the model or the optimizer is set up",
        cause="there is no usual place for a fast local disk",
    ),
    FrameworkRule(
        "accelerate.mesh",
        "error",
        (),
        _mesh,
        symptom="ValueError: ParallelismConfig total_size does not match num_processes",
        cause="every rank has exactly one place on the mesh",
        supersedes=("topology.world", "topology.shard-product"),
    ),
    FrameworkRule(
        "accelerate.degrees",
        "error",
        ("num_processes",),
        _degrees,
        symptom="an assertion that the world size is divisible by tp × pp",
        cause="each copy of the model takes tp × pp ranks",
        supersedes=("topology.world",),
    ),
)
