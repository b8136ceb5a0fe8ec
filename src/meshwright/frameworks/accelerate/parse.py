"""Parse the YAML of `accelerate config`, and `accelerate launch` commands."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright.clusters import Cluster
from meshwright.errors import InputError
from meshwright.frameworks.accelerate.job_environment import settings_of
from meshwright.frameworks.accelerate.job_gpus import job_gpus
from meshwright.frameworks.accelerate.keys import TABLE
from meshwright.frameworks.accelerate.parse_settings import CHECKPOINTING, DOUBLE, parse_settings
from meshwright.frameworks.accelerate.precision import MARK, MARKS
from meshwright.frameworks.accelerate.trainer_fsdp import sharding_settings
from meshwright.frameworks.accelerate.trl_commands import (
    TRL,
    TRL_CONFIGS,
    given_arguments,
    is_by_trl,
    trl_findings,
    with_trl_file,
)
from meshwright.frameworks.accelerate_options import TYPES
from meshwright.frameworks.common import gpu_request_of, value_or_default
from meshwright.frameworks.constructors import constructor_findings
from meshwright.frameworks.framework import Content, GpuRequest, ParsedConfig
from meshwright.frameworks.hf_arguments import flags_without_value
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
    open_referenced_file,
    parse_arguments,
    refused_arguments,
    unknown_arguments,
)
from meshwright.frameworks.trainer_calls import TRAINERS, uses_trl, uses_unsloth
from meshwright.frameworks.trainer_fields import is_trl
from meshwright.frameworks.trainer_files import (
    config_beside,
    file_arguments,
    names_deepspeed,
    started_program,
    written_arguments,
    written_beside,
)
from meshwright.frameworks.trl_data import is_trl_script
from meshwright.frameworks.types import Settings, SourcedValue, as_int
from meshwright.frameworks.unused_adapters import PEFT_CONFIG, names_adapters, quantized_without_adapters
from meshwright.recipes.key_maps import config_keys
from meshwright.recipes.key_maps.accelerate import FSDP, MEGATRON, ZERO, sharding_strategy
from meshwright.recipes.types import Recipe
from meshwright.rules.rule import Finding

if TYPE_CHECKING:
    from meshwright.frameworks.shell import LaunchCommand

LAUNCHERS = ("torchrun", "python", "srun", "deepspeed")  # that pass no config of Accelerate
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
TYPE_OPTIONS = tuple(name.replace("_", "-") for name in TYPES)
MICRO_BATCHES = {
    "MEGATRON_LM": f"{MEGATRON}megatron_lm_num_micro_batches",
    "DEEPSPEED": f"{ZERO}gradient_accumulation_steps",
}
"""Key with the micro batches per step."""


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
        parsed = parse_settings(content, content.settings, GpuRequest(), {})
        return msgspec.structs.replace(parsed, notes=(*parsed.notes, with_program(content.path)))
    if content.format == "python":
        config = config_beside(content)
        return _of_program(open_file(config), content) if config else _of_program_alone(content)
    return _of_command(content)


class _Configured(msgspec.Struct, frozen=True):
    """The settings with which a command starts its program."""

    settings: Settings
    findings: tuple[Finding, ...] = ()
    without_config: bool = False  # Accelerate gets neither a config nor options
    of_job: bool = False  # the config is one that export or launch wrote


def _configured(content: Content, launch: LaunchCommand, own: Content | None, arguments: Arguments) -> _Configured:
    """Return the settings of a command: its config and options, the config of its job, or what the Trainer makes."""
    script, options = str(launch.program.value), dict(_options(launch))
    by_accelerate = launch.launcher == "accelerate"
    if by_accelerate and script.startswith(TRL) and not {"config-file", *TYPE_OPTIONS} & set(launch.launcher_args):
        of_trainer = dict(_settings_of_trainer(launch.program, arguments, alone=False, trl=True))
        return _Configured(of_trainer | options, without_config="num-processes" not in launch.launcher_args)
    if by_accelerate:
        named, missing = _config_of(content, launch)
        settings = {**named, **options}
        if not {"config-file", "config_file"} & launch.launcher_args.keys():  # without a config, one replica per GPU
            settings.setdefault("distributed_type", msgspec.structs.replace(launch.program, value="MULTI_GPU"))
        return _Configured(settings, missing)
    if found := _written_config(own, launch):
        return _Configured(found, of_job=True)
    alone, trl = launch.launcher == "python", is_trl(arguments, script)
    return _Configured(dict(_settings_of_trainer(launch.program, arguments, alone, trl)), without_config=True)


def _of_command(content: Content) -> ParsedConfig:
    """Return what a command trains: its settings, and the arguments of its program."""
    launch = next((launch for launch in content.launches if launch.launcher == "accelerate"), None)
    launch = launch or _trainer_launch(content)
    if launch is None:
        raise InputError("contains no accelerate launch command", field="file", value=content.path)
    own = started_program(content, launch.program)
    given = given_arguments(launch)
    command = command_arguments("accelerate", own, given, content.assigned)
    arguments = dict(command.arguments)
    of_file: Settings = {}
    if "config" in arguments and is_trl_script([str(launch.program.value)]):
        launch, arguments, of_file = with_trl_file(content, launch, arguments)
    configured = _configured(content, launch, own, arguments)
    trl = own is not None and uses_trl(own)
    script = str(launch.program.value)
    if own is not None and not trl and is_trl({}, script):
        script = ""  # the program was read: its name does not make it one of TRL
    parsed = parse_settings(content, configured.settings, gpu_request_of(launch), arguments, trl, script, trl)
    found = parsed.findings
    own_loop = not trl and _has_own_loop(content, launch)
    if own_loop:
        found = tuple(one for one in found if one.rule != DOUBLE)
    of_command = {
        "argv": launch.argv,
        "fixed_in": command.fixed_in,
        "takes": command.takes,
        "switches": command.switches,
    }
    repeats = {} if own_loop else parsed.program.repeats
    program, inner = msgspec.structs.replace(parsed.program, repeats=repeats, **of_command), parsed.referenced
    if inner is not None:
        inner = msgspec.structs.replace(inner, program=msgspec.structs.replace(inner.program, **of_command))
    refused = _refused(launch, own, by_trl=is_by_trl(script))
    found = (*configured.findings, *found, *refused, *command.findings)
    if is_by_trl(script):
        theirs = (*trl_findings({**of_file, **given}), *flags_without_value(launch.args, read_table(TRL_KEYS), "TRL"))
        twice = {one.field for one in theirs}  # of arguments that the Trainer refuses too
        others = (one for one in found if one.rule != "accelerate.argument-refused" or one.field not in twice)
        found = (*theirs, *others)
    notes = tuple(_command_notes(parsed.notes, own, configured))
    job = job_gpus(content, launch)
    changed = {"program": program, "referenced": inner, "env": launch.env, "job_gpus": job}
    return msgspec.structs.replace(parsed, findings=found, notes=notes, **changed)


def _refused(launch: LaunchCommand, own: Content | None, by_trl: bool) -> Iterator[Finding]:
    """Yield arguments that the program does not accept; the table of TRL's scripts has all of theirs."""
    typed = parse_arguments(launch.args)
    yield from refused_arguments("accelerate", typed, own)
    if not by_trl:
        yield from unknown_arguments(typed, own)
    yield from constructor_findings(own)


def _command_notes(notes: tuple[str, ...], own: Content | None, configured: _Configured) -> Iterator[str]:
    if own is not None:
        notes = (*notes, f"the arguments of the program are read from {own.path}")
        notes = (*notes, UNSLOTH_NOTE) if uses_unsloth(own) else notes
    if configured.without_config or configured.of_job:  # torchrun has the number of processes
        notes = tuple(one for one in notes if "num_processes" not in one)
    yield from notes
    if configured.without_config:
        yield NO_CONFIG


def parse_arguments_of(
    content: Content, settings: Settings, gpu_request: GpuRequest, arguments: Arguments, keeps_dtype: bool = False
) -> ParsedConfig:
    """Return a fine-tuning with arguments of the Trainer, TRL and peft, and settings of Accelerate.

    `keeps_dtype`: FSDP leaves weights in the dtype in which they were loaded, as Accelerate's own does not.
    """
    return parse_settings(content, settings, gpu_request, arguments, fine_tuning=True, keeps_dtype=keeps_dtype)


def _of_program_alone(content: Content) -> ParsedConfig:
    """Return what a Python program trains by its own arguments, without a config of Accelerate."""
    arguments, trl = file_arguments(content), uses_trl(content)
    where = next(iter(arguments.values()), None) or trainer_call(content)
    if where is None:
        raise InputError("constructs no arguments of the Trainer or TRL", field="file", value=content.path)
    settings = dict(_settings_of_trainer(where, arguments, alone=False, trl=trl))
    parsed = parse_settings(content, settings, GpuRequest(), arguments, trl, trl=trl)
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


def _of_program(config: Content, program: Content) -> ParsedConfig:
    """Return a config with the arguments that a Python file passes to the Trainer."""
    trl = uses_trl(program)
    parsed = parse_settings(config, config.settings, GpuRequest(), file_arguments(program), trl, trl=trl)
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


def _options(launch: LaunchCommand) -> Iterator[tuple[str, SourcedValue]]:
    """Yield the launcher's options by the config key that they override."""
    key_of = {key.rsplit(".", 1)[-1]: key for key in config_keys(TABLE)}
    for option, setting in launch.launcher_args.items():
        name = option.replace("-", "_")
        if name in TYPES and setting.value is True:
            yield "distributed_type", msgspec.structs.replace(setting, value=TYPES[name])
        elif name in key_of:
            number = as_int(setting)
            yield key_of[name], setting if number is None else msgspec.structs.replace(setting, value=number)


def _has_own_loop(content: Content, launch: LaunchCommand) -> bool:
    """Return whether the program of a command is there, and names no Trainer: its loop may do without its checks."""
    path = program_path(content, launch.program)
    return path is not None and path.is_file() and "Trainer" not in path.read_text(errors="replace")


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
