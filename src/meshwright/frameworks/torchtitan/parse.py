"""Parse torchtitan: TOML configs of the 0.2 line, and the commands of 0.2, 0.3.0 and main."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from meshwright.errors import InputError, closest
from meshwright.frameworks.common import format_toml
from meshwright.frameworks.framework import Content, ParsedConfig
from meshwright.frameworks.load import open_file
from meshwright.frameworks.model_match import find_local_model, same_shape
from meshwright.frameworks.torchtitan.commands import (
    PresetName,
    Run,
    counts_samples,
    parse_flags,
    preset_of_command,
    runs,
)
from meshwright.frameworks.torchtitan.derived_fields import approximations, derived_values, value
from meshwright.frameworks.torchtitan.format_override import RENAMED_KEYS, flag
from meshwright.frameworks.torchtitan.models import MODULES, PRESETS, flavor_model, preset_model
from meshwright.frameworks.torchtitan.own_flavor import CUSTOM_IMPORT, RegisteredFlavor, registered_flavor
from meshwright.frameworks.torchtitan.own_modules import module_text
from meshwright.frameworks.torchtitan.python_config import (
    ConfigFunction,
    config_functions,
    has_config_functions,
    module_of,
)
from meshwright.frameworks.types import Settings, SourcedValue, as_int
from meshwright.models import ModelSpec
from meshwright.recipes.key_maps import ConfigKey, config_keys
from meshwright.recipes.key_maps.torchtitan import (
    CONTEXT_LENGTH,
    LOCAL_BATCH,
    MICRO_BATCH_TOKENS,
    SAMPLE_KEYS,
    TOKEN_KEYS,
)
from meshwright.rules.rule import Finding
from meshwright.similar import is_slip

TABLE = "torchtitan"
LAST_02_DAY, CURRENT_DAY = "2026-02-22", "2026-08-21"
"""The last day of the 0.2 line (0.2.2), and the day of main's flags."""
VERSION_030, VERSION_MAIN = "0.3.0", "main"
RELEASED = "0.3.0 (2026-09-03), where batch sizes are in samples; on main they are in tokens"
OPEN_SECTIONS = re.compile(r"(dataloader|validator|tokenizer|encoder|inference|loss|override|profiler|optimizer)\.")
"""Sections whose keys depend on the config function."""
UNKNOWN_PRESET = "the values of this preset are unknown"
PRESET_KEYS = (
    "training.num_tokens_per_microbatch_per_dp_rank", "training.max_context_length", "training.steps",
    "optimizer.param_groups.0.optimizer_kwargs.lr", "activation_checkpoint.mode",
)  # fmt: skip
"""Keys that every preset sets."""
FIELDS_OF_MISSING_FILE = (
    "data.seq_length", "train.steps", "train.global_batch_size", "schedule.warmup_steps", "layout.micro_batch_size",
    "layout.tp", "layout.pp", "layout.cp", "layout.ep", "layout.dp_replicate", "layout.recompute",
)  # fmt: skip
"""Fields that a missing config file may set: their defaults are no reason for a finding."""
UNSET_BY_MINUS_1 = (
    "training.global_batch_size", "training.num_tokens_per_train_step", "validation.steps", "validator.steps",
)  # fmt: skip


def detect(content: Content) -> int:
    """Return how likely a file is torchtitan's; 0 if it is not."""
    if content.format == "toml":
        sections = content.top_level_keys()
        if "parallelism" in sections or "model.flavor" in content.settings or "activation_checkpoint" in sections:
            return 3
        return 2 if {"training", "metrics"} <= sections or {"job", "model"} <= sections else 0
    if content.format == "python":
        return 3 if has_config_functions(content) and config_functions(content) else 0
    return 3 if any(True for _ in runs(content)) else 0


def parse(content: Content) -> ParsedConfig:
    """Parse a file or script, for the torchtitan version it is written for."""
    if content.format == "toml":
        return _parse_toml(content, dict(content.settings))
    if content.format == "python":
        return _parse_functions(content)
    found = list(runs(content))
    if not found:
        raise InputError("contains no torchtitan command", field="file", value=content.path)
    run = found[0]
    run_notes = (f"the script starts {len(found)} training runs; only the first is checked",) if len(found) > 1 else ()
    flag_values, findings = parse_flags(run.args)
    preset_name = preset_of_command(run, flag_values)
    parsed = (
        _parse_current(content, run, flag_values, preset_name) if preset_name else _parse_02(content, run, flag_values)
    )
    return msgspec.structs.replace(
        parsed,
        findings=(*findings, *parsed.findings),
        notes=(*run_notes, *parsed.notes),
        env=run.env,
        gpu_request=run.gpu_request,
    )


def _parse_functions(content: Content) -> ParsedConfig:
    """Parse the config functions of a Python file: the first, with the findings of all others."""
    found = config_functions(content)
    if not found:
        raise InputError("defines no config of torchtitan", field="file", value=content.path)
    named = content.settings.get("config")
    name = next(iter(found)) if named is None else str(named.value)
    parsed = _parse_function(content, found[name])
    if named is not None or len(found) == 1:
        return parsed
    seen = {(one.rule, one.line, one.message): one for one in parsed.findings}
    for one in _findings_of_others(content.path, content.text, name):
        seen.setdefault((one.rule, one.line, one.message), one)
    notes = (f"the file has {len(found)} configs: shown is {name}, findings are those of all", *parsed.notes)
    return msgspec.structs.replace(parsed, findings=tuple(seen.values()), notes=notes)


@lru_cache(maxsize=16)
def _findings_of_others(path: str, text: str, first: str) -> tuple[Finding, ...]:
    """Return the findings of all configs of a file but the first; a file is parsed several times per check."""
    from meshwright.frameworks.check_file import findings_without_fixes
    from meshwright.frameworks.registry import framework

    content, torchtitan = Content(path, text, "python"), framework(TABLE)
    found: list[Finding] = []
    for name, function in config_functions(content).items():
        if name != first:
            where = SourcedValue(name, function.line, path)
            chosen = msgspec.structs.replace(content, settings={"config": where})
            found += [msgspec.structs.replace(one, fix=()) for one in findings_without_fixes(torchtitan, chosen)]
    return tuple(found)


def _parse_function(content: Content, function: ConfigFunction) -> ParsedConfig:
    written = dict(function.settings)
    recompute = written.pop("activation_checkpoint.mode", None)  # a class here, a mode in the key map
    released = counts_samples(written)
    settings, findings = _in_version(written, CURRENT_DAY)
    if released:  # a file of 0.3.0: its batch sizes count, and main's keys are named beside them
        settings |= {key: written[key] for key in SAMPLE_KEYS if key in written}
        settings = {key: setting for key, setting in settings.items() if key not in TOKEN_KEYS}
    flavor = function.flavor
    named = "" if flavor is None or flavor.unresolved else str(flavor.value)
    model = flavor_model(module_of(content), named) if named else None
    source = SourcedValue(function.name, function.line, content.path)
    settings["activation_checkpoint.mode"] = recompute or msgspec.structs.replace(source, value="none")
    settings.setdefault("activation_checkpoint.selective_ac_option", msgspec.structs.replace(source, value="op"))
    version = RELEASED if released else f"main of {CURRENT_DAY}"
    notes = [f"checked against torchtitan {version}: literals of {function.name}, nothing executed"]
    tp_is_sp = "parallelism.enable_sequence_parallel" not in settings
    parsed = _parsed(content, settings, model, notes, findings, tp_is_sp)
    return msgspec.structs.replace(
        parsed,
        name=function.name,
        suppressed_rules=(*LIMITS_OF_02, *(("graphs.syncing-dispatch",) if function.dispatcher else ())),
        version=VERSION_030 if released else VERSION_MAIN,
        field_values={**parsed.field_values, "kernels.loss": "chunked"},
        unknown_fields=() if function.complete else FIELDS_OF_MISSING_FILE,
    )  # fmt: skip


def _parse_02(content: Content, run: Run, command_settings: dict[str, SourcedValue]) -> ParsedConfig:
    config_file = command_settings.get("job.config_file") or (run.env.get("CONFIG_FILE") if run.by_script else None)
    settings, notes = dict(command_settings), []
    path = (content.folder or Path()) / str(config_file.value) if config_file is not None else None
    if (
        path is not None
        and config_file is not None
        and not config_file.unresolved
        and content.folder is not None
        and path.is_file()
    ):
        settings = {**open_file(path).settings, **command_settings}
    elif config_file is not None:
        notes.append(f"{config_file.value} was not found: only the command's flags are checked")
    complete = not notes
    parsed = _parse_toml(content, settings, complete)
    if run.by_script:
        notes.append("since 0.3.0, run_train.sh ignores CONFIG_FILE and reads MODULE and CONFIG")
    unknown_fields = () if complete else FIELDS_OF_MISSING_FILE
    return msgspec.structs.replace(
        parsed, notes=(*parsed.notes, *notes), unknown_fields=(*parsed.unknown_fields, *unknown_fields)
    )


def _parse_toml(content: Content, settings: dict[str, SourcedValue], complete: bool = True) -> ParsedConfig:
    """Parse a TOML config of the 0.2 line, with the command's overrides."""
    notes = ["checked against torchtitan 0.2.2; later versions do not read TOML files"]
    if "activation-checkpoint" in settings:
        settings["activation_checkpoint.mode"] = settings.pop("activation-checkpoint")
    extended = [
        settings[key] for key in ("job.custom_config_module", "experimental.custom_args_module") if key in settings
    ]
    if any(str(setting.value) for setting in extended):
        custom_keys = sorted(key for key in settings if key not in config_keys(TABLE) and not _is_slip(key))
        settings = {key: setting for key, setting in settings.items() if key not in custom_keys}
        if custom_keys:
            notes.append(f"keys of your custom config module are not checked: {', '.join(custom_keys)}")
    settings, findings = _in_version(settings, LAST_02_DAY, write=format_toml if content.format == "toml" else flag)
    model_known = complete or {"model.name", "model.flavor"} <= settings.keys()
    model = flavor_model(_text(settings, "model.name"), _text(settings, "model.flavor")) if model_known else None
    numbers: Mapping[str, float] = {}
    if model is None and _text(settings, CUSTOM_IMPORT):  # its flavor is registered by that module
        registered = _registered(content, settings)
        model, _ = find_local_model(_text(settings, "model.hf_assets_path"), content)
        if registered is not None and (model is None or not same_shape(model, registered.model)):
            model, numbers = registered.model, registered.numbers
            notes.append(
                f"the flavor {_text(settings, 'model.flavor')} is read from {_text(settings, CUSTOM_IMPORT)}.py"
            )
        elif model is not None:
            notes.append(f"the flavor {_text(settings, 'model.flavor')} is read as the model in {model.source}")
    parsed = _parsed(content, settings, model, notes, findings, tp_is_sp=True)
    if numbers:
        own = {f"architecture.{name}": value for name, value in numbers.items()}
        parsed = msgspec.structs.replace(parsed, field_values={**parsed.field_values, **own})
    emulated = value(settings, "quantize.linear.float8.emulate") is True
    # Expert tensor parallelism was removed after 0.2; emulated float8 needs no hardware support.
    return msgspec.structs.replace(
        parsed, suppressed_rules=("engine.no-etp", *(("precision.fp8-gpu",) if emulated else ()))
    )


def _is_slip(key: str) -> bool:
    """Return whether a key is one of torchtitan's with a wrong letter in its section or its name."""
    section, _, name = key.rpartition(".")
    known = [one.rpartition(".")[::2] for one in config_keys(TABLE)]
    return any((section == its and is_slip(name, own)) or (name == own and is_slip(section, its)) for its, own in known)


def _registered(content: Content, settings: Settings) -> RegisteredFlavor | None:
    """Return the flavor that the module of custom_import registers, if its file is beside the config."""
    text = module_text(content, settings.get(CUSTOM_IMPORT))
    if text is None:
        return None
    return registered_flavor(text, _text(settings, "model.name"), _text(settings, "model.flavor"))


def _parse_current(
    content: Content, run: Run, command_settings: dict[str, SourcedValue], preset_name: PresetName
) -> ParsedConfig:
    """Parse a command of 0.3.0 or main: a preset plus flags."""
    released = counts_samples(command_settings)
    notes = [
        f"checked against torchtitan {RELEASED}" if released else f"checked against torchtitan main of {CURRENT_DAY}"
    ]
    findings = [*_toml_removed(run, command_settings), *_unknown_preset(preset_name)]
    module, config = str(preset_name.module.value), str(preset_name.config.value)
    recompute = command_settings.pop("activation-checkpoint", None)
    settings_in_version, version_findings = _in_version(
        {k: v for k, v in command_settings.items() if k not in ("module", "config", "job.config_file")},
        CURRENT_DAY,
        released,
    )
    findings += version_findings
    preset = PRESETS.get(module, {}).get(config)
    base: dict[str, SourcedValue] = {}
    source = msgspec.structs.replace(preset_name.config, unresolved="")
    if preset is None and not findings:
        notes.append(f"--module {module} --config {config} is not a known preset: its model and values are unknown")
    elif preset is not None and not preset.known:
        base = {key: msgspec.structs.replace(source, value=config, unresolved=UNKNOWN_PRESET) for key in PRESET_KEYS}
    elif preset is not None:
        base = {key: msgspec.structs.replace(source, value=value) for key, value in preset.settings.items()}
        for key in ("training.disable_cuda_graphs", "validator.enable"):
            base.setdefault(key, msgspec.structs.replace(source, value=False))
    settings = {**(_preset_in_samples(base) if released else base), **settings_in_version}
    if recompute is not None:
        settings["activation_checkpoint.mode"] = recompute
    if preset is not None and "activation_checkpoint.selective_ac_option" not in settings:
        settings["activation_checkpoint.selective_ac_option"] = msgspec.structs.replace(source, value="op")
    settings["module"], settings["config"] = preset_name.module, preset_name.config
    tp_is_sp = "parallelism.enable_sequence_parallel" not in settings
    parsed = _parsed(content, settings, preset_model(module, config), notes, tuple(findings), tp_is_sp)
    return msgspec.structs.replace(
        parsed,
        field_values={**parsed.field_values, "kernels.loss": "chunked"},  # in every preset
        suppressed_rules=LIMITS_OF_02,
        version=VERSION_030 if released else VERSION_MAIN,
    )


LIMITS_OF_02 = ("pipeline.torchtitan-models", "sequence.torchtitan-models")
"""Rules about models of the 0.2 line, which later versions pipeline and shard by context."""


def _toml_removed(run: Run, command_settings: Mapping[str, SourcedValue]) -> Iterator[Finding]:
    setting = command_settings.get("job.config_file") or (run.env.get("CONFIG_FILE") if run.by_script else None)
    if setting is not None:
        key = "job.config_file" if "job.config_file" in command_settings else "CONFIG_FILE"
        message = f"{key}={setting.value}: TOML files are not supported since 2026-02-23; use a preset and flags"
        fix = ("--module llama3 --config llama3_8b",)
        yield Finding("torchtitan.toml-removed", "error", key, message, fix, file=setting.file, line=setting.line)


def _unknown_preset(preset_name: PresetName) -> Iterator[Finding]:
    """Yield findings for unknown modules and configs; a dotted module is the user's own."""
    module, config = str(preset_name.module.value), str(preset_name.config.value)
    if preset_name.module.unresolved or preset_name.config.unresolved or "." in module:
        return
    for key, setting in (("module", preset_name.module), ("config", preset_name.config)):
        if not str(setting.value):
            message = f"--{key} is missing: both --module and --config are required"
            yield Finding("torchtitan.preset", "error", key, message, (), file=setting.file, line=setting.line)
            return
    if module not in MODULES and "/" not in module:
        similar = closest(module, MODULES, 1)
        message = f"--module {module}: torchtitan has {', '.join(MODULES)}; use pkg.module for your own"
        fix = tuple(f"--module {name}" for name in similar)
        source = preset_name.module
        yield Finding("torchtitan.preset", "error", "module", message, fix, file=source.file, line=source.line)
        return
    known = PRESETS.get(module, {})
    similar = [name for name in known if name.lower() == config.lower().replace("-", "_")]
    if config not in known and similar:
        message = f"--config {config}: names are case-sensitive; the function is {similar[0]}"
        source = preset_name.config
        yield Finding(
            "torchtitan.preset", "error", "config", message, (f"--config {similar[0]}",), source.file, source.line
        )


def _preset_in_samples(base: Mapping[str, SourcedValue]) -> dict[str, SourcedValue]:
    """Return the settings of a preset with 0.3.0's keys."""
    settings = dict(base)
    tokens, context = settings.pop(MICRO_BATCH_TOKENS, None), settings.pop(CONTEXT_LENGTH, None)
    if context is not None:
        settings["training.seq_len"] = context
    if tokens is not None and context is not None:
        known = not tokens.unresolved and not context.unresolved
        settings[LOCAL_BATCH] = (
            msgspec.structs.replace(tokens, value=tokens.value // context.value) if known else tokens
        )
    return settings


OLDER_KEYS = {new: old for old, new in RENAMED_KEYS.items()}
"""Current keys with their names in the 0.2 line."""


def _in_version(
    settings: Mapping[str, SourcedValue], day: str, samples: bool = False, write: Callable[[str, Any], str] = flag
) -> tuple[dict[str, SourcedValue], tuple[Finding, ...]]:
    """Return the settings that exist in a version, and a finding for each of another version."""
    kept: dict[str, SourcedValue] = {}
    findings: list[Finding] = []
    for key, setting in settings.items():
        config_key = config_keys(TABLE).get(key)
        if config_key is None and day == CURRENT_DAY and OPEN_SECTIONS.match(key):
            continue
        if samples and key in SAMPLE_KEYS:
            kept[key] = setting
            continue
        if config_key is None or config_key.status != "read" or not (reason := _absence(config_key, day)):
            kept[key] = setting
            continue
        older = OLDER_KEYS.get(key)
        fix: tuple[str, ...] = (write(older, setting.value),) if older and not setting.unresolved else ()
        fix = _instead(config_key, setting, settings) if day == CURRENT_DAY else fix
        findings.append(
            Finding("torchtitan.other-version", "error", key, reason, fix, file=setting.file, line=setting.line)
        )
        if (moved := _moved(config_key, setting, settings, day)) is not None and moved[0] not in settings:
            kept[moved[0]] = msgspec.structs.replace(setting, value=moved[1])  # the figures count what was meant
    return kept, tuple(findings)


def _moved(
    config_key: ConfigKey, setting: SourcedValue, settings: Mapping[str, SourcedValue], day: str
) -> tuple[str, Any] | None:
    """Return the key of a version that has the meaning of another version's key, and its value there."""
    if setting.unresolved:
        return None
    if day != CURRENT_DAY:
        older = OLDER_KEYS.get(config_key.key)
        return (older, setting.value) if older else None
    texts = _instead(config_key, setting, settings)
    found = re.fullmatch(r"--([\w.]+)=(.+)", texts[0]) if texts else None
    if found is None or found[1] not in config_keys(TABLE) or ("tokens" in found[1] and not found[2].isdigit()):
        return None
    return found[1], int(found[2]) if "tokens" in found[1] else setting.value


def _instead(config_key: ConfigKey, setting: SourcedValue, settings: Mapping[str, SourcedValue]) -> tuple[str, ...]:
    """Return what to write instead of a key of the 0.2 line: with its value, if that has the same meaning."""
    text, value = config_key.replacement, setting.value
    name = re.match(r"--([\w.]+)", text)
    length = as_int(settings.get("training.seq_len") or settings.get(CONTEXT_LENGTH))
    if name is None or setting.unresolved or name[1].endswith("betas"):
        return (text,) if text else ()
    if "tokens" in text:
        count = as_int(setting)
        return (
            (flag(name[1], count * length),)
            if count and length
            else (f"--{name[1]}=TOKENS (samples × --{CONTEXT_LENGTH})",)
        )
    return (flag(name[1], value),) if name[0] == text else (text,)


def _absence(config_key: ConfigKey, day: str) -> str:
    """Return why a key does not exist on a day, or an empty string if it does."""
    if config_key.until and config_key.until <= day:
        if config_key.key in SAMPLE_KEYS:
            return f"{config_key.key} is of the 0.2 line and 0.3.0; main counts in tokens (since {config_key.until})"
        return f"{config_key.key} belongs to the 0.2 line and was removed (until {config_key.until})"
    if config_key.since and config_key.since > day:
        return f"{config_key.key} was added after the 0.2 line (since {config_key.since})"
    return ""


def _text(settings: Settings, key: str) -> str:
    setting = settings.get(key)
    return str(config_keys(TABLE)[key].default if setting is None else "" if setting.unresolved else setting.value)


def _parsed(
    content: Content,
    settings: dict[str, SourcedValue],
    model: ModelSpec | None,
    notes: list[str],
    findings: tuple[Finding, ...],
    tp_is_sp: bool,
) -> ParsedConfig:
    field_values = derived_values(settings, model, tp_is_sp)
    notes += approximations(settings)
    for key in UNSET_BY_MINUS_1:
        if value(settings, key) == -1:
            del settings[key]
    return ParsedConfig(
        settings=settings,
        name=Path(content.path).stem,
        model=model,
        goal="pretrain",
        findings=findings,
        notes=tuple(notes),
        files=tuple(dict.fromkeys([content.path, *(setting.file for setting in settings.values())])),
        field_values=field_values,
    )
