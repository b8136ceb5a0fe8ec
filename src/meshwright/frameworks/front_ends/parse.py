"""Parse files and commands of the fine-tuning front ends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from meshwright.errors import InputError
from meshwright.frameworks.accelerate.parse import parse_arguments_of
from meshwright.frameworks.adapter_defaults import library_setting
from meshwright.frameworks.common import visible_devices
from meshwright.frameworks.framework import NOT_ESTIMATED, Content, GpuRequest, ParsedConfig
from meshwright.frameworks.front_ends import swift_megatron
from meshwright.frameworks.front_ends.accelerate_settings import (
    fsdp_version,
    leaves_sharding_open,
    sharding_settings,
    zero_settings,
)
from meshwright.frameworks.front_ends.commands import (
    PER_NODE,
    VISIBLE,
    command_settings,
    gpus_of,
    program_of,
    rank_env,
    spreads_layers,
    subcommand_of,
    training_launch,
)
from meshwright.frameworks.front_ends.data_columns import column_findings
from meshwright.frameworks.front_ends.deepspeed_file import deepspeed_findings, missing_file_notes
from meshwright.frameworks.front_ends.describe import METHOD_KEYS, FrontEnd, table
from meshwright.frameworks.front_ends.half_precision import dropped_half
from meshwright.frameworks.front_ends.keys import (
    find_key,
    is_of_other_program,
    key_findings,
    plugin_findings,
    value_findings,
)
from meshwright.frameworks.front_ends.trainer_arguments import (
    MODEL,
    adapters_of,
    is_true,
    own_keys,
    trainer_arguments,
    warmup_of,
)
from meshwright.frameworks.front_ends.trainer_values import (
    missing_keys,
    quoted_numbers,
    refused_values,
    tables_for_values,
)
from meshwright.frameworks.front_ends.weights import weight_note, weights_of
from meshwright.frameworks.hf_arguments import flags_without_value
from meshwright.frameworks.key_table import KeyTable
from meshwright.frameworks.model_match import find_local_model, find_model
from meshwright.frameworks.other_losses import loss_of
from meshwright.frameworks.repository import declares
from meshwright.frameworks.start_checks import TRAINER_CHOICES, Style, broken_checks, tables_of
from meshwright.frameworks.trainer_fields import FROZEN, WEIGHT_DTYPES
from meshwright.frameworks.types import Settings, SourcedValue, as_int
from meshwright.frameworks.unused_adapters import is_of_adapters, quantized_without_adapters, unused_adapters
from meshwright.rules.rule import Finding

ADAPTERS = ("lora", "qlora", "lora8bit")
NOT_THEIRS = ("optimizer.supported", "sequence.packing-over-context", "sequence.attention-kernel")
"""Rules of ours on what an engine supports: front ends bring their own optimizers and kernels."""
PACKED = ("data.packing-attention",)
"""Rules on transformers' attention, which the kernels of a plugin replace."""
STATES_ALL_WEIGHTS = ("full",)  # values of a key that names the adapters
PLUGINS = ("external_plugins", "custom_register_path")


def confidence(one: FrontEnd, content: Content) -> int:
    """Return how likely a file is one of this front end; 0 if it is not."""
    if content.format == "yaml":
        keys = content.top_level_keys() | content.settings.keys()
        if keys & set(one.not_with) or (one.trains_with and not keys & set(one.trains_with)):
            return 0
        return max((len(marks) for marks in one.marks if set(marks) <= keys), default=0)
    return 3 if training_launch(one, content) is not None else 0


def parse(one: FrontEnd, content: Content) -> ParsedConfig:
    """Parse a YAML file, or the command of a script."""
    if content.format != "shell":
        return _parsed(_file(one, content, content.settings, GpuRequest(), "", {}))
    launch = training_launch(one, content)
    if launch is None:
        raise InputError(f"contains no training command of {one.title}", field="file", value=content.path)
    arguments = command_settings(one, content, launch)
    program = program_of(launch).split(" ")[0]
    return _parsed(_file(one, content, arguments, gpus_of(one, launch), one.programs[program], rank_env(launch)))


class _File(msgspec.Struct, frozen=True):
    """The settings of a file or command, and what is known of its keys."""

    one: FrontEnd
    content: Content
    settings: Settings
    values: Mapping[str, Any]  # of the settings that are known before the training starts
    keys: set[str]
    gpus: GpuRequest
    program: str
    subcommand: str
    env: Settings
    table_name: str
    known: KeyTable
    is_open: bool  # keys of another trainer may be in it
    is_others: bool  # a program with arguments of its own reads it
    is_command: bool


def _file(one: FrontEnd, content: Content, settings: Settings, gpus: GpuRequest, program: str, env: Settings) -> _File:
    keys = _all_keys(settings)
    table_name = _table_name(one, keys, program)
    known, is_command = table(table_name), content.format == "shell"
    return _File(
        one=one,
        content=content,
        settings=settings,
        values={
            **(swift_megatron.TUNER if is_megatron(one, content) else {}),
            **{key: setting.value for key, setting in settings.items() if not setting.unresolved},
        },
        keys=keys,
        gpus=gpus,
        program=program,
        subcommand=subcommand_of(one, content),
        env=env,
        table_name=table_name,
        known=known,
        is_open=any(key in keys for key in one.open_with),
        is_others=is_of_other_program(one, known, settings, is_command, table_name),
        is_command=is_command,
    )


def _parsed(file: _File) -> ParsedConfig:
    one, content, settings, values, gpus = file.one, file.content, file.settings, file.values, file.gpus
    refused = _refused(file)
    arguments = _arguments(file)
    findings = (*_findings(file, refused), *deepspeed_findings(one, content, settings, arguments))
    zero = zero_settings(content, settings)
    adapters = adapters_of(one, values)
    sharding = dict(sharding_settings(one, settings, values, zero))
    keeps = one.keeps_dtype_in_fsdp2 and fsdp_version(one, values) == 2
    weights = weights_of(one.weights, settings)
    if not adapters or not one.upcasts_trained:  # else frozen weights are loaded in the dtype of the computation
        at = settings.get(weights.key) or next(iter(settings.values()), SourcedValue("", 1, ""))
        arguments[WEIGHT_DTYPES[0]] = msgspec.structs.replace(at, value=weights.name, unresolved="")
    parsed = parse_arguments_of(content, sharding, gpus, arguments, keeps)
    why = _not_estimated(file, refused)
    dropped = ("num_processes", "placeholder", f"{WEIGHT_DTYPES[0]}=")
    notes = [note for note in parsed.notes if not any(text in note for text in dropped)]
    values_of = parsed.field_values.get
    notes += filter(None, (weight_note(weights, values_of("precision.master", ""), values_of(FROZEN, "")),))
    always = list(missing_file_notes(content, settings))
    if why:
        always.append(f"{why}: keys and values are checked, {NOT_ESTIMATED}")
    assumed: tuple[str, ...] = ("data.seq_length",) if not {"max_length", "cutoff_len"} & arguments.keys() else ()
    assumed += ("layout.strategy",) if leaves_sharding_open(settings, zero, file.is_command or bool(adapters)) else ()
    of_trainer = msgspec.structs.replace(
        parsed,
        settings={**parsed.settings},
        model=None if why else parsed.model,
        gpu_request=gpus if gpus.count else parsed.gpu_request,
        findings=findings,
        notes=(*notes, *always),
        env=file.env,
        suppressed_rules=(*NOT_THEIRS, *(PACKED if one.isolates or _has_own_kernels(one, values) else ())),
        assumed=assumed,
        program=msgspec.structs.replace(
            parsed.program,
            warmup_share=warmup_of(one, parsed, arguments),
            **own_keys(one, file.known, settings, arguments, file.is_command),
            sharding=one.sharding.get(file.table_name, {}),
        ),
    )
    if not is_megatron(one, content):
        return of_trainer
    return swift_megatron.parsed(msgspec.structs.replace(of_trainer, notes=tuple(always)), settings, file.is_command)


def _refused(file: _File) -> tuple[Finding, ...]:
    """Return the values that the front end, transformers, bitsandbytes or peft refuse."""
    own = {key: found for found in file.one.refused(file.values) for key in found[:1]}
    others = [found for found in refused_values(file.one, file.values) if found[0] not in own]
    if file.one.keeps_text and not file.is_command:
        others += quoted_numbers(file.one, file.values)
    return tuple(value_findings(file.settings, (*own.values(), *others), file.is_command))


def _findings(file: _File, refused: tuple[Finding, ...]) -> Iterator[Finding]:
    one, content, settings, known = file.one, file.content, file.settings, file.known
    of_keys = list(key_findings(one, known, settings, file.is_open, file.is_command, file.table_name))
    yield from _without_own_fields(one, content, of_keys)
    yield from tables_for_values(known, settings)
    yield from refused
    yield from one.own_findings(settings, file.is_command)
    yield from dropped_half(one, settings, file.is_command)
    misspelled = (found for found in of_keys if found.rule == "value.invalid" and found.fix)
    yield from _start_findings(file, (*refused, *misspelled))
    yield from plugin_findings(one, settings)
    yield from column_findings(one, content.folder, settings, file.is_command)
    if not file.is_command:
        yield from missing_keys(one, settings, file.keys)
    yield from _switches_without_value(one, content, known)
    yield from _sharded_across_devices(one, settings, file.env)
    yield from _as_warnings(file.is_others, _adapters_unused(one, settings, file.values, file.is_command))


def _arguments(file: _File) -> dict[str, SourcedValue]:
    """Return the settings that the table has as arguments of the Trainer, with the tokens that the loss counts."""
    one, settings = file.one, file.settings
    read = settings if file.is_open else {key: at for key, at in settings.items() if _is_read(file.known, key)}
    renamed = {key: new for key, (_, new) in one.removed.get(file.table_name, {}).items() if new and key in settings}
    read = {**{new: settings[key] for key, new in renamed.items()}, **read}  # as the older release reads them
    arguments = dict(trainer_arguments(one, read, file.values))
    if adapters_of(one, file.values):
        arguments |= library_setting(one.name, next(iter(settings.values()), SourcedValue(True, 1, "")))
    if one.all_tokens is not None:
        first = next(iter(settings.values()), SourcedValue(True, 1, ""))
        answers = not one.all_tokens(file.values) and file.subcommand != "pt"
        name = "assistant_only_loss" if answers else "completion_only_loss"
        arguments[name] = msgspec.structs.replace(first, value=answers, unresolved="", pyyaml=msgspec.UNSET)
    return arguments


def _not_estimated(file: _File, refused: Sequence[Finding]) -> str:
    """Return why the training has no estimate; empty if it has one."""
    if (loss := loss_of(file.values, file.subcommand)) is not None:
        return loss.note()
    adapters = adapters_of(file.one, file.values)
    unknown = any(finding.field in METHOD_KEYS for finding in refused)
    reasons = {
        "Megatron": file.is_open,
        "layers spread over the visible devices": spreads_layers(file.one, file.env),
        file.subcommand: file.subcommand not in ("", "sft", "pt", "train"),
        "a model that a plugin may register": _is_registered(file.settings),
        "unknown adapter" if unknown else f"{adapters} adapters": adapters not in ("", *ADAPTERS),
    }
    return file.one.other(file.values) or next((why for why, holds in reasons.items() if holds), "")


def _switches_without_value(one: FrontEnd, content: Content, known: KeyTable) -> Iterator[Finding]:
    launch = training_launch(one, content) if content.format == "shell" and not one.uses_click else None
    return flags_without_value(launch.args, known, one.title) if launch is not None else iter(())


def _start_findings(file: _File, refused: Sequence[Finding]) -> Iterator[Finding]:
    """Yield the checks at start that refuse the settings; other programs of a front end have checks of their own."""
    one, settings = file.one, file.settings
    if file.known is not one.table:
        return
    processes = file.gpus.count or as_int(settings.get("num_processes"))
    named = next((settings[key] for key, name in one.names.items() if name == MODEL and key in settings), None)
    name = str(named.value) if named is not None and not named.unresolved else ""
    model = find_model(name) or find_local_model(name, file.content)[0]
    style: Style = "command" if file.is_command else "yaml"
    tables = tables_of(one.name, settings, file.subcommand)
    reported = {finding.field for finding in refused}
    choices = [one for one in tables if one is TRAINER_CHOICES]  # depend on nothing that a file leaves out
    found = broken_checks([one for one in tables if one not in choices], settings, style, model, processes)
    own = broken_checks(choices, settings, style, model, processes)
    every = (*_as_warnings(file.is_others, found), *own)
    yield from (finding for finding in every if finding.field not in reported)


def _as_warnings(is_others: bool, findings: Iterable[Finding]) -> Iterator[Finding]:
    """Yield findings; as warnings if another program reads the file, which may set what it leaves out."""
    for one in findings:
        changes = is_others and one.severity == "error"
        yield msgspec.structs.replace(one, severity="warning") if changes else one


def _has_own_kernels(one: FrontEnd, values: Mapping[str, Any]) -> bool:
    return any(is_true(values.get(key)) for key in one.kernels)


def _sharded_across_devices(one: FrontEnd, settings: Settings, env: Settings) -> Iterator[Finding]:
    """Yield that ms-swift refuses to shard what it spreads over the devices of one process: is_mp of utils/env.py."""
    devices, ranks = len(visible_devices(env.get(VISIBLE))), as_int(env.get(PER_NODE)) or 1
    key = next((key for key in ("deepspeed", "fsdp") if settings.get(key) and settings[key].value), "")
    by_ray = str(getattr(settings.get("use_ray"), "value", "")).lower() == "true"
    if one.starts_a_rank_per_device or not key or by_ray or devices < 2 * ranks or settings[key].unresolved:
        return
    at, each = settings[key], "one process sees" if ranks == 1 else f"{ranks} processes see"
    message = f"--{key} {at.value} shards over processes, but {each} the {devices} GPUs of {VISIBLE}"
    reason = f"{one.title} spreads the layers over them (device_map) and refuses to start"
    yield Finding("value.invalid", "error", key, f"{message}: {reason}", (f"{PER_NODE}={devices}",), at.file, at.line)


def _without_own_fields(one: FrontEnd, content: Content, findings: Iterable[Finding]) -> Iterator[Finding]:
    """Yield the findings but those on keys that the repository's own arguments have: its program reads the file."""
    for finding in findings:
        is_unknown = one.has_other_programs and finding.rule == "key.unknown"
        if not (is_unknown and declares(content.folder, finding.field)):
            yield finding


def _is_registered(settings: Settings) -> bool:
    """Return whether ms-swift runs code of the user that may add the named type of model, with a loss of its own."""
    return "model_type" in settings and any(settings[key].value for key in PLUGINS if key in settings)


def _all_keys(settings: Settings) -> set[str]:
    return {*settings, *(key.split(".")[0].split("[")[0] for key in settings)}


def _table_name(one: FrontEnd, keys: set[str], program: str) -> str:
    other = next((name for marks, name in one.other_tables if set(marks) <= keys), "")
    return other or program or one.name.replace("-", "_")


def is_megatron(one: FrontEnd, content: Content) -> bool:
    """Return whether ms-swift trains a file or command with Megatron-LM."""
    if content.format != "shell":
        keys = _all_keys(content.settings)
        return one.name == "ms-swift" and _table_name(one, keys, "") == swift_megatron.TABLE
    launch = training_launch(one, content)
    return launch is not None and one.programs[program_of(launch).split(" ")[0]] == swift_megatron.TABLE


def table_of(one: FrontEnd, content: Content) -> KeyTable:
    """Return the keys that a file or command accepts."""
    launch = training_launch(one, content) if content.format == "shell" else None
    program = "" if launch is None else one.programs[program_of(launch).split(" ")[0]]
    return table(_table_name(one, _all_keys(content.settings), program))


def _is_read(known: KeyTable, key: str) -> bool:
    """Return whether a table has a key; the keys of some sections are in no table."""
    _, name, found = find_key(known, key)
    return not name or found is not None


def _adapters_unused(
    one: FrontEnd, settings: Settings, values: Mapping[str, Any], is_command: bool
) -> Iterator[Finding]:
    """Yield that a training of all weights ignores settings of adapters, or cannot quantize its weights."""
    if adapters_of(one, values):
        return
    key, value = one.turns_adapters_on
    flag, turned_on = ("--", f"--{key} {value}") if is_command else ("", f"{key}: {value}")
    names = [key for key in settings if key in values and is_of_adapters(one.names.get(key, ""))]
    is_meant = any(str(values.get(key) or "") in STATES_ALL_WEIGHTS for key in METHOD_KEYS)
    yield from unused_adapters(settings, names, turned_on, is_meant, flag)
    if one.name == "trl":
        yield from quantized_without_adapters(settings, turned_on, flag)
