"""Parse files and commands of the fine-tuning front ends."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright.config_io.scalars import resolve
from meshwright.errors import InputError
from meshwright.frameworks import accelerate_options
from meshwright.frameworks.accelerate.parse import parse_arguments_of
from meshwright.frameworks.accelerate.trl_commands import TRL_CONFIGS
from meshwright.frameworks.common import torchrun_gpu_request, visible_devices
from meshwright.frameworks.framework import NOT_ESTIMATED, Content, GpuRequest, ParsedConfig
from meshwright.frameworks.front_ends.data_columns import column_findings
from meshwright.frameworks.front_ends.deepspeed_file import deepspeed_findings, missing_file_notes, named_config
from meshwright.frameworks.front_ends.describe import METHOD_KEYS, QUANTIZED_LORA, FrontEnd, table
from meshwright.frameworks.front_ends.keys import (
    PROGRAM_OPTIONS,
    SHORT_KERNELS,
    find_key,
    is_of_other_program,
    key_findings,
    plugin_findings,
    plugin_line,
    value_findings,
)
from meshwright.frameworks.front_ends.synonyms import key_for
from meshwright.frameworks.front_ends.trainer_values import missing_keys, refused_values, tables_for_values
from meshwright.frameworks.front_ends.weights import weight_note, weights_of
from meshwright.frameworks.hf_arguments import as_parsed, flags_without_value
from meshwright.frameworks.key_table import KeyTable
from meshwright.frameworks.model_match import find_model
from meshwright.frameworks.other_losses import loss_of
from meshwright.frameworks.repository import declares
from meshwright.frameworks.start_checks import TRAINER_CHOICES, Style, broken_checks, tables_of
from meshwright.frameworks.start_checks.axolotl import ATTENTION_FLAGS
from meshwright.frameworks.trainer import open_deepspeed_config, open_referenced_file
from meshwright.frameworks.trainer_args import BITS
from meshwright.frameworks.trainer_fields import DATASETS, FROZEN, LISTS, SCHEDULE, SHARE, WARMUPS, WEIGHT_DTYPES
from meshwright.frameworks.types import Settings, SourcedValue, as_int
from meshwright.frameworks.unused_adapters import is_of_adapters, quantized_without_adapters, unused_adapters
from meshwright.models import quantized_bits
from meshwright.recipes.adapter_targets import groups_of, require_targets
from meshwright.recipes.key_maps import hugging_face
from meshwright.recipes.key_maps.accelerate import AXIS, FSDP, ZERO
from meshwright.recipes.replacements import WarmupShare
from meshwright.rules.rule import Finding

if TYPE_CHECKING:
    from meshwright.frameworks.shell import LaunchCommand

PER_NODE, VISIBLE = "NPROC_PER_NODE", "CUDA_VISIBLE_DEVICES"
FRONT_END = "front-end"  # launcher of their commands
TRAININGS = ("sft", "pt", "rlhf", "train", "dpo", "grpo", "kto", "reward", "rloo", "bco", "cpo", "orpo", "gkd")
"""Subcommands that train."""
SCRIPTS = (
    ("swift", re.compile(r"(?:^|[/.])swift[/.]cli[/.](sft|pt|rlhf)(?:\.py)?$")),
    ("megatron", re.compile(r"(?:^|[/.])swift[/.]cli[/.]_megatron[/.](sft|pt|rlhf)(?:\.py)?$")),
    ("axolotl", re.compile(r"(?:^|[/.])axolotl[/.]cli[/.](train)(?:\.py)?$")),
    ("trl", re.compile(r"(?:^|/)trl/scripts/(dpo|grpo|kto|reward|rloo)\.py$")),  # sft: with Accelerate's config
)
"""Scripts and modules of the front ends by program, as Python, torchrun and accelerate launch start them."""
STAGE = re.compile(r"z(?:ero)?[-_]?([0-3])", re.IGNORECASE)
FIRST_ITEM = re.compile(r"(\w+)\[0\]\.(\w+)")  # of a list of sections
DEFAULT_KERNEL = "auto"  # of LLaMA-Factory and Unsloth's files
ADAPTERS = ("lora", "qlora", "lora8bit")
MODEL = "model_name_or_path"
NOT_THEIRS = ("optimizer.supported", "sequence.packing-over-context", "sequence.attention-kernel")
"""Rules of ours on what an engine supports: front ends bring their own optimizers and kernels."""
PACKED = ("data.packing-attention",)
"""Rules on transformers' attention, which the kernels of a plugin replace."""
LOADED = {"qlora": "load_in_4bit", "lora8bit": "load_in_8bit"}
"""Argument that loads the frozen weights, by adapters."""
STATES_ALL_WEIGHTS = ("full",)  # values of a key that names the adapters
PLUGINS = ("external_plugins", "custom_register_path")
QUANTIZER = "quant_method"  # of ms-swift, without which it refuses a number of bits
CONFIGS = (".yaml", ".yml", ".json")


def confidence(one: FrontEnd, content: Content) -> int:
    """Return how likely a file is one of this front end; 0 if it is not."""
    if content.format == "yaml":
        keys = content.top_level_keys() | content.settings.keys()
        if keys & set(one.not_with) or (one.trains_with and not keys & set(one.trains_with)):
            return 0
        return max((len(marks) for marks in one.marks if set(marks) <= keys), default=0)
    return 3 if _launch(one, content) is not None else 0


def _launch(one: FrontEnd, content: Content) -> LaunchCommand | None:
    for launch in content.launches:
        program, _, subcommand = program_of(launch).partition(" ")
        if program in one.programs and subcommand in TRAININGS:
            return launch
    return None


def program_of(launch: LaunchCommand) -> str:
    """Return the program and its subcommand, `swift sft`, also if a launcher starts its script; else empty."""
    text = str(launch.program.value)
    if launch.launcher == FRONT_END:
        return text
    found = ((program, pattern.search(text)) for program, pattern in SCRIPTS)
    return next((f"{program} {script[1]}" for program, script in found if script), "")


def parse(one: FrontEnd, content: Content) -> ParsedConfig:
    """Parse a YAML file, or the command of a script."""
    if content.format != "shell":
        return _parsed(one, content, content.settings, GpuRequest(), "")
    launch = _launch(one, content)
    if launch is None:
        raise InputError(f"contains no training command of {one.title}", field="file", value=content.path)
    arguments = _command_settings(one, content, launch)
    program = program_of(launch).split(" ")[0]
    return _parsed(one, content, arguments, _gpus(one, launch), one.programs[program], launch.env)


def with_command_settings(one: FrontEnd, content: Content) -> Content:
    """Return a script with the settings of its training command, as a YAML file has them."""
    launch = _launch(one, content) if content.format == "shell" else None
    if launch is None:
        return content
    found = _command_settings(one, content, launch)
    settings = {key: msgspec.structs.replace(setting, value=_plain(setting.value)) for key, setting in found.items()}
    return msgspec.structs.replace(content, settings=settings)


def _plain(value: Any) -> Any:
    return resolve(value) if isinstance(value, str) and value else value


def _command_settings(one: FrontEnd, content: Content, launch: LaunchCommand) -> dict[str, SourcedValue]:
    """Return the arguments of a command, and the settings of the file that it names."""
    arguments = _arguments(launch.args)
    written = {name: setting for name, setting in arguments.items() if name not in PROGRAM_OPTIONS}
    name = one.programs[program_of(launch).split(" ")[0]]
    older = one.removed.get(name, {})
    read = as_parsed(written, table(name), shortened=not one.uses_click, every_switch=one.uses_click, older=older)
    arguments = {**{key: arguments[key] for key in arguments if key in PROGRAM_OPTIONS}, **read}
    named = next((arg for arg in launch.args if str(arg.value).endswith(CONFIGS)), None)
    file = arguments.pop("config", None) or (named if launch.args and named is launch.args[0] else None)
    if file is None:
        return arguments
    if file is named:  # llamafactory-cli train FILE.yaml key=value
        arguments |= {key: one for word in launch.args[1:] for key, one in _override(word)}
    try:
        return {**open_referenced_file(content, file).settings, **arguments}
    except InputError:
        if not arguments:
            raise
        return arguments


def _arguments(argv: tuple[SourcedValue, ...]) -> dict[str, SourcedValue]:
    """Return `--name value …` by name; several values are a list."""
    found: dict[str, SourcedValue] = {}
    name = ""
    for word in argv:
        text = str(word.value)
        if text == "--":  # options of the launcher follow
            break
        if text.startswith("--"):
            name, equals, value = text[2:].partition("=")
            name = name.replace("-", "_")
            found[name] = msgspec.structs.replace(word, value=value if equals else True)
        elif name:
            before = found[name].value
            many = [*before, text] if isinstance(before, list) else text if before is True else [before, text]
            found[name] = msgspec.structs.replace(word, value=many, line=found[name].line)
    return found


def _override(word: SourcedValue) -> Iterator[tuple[str, SourcedValue]]:
    """Yield the key and the value of an override after a file: key=value."""
    key, equals, value = str(word.value).partition("=")
    if equals and key.isidentifier():
        yield key, msgspec.structs.replace(word, value=_plain(value))


def _gpus(one: FrontEnd, launch: LaunchCommand) -> GpuRequest:
    """Return the GPUs of a command: NPROC_PER_NODE, or the visible devices."""
    per_node, nodes = as_int(launch.env.get(PER_NODE)), as_int(launch.env.get("NNODES"))
    devices = launch.env.get(VISIBLE)
    stated = launch.launcher_args.get("num-processes")
    if processes := as_int(stated):
        return GpuRequest(world_size=processes, source=stated)
    count = per_node or len(visible_devices(devices))
    if not per_node and launch.gpus_per_node is not None:
        return torchrun_gpu_request(launch)
    if not count or _spreads(one, launch.env) or ("NNODES" in launch.env and nodes is None):
        return GpuRequest()
    return GpuRequest(nodes=nodes or 1, gpus_per_node=count, source=launch.env.get(PER_NODE) or devices)


def _parsed(
    one: FrontEnd, content: Content, settings: Settings, gpus: GpuRequest, program: str, env: Settings | None = None
) -> ParsedConfig:
    values = {key: setting.value for key, setting in settings.items() if not setting.unresolved}
    keys = _all_keys(settings)
    table_name = _table_name(one, keys, program)
    known = table(table_name)
    is_open = any(key in keys for key in one.open_with)
    is_command = content.format == "shell"
    own = {key: found for found in one.refused(values) for key in found[:1]}
    others = (found for found in refused_values(one, values) if found[0] not in own)
    processes = gpus.count or as_int(settings.get("num_processes"))
    refused = tuple(value_findings(settings, (*own.values(), *others), is_command))
    is_others = is_of_other_program(one, known, settings, is_command, table_name)
    findings = (
        *_without_own_fields(one, content, key_findings(one, known, settings, is_open, is_command, table_name)),
        *tables_for_values(known, settings),
        *refused,
        *one.own_findings(settings, is_command),
        *_start_findings(one, content, settings, known, refused, processes, is_others),
        *plugin_findings(one, settings),
        *column_findings(one, content.folder, settings, is_command),
        *(() if is_command else missing_keys(one, settings, keys)),
        *_switches_without_value(one, content, known),
        *_sharded_across_devices(one, settings, env or {}),
        *_as_warnings(is_others, _adapters_unused(one, settings, values, is_command)),
    )
    read = settings if is_open else {key: setting for key, setting in settings.items() if _is_read(known, key)}
    renamed = {key: new for key, (_, new) in one.removed.get(table_name, {}).items() if new and key in settings}
    read = {**{new: settings[key] for key, new in renamed.items()}, **read}  # as the older release reads them
    arguments = dict(_trainer_arguments(one, read, values))
    subcommand = _subcommand(one, content)
    if one.all_tokens is not None:
        first = next(iter(settings.values()), SourcedValue(True, 1, ""))
        answers = not one.all_tokens(values) and subcommand != "pt"
        name = "assistant_only_loss" if answers else "completion_only_loss"
        arguments[name] = msgspec.structs.replace(first, value=answers, unresolved="", pyyaml=msgspec.UNSET)
    findings = (*findings, *deepspeed_findings(one, content, settings, arguments))
    zero = _zero(content, settings)
    adapters = _adapters(one, values)
    sharding = dict(_sharding(one, settings, values, zero))
    keeps = one.keeps_dtype_in_fsdp2 and _fsdp_version(one, values) == 2
    weights = weights_of(one.weights, settings)
    if not adapters or not one.upcasts_trained:  # else frozen weights are loaded in the dtype of the computation
        at = settings.get(weights.key) or next(iter(settings.values()), SourcedValue("", 1, ""))
        arguments[WEIGHT_DTYPES[0]] = msgspec.structs.replace(at, value=weights.name, unresolved="")
    parsed = parse_arguments_of(content, sharding, gpus, arguments, keeps)
    why = one.other(values) or ("Megatron" if is_open or program.endswith("megatron") else "")
    why = why or ("layers spread over the visible devices" if _spreads(one, env or {}) else "")
    why = why or (subcommand if subcommand not in ("", "sft", "pt", "train") else "")
    why = why or ("a model that a plugin may register" if _is_registered(settings) else "")
    why = loss.note() if (loss := loss_of(values, subcommand)) is not None else why
    if not why and adapters not in ("", *ADAPTERS):
        unknown = any(finding.field in METHOD_KEYS for finding in refused)
        why = "unknown adapter" if unknown else f"{adapters} adapters"
    dropped = ("num_processes", "placeholder", f"{WEIGHT_DTYPES[0]}=")
    notes = [note for note in parsed.notes if not any(text in note for text in dropped)]
    values_of = parsed.field_values.get
    notes += filter(None, (weight_note(weights, values_of("precision.master", ""), values_of(FROZEN, "")),))
    notes += missing_file_notes(content, settings)
    if why:
        notes.append(f"{why}: keys and values are checked, {NOT_ESTIMATED}")
    assumed: tuple[str, ...] = ("data.seq_length",) if not {"max_length", "cutoff_len"} & arguments.keys() else ()
    assumed += ("layout.strategy",) if _leaves_sharding_open(settings, zero, is_command or bool(adapters)) else ()
    return msgspec.structs.replace(
        parsed,
        settings={**parsed.settings},
        model=None if why else parsed.model,
        gpu_request=gpus if gpus.count else parsed.gpu_request,
        findings=findings,
        notes=tuple(notes),
        env=env or {},
        suppressed_rules=(*NOT_THEIRS, *(PACKED if one.isolates or _has_own_kernels(one, values) else ())),
        assumed=assumed,
        program=msgspec.structs.replace(
            parsed.program,
            warmup_share=_warmup(one, parsed, arguments),
            **_own_keys(one, known, settings, arguments, is_command),
            sharding=one.sharding.get(table_name, {}),
        ),
    )


def _warmup(one: FrontEnd, parsed: ParsedConfig, arguments: Settings) -> WarmupShare:
    """Return the warmup as a share of the steps: that of the file, or the front end's own if the file has none."""
    stated = parsed.program.warmup_share
    if stated:
        return msgspec.structs.replace(stated, rounds_down=one.warmup.rounds_down)
    is_set = any(name in arguments for name in (*WARMUPS, SHARE))
    is_constant = str(getattr(arguments.get(SCHEDULE), "value", "")) == "constant"  # has none
    return stated if is_set or is_constant else one.warmup


def _switches_without_value(one: FrontEnd, content: Content, known: KeyTable) -> Iterator[Finding]:
    launch = _launch(one, content) if content.format == "shell" and not one.uses_click else None
    return flags_without_value(launch.args, known, one.title) if launch is not None else iter(())


def _start_findings(
    one: FrontEnd,
    content: Content,
    settings: Settings,
    known: KeyTable,
    refused: Sequence[Finding],
    processes: int | None,
    is_others: bool,
) -> Iterator[Finding]:
    """Yield the checks at start that refuse the settings; other programs of a front end have checks of their own."""
    if known is not one.table:
        return
    named = next((settings[key] for key, name in one.names.items() if name == MODEL and key in settings), None)
    model = find_model(str(named.value)) if named is not None and not named.unresolved else None
    style: Style = "command" if content.format == "shell" else "yaml"
    tables = tables_of(one.name, settings, _subcommand(one, content))
    reported = {finding.field for finding in refused}
    choices = [one for one in tables if one is TRAINER_CHOICES]  # depend on nothing that a file leaves out
    found = broken_checks([one for one in tables if one not in choices], settings, style, model, processes)
    own = broken_checks(choices, settings, style, model, processes)
    every = (*_as_warnings(is_others, found), *own)
    yield from (finding for finding in every if finding.field not in reported)


def _as_warnings(is_others: bool, findings: Iterable[Finding]) -> Iterator[Finding]:
    """Yield findings; as warnings if another program reads the file, which may set what it leaves out."""
    for one in findings:
        changes = is_others and one.severity == "error"
        yield msgspec.structs.replace(one, severity="warning") if changes else one


def _has_own_kernels(one: FrontEnd, values: Mapping[str, Any]) -> bool:
    return any(_is_true(values.get(key)) for key in one.kernels)


def _is_true(value: Any) -> bool:
    return str(value).lower() == "true"


def _spreads(one: FrontEnd, env: Settings) -> bool:
    """Return whether one process sees several devices: transformers then places layers on all of them."""
    several = len(visible_devices(env.get(VISIBLE))) > 1
    return several and PER_NODE not in env and not one.starts_a_rank_per_device


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


def _subcommand(one: FrontEnd, content: Content) -> str:
    launch = _launch(one, content) if content.format == "shell" else None
    return "" if launch is None else program_of(launch).partition(" ")[2]


def _all_keys(settings: Settings) -> set[str]:
    return {*settings, *(key.split(".")[0].split("[")[0] for key in settings)}


def _table_name(one: FrontEnd, keys: set[str], program: str) -> str:
    other = next((name for marks, name in one.other_tables if set(marks) <= keys), "")
    return other or program or one.name.replace("-", "_")


def table_of(one: FrontEnd, content: Content) -> KeyTable:
    """Return the keys that a file or command accepts."""
    launch = _launch(one, content) if content.format == "shell" else None
    program = "" if launch is None else one.programs[program_of(launch).split(" ")[0]]
    return table(_table_name(one, _all_keys(content.settings), program))


def _is_read(known: KeyTable, key: str) -> bool:
    """Return whether a table has a key; the keys of some sections are in no table."""
    _, name, found = find_key(known, key)
    return not name or found is not None


def _own_keys(
    one: FrontEnd, known: KeyTable, settings: Settings, arguments: Mapping[str, SourcedValue], is_command: bool
) -> dict[str, Any]:
    """Return the front end's key of each argument of the Trainer, and the lines that a key needs, for fixes."""
    written = {argument: key for key, argument in one.names.items() if argument in arguments and key in settings}
    keys = {
        name: written.get(name) or key_for(one, known, name)
        for name in {
            *one.names.values(),
            *(row.key for row in hugging_face.KEYS),
            *LOADED.values(),
            *BITS,
            *WEIGHT_DTYPES,
        }
    }
    former, today = (keys[name] for name in reversed(WEIGHT_DTYPES))
    keys[WEIGHT_DTYPES[0]] = today or former
    texts = " ".join(str(settings[key].value) for key in settings if key.split("[")[0] == "plugins")
    needed = {
        key: plugin_line(plugin, settings)
        for key in keys.values()
        for start, plugin in one.plugins.items()
        if key.startswith(start) and plugin not in texts
    }
    if str(getattr(settings.get("adapter"), "value", "")) == "lora":  # which Axolotl loads in 16 bits or 8
        needed[LOADED["qlora"]] = "adapter: qlora"
    if known.find("", QUANTIZER) and QUANTIZER not in settings:
        needed["quant_bits"] = f"--{QUANTIZER} bnb" if is_command else f"{QUANTIZER}: bnb"
    if older := next((key for key in ATTENTION_FLAGS if key in settings and _is_true(settings[key].value)), ""):
        needed["attn_implementation"] = f"without {older}"  # the schema refuses both
    return {"written_keys": {name: key for name, key in keys.items() if key}, "needed_lines": needed,
        "written_values": SHORT_KERNELS, "is_command": is_command, "is_front_end": True}  # fmt: skip


def _of_all_items(values: Mapping[str, Any], section: str, key: str) -> Iterator[str]:
    """Yield the values of a key in all items of a list of sections: datasets[0].path, datasets[1].path, …"""
    at = 0
    while (value := values.get(f"{section}[{at}].{key}")) is not None:
        yield str(value)
        at += 1


def _trainer_arguments(
    one: FrontEnd, settings: Settings, values: Mapping[str, Any]
) -> Iterator[tuple[str, SourcedValue]]:
    """Yield the settings as arguments of the Trainer, TRL and peft."""
    adapters = _adapters(one, values)
    for key, setting in settings.items():
        name = one.names.get(key)
        if name is None or setting.value is None or (not adapters and is_of_adapters(name)):
            continue
        value = setting.value
        if isinstance(value, list):
            value = ",".join(map(str, value)) if name in (*LISTS, *DATASETS) else value[0] if value else ""
        if items := FIRST_ITEM.fullmatch(key):
            value = ",".join(_of_all_items(values, *items.groups()))
        if name == "gradient_checkpointing":
            value = str(value).lower() not in ("false", "no")
        if name in ("bf16", "fp16"):
            value = str(value).lower() in ("true", "auto", "full")
        if name == "attn_implementation":
            value = hugging_face.OTHER_KERNEL_NAMES.get(str(value).lower(), value)
            is_read = setting.unresolved or hugging_face.is_attention_kernel(str(value))
            if setting.value == DEFAULT_KERNEL or not is_read:
                continue  # transformers' own choice, or a kernel of the front end
        if name in LISTS and (value == "all-linear" or not _is_known(str(value).split(","))):
            name, value = "lora_target_linear", True
        if name in ("max_steps", "eval_steps", "save_steps") and isinstance(value, float) and value < 1:
            continue  # a share of the training
        yield name, msgspec.structs.replace(setting, value=value)
    flag = next((key for key in ATTENTION_FLAGS if _is_true(values.get(key))), "")
    if flag in settings and not values.get("attn_implementation"):
        yield "attn_implementation", msgspec.structs.replace(settings[flag], value=ATTENTION_FLAGS[flag])
    first = next(iter(settings.values()), SourcedValue(True, 1, ""))
    if not any(one.names.get(key) == "gradient_checkpointing" for key in settings):
        yield "gradient_checkpointing", msgspec.structs.replace(first, value=one.recomputes(values), unresolved="")
    if (truncation := one.truncation(values)) != "end":
        yield "truncation_mode", msgspec.structs.replace(first, value=truncation, unresolved="")
    if adapters:
        yield "use_peft", msgspec.structs.replace(first, value=True, unresolved="")
    if adapters in LOADED:
        yield LOADED[adapters], msgspec.structs.replace(first, value=True, unresolved="")


def _adapters(one: FrontEnd, values: Mapping[str, Any]) -> str:
    """Return the adapters of a file; LoRA on a model that is published in fewer bits is named by those."""
    found = one.adapters(values)
    named = next((str(values[key]) for key, name in one.names.items() if name == MODEL and values.get(key)), "")
    bits = quantized_bits(named) if found == "lora" else 0
    return QUANTIZED_LORA.get(bits, found)


def _adapters_unused(
    one: FrontEnd, settings: Settings, values: Mapping[str, Any], is_command: bool
) -> Iterator[Finding]:
    """Yield that a training of all weights ignores settings of adapters, or cannot quantize its weights."""
    if _adapters(one, values):
        return
    key, value = one.turns_adapters_on
    flag, turned_on = ("--", f"--{key} {value}") if is_command else ("", f"{key}: {value}")
    names = [key for key in settings if key in values and is_of_adapters(one.names.get(key, ""))]
    is_meant = any(str(values.get(key) or "") in STATES_ALL_WEIGHTS for key in METHOD_KEYS)
    yield from unused_adapters(settings, names, turned_on, is_meant, flag)
    if one.name == "trl":
        yield from quantized_without_adapters(settings, turned_on, flag)


def _is_known(targets: list[str]) -> bool:
    """Return whether recipes have names for these adapter targets; the memory of others is that of all layers."""
    try:
        require_targets(tuple(targets))
    except InputError:
        return False
    return bool(groups_of(tuple(targets)))


def _zero(content: Content, settings: Settings) -> Mapping[str, Any]:
    """Return the stage and offloading of DeepSpeed's config, by the file or by its name; empty if neither has them."""
    setting = named_config(settings)
    if setting is None or setting.unresolved:
        return {}
    with suppress(InputError):
        config = open_deepspeed_config(content, setting).settings
        stage = as_int(config.get("zero_optimization.stage"))
        if stage is not None:
            found: dict[str, Any] = {f"{ZERO}zero_stage": stage}
            for part in ("optimizer", "param"):
                device = config.get(f"zero_optimization.offload_{part}.device")
                found |= {f"{ZERO}offload_{part}_device": device.value} if device is not None and stage else {}
            return found
    name = str(setting.value)
    named = STAGE.search(name)
    if named is None:
        return {}
    found = {f"{ZERO}zero_stage": int(named[1])}
    offload = "cpu" if "offload" in name else "none"
    found |= {f"{ZERO}offload_optimizer_device": offload} if named[1] != "0" else {}
    return found | ({f"{ZERO}offload_param_device": offload} if named[1] == "3" else {})


def _has_fsdp(settings: Settings) -> bool:
    if (named := settings.get("dist_config.name")) is not None and str(named.value) in ("fsdp2", "fsdpturbo"):
        return True
    return any(key == "fsdp" or key.startswith("fsdp_config") for key in settings) or "dp_shard_size" in settings


def _of_fsdp(values: Mapping[str, Any], name: str) -> Any:
    """Return a value of fsdp_config, whose keys are read with and without the prefix fsdp_; None without one."""
    return values.get(f"fsdp_config.{name}", values.get(f"fsdp_config.fsdp_{name}"))


def _fsdp_version(one: FrontEnd, values: Mapping[str, Any]) -> int:
    """Return the version of FSDP that a file names, else the front end's own."""
    stated = values.get("fsdp_version") or _of_fsdp(values, "version") or one.fsdp_version
    return 1 if str(stated) == "1" else 2


def _shipped_config(one: FrontEnd, settings: Settings) -> Mapping[str, Any]:
    """Return the config of Accelerate that TRL ships under the name that a file has for it; empty if it has none."""
    setting = settings.get(accelerate_options.CONFIG) if one.is_of_command(accelerate_options.CONFIG) else None
    return {} if setting is None or setting.unresolved else TRL_CONFIGS.get(str(setting.value), {})


def _leaves_sharding_open(settings: Settings, zero: Mapping[str, Any], is_stated: bool) -> bool:
    """Return whether a config of DeepSpeed that is not here shards, or one of Accelerate may, which a file is for."""
    if named_config(settings) is not None:
        return not zero
    if (setting := settings.get(accelerate_options.CONFIG)) is not None:
        return str(setting.value) not in TRL_CONFIGS
    return not is_stated and not _has_fsdp(settings)


def _mixed_precision(one: FrontEnd, values: Mapping[str, Any]) -> str:
    """Return the format of the computation; bf16 where a file states none."""
    named = str(values.get("torch_dtype")).removeprefix("torch.")
    if str(values.get("bf16", "")).lower() in ("true", "auto", "full") or named == "bfloat16":
        return "bf16"
    if _is_true(values.get("fp16")):
        return "fp16"
    if one.scales_other_dtypes and not {"bf16", "fp16"} & values.keys() and named in ("float16", "float32"):
        return "fp16"
    is_off = "bf16" in values and not one.upcasts_trained  # else the checkpoint's dtype computes
    return "no" if "fp16" in values or is_off else "bf16"


def _sharding(
    one: FrontEnd, settings: Settings, values: Mapping[str, Any], zero: Mapping[str, Any]
) -> Iterator[tuple[str, SourcedValue]]:
    """Yield how the training is sharded, as keys of Accelerate's config."""
    first = next(iter(settings.values()), SourcedValue("", 1, ""))
    found: dict[str, Any] = {"distributed_type": "MULTI_GPU"}
    if zero:
        found = {"distributed_type": "DEEPSPEED", **zero}
    elif shipped := _shipped_config(one, settings):
        found = dict(shipped)
    elif _has_fsdp(settings):
        found = {"distributed_type": "FSDP", f"{FSDP}fsdp_version": _fsdp_version(one, values)}
        found |= {f"{FSDP}fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
        switches = ("offload_params", "activation_checkpointing")
        found |= {f"{FSDP}fsdp_{name}": True for name in switches if _is_true(_of_fsdp(values, name))}
        axes = {"tp": "tensor_parallel_size", "cp": "context_parallel_size", "dp_replicate": "dp_replicate_size"}
        found |= {f"{AXIS}{axis}_size": values[key] for axis, key in axes.items() if isinstance(values.get(key), int)}
    half = found["mixed_precision"] = _mixed_precision(one, values)
    for key, value in found.items():
        place = settings.get(half, first) if key == "mixed_precision" else first
        yield key, msgspec.structs.replace(place, value=value, unresolved="", pyyaml=msgspec.UNSET)
