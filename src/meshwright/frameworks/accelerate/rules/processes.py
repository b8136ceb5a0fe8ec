"""Accelerate's rules on processes, machines and unused sections."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import UNSET

from meshwright.frameworks.accelerate.keys import SECTION_OF_TYPE
from meshwright.frameworks.accelerate.parse_settings import GPU_TYPES
from meshwright.frameworks.accelerate.rules.common import has_command_line, int_value, type_of
from meshwright.frameworks.accelerate.rules.sizes import machine_problems, process_problems
from meshwright.frameworks.framework import FrameworkRule, Problem, RuleContext
from meshwright.frameworks.types import as_int
from meshwright.recipes.key_maps.accelerate import DISTRIBUTED_TYPES, ZERO


def _no_distributed_type(ctx: RuleContext) -> Problem | None:
    if ctx.is_set("distributed_type") or has_command_line(ctx):
        return None
    return Problem("distributed_type is missing", ("distributed_type: MULTI_GPU",), key="distributed_type")


def _machines(ctx: RuleContext) -> Iterator[Problem]:
    processes, machines = int_value(ctx, "num_processes"), int_value(ctx, "num_machines") or 1
    rank = int_value(ctx, "machine_rank")
    if processes and machines > 0 and processes % machines:
        each = processes // machines
        total = each * machines or processes * machines  # fewer than machines: meant for each of them
        if ctx.cluster is not None and ctx.cluster.world % machines == 0:
            total = ctx.cluster.world
        yield Problem(
            f"num_processes={processes} is the total and is not divisible by num_machines={machines}: "
            f"{each} would start on each machine, {each * machines} in total",
            (ctx.written("num_processes", total),),
            key="num_processes",
        )
    if rank is not None and not 0 <= rank < machines:
        yield Problem(
            f"machine_rank={rank} is out of range for {machines} machines, counted from 0",
            (ctx.written("machine_rank", 0),),
            key="machine_rank",
        )
    yield from machine_problems(ctx)


def _no_main_process_ip(ctx: RuleContext) -> Problem | None:
    machines = int_value(ctx, "num_machines") or 1
    uses_hostfile = type_of(ctx) == "DEEPSPEED" and ctx.get(f"{ZERO}deepspeed_multinode_launcher") != "standard"
    if machines < 2 or ctx.is_set("main_process_ip") or uses_hostfile or type_of(ctx) not in DISTRIBUTED_TYPES[:5]:
        return None
    known = has_command_line(ctx)
    return Problem(
        f"num_machines={machines}, but main_process_ip is not set" + ("" if known else "; pass it on the command line"),
        (ctx.written("main_process_ip", "10.0.0.1"),),
        "num_machines",
        "error" if known else "warning",
    )


def _process_count(ctx: RuleContext) -> Iterator[Problem]:
    type_name, processes = type_of(ctx), int_value(ctx, "num_processes")
    setting = ctx.parsed.settings.get("distributed_type")
    in_file = setting is not None and setting.file.endswith((".yaml", ".yml"))
    if in_file and has_command_line(ctx) and not ctx.is_set("num_processes") and type_name in DISTRIBUTED_TYPES[1:5]:
        yield Problem("num_processes is not set", (ctx.written("num_processes", 8),), key="distributed_type")
    if processes is not None and processes < 1:  # of a file, the command may still pass another
        yield Problem(
            f"num_processes={processes}: at least one process trains",
            (ctx.written("num_processes", ctx.cluster.world if ctx.cluster else 8),),
            "num_processes",
            "error" if processes == 0 or has_command_line(ctx) else "warning",
        )
        return
    if setting is not None and type_name == "NO" and processes is not None and processes > 1:
        yield Problem(
            f"num_processes={processes} is ignored: distributed_type NO starts one process",
            (ctx.written("distributed_type", "MULTI_GPU"), ctx.written("num_processes", 1)),
            "num_processes",
            "warning",
        )
    yield from process_problems(ctx)


def _gpu_ids(ctx: RuleContext) -> Problem | None:
    ids, processes, machines = (
        ctx.get("gpu_ids"),
        int_value(ctx, "num_processes"),
        int_value(ctx, "num_machines") or 1,
    )
    if ids in (None, "all") or not processes or type_of(ctx) not in GPU_TYPES[1:]:
        return None
    listed = len([one for one in str(ids).split(",") if one.strip()])
    if listed >= processes // machines:
        return None
    return Problem(
        f"gpu_ids lists {listed} GPUs, but {processes // machines} processes start on each machine",
        (ctx.written("num_processes", listed * machines), ctx.written("gpu_ids", "all")),
        key="gpu_ids",
    )


def _unquoted_no(ctx: RuleContext) -> Iterator[Problem]:
    for key in ("mixed_precision", "dynamo_backend", "dynamo_config.dynamo_backend"):
        setting = ctx.parsed.settings.get(key)
        if setting is not None and setting.pyyaml is not UNSET and setting.pyyaml is False:
            name = key.rsplit(".", 1)[-1]
            yield Problem(
                f"{name}: {setting.value} without quotes is parsed as the boolean false", (f"{name}: 'no'",), key=key
            )


def _quoted_value(ctx: RuleContext) -> Iterator[Problem]:
    """Quoted numbers, which are compared or divided when there are several machines."""
    for key in ("num_machines", "num_processes"):
        setting = ctx.parsed.settings.get(key)
        several = key == "num_machines" or (int_value(ctx, "num_machines") or 1) > 1
        if setting is None or not several or not setting.file.endswith((".yaml", ".yml")):
            continue
        if isinstance(setting.value, str) and as_int(setting) is not None:
            yield Problem(f'{key} is the string "{setting.value}", not a number', (f"{key}: {setting.value}",), key=key)


def _unused_section(ctx: RuleContext) -> Iterator[Problem]:
    type_name = type_of(ctx)
    for owner, section in SECTION_OF_TYPE.items():
        keys = [key for key in ctx.keys_under(section) if key != section]
        if keys and type_name != owner and type_name in DISTRIBUTED_TYPES:
            yield Problem(
                f"{section} is ignored with distributed_type {type_name}",
                (ctx.written("distributed_type", owner),),
                key=keys[0],
            )
    for section, without in (("parallelism_config", "NO"), ("dynamo_config", "DEEPSPEED")):
        keys = [key for key in ctx.keys_under(section) if key != section]
        if keys and type_name == without:
            yield Problem(f"{section} is ignored with distributed_type {type_name}", key=keys[0])
    keys = [key for key in ctx.keys_under("fp8_config") if key != "fp8_config"]
    if keys and str(ctx.get("mixed_precision", "no")).lower() != "fp8":
        yield Problem("fp8_config requires mixed_precision fp8", (ctx.written("mixed_precision", "fp8"),), key=keys[0])


def _fp8_backend_unset(ctx: RuleContext) -> Problem | None:
    if str(ctx.get("mixed_precision", "no")).lower() != "fp8" or ctx.keys_under("fp8_config"):
        return None
    return Problem(
        "mixed_precision fp8 without fp8_config uses whichever of torchao, Transformer Engine and MS-AMP is installed",
        (ctx.written("fp8_config.backend", "TE"),),
        key="mixed_precision",
    )


RULES = (
    FrameworkRule("accelerate.no-distributed-type", "error", ("distributed_type",), _no_distributed_type,
        symptom="ValueError: A `distributed_type` must be specified in the config file",
        cause="distributed_type selects every other section"),
    FrameworkRule("accelerate.machines", "error", ("num_machines", "num_processes", "machine_rank"), _machines,
        symptom="fewer processes than requested, or a hang at startup waiting for other machines",
        cause="num_processes is the total over all machines; it is divided with rounding down"),
    FrameworkRule("accelerate.no-main-process-ip", "warning", ("num_machines",), _no_main_process_ip,
        symptom="startup hangs on the address None until the rendezvous timeout",
        cause="the machines rendezvous at the address of the first one"),
    FrameworkRule("accelerate.processes", "error", ("num_processes",), _process_count,
        symptom="invalid device ordinal, or GPUs that stay idle", cause="one process drives one GPU",
        supersedes=("topology.world",)),
    FrameworkRule("accelerate.gpu-ids", "error", ("gpu_ids",), _gpu_ids, symptom="invalid device ordinal",
        cause="only the listed GPUs are visible to the processes"),
    FrameworkRule("accelerate.unquoted-no", "error", ("mixed_precision",), _unquoted_no,
        symptom="AttributeError: 'bool' object has no attribute 'lower'",
        cause="PyYAML parses a bare no as false, and the launcher expects a string"),
    FrameworkRule("accelerate.quoted-value", "error", ("num_processes",), _quoted_value,
        symptom="TypeError: '>' not supported between instances of 'str' and 'int'",
        cause="the value is used without conversion"),
    FrameworkRule("accelerate.unused-section", "warning", (), _unused_section,
        symptom="none: the section is parsed but not used", cause="distributed_type selects the section that is used"),
    FrameworkRule("accelerate.fp8-backend-unset", "warning", ("mixed_precision",), _fp8_backend_unset,
        symptom="a different fp8 backend on another machine, or none at all",
        cause="the backend depends on the installed packages"),
)  # fmt: skip
