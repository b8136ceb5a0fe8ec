"""Write a recipe as the YAML of `accelerate launch` for the user's training program."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from meshwright.clusters import Cluster
from meshwright.errors import InputError
from meshwright.frameworks.framework import Framework
from meshwright.frameworks.mapping import nest, relevant_fields, to_settings, without_defaults
from meshwright.frameworks.trainer_args import PROGRAM, file_name, program_file, program_notes
from meshwright.frameworks.trainer_program import (
    carried_by_program,
    lost_by_program,
    program_data_notes,
    program_text,
    with_data,
    without_balancing,
    without_model,
)
from meshwright.frameworks.types import ExportedConfig, Program, UnmappedField
from meshwright.models import ModelSpec
from meshwright.recipes.key_maps import config_keys
from meshwright.recipes.key_maps.accelerate import (
    AXIS,
    CP_COMM_STRATEGIES,
    FSDP,
    ZERO,
    distributed_type,
    uses_deepspeed,
)
from meshwright.recipes.types import Layout, Recipe

KEEP = ("fsdp_config.fsdp_version", "fsdp_config.fsdp_reshard_after_forward", "deepspeed_config.zero_stage")
DERIVED_FIELDS = ("precision.grads", "precision.reduce", "train.global_batch_size", "layout.micro_batch_size")
"""Fields derived from others, or set by the program's arguments."""
OF_ONE_PROCESS = ("layout.strategy", "layout.reshard_after_forward", "precision.reduce")
"""Fields that make no difference to one process."""


REPLICATED = ("layout.strategy", "layout.dp_replicate", "layout.dp_shard", "layout.reshard_after_forward")
"""Fields of a full model on every process, which Accelerate has as DDP only."""


def write(framework: Framework, recipe: Recipe, model: ModelSpec, on: Cluster) -> ExportedConfig:
    replicated = _as_ddp(recipe, on)
    ddp = replicated is not recipe
    recipe, layout = replicated, replicated.layout
    _require_supported(layout, on)
    alone = on.world == 1 and not uses_deepspeed(recipe) and layout.offload == "none"
    settings, unmapped = _settings(framework, recipe, model, on, alone)
    name = f"{recipe.name or 'recipe'}.yaml"
    micro, steps = layout.micro_batch_size, _accumulation_steps(recipe, on)
    argv = (PROGRAM, "--per_device_train_batch_size", str(micro), "--gradient_accumulation_steps", str(steps))
    arguments = file_name(recipe)
    recomputes = layout.recompute == "full" and settings.get("fsdp_config.fsdp_activation_checkpointing") is not True
    program = program_text(recipe, model, arguments.removesuffix(".py"))
    named = with_data(recipe) if program else recipe
    text, carried, lost = program_file(named, micro, steps, recomputes, sharded=not alone)
    lost = (*lost, *without_balancing(recipe, model), *(lost_by_program(recipe) if program else ()))
    carried = (*carried, *(carried_by_program(recipe) if program else ()))
    rest = [one for one in unmapped if one.field not in carried and one.field not in {two.field for two in lost}]
    return ExportedConfig(
        framework=framework.name,
        files={
            name: config_text(nest({**_launch_settings(on), **settings}), recipe, framework),
            arguments: text,
            **({PROGRAM: program} if program else {}),
        },
        program=Program(argv=(PROGRAM,) if program else argv, env=environment_of_file(settings), modules=(arguments,)),
        unmapped=(*(() if program else without_model(recipe, model)), *rest, *lost),
        in_other_files=(*carried, *(OF_ONE_PROCESS if alone else ()), *(REPLICATED if ddp else ())),
        notes=tuple(_notes(recipe, on, name, arguments, bool(program))),
    )


def _require_supported(layout: Layout, on: Cluster) -> None:
    """Raise InputError for a layout that Accelerate cannot run."""
    if layout.strategy == "megatron_fsdp" or layout.pp > 1 or layout.ep > 1:
        field = "strategy" if layout.strategy == "megatron_fsdp" else "pp" if layout.pp > 1 else "ep"
        raise InputError("is not supported by Accelerate", field=f"layout.{field}", value=getattr(layout, field))
    shard_ranks = _ranks(layout, on) // layout.dp_replicate * layout.cp
    if layout.strategy == "fsdp2" and layout.tp > 1 and shard_ranks < 2:
        raise InputError(
            "leaves no ranks to shard over: Accelerate's FSDP2 needs ranks besides the tensor-parallel ones",
            field="layout.tp",
            value=layout.tp,
        )
    if layout.cp > 1 and layout.cp_comm not in CP_COMM_STRATEGIES.values():
        raise InputError(
            "must be allgather or ring: torch gathers keys and values or rotates them",
            field="layout.cp_comm",
            value=layout.cp_comm,
        )


def _ranks(layout: Layout, on: Cluster) -> int:
    """Return the data-parallel ranks."""
    return max(1, on.world // (layout.tp * layout.cp))


def _accumulation_steps(recipe: Recipe, on: Cluster) -> int:
    micro = recipe.layout.micro_batch_size
    return max(1, recipe.train.global_batch_size // (micro * _ranks(recipe.layout, on)))


def _settings(
    framework: Framework, recipe: Recipe, model: ModelSpec, on: Cluster, alone: bool
) -> tuple[dict[str, Any], Sequence[UnmappedField]]:
    """Return the settings of the YAML, and the fields without a key; `alone`: one process has nothing to shard."""
    fields = [key for key in relevant_fields(recipe, model) if key not in DERIVED_FIELDS]
    settings, unmapped = to_settings(framework, recipe, fields)
    settings = without_defaults(framework, settings, KEEP)
    if alone:
        settings = {key: value for key, value in settings.items() if not key.startswith("fsdp_config.")}
        settings["distributed_type"] = "NO"
    if any(key.startswith(AXIS) for key in settings):
        settings[f"{AXIS}dp_shard_size"] = max(1, _ranks(recipe.layout, on) // recipe.layout.dp_replicate)
    if uses_deepspeed(recipe):
        settings[f"{ZERO}gradient_accumulation_steps"] = _accumulation_steps(recipe, on)
    else:
        settings = {key: value for key, value in settings.items() if not key.startswith(ZERO)}
    return settings, unmapped


def _launch_settings(on: Cluster) -> dict[str, Any]:
    return {
        "compute_environment": "LOCAL_MACHINE",
        "num_machines": on.nodes,
        "num_processes": on.world,
        "machine_rank": 0,
        **({"main_process_ip": "10.0.0.1", "main_process_port": 29500} if on.nodes > 1 else {}),
    }


def _notes(recipe: Recipe, on: Cluster, name: str, arguments: str, has_program: bool) -> Iterator[str]:
    """Yield how to start the config, and what the user adds to it."""
    yield (
        f"start it with accelerate launch --config_file {name} {PROGRAM} on every machine, each with its "
        "--machine_rank; or with torchrun and the environment that accelerate launch would set"
    )
    if not has_program:
        yield (
            f"replace train.py with your program, which passes what {arguments} has to its Trainer; "
            "the model and the data are its arguments"
        )
    yield from program_notes(recipe, has_program)
    if has_program:
        yield from program_data_notes(recipe)
    if on.nodes > 1:
        yield "replace main_process_ip with the address of the first machine"


def _as_ddp(recipe: Recipe, on: Cluster) -> Recipe:
    """Return a recipe whose processes all hold the full model as DDP: Accelerate's FSDP needs ranks to shard over."""
    layout = recipe.layout
    replicas = layout.strategy == "fsdp2" and 1 < layout.dp_replicate == on.world
    if not replicas or layout.offload != "none":
        return recipe
    plain = msgspec.structs.replace(layout, strategy="ddp", dp_replicate=1, dp_shard=-1)
    return msgspec.structs.replace(recipe, layout=plain)


ENV_VARS = {
    "mixed_precision": "ACCELERATE_MIXED_PRECISION",
    "dynamo_config.dynamo_backend": "ACCELERATE_DYNAMO_BACKEND",
    f"{ZERO}gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    f"{ZERO}gradient_clipping": "ACCELERATE_GRADIENT_CLIPPING",
    f"{ZERO}zero_stage": "ACCELERATE_DEEPSPEED_ZERO_STAGE",
    f"{ZERO}offload_optimizer_device": "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
    f"{ZERO}offload_param_device": "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE",
    f"{ZERO}zero3_init_flag": "ACCELERATE_DEEPSPEED_ZERO3_INIT",
    f"{ZERO}zero3_save_16bit_model": "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL",
    f"{ZERO}deepspeed_config_file": "ACCELERATE_DEEPSPEED_CONFIG_FILE",
}
FSDP_DEFAULTS = {
    name: config_keys("accelerate")[f"{FSDP}{name}"].default
    for name in ("fsdp_version", "fsdp_use_orig_params", "fsdp_sync_module_states", "fsdp_cpu_ram_efficient_loading")
}
"""Values that accelerate launch sets if a config does not: those of a program without its environment differ."""
FSDP_NAMES = {"fsdp_transformer_layer_cls_to_wrap": "FSDP_TRANSFORMER_CLS_TO_WRAP"}
USE_FLAGS = {"FSDP": "ACCELERATE_USE_FSDP", "DEEPSPEED": "ACCELERATE_USE_DEEPSPEED"}


def environment(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment variables that accelerate launch would set, for programs started otherwise."""
    env = {USE_FLAGS[type_name]: "true"} if (type_name := settings["distributed_type"]) in USE_FLAGS else {}
    if any(key.startswith(AXIS) for key in settings):
        env["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
    for key, value in settings.items():
        section, _, last = key.partition(".")
        text = str(value).lower() if isinstance(value, bool) else str(value)
        if section in ("fsdp_config", "parallelism_config"):
            env[FSDP_NAMES.get(last, last.upper())] = text
        elif section == "fp8_config":
            env[f"ACCELERATE_FP8_{last.removeprefix('fp8_').upper()}"] = text
        elif key in ENV_VARS:
            env[ENV_VARS[key]] = text
    return env


def environment_of_file(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment that accelerate launch sets for a config: its settings, and its own defaults."""
    found = {key: value for key, value in settings.items() if value is not None}
    if distributed_type(found) == "FSDP":
        found = {**{f"{FSDP}{name}": value for name, value in FSDP_DEFAULTS.items()}, **found}
    return environment({**found, "distributed_type": distributed_type(found)})


def config_text(tables: dict[str, Any], recipe: Recipe, framework: Framework) -> str:
    """Return the YAML file of a config."""
    lines = [f"# {recipe.name or 'a recipe'} for Accelerate {framework.version}, written by meshwright export"]
    for key, value in tables.items():
        if isinstance(value, dict):
            lines += [f"{key}:", *(f"  {name}: {_scalar(item)}" for name, item in value.items())]
        else:
            lines.append(f"{key}: {_scalar(value)}")
    return "\n".join(lines) + "\n"


def _scalar(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"'{value}'" if str(value).lower() == "no" else str(value)  # YAML reads a bare no as false
