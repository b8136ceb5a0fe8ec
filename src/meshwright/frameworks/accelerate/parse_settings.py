"""What settings of Accelerate and arguments of the Trainer, TRL and peft train together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET

from meshwright.frameworks.accelerate.deepspeed_config import (
    missing_file_note,
    read_deepspeed_config,
    repeated_arguments,
)
from meshwright.frameworks.accelerate.keys import PREFIXES, SECTION_OF_TYPE, TABLE
from meshwright.frameworks.accelerate.precision import (
    ENGINES,
    MARK,
    Precision,
    frozen_note,
    is_unmixed,
    mixed_precision,
    overwritten_precision,
    precision_of,
    scaled_fp16_weights,
    weight_notes,
)
from meshwright.frameworks.accelerate.trainer_fsdp import carried_arguments, sharding_settings
from meshwright.frameworks.accelerate.trl_commands import is_by_trl
from meshwright.frameworks.adapter_defaults import library_setting
from meshwright.frameworks.common import value_or_default
from meshwright.frameworks.framework import Content, GpuRequest, ParsedConfig
from meshwright.frameworks.stated_arguments import STORAGE
from meshwright.frameworks.trainer import Arguments, ProgramFields, is_on, program_fields, start_findings, unknown_names
from meshwright.frameworks.trainer_fields import LOADED_BY_TRL, STORED_IN_BYTES, WEIGHT_DTYPES, is_trl
from meshwright.frameworks.trl_data import is_trl_script
from meshwright.frameworks.types import Settings, SourcedValue, as_int
from meshwright.frameworks.unused_adapters import (
    is_of_adapters,
    quantized_without_adapters,
    unused_adapters,
    unused_of_program,
)
from meshwright.recipes.key_maps import config_keys
from meshwright.recipes.key_maps.accelerate import AXIS, FSDP, MEGATRON, distributed_type
from meshwright.recipes.types import Engine
from meshwright.rules.rule import Finding

DOUBLE, CHECKPOINTING = "accelerate.double-checkpointing", "gradient_checkpointing"
GPU_TYPES = ("NO", "MULTI_GPU", "FSDP", "DEEPSPEED", "MEGATRON_LM")
WRAPPED = "fsdp_transformer_layer_cls_to_wrap"
DISTRIBUTED_OPTIMIZER = f"{MEGATRON}megatron_lm_use_distributed_optimizer"


def _bytes_in_fsdp(settings: Settings, arguments: Arguments) -> Iterator[Finding]:
    """Yield that FSDP1 cannot flatten 4-bit weights, which are uint8 tensors, with the norms beside them."""
    stored, version = arguments.get(STORED_IN_BYTES), settings.get(f"{FSDP}fsdp_version")
    is_second = version is not None and (version.unresolved or str(version.value) == "2")
    if stored is None or is_second or not is_on(arguments, "load_in_4bit"):
        return
    dtype = next((str(arguments[name].value) for name in WEIGHT_DTYPES if name in arguments), "bfloat16")
    dtype = dtype.removeprefix("torch.") if dtype.endswith(("float16", "float32")) else "bfloat16"
    message = (
        f"{STORAGE} is not set: 4-bit weights are then stored as uint8, and FSDP stops at start, because it flattens "
        f"only floating-point weights of one dtype, here {dtype}"
    )
    yield Finding("value.invalid", "error", STORAGE, message, (f"{STORAGE}=torch.{dtype}",), stored.file, stored.line)


def _without_sharding(arguments: Arguments, type_name: str, lost: Mapping[str, str]) -> dict[str, str]:
    """Return the arguments that no field carries, without those that settings of FSDP carry."""
    carried = carried_arguments(arguments) if type_name == "FSDP" and sharding_settings(arguments) else ()
    return {name: why for name, why in lost.items() if name not in carried}


class _Inputs(msgspec.Struct, frozen=True):
    """Settings and arguments of a run, and what was found out from them."""

    settings: Settings
    given: Arguments  # as the user wrote them
    arguments: Arguments  # those that have an effect
    type_name: str
    program: ProgramFields
    precision: Precision
    script: str
    trl: bool

    @property
    def by_trl(self) -> bool:
        """Whether TRL trains: its defaults differ from the Trainer's."""
        return self.trl or is_trl_script([self.script]) or is_trl(self.arguments, self.script)

    @property
    def without_peft(self) -> bool:
        """TRL trains all weights unless --use_peft is given."""
        return is_by_trl(self.script) and not is_on(self.given, "use_peft")

    @property
    def checkpointing(self) -> SourcedValue | None:
        """FSDP's setting that recomputes layers, if it is on."""
        setting = self.settings.get(f"{FSDP}fsdp_activation_checkpointing")
        is_set = self.type_name == "FSDP" and setting is not None and str(setting.value).lower() == "true"
        return setting if is_set else None


def parse_settings(
    content: Content,
    raw_settings: Settings,
    gpu_request: GpuRequest,
    arguments: Arguments,
    fine_tuning: bool = False,
    script: str = "",
    trl: bool = False,
    keeps_dtype: bool = False,
) -> ParsedConfig:
    settings = normalize(raw_settings)
    run = _inputs(content, settings, arguments, fine_tuning, script, trl, keeps_dtype)
    type_name, program, effective = run.type_name, run.program, run.precision.settings
    inner = None
    if type_name == "DEEPSPEED":
        inner = read_deepspeed_config(content, effective, run.arguments, fine_tuning, script, trl)
    field_values = {**_field_values(run), **(inner.field_values if inner else {})}
    open_fields = (*program.unknown_fields, *(inner.unknown_fields if inner else ()))
    files = [content.path, *(setting.file for setting in raw_settings.values())]
    return ParsedConfig(
        settings=settings,
        mappable={key: setting for key, setting in effective.items() if _is_used(key, type_name, settings)},
        name=Path(content.path).stem,
        model=program.model,
        goal=program.goal,
        goal_open=program.goal == "pretrain",  # no argument names a model to start from
        gpu_request=_gpu_request(settings, type_name, gpu_request),
        files=tuple(dict.fromkeys([*files, *(inner.parsed.files if inner and inner.parsed else ())])),
        findings=(*_findings(run), *(inner.findings if inner else ())),
        field_values=field_values,
        unknown_fields=(
            *(key for key in open_fields if key not in field_values),
            *_program_fields(type_name, effective, field_values),
        ),
        engine=_engine(type_name, settings),
        suppressed_rules=program.suppressed_rules,
        referenced=inner.parsed if inner else None,
        program=msgspec.structs.replace(
            program.arguments,
            fills=_filled_in(run.arguments),
            repeats=repeated_arguments(type_name, settings, run.given, run.by_trl),
            lost=_without_sharding(run.arguments, type_name, program.arguments.lost),
        ),
        notes=(
            *_notes(type_name, settings, field_values),
            *missing_file_note(type_name, settings, inner),
            *weight_notes(run.arguments, run.precision, type_name),
            *frozen_note(run.arguments, field_values, is_by_trl(script)),
            *program.notes,
        ),
    )


def _inputs(
    content: Content,
    settings: Settings,
    arguments: Arguments,
    fine_tuning: bool,
    script: str,
    trl: bool,
    keeps_dtype: bool,
) -> _Inputs:
    if is_by_trl(script) and "model_name_or_path" in arguments:
        arguments = {**arguments, LOADED_BY_TRL: arguments["model_name_or_path"]}
    given = arguments
    if is_by_trl(script) and not is_on(given, "use_peft"):
        arguments = {name: one for name, one in given.items() if not is_of_adapters(name)}
    elif is_by_trl(script):
        arguments = {**arguments, **library_setting("trl", given["use_peft"])}
    type_name = distributed_type({key: setting.value for key, setting in settings.items()})
    program = program_fields(content, arguments, fine_tuning, script, trl)
    precision = precision_of(settings, arguments, type_name, program.goal, keeps_dtype)
    return _Inputs(settings, given, arguments, type_name, program, precision, script, trl)


def _field_values(run: _Inputs) -> dict[str, Any]:
    """Return the recipe fields that the arguments, the dtypes and settings without a field of their own set."""
    values = {**run.precision.field_values, **run.program.field_values}
    distributed_optimizer = getattr(run.settings.get(DISTRIBUTED_OPTIMIZER), "value", "")
    if run.type_name == "MEGATRON_LM" and str(distributed_optimizer).lower() != "true":
        values["kernels.overlap_param_gather"] = False
    if size := as_int(run.arguments.get("per_device_train_batch_size")):
        values["layout.micro_batch_size"] = size
    if run.checkpointing is not None:
        values["layout.recompute"] = "full"
    return values


def _findings(run: _Inputs) -> Iterator[Finding]:
    """Yield what is wrong with settings and arguments together."""
    arguments, effective = run.arguments, run.precision.settings
    if run.checkpointing is not None:
        yield from _double_checkpointing(run.checkpointing, arguments, run.by_trl)
    yield from overwritten_precision(run.settings, arguments)
    yield from unknown_names("accelerate", arguments)
    yield from start_findings({**arguments, **mixed_precision(effective)}, run.program.model, run.script)
    yield from scaled_fp16_weights(run.precision, arguments)
    if run.without_peft:
        names = [name for name in run.given if is_of_adapters(name)]
        yield from unused_adapters(run.given, names, "--use_peft", is_meant=False, flag="--")
        yield from quantized_without_adapters(run.given, "--use_peft", "--")
    if run.type_name == "FSDP":
        yield from _bytes_in_fsdp(run.settings, arguments)
    from_command = [name for name, one in run.given.items() if not one.file.endswith(".py")]
    yield from unused_of_program(run.given, from_command)


def _is_used(key: str, type_name: str, settings: Settings) -> bool:
    """Return whether the distributed type uses a key; rules report the unused ones."""
    section = key.partition(".")[0]
    if section in SECTION_OF_TYPE.values():
        policy = settings.get(f"{FSDP}fsdp_auto_wrap_policy")
        by_size = policy is not None and str(policy.value).upper() == "SIZE_BASED_WRAP"
        return SECTION_OF_TYPE.get(type_name, section if type_name not in GPU_TYPES else "") == section and (
            by_size or key != f"{FSDP}fsdp_min_num_params"
        )
    return (section, type_name) not in (("parallelism_config", "NO"), ("dynamo_config", "DEEPSPEED"))


def normalize(settings: Settings) -> dict[str, SourcedValue]:
    """Return settings as the launcher sees them: keys with their section's prefix, booleans as PyYAML reads them."""
    normalized: dict[str, SourcedValue] = {}
    for key, setting in settings.items():
        section, dot, name = key.partition(".")
        prefix = PREFIXES.get(section, "")
        full_key = f"{section}.{prefix}{name}" if dot and prefix and not name.startswith(prefix[:-1]) else key
        config_key = config_keys(TABLE).get(full_key)
        if setting.value is None and config_key is not None:
            continue
        if config_key is not None and config_key.type == "bool" and setting.pyyaml is not UNSET:
            setting = msgspec.structs.replace(setting, value=setting.pyyaml)
        if setting.value == "auto" and section == "deepspeed_config":
            setting = msgspec.structs.replace(setting, unresolved="auto: filled in when training starts")
        normalized[full_key] = setting
    return normalized


def _program_fields(type_name: str, settings: Settings, field_values: dict[str, Any]) -> Iterator[str]:
    """Yield fields that the program sets: without mixed precision this includes the model dtype."""
    if type_name == "MEGATRON_LM":
        yield "layout.vp"
    if "layout.micro_batch_size" not in field_values:
        yield "layout.micro_batch_size"
    if is_unmixed(settings) and "precision.compute" not in field_values:
        yield "precision.compute"


def _engine(type_name: str, settings: Settings) -> Engine:
    """Return the engine; torch's tensor and context parallelism is modeled as AutoModel's."""
    has_model_axes = any((as_int(settings.get(f"{AXIS}{name}_size")) or 1) > 1 for name in ("tp", "cp"))
    return ENGINES.get(type_name, "automodel" if has_model_axes else "fsdp1")


def _gpu_request(settings: Settings, type_name: str, requested: GpuRequest) -> GpuRequest:
    if type_name not in GPU_TYPES:
        return GpuRequest()
    processes, nodes = settings.get("num_processes"), as_int(settings.get("num_machines")) or requested.nodes or 1
    world = 1 if type_name == "NO" else as_int(processes)
    if not world:
        return requested
    per_node = world // nodes if world % nodes == 0 else None
    return GpuRequest(nodes=nodes, gpus_per_node=per_node, world_size=world, gpu=requested.gpu, source=processes)


def _notes(type_name: str, settings: Settings, field_values: Mapping[str, Any]) -> Iterator[str]:
    if type_name not in GPU_TYPES:
        yield f"distributed_type {type_name} does not run on GPUs: memory and layout are not checked"
    if "num_processes" not in settings and type_name != "NO":
        yield "num_processes is not set: pass it on the command line"
    policy = value_or_default(TABLE, settings, f"{FSDP}fsdp_auto_wrap_policy")
    layers_unset = f"{FSDP}{WRAPPED}" not in settings
    if type_name == "FSDP" and str(policy).upper() == "TRANSFORMER_BASED_WRAP" and layers_unset:
        yield "the layers to wrap come from the model's _no_split_modules"
    if "layout.micro_batch_size" not in field_values:
        yield "the program sets the batch size: micro batch 1 is assumed; write layout.micro_batch_size=N for another"


def _filled_in(arguments: Arguments) -> dict[str, str]:
    """Return the batch arguments of the Trainer, which no config has or which replace it."""
    return {name: name for name in (MARK, "gradient_accumulation_steps")} if MARK in arguments else {}


def _double_checkpointing(setting: SourcedValue, arguments: Arguments, trl: bool) -> Iterator[Finding]:
    """Yield a finding if layers would be recomputed twice, which transformers rejects; TRL recomputes by default.

    The argument is turned off, not left out: without it TRL would recompute again.
    """
    stated = arguments.get(CHECKPOINTING)
    if stated is not None and is_on(arguments, CHECKPOINTING):
        other = f"--{CHECKPOINTING} ({stated.location})"
    elif stated is None and trl:
        other = f"{CHECKPOINTING}, which TRL turns on by default,"
    else:
        return
    yield Finding(
        DOUBLE,
        "error",
        f"{FSDP}fsdp_activation_checkpointing",
        f"fsdp_activation_checkpointing and {other} would checkpoint the same layers twice",
        (f"--{CHECKPOINTING} false",),
        file=setting.file,
        line=setting.line,
    )
