"""Parse the YAML of `accelerate config`, and `accelerate launch` commands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET

from meshwright.clusters import Cluster
from meshwright.errors import InputError
from meshwright.frameworks import accelerate_options
from meshwright.frameworks.accelerate.job_environment import settings_of
from meshwright.frameworks.accelerate.keys import PREFIXES, SECTION_OF_TYPE, TABLE, format_setting
from meshwright.frameworks.accelerate.trainer_fsdp import carried_arguments, sharding_settings
from meshwright.frameworks.common import gpu_request_of, value_or_default
from meshwright.frameworks.constructors import constructor_findings
from meshwright.frameworks.framework import Content, GpuRequest, ParsedConfig
from meshwright.frameworks.hf_arguments import as_parsed, flags_without_value
from meshwright.frameworks.imported_trainers import trainer_call
from meshwright.frameworks.key_table import read_table
from meshwright.frameworks.load import open_file, program_path
from meshwright.frameworks.trainer import (
    TRL_KEYS,
    Arguments,
    MissingConfigError,
    command_arguments,
    is_on,
    missing_config,
    open_deepspeed_config,
    open_referenced_file,
    parse_arguments,
    program_fields,
    refused_arguments,
    start_findings,
    unknown_arguments,
    unknown_names,
)
from meshwright.frameworks.trainer_fields import FROZEN, LOADED_BY_TRL, STORED_IN_BYTES, WEIGHT_DTYPES, is_trl
from meshwright.frameworks.trainer_files import (
    STORAGE,
    TRAINERS,
    config_beside,
    file_arguments,
    names_deepspeed,
    started_program,
    uses_trl,
    uses_unsloth,
    written_arguments,
    written_beside,
)
from meshwright.frameworks.trl_data import CONFIG, MIXTURE, is_of_command, is_trl_script
from meshwright.frameworks.types import Settings, SourcedValue, as_int
from meshwright.frameworks.unused_adapters import (
    PEFT_CONFIG,
    is_of_adapters,
    names_adapters,
    quantized_without_adapters,
    unused_adapters,
    unused_of_program,
)
from meshwright.recipes.key_maps import config_keys
from meshwright.recipes.key_maps.accelerate import AXIS, FSDP, MEGATRON, ZERO, distributed_type, sharding_strategy
from meshwright.recipes.key_maps.deepspeed import PRECISION_KEYS
from meshwright.recipes.types import Engine, Recipe, field_value, recipe_fields
from meshwright.rules.rule import Finding

if TYPE_CHECKING:
    from meshwright.frameworks.shell import LaunchCommand

LAUNCHERS = ("torchrun", "python", "srun", "deepspeed")  # that pass no config of Accelerate
DOUBLE, CHECKPOINTING = "accelerate.double-checkpointing", "gradient_checkpointing"
MARK, MARKS = "per_device_train_batch_size", ("output_dir", "num_train_epochs")
PROGRAM_READ = (
    "read from the program: literals, constants and defaults of options, nothing executed; without fsdp=… or "
    "deepspeed=… every GPU has a replica. Fixes are arguments of the program, or lines of a config for accelerate "
    "launch --config_file FILE"
)
NO_CONFIG = "the command has no config of Accelerate: fixes are lines of one, for accelerate launch --config_file FILE"
FROM_COMMAND = "the arguments of the Trainer come from the command that starts the program: check its script too"
UNSLOTH_NOTE = (
    "Unsloth's own kernels and gradient checkpointing are not modelled: the estimate is that of TRL, and Unsloth "
    "usually needs less memory and time"
)
TRL, TRL_SCRIPTS = "trl.", "trl/scripts/"  # modules of TRL, and their files
TRL_FILES = ("datasets[0].data_files", "datasets[0].data_dir", "datasets[0].path")  # the first of these names the data
_SHARDED = {
    "distributed_type": "FSDP",
    f"{FSDP}fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    f"{FSDP}fsdp_offload_params": False,
}
TRL_CONFIGS: dict[str, dict[str, Any]] = {
    "single_gpu": {"distributed_type": "NO", "num_processes": 1},
    "multi_gpu": {"distributed_type": "MULTI_GPU"},
    "fsdp1": {**_SHARDED, f"{FSDP}fsdp_version": 1, f"{FSDP}fsdp_sharding_strategy": "FULL_SHARD"},
    "fsdp2": {**_SHARDED, f"{FSDP}fsdp_version": 2, f"{FSDP}fsdp_reshard_after_forward": True},
    **{f"zero{n}": {"distributed_type": "DEEPSPEED", f"{ZERO}zero_stage": n} for n in (1, 2, 3)},
}
"""Configs of Accelerate that TRL ships, by the names that --accelerate_config accepts."""
FLAGS = {"use_fsdp": "FSDP", "use_deepspeed": "DEEPSPEED", "use_megatron_lm": "MEGATRON_LM", "multi_gpu": "MULTI_GPU"}
TYPE_OPTIONS = tuple(name.replace("_", "-") for name in FLAGS)
GPU_TYPES = ("NO", "MULTI_GPU", "FSDP", "DEEPSPEED", "MEGATRON_LM")
ENGINES: dict[str, Engine] = {"DEEPSPEED": "deepspeed", "MEGATRON_LM": "megatron"}
WRAPPED = "fsdp_transformer_layer_cls_to_wrap"
WEIGHTS = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32", "auto": "bf16"}
"""Format of loaded weights, by torch's name of the dtype."""
MICRO_BATCHES = {
    "MEGATRON_LM": f"{MEGATRON}megatron_lm_num_micro_batches",
    "DEEPSPEED": f"{ZERO}gradient_accumulation_steps",
}
"""Key with the micro batches per step."""
DISTRIBUTED_OPTIMIZER = f"{MEGATRON}megatron_lm_use_distributed_optimizer"
FROM_DEEPSPEED = (
    "layout.strategy",
    "layout.reshard_after_forward",
    "layout.offload",
    "layout.tp",
    "optimizer.clip_grad",
)
"""Fields set by a referenced DeepSpeed config, by its values or by DeepSpeed's defaults."""
FILLED_FROM_YAML = {
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "zero_optimization.stage": "zero_stage",
    "zero_optimization.offload_optimizer.device": "offload_optimizer_device",
    "zero_optimization.offload_param.device": "offload_param_device",
}
"""Key of a DeepSpeed config that is auto → the key of deepspeed_config that fills it in."""


def detect(content: Content) -> int:
    if content.format == "python":
        stated = any(f"{name}(" in content.text for name in TRAINERS) and bool(file_arguments(content))
        is_trainer = stated or trainer_call(content) is not None
        return 2 if is_trainer and not names_deepspeed(content) else 0
    if content.format == "yaml":
        return 3 if {"distributed_type", "compute_environment"} & content.settings.keys() else 0
    if any(launch.launcher == "accelerate" for launch in content.launches):
        return 3
    return 2 if _trainer_launch(content) is not None else 0


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


def with_program(config: str) -> str:
    """Return the note of a config without its program: how both are checked together."""
    command = f"accelerate launch --config_file {Path(config).name} PROGRAM.py"
    return f"the program is not part of this file: write its command, {command}, into a file run.sh, and check run.sh"


def parse(content: Content) -> ParsedConfig:
    parsed = _parse(content)
    off = (  # where the program has its arguments: in the command, or in its code
        msgspec.structs.replace(one, fix=parsed.program.formatted(CHECKPOINTING, False)) if one.rule == DOUBLE else one
        for one in parsed.findings
    )
    return msgspec.structs.replace(parsed, findings=tuple(off))


def _parse(content: Content) -> ParsedConfig:
    if content.settings:
        written = written_beside(content)
        if written:
            return _of_program(content, written)
        parsed = _parsed(content, content.settings, GpuRequest(), {})
        return msgspec.structs.replace(parsed, notes=(*parsed.notes, with_program(content.path)))
    if content.format == "python":
        config = config_beside(content)
        return _of_program(open_file(config), content) if config else _of_program_alone(content)
    launch = next((launch for launch in content.launches if launch.launcher == "accelerate"), None)
    without_config = launch is None
    launch = launch or _trainer_launch(content)
    if launch is None:
        raise InputError("contains no accelerate launch command", field="file", value=content.path)
    own, of_job = started_program(content, launch.program), False
    given = _given(launch)
    command = command_arguments("accelerate", own, given, content.assigned)
    arguments = dict(command.arguments)
    missing: tuple[Finding, ...] = ()
    of_file: Settings = {}
    if "config" in arguments and is_trl_script([str(launch.program.value)]):
        launch, arguments, of_file = _with_trl_file(content, launch, arguments)
    by_default = str(launch.program.value).startswith(TRL) and not {"config-file", *TYPE_OPTIONS} & set(
        launch.launcher_args
    )
    if by_default and not without_config:  # Accelerate then starts one replica on every GPU
        settings = dict(_settings_of_trainer(launch.program, arguments, alone=False, trl=True))
        settings |= dict(_options(launch))
        without_config = "num-processes" not in launch.launcher_args
    elif without_config and (found := _written_config(own, launch)):
        settings, without_config, of_job = found, False, True
    elif without_config:
        alone, trl = launch.launcher == "python", is_trl(arguments, str(launch.program.value))
        settings = dict(_settings_of_trainer(launch.program, arguments, alone, trl))
    else:
        named, missing = _config_of(content, launch)
        settings = {**named, **dict(_options(launch))}
        if not {"config-file", "config_file"} & launch.launcher_args.keys():  # without a config, one replica per GPU
            settings.setdefault("distributed_type", msgspec.structs.replace(launch.program, value="MULTI_GPU"))
    trl = own is not None and uses_trl(own)
    script = str(launch.program.value)
    if own is not None and not trl and is_trl({}, script):
        script = ""  # the program was read: its name does not make it one of TRL
    parsed = _parsed(content, settings, gpu_request_of(launch), arguments, fine_tuning=trl, script=script, trl=trl)
    if not trl and _has_own_loop(content, launch):
        findings = tuple(one for one in parsed.findings if one.rule != DOUBLE)
        parsed = msgspec.structs.replace(parsed, findings=findings)
    program = msgspec.structs.replace(
        parsed.program, argv=launch.argv, fixed_in=command.fixed_in, takes=command.takes, switches=command.switches
    )
    typed = parse_arguments(launch.args)
    by_trl = is_by_trl(script)  # its table has all of its arguments
    refused = (*refused_arguments("accelerate", typed, own), *(() if by_trl else unknown_arguments(typed, own)))
    refused = (*refused, *constructor_findings(own))
    parsed = msgspec.structs.replace(parsed, findings=(*missing, *parsed.findings, *refused, *command.findings))
    if by_trl:
        theirs = (*_trl_findings({**of_file, **given}), *flags_without_value(launch.args, read_table(TRL_KEYS), "TRL"))
        twice = {one.field for one in theirs}  # of arguments that the Trainer refuses too
        others = [one for one in parsed.findings if one.rule != "accelerate.argument-refused" or one.field not in twice]
        parsed = msgspec.structs.replace(parsed, findings=(*theirs, *others))
    notes = parsed.notes if own is None else (*parsed.notes, f"the arguments of the program are read from {own.path}")
    notes = (*notes, UNSLOTH_NOTE) if own is not None and uses_unsloth(own) else notes
    if without_config or of_job:  # torchrun has the number of processes
        notes = (*(one for one in notes if "num_processes" not in one), *((NO_CONFIG,) if without_config else ()))
    return msgspec.structs.replace(parsed, program=program, env=launch.env, notes=notes)


def _given(launch: LaunchCommand) -> dict[str, SourcedValue]:
    """Return the arguments of a command; the parser of TRL's scripts completes shortened names."""
    given, script = parse_arguments(launch.args), str(launch.program.value)
    if not is_by_trl(script):
        return given
    from meshwright.frameworks.front_ends import older_keys

    return as_parsed(given, read_table(TRL_KEYS), shortened=True, older=(CONFIG, *older_keys.TRL))


def _trl_findings(arguments: Arguments) -> Iterator[Finding]:
    """Yield arguments that TRL does not have, and values that it does not accept."""
    from meshwright.frameworks.front_ends.describe import FRONT_ENDS
    from meshwright.frameworks.front_ends.keys import key_findings

    trl = FRONT_ENDS["trl"]
    return key_findings(trl, trl.table, arguments, is_open=False, is_command=True, table=trl.name)


def parse_arguments_of(
    content: Content, settings: Settings, gpu_request: GpuRequest, arguments: Arguments, keeps_dtype: bool = False
) -> ParsedConfig:
    """Return a fine-tuning with arguments of the Trainer, TRL and peft, and settings of Accelerate.

    `keeps_dtype`: FSDP leaves weights in the dtype in which they were loaded, as Accelerate's own does not.
    """
    return _parsed(content, settings, gpu_request, arguments, fine_tuning=True, keeps_dtype=keeps_dtype)


def _of_program_alone(content: Content) -> ParsedConfig:
    """Return what a Python program trains by its own arguments, without a config of Accelerate."""
    arguments, trl = file_arguments(content), uses_trl(content)
    where = next(iter(arguments.values()), None) or trainer_call(content)
    if where is None:
        raise InputError("constructs no arguments of the Trainer or TRL", field="file", value=content.path)
    settings = dict(_settings_of_trainer(where, arguments, alone=False, trl=trl))
    parsed = _parsed(content, settings, GpuRequest(), arguments, trl, trl=trl)
    notes = (*(one for one in parsed.notes if "num_processes" not in one), PROGRAM_READ, *_not_read(arguments))
    notes = notes if arguments else (*notes, FROM_COMMAND)
    notes = (*notes, UNSLOTH_NOTE) if uses_unsloth(content) else notes
    findings = (*constructor_findings(content), *parsed.findings)
    if not names_adapters(content.text):
        findings = (*findings, *quantized_without_adapters(arguments, PEFT_CONFIG, ""))
    return msgspec.structs.replace(parsed, findings=findings, notes=notes)


def _not_read(arguments: Arguments) -> Iterator[str]:
    """Yield the arguments whose values only the running program knows."""
    found = [f"{name}={one.value} (line {one.line})" for name, one in arguments.items() if one.unresolved]
    if found:
        yield f"not read, because the program computes it: {', '.join(found)}; overrides such as optimizer.lr=N set it"


def _written_config(own: Content | None, launch: LaunchCommand) -> dict[str, SourcedValue]:
    """Return the config of a job that export or launch wrote: the YAML file beside its program, or its variables."""
    arguments = None if own is None else written_arguments(own)
    config = None if arguments is None else config_beside(arguments)
    if config is not None:
        return dict(open_file(config).settings)
    return settings_of(launch.env)


def _trainer_launch(content: Content) -> LaunchCommand | None:
    """Return the command that starts a program of the Trainer without a config of DeepSpeed or Accelerate."""
    for launch in content.launches:
        arguments = parse_arguments(launch.args)
        own = launch.launcher in LAUNCHERS and not any(name.startswith("deepspeed") for name in arguments)
        program = started_program(content, launch.program) if own else None
        if program is not None and names_deepspeed(program):
            continue
        if own and (MARK in arguments or all(name in arguments for name in MARKS) or program is not None):
            return launch
    return None


def _settings_of_trainer(
    where: SourcedValue, arguments: Arguments, alone: bool, trl: bool
) -> Iterator[tuple[str, SourcedValue]]:
    """Yield the settings that the Trainer's own arguments make: FSDP by --fsdp, else one replica on every GPU.

    `alone`: one process. TRL computes in bf16 by default.
    """
    sharding = sharding_settings(arguments)
    type_name = "FSDP" if sharding else "NO" if alone else "MULTI_GPU"
    default = "bf16" if trl and "bf16" not in arguments else "no"
    precision = next((one for one in ("bf16", "fp16") if is_on(arguments, one)), default)
    found: dict[str, Any] = {"distributed_type": type_name, "mixed_precision": precision, **sharding}
    for key, value in found.items():
        place = arguments.get(str(value), where) if key == "mixed_precision" else where
        yield key, msgspec.structs.replace(place, value=value, unresolved="")


def _without_sharding(arguments: Arguments, type_name: str, lost: Mapping[str, str]) -> dict[str, str]:
    """Return the arguments that no field carries, without those that settings of FSDP carry."""
    carried = carried_arguments(arguments) if type_name == "FSDP" and sharding_settings(arguments) else ()
    return {name: why for name, why in lost.items() if name not in carried}


def _of_program(config: Content, program: Content) -> ParsedConfig:
    """Return a config with the arguments that a Python file passes to the Trainer."""
    trl = uses_trl(program)
    parsed = _parsed(config, config.settings, GpuRequest(), file_arguments(program), trl, trl=trl)
    note = f"the config is {config.path}, the arguments of the program are those of {program.path}"
    files = tuple(dict.fromkeys([*parsed.files, program.path]))
    findings = (*constructor_findings(program), *parsed.findings)
    return msgspec.structs.replace(parsed, findings=findings, files=files, notes=(*parsed.notes, note))


def _config_of(content: Content, launch: LaunchCommand) -> tuple[Settings, tuple[Finding, ...]]:
    """Return the config that a command names; if it is not here, its type is open, and a finding says so."""
    path = launch.launcher_args.get("config-file") or launch.launcher_args.get("config_file")
    if path is None:
        return {}, ()
    if path.value in TRL_CONFIGS and str(launch.program.value).startswith(TRL):
        found = {"mixed_precision": "bf16", "num_processes": 8, "num_machines": 1, **TRL_CONFIGS[path.value]}
        return {key: msgspec.structs.replace(path, value=value) for key, value in found.items()}, ()
    try:
        return open_referenced_file(content, path).settings, ()
    except MissingConfigError:
        reason = path.unresolved or f"{path.value} was not found"
        unknown = {"distributed_type": msgspec.structs.replace(path, unresolved=reason)}
        return unknown, (missing_config(content, "--config_file", path),)


def _with_trl_file(
    content: Content, launch: LaunchCommand, arguments: Arguments
) -> tuple[LaunchCommand, dict[str, SourcedValue], Settings]:
    """Return a command of TRL with the arguments of its --config FILE, which those of the command replace.

    The third value has TRL's arguments as the file writes them, without the options of Accelerate's launcher.
    """
    path = arguments.get(CONFIG)
    if path is None:
        return launch, dict(arguments), {}
    from meshwright.frameworks.shell import with_options

    named = open_referenced_file(content, path).settings
    options = {key.replace("_", "-"): one for key, one in named.items() if key in accelerate_options.IN_FILE}
    if "accelerate-config" in options:
        options["config-file"] = options.pop("accelerate-config")
    launch = with_options(launch, {**options, **launch.launcher_args}, launch.job)
    own = {key: one for key, one in named.items() if not is_of_command(key)}
    given = {key: one for key, one in own.items() if one.value is not None}
    files = [given[key] for key in TRL_FILES if key in given]
    given = {key: one for key, one in given.items() if not key.startswith(f"{MIXTURE}[")}
    given |= {MIXTURE: files[0]} if files else {}
    texts = {key: ",".join(map(str, one.value)) for key, one in given.items() if isinstance(one.value, list)}
    read = {key: msgspec.structs.replace(one, value=texts.get(key, one.value)) for key, one in given.items()}
    return launch, {**read, **{key: one for key, one in arguments.items() if key != CONFIG}}, own


def is_by_trl(script: str) -> bool:
    """Return whether a script is one of TRL's own, not a program that uses TRL."""
    return script.startswith(TRL) or TRL_SCRIPTS in script


def _options(launch: LaunchCommand) -> Iterator[tuple[str, SourcedValue]]:
    """Yield the launcher's options by the config key that they override."""
    key_of = {key.rsplit(".", 1)[-1]: key for key in config_keys(TABLE)}
    for option, setting in launch.launcher_args.items():
        name = option.replace("-", "_")
        if name in FLAGS and setting.value is True:
            yield "distributed_type", msgspec.structs.replace(setting, value=FLAGS[name])
        elif name in key_of:
            number = as_int(setting)
            yield key_of[name], setting if number is None else msgspec.structs.replace(setting, value=number)


def _parsed(
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
    if is_by_trl(script) and "model_name_or_path" in arguments:
        arguments = {**arguments, LOADED_BY_TRL: arguments["model_name_or_path"]}
    given, without_peft = arguments, is_by_trl(script) and not is_on(arguments, "use_peft")
    if without_peft:  # TRL then trains all weights
        arguments = {name: one for name, one in arguments.items() if not is_of_adapters(name)}
    effective = {**settings, **_trainer_precision(arguments)}
    type_name = distributed_type({key: setting.value for key, setting in settings.items()})
    program = program_fields(arguments, fine_tuning, script, trl)
    weights = _weight_dtype(arguments) if program.goal != "peft" else ""
    in_weight_dtype = bool(weights) and (keeps_dtype or not _updates_in_fp32(type_name, effective))
    dtypes = _state_dtypes(weights, effective) if in_weight_dtype else _gradient_dtypes(type_name, effective)
    frozen = _frozen_dtype(arguments, effective, type_name) if program.goal == "peft" else {}
    field_values: dict[str, Any] = {**dtypes, **frozen, **program.field_values}
    if type_name == "MEGATRON_LM" and str(getattr(settings.get(DISTRIBUTED_OPTIMIZER), "value", "")).lower() != "true":
        field_values["kernels.overlap_param_gather"] = False
    if size := as_int(arguments.get("per_device_train_batch_size")):
        field_values["layout.micro_batch_size"] = size
    findings: tuple[Finding, ...] = ()
    checkpointing = settings.get(f"{FSDP}fsdp_activation_checkpointing")
    if type_name == "FSDP" and checkpointing is not None and str(checkpointing.value).lower() == "true":
        field_values["layout.recompute"] = "full"
        by_trl = trl or is_trl_script([script]) or is_trl(arguments, script)
        findings = tuple(_double_checkpointing(checkpointing, arguments, by_trl))
    findings = (*findings, *_overwritten_precision(settings, arguments))
    findings = (*findings, *unknown_names("accelerate", arguments))
    findings = (*findings, *start_findings({**arguments, **_mixed(effective)}, program.model, script))
    if in_weight_dtype:
        findings = (*findings, *_scaled_fp16_weights(effective, arguments, weights))
    if without_peft:
        names = [name for name in given if is_of_adapters(name)]
        findings = (*findings, *unused_adapters(given, names, "--use_peft", is_meant=False, flag="--"))
        findings = (*findings, *quantized_without_adapters(given, "--use_peft", "--"))
    if type_name == "FSDP":
        findings = (*findings, *_bytes_in_fsdp(settings, arguments))
    from_command = [name for name, one in given.items() if not one.file.endswith(".py")]
    findings = (*findings, *unused_of_program(given, from_command))
    inner = None
    if type_name == "DEEPSPEED":
        inner = _read_deepspeed_config(content, effective, arguments, fine_tuning, script, trl)
    field_values |= dict(inner.field_values) if inner else {}
    return ParsedConfig(
        settings=settings,
        mappable={key: setting for key, setting in effective.items() if _is_used(key, type_name, settings)},
        name=Path(content.path).stem,
        model=program.model,
        goal=program.goal,
        goal_open=program.goal == "pretrain",  # no argument names a model to start from
        gpu_request=_gpu_request(settings, type_name, gpu_request),
        files=tuple(
            dict.fromkeys(
                [
                    content.path,
                    *(setting.file for setting in raw_settings.values()),
                    *(inner.parsed.files if inner and inner.parsed else ()),
                ]
            )
        ),
        findings=(*findings, *(inner.findings if inner else ())),
        field_values=field_values,
        unknown_fields=(
            *(key for key in program.unknown_fields if key not in field_values),
            *(key for key in (inner.unknown_fields if inner else ()) if key not in field_values),
            *_program_fields(type_name, effective, field_values),
        ),
        engine=_engine(type_name, settings),
        suppressed_rules=program.suppressed_rules,
        referenced=inner.parsed if inner else None,
        program=msgspec.structs.replace(
            program.arguments,
            fills=_filled_in(arguments),
            lost=_without_sharding(arguments, type_name, program.arguments.lost),
        ),
        notes=(
            *_notes(type_name, settings, field_values),
            *_missing_file_note(type_name, settings, inner),
            *_weight_notes(arguments, weights, in_weight_dtype, type_name),
            *_frozen_note(arguments, field_values, is_by_trl(script)),
            *program.notes,
        ),
    )


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


def _gradient_dtypes(type_name: str, settings: Settings) -> dict[str, Any]:
    """Return the gradient dtypes, which depend on mixed_precision and the distributed type."""
    setting = settings.get("mixed_precision")
    text = str(setting.value).lower() if setting else "no"
    if text == "no":
        return {}
    if type_name == "DEEPSPEED":
        return {"precision.grads": "bf16", "precision.reduce": "bf16"}
    return {"precision.reduce": "bf16"} if type_name == "FSDP" else {}


def _trainer_precision(arguments: Arguments) -> dict[str, SourcedValue]:
    """Return the mixed precision that the Trainer's own flags set: they replace Accelerate's, whatever it is.

    TrainingArguments reads ACCELERATE_MIXED_PRECISION first; fp16 or bf16 replaces it if true, not if false.
    """
    if not any(name in arguments for name in (MARK, *MARKS)):
        return {}  # flags of another program, which may leave the dtype to Accelerate
    for name in ("fp16", "bf16"):
        if name in arguments and not arguments[name].unresolved and is_on(arguments, name):
            return {"mixed_precision": msgspec.structs.replace(arguments[name], value=name)}
    return {}


def _overwritten_precision(settings: Settings, arguments: Arguments) -> Iterator[Finding]:
    """Yield a finding if Accelerate's config states another precision than the Trainer's flag."""
    key = "mixed_precision"
    written, flag = settings.get(key), _trainer_precision(arguments).get(key)
    if all(is_on(arguments, name) for name in ("fp16", "bf16")):
        return  # the Trainer refuses to start
    if written is None or flag is None or str(written.value).lower() in ("no", "false", flag.value):
        return  # "no" leaves the choice to the program
    yield Finding(
        "key.overwritten",
        "warning",
        key,
        f"{key}={written.value} has no effect: --{flag.value} True of the Trainer ({flag.location}) replaces it, and "
        f"training computes in {flag.value}",
        (format_setting(key, flag.value),),
        file=written.file,
        line=written.line,
    )


def _mixed(settings: Settings) -> dict[str, SourcedValue]:
    """Return the mixed precision of a run as an argument beside the Trainer's own."""
    return {key: one for key, one in settings.items() if key == "mixed_precision"}


def _is_unmixed(settings: Settings) -> bool:
    setting = settings.get("mixed_precision")
    return setting is None or str(setting.value).lower() in ("no", "false")


def _weight_dtype(arguments: Arguments) -> str:
    """Return the dtype in which from_pretrained loads the weights; empty if none is given, or the program computes it.

    "auto" is the dtype of the checkpoint: published weights are in bf16, with few exceptions.
    """
    setting = next((arguments[name] for name in WEIGHT_DTYPES if name in arguments), None)
    if setting is None and LOADED_BY_TRL in arguments:
        return "fp32"
    if setting is None or setting.unresolved:
        return ""
    return WEIGHTS.get(str(setting.value).lower().removeprefix("torch."), "")


def _updates_in_fp32(type_name: str, settings: Settings) -> bool:
    """Return whether the optimizer updates weights in fp32 whatever dtype they were loaded in.

    DeepSpeed and Megatron keep a copy in fp32; FSDP upcasts trainable weights if mixed precision is on. Replicas of
    the Trainer are not upcast.
    """
    return type_name in ENGINES or (type_name == "FSDP" and not _is_unmixed(settings))


def _state_dtypes(weights: str, settings: Settings) -> dict[str, Any]:
    """Return the dtypes of a run whose gradients and optimizer states are in the dtype of the loaded weights."""
    halves = dict.fromkeys(("master", "moments", "grads", "reduce"), "bf16")  # a recipe's format with 16 bits
    states = {} if weights == "fp32" else halves
    compute = {"compute": weights} if _is_unmixed(settings) else {}
    return {f"precision.{name}": value for name, value in {**states, **compute}.items()}


def _scaled_fp16_weights(settings: Settings, arguments: Arguments, weights: str) -> Iterator[Finding]:
    """Yield a finding if loss scaling would meet gradients in fp16, which torch's GradScaler rejects."""
    mixed = settings.get("mixed_precision")
    name = next((name for name in WEIGHT_DTYPES if name in arguments), "")
    if weights == "fp16" and mixed is not None and str(mixed.value).lower() == "fp16":
        setting = arguments[name]
        yield Finding(
            "accelerate.fp16-weights",
            "error",
            name,
            f"{name}={setting.value} loads weights in fp16, and fp16 mixed precision scales the loss: GradScaler does "
            "not unscale gradients in fp16",
            (f'{name}="float32"',),
            file=setting.file,
            line=setting.line,
        )


def _weight_notes(arguments: Arguments, weights: str, in_weight_dtype: bool, type_name: str) -> Iterator[str]:
    """Yield what follows from the dtype of from_pretrained, where the user may expect something else."""
    setting = next((arguments[name] for name in WEIGHT_DTYPES if name in arguments), None)
    if setting is None or weights == "fp32":
        return
    given = f"{next(name for name in WEIGHT_DTYPES if name in arguments)}={setting.value}"
    if setting.unresolved:
        yield f"{given} is computed by the program: fp32 weights are assumed; write precision.master=bf16 for bf16"
    elif weights and not in_weight_dtype and type_name == "FSDP":
        yield f"{given}: FSDP with mixed precision converts trainable weights to fp32"
    elif weights and in_weight_dtype:
        auto = ", the checkpoint's dtype, assumed to be bf16" if str(setting.value).lower() == "auto" else ""
        counted = " (counted as precision.master=bf16: recipes have no fp16 weights)" if weights == "fp16" else ""
        yield (
            f"{given}{auto}: weights, gradients and optimizer states are in {weights}{counted}; updates that are small "
            "against a weight are rounded away: dtype=float32 keeps them, with twice the memory"
        )


def _frozen_dtype(arguments: Arguments, settings: Settings, type_name: str) -> dict[str, Any]:
    """Return the dtype of frozen weights: as loaded, except where DeepSpeed and Megatron convert it.

    Without mixed precision it is also the dtype of the computation.
    """
    weights = _weight_dtype(arguments)
    if not weights or type_name in ENGINES:
        return {}
    if _is_unmixed(settings):
        return {"precision.compute": weights}
    return {FROZEN: "fp32"} if weights == "fp32" else {}


def _frozen_note(arguments: Arguments, field_values: Mapping[str, Any], is_command: bool) -> Iterator[str]:
    """Yield that frozen weights take twice the memory of the computation's dtype, which the user may not expect."""
    if field_values.get(FROZEN) != "fp32" or field_values.get("peft.method") == "qlora":
        return
    name = next((name for name in WEIGHT_DTYPES if name in arguments), "")
    if name:
        yield f'{name}={arguments[name].value}: the frozen weights take 4 bytes each; {name}="bfloat16" halves them'
    else:
        how = "--dtype bfloat16" if is_command else f'{LOADED_BY_TRL}={{"dtype": "bfloat16"}}'
        yield f"TRL loads a model given by name in float32: the frozen weights take 4 bytes each; {how} halves them"


def _program_fields(type_name: str, settings: Settings, field_values: dict[str, Any]) -> Iterator[str]:
    """Yield fields that the program sets: without mixed precision this includes the model dtype."""
    if type_name == "MEGATRON_LM":
        yield "layout.vp"
    if "layout.micro_batch_size" not in field_values:
        yield "layout.micro_batch_size"
    if _is_unmixed(settings) and "precision.compute" not in field_values:
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


def _has_own_loop(content: Content, launch: LaunchCommand) -> bool:
    """Return whether the program of a command is there, and names no Trainer: its loop may do without its checks."""
    path = program_path(content, launch.program)
    return path is not None and path.is_file() and "Trainer" not in path.read_text(errors="replace")


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


class DeepSpeedResult(msgspec.Struct, frozen=True):
    """A DeepSpeed config referenced by an Accelerate config: its fields, those it leaves open, and findings."""

    findings: tuple[Finding, ...]
    field_values: Mapping[str, Any] = {}
    unknown_fields: tuple[str, ...] = ()
    parsed: ParsedConfig | None = None


def _read_deepspeed_config(
    content: Content, settings: Settings, arguments: Arguments, fine_tuning: bool, script: str, trl: bool
) -> DeepSpeedResult | None:
    """Return the DeepSpeed config as DeepSpeed's own reader maps it, with auto filled in; None if there is none."""
    path = settings.get(f"{ZERO}deepspeed_config_file")
    if path is None or path.value in (None, "none"):
        return None
    try:
        inner = open_deepspeed_config(content, path)
    except InputError:
        return None
    from meshwright.frameworks.check_file import check
    from meshwright.frameworks.deepspeed.definition import FRAMEWORK
    from meshwright.frameworks.deepspeed.parse import parse_json
    from meshwright.frameworks.mapping import map_to_recipe

    if inner.format != "json":
        message = f"{path.value} is not a DeepSpeed config: it must be JSON"
        key = f"{ZERO}deepspeed_config_file"
        finding = Finding("accelerate.not-json", "error", key, message, (), file=path.file, line=path.line)
        return DeepSpeedResult((finding,))
    inner = msgspec.structs.replace(inner, settings=_filled_from_yaml(inner.settings, settings))
    parsed = parse_json(inner, arguments, fine_tuning, script, trl)
    mapped = map_to_recipe(FRAMEWORK, parsed)
    stated = {*mapped.source_keys, *parsed.field_values, *FROM_DEEPSPEED}
    if any(key in parsed.settings for key in PRECISION_KEYS):
        stated |= {f"precision.{name}" for name in ("compute", "master", "moments", "grads", "reduce")}
    implied = {
        key
        for key, info in recipe_fields().items()
        if not key.startswith("precision.") and field_value(mapped.recipe, key) != info.default
    }  # by what the config states, such as the betas of its optimizer
    values = {key: field_value(mapped.recipe, key) for key in stated | implied if key not in mapped.unresolved}
    at_check = {one.id for one in FRAMEWORK.rules}  # which the check tries on the model and the GPUs of the run
    findings = (*parsed.findings, *(one for one in check(FRAMEWORK, inner).findings if one.rule not in at_check))
    return DeepSpeedResult(findings, values, mapped.unresolved, parsed)


def _filled_from_yaml(inner: Settings, settings: Settings) -> dict[str, SourcedValue]:
    """Return the settings of a DeepSpeed config with each auto that Accelerate fills in from its own YAML."""
    filled = dict(inner)
    values = {key: settings[f"{ZERO}{name}"] for key, name in FILLED_FROM_YAML.items() if f"{ZERO}{name}" in settings}
    if (mixed := settings.get("mixed_precision")) is not None:
        for name in ("bf16", "fp16"):
            values[f"{name}.enabled"] = msgspec.structs.replace(mixed, value=str(mixed.value).lower() == name)
    for key, setting in values.items():
        if key in filled and filled[key].value == "auto" and not setting.unresolved:
            filled[key] = setting
    return filled


def _missing_file_note(type_name: str, settings: Settings, deepspeed: DeepSpeedResult | None) -> Iterator[str]:
    path = settings.get(f"{ZERO}deepspeed_config_file")
    if type_name == "DEEPSPEED" and path is not None and deepspeed is None:
        yield f"the DeepSpeed config {path.value} was not found and is not checked"


def replica_count(settings: Settings, on: Cluster) -> int:
    """Return the number of replicas: FSDP1's hybrid strategies shard within each machine."""
    if value_or_default(TABLE, settings, f"{FSDP}fsdp_version") not in (1, "1"):
        return 1
    try:
        strategy = sharding_strategy(str(value_or_default(TABLE, settings, f"{FSDP}fsdp_sharding_strategy")))
    except InputError:
        return 1
    return on.nodes if strategy.startswith("HYBRID") else 1


def complete(recipe: Recipe, parsed: ParsedConfig, on: Cluster) -> Recipe:
    """Derive the global batch from accumulation steps and GPUs, and the replicas of hybrid sharding."""
    if parsed.referenced is not None:
        from meshwright.frameworks.deepspeed.parse import complete as complete_deepspeed

        return complete_deepspeed(recipe, parsed.referenced, on)
    layout, setting = recipe.layout, parsed.settings.get("distributed_type")
    type_name = str(setting.value).upper() if setting else ""
    configured = parsed.settings.get(MICRO_BATCHES.get(type_name, MICRO_BATCHES["DEEPSPEED"]))
    argument = parsed.program.given.get("gradient_accumulation_steps")  # the Trainer's own replaces the YAML's
    steps = as_int(argument) or as_int(configured) or 1
    if type_name == "FSDP" and layout.dp_replicate == 1:
        layout = msgspec.structs.replace(layout, dp_replicate=replica_count(parsed.settings, on))
    ranks = max(1, on.world // (layout.tp * layout.pp * layout.cp))
    batch = layout.micro_batch_size * steps * ranks
    return msgspec.structs.replace(
        recipe, layout=layout, train=msgspec.structs.replace(recipe.train, global_batch_size=batch)
    )
