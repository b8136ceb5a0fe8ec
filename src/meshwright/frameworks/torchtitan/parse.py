"""Reading torchtitan: the TOML of the 0.2 line, its command, and the command of today."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from meshwright.errors import InputError, closest
from meshwright.frameworks.framework import Content, ParsedConfig
from meshwright.frameworks.load import open_file
from meshwright.frameworks.torchtitan.commands import Named, Run, counts_samples, flags, named_preset, runs
from meshwright.frameworks.torchtitan.derived_fields import approximations, own_values, value
from meshwright.frameworks.torchtitan.models import MODULES, PRESETS, flavor_model, preset_model
from meshwright.frameworks.types import Settings, SourcedValue
from meshwright.models import ModelSpec
from meshwright.recipes.key_maps import ConfigKey, config_keys
from meshwright.recipes.key_maps.torchtitan import CONTEXT_LENGTH, LOCAL_BATCH, MICRO_BATCH_TOKENS, SAMPLE_KEYS
from meshwright.rules.rule import Finding

TABLE = "torchtitan"
V02, TODAY = "2026-02-22", "2026-08-21"
"""The last day of the 0.2 line (0.2.2), and the day of the flags of today."""
RELEASED = "0.3.0, the release of 2026-09-03, which counts a batch in samples where the main branch counts tokens"
OPEN = re.compile(r"(dataloader|validator|tokenizer|encoder|inference|loss|override|profiler|optimizer)\.")
"""Sections of today whose keys depend on what a config function puts there."""
UNKNOWN_PRESET = "the values of this preset are not in the table here"
MAIN = (
    "training.num_tokens_per_microbatch_per_dp_rank", "training.max_context_length", "training.steps",
    "optimizer.param_groups.0.optimizer_kwargs.lr", "activation_checkpoint.mode",
)  # fmt: skip
"""Settings that every preset has."""
LEFT_TO_A_FILE = (
    "data.seq_length", "train.steps", "train.global_batch_size", "schedule.warmup_steps", "layout.micro_batch_size",
    "layout.tp", "layout.pp", "layout.cp", "layout.ep", "layout.dp_replicate", "layout.recompute",
)  # fmt: skip
"""What a config file that cannot be read may say: its default there is no reason for a finding."""
UNSET_BY_MINUS_1 = (
    "training.global_batch_size", "training.num_tokens_per_train_step", "validation.steps", "validator.steps",
)  # fmt: skip


def detect(content: Content) -> int:
    """How surely a file is torchtitan's."""
    if content.format == "toml":
        sections = content.top_level_keys()
        if "parallelism" in sections or "model.flavor" in content.settings or "activation_checkpoint" in sections:
            return 3
        return 2 if {"training", "metrics"} <= sections or {"job", "model"} <= sections else 0
    return 3 if any(True for _ in runs(content)) else 0


def parse(content: Content) -> ParsedConfig:
    """What a file says, by the line of torchtitan that it speaks."""
    if content.format == "toml":
        return _config(content, dict(content.settings))
    found = list(runs(content))
    if not found:
        raise InputError("starts no training of torchtitan", field="file", value=content.path)
    run = found[0]
    more = (f"the script starts {len(found)} trainings; the first is read",) if len(found) > 1 else ()
    said, findings = flags(run.args)
    named = named_preset(run, said)
    parsed = _of_today(content, run, said, named) if named else _of_02(content, run, said)
    return msgspec.structs.replace(
        parsed, findings=(*findings, *parsed.findings), notes=(*more, *parsed.notes), env=run.env, gpu_request=run.asked
    )


def _of_02(content: Content, run: Run, asked: dict[str, SourcedValue]) -> ParsedConfig:
    named = asked.get("job.config_file") or (run.env.get("CONFIG_FILE") if run.by_script else None)
    settings, notes = dict(asked), []
    path = (content.folder or Path()) / str(named.value) if named is not None else None
    if (
        path is not None
        and named is not None
        and not named.unresolved
        and content.folder is not None
        and path.is_file()
    ):
        settings = {**open_file(path).settings, **asked}
    elif named is not None:
        notes.append(f"{named.value} is not here: only what the command says is judged")
    complete = not notes
    parsed = _config(content, settings, complete)
    if run.by_script:
        notes.append("run_train.sh of today ignores CONFIG_FILE and reads MODULE and CONFIG")
    left = () if complete else LEFT_TO_A_FILE
    return msgspec.structs.replace(
        parsed, notes=(*parsed.notes, *notes), unknown_fields=(*parsed.unknown_fields, *left)
    )


def _config(content: Content, settings: dict[str, SourcedValue], complete: bool = True) -> ParsedConfig:
    """A TOML of the 0.2 line, with what a command sets on top."""
    notes = ["spoken is torchtitan 0.2 (0.2.2), whose TOML files later versions do not read"]
    if "activation-checkpoint" in settings:
        settings["activation_checkpoint.mode"] = settings.pop("activation-checkpoint")
    extended = [
        settings[key] for key in ("job.custom_config_module", "experimental.custom_args_module") if key in settings
    ]
    if any(str(said.value) for said in extended):
        foreign = sorted(key for key in settings if key not in config_keys(TABLE))
        settings = {key: said for key, said in settings.items() if key in config_keys(TABLE)}
        if foreign:
            notes.append(f"keys of the config module of your own are not judged: {', '.join(foreign)}")
    settings, findings = _of_line(settings, V02)
    named = complete or {"model.name", "model.flavor"} <= settings.keys()
    model = flavor_model(_text(settings, "model.name"), _text(settings, "model.flavor")) if named else None
    parsed = _parsed(content, settings, model, notes, findings, tp_is_sp=True)
    emulated = value(settings, "quantize.linear.float8.emulate") is True
    # Experts over tensor ranks went only after this line; what is emulated needs no hardware.
    return msgspec.structs.replace(
        parsed, suppressed_rules=("engine.no-etp", *(("precision.fp8-gpu",) if emulated else ()))
    )


def _of_today(content: Content, run: Run, asked: dict[str, SourcedValue], named: Named) -> ParsedConfig:
    """A command of today: a preset, and flags on top."""
    released = counts_samples(asked)
    notes = [f"spoken is torchtitan {RELEASED}" if released else f"spoken is torchtitan of {TODAY}"]
    findings = [*_toml_today(run, asked), *_unknown_preset(named)]
    module, config = str(named.module.value), str(named.config.value)
    recompute = asked.pop("activation-checkpoint", None)
    said, absent = _of_line(
        {k: v for k, v in asked.items() if k not in ("module", "config", "job.config_file")}, TODAY, released
    )
    findings += absent
    preset = PRESETS.get(module, {}).get(config)
    base: dict[str, SourcedValue] = {}
    at = msgspec.structs.replace(named.config, unresolved="")
    if preset is None and not findings:
        notes.append(f"--module {module} --config {config} is not in the table here: its model and values are unknown")
    elif preset is not None and not preset.known:
        base = {key: msgspec.structs.replace(at, value=config, unresolved=UNKNOWN_PRESET) for key in MAIN}
    elif preset is not None:
        base = {key: msgspec.structs.replace(at, value=value) for key, value in preset.settings.items()}
        for key in ("training.disable_cuda_graphs", "validator.enable"):
            base.setdefault(key, msgspec.structs.replace(at, value=False))
    settings = {**(_in_samples(base) if released else base), **said}
    if recompute is not None:
        settings["activation_checkpoint.mode"] = recompute
    if preset is not None and "activation_checkpoint.selective_ac_option" not in settings:
        settings["activation_checkpoint.selective_ac_option"] = msgspec.structs.replace(at, value="op")
    settings["module"], settings["config"] = named.module, named.config
    tp_is_sp = "parallelism.enable_sequence_parallel" not in settings
    parsed = _parsed(content, settings, preset_model(module, config), notes, tuple(findings), tp_is_sp)
    return msgspec.structs.replace(
        parsed, field_values={**parsed.field_values, "kernels.loss": "chunked"}
    )  # in every preset


def _toml_today(run: Run, asked: Mapping[str, SourcedValue]) -> Iterator[Finding]:
    said = asked.get("job.config_file") or (run.env.get("CONFIG_FILE") if run.by_script else None)
    if said is not None:
        key = "job.config_file" if "job.config_file" in asked else "CONFIG_FILE"
        message = f"{key}={said.value}: TOML files are not read since 2026-02-23; a preset and flags say everything"
        fix = ("--module llama3 --config llama3_8b",)
        yield Finding("torchtitan.toml-removed", "error", key, message, fix, file=said.file, line=said.line)


def _unknown_preset(named: Named) -> Iterator[Finding]:
    """Modules and configs that are not there; a dotted module is somebody's own."""
    module, config = str(named.module.value), str(named.config.value)
    if named.module.unresolved or named.config.unresolved or "." in module:
        return
    for key, said in (("module", named.module), ("config", named.config)):
        if not str(said.value):
            message = f"--{key} is missing: today's command needs both --module and --config"
            yield Finding("torchtitan.preset", "error", key, message, (), file=said.file, line=said.line)
            return
    if module not in MODULES and "/" not in module:
        near = closest(module, MODULES, 1)
        message = f"--module {module}: torchtitan has {', '.join(MODULES)}; others are named as pkg.module"
        fix = tuple(f"--module {name}" for name in near)
        at = named.module
        yield Finding("torchtitan.preset", "error", "module", message, fix, file=at.file, line=at.line)
        return
    known = PRESETS.get(module, {})
    near = [name for name in known if name.lower() == config.lower().replace("-", "_")]
    if config not in known and near:
        message = f"--config {config}: functions are named exactly, and this one is {near[0]}"
        at = named.config
        yield Finding("torchtitan.preset", "error", "config", message, (f"--config {near[0]}",), at.file, at.line)


def _in_samples(base: Mapping[str, SourcedValue]) -> dict[str, SourcedValue]:
    """The settings of a preset as 0.3.0 says them."""
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


def _of_line(
    settings: Mapping[str, SourcedValue], day: str, samples: bool = False
) -> tuple[dict[str, SourcedValue], tuple[Finding, ...]]:
    """The settings that there are in a line, and a finding for each that is of the other one."""
    kept: dict[str, SourcedValue] = {}
    findings: list[Finding] = []
    for key, said in settings.items():
        word = config_keys(TABLE).get(key)
        if word is None and day == TODAY and OPEN.match(key):
            continue
        if samples and key in SAMPLE_KEYS:
            kept[key] = said
            continue
        if word is None or word.status != "read" or not (why := _absent(word, day)):
            kept[key] = said
            continue
        fix = (word.replacement,) if word.replacement and day == TODAY else ()
        findings.append(Finding("torchtitan.other-version", "error", key, why, fix, file=said.file, line=said.line))
    return kept, tuple(findings)


def _absent(word: ConfigKey, day: str) -> str:
    """Why a key is not there on a day; empty when it is."""
    if word.until and word.until <= day:
        return f"{word.key} is of the 0.2 line and no longer there (until {word.until})"
    if word.since and word.since > day:
        return f"{word.key} is of today's torchtitan (since {word.since}), not of the 0.2 line"
    return ""


def _text(settings: Settings, key: str) -> str:
    said = settings.get(key)
    return str(config_keys(TABLE)[key].default if said is None else "" if said.unresolved else said.value)


def _parsed(
    content: Content,
    settings: dict[str, SourcedValue],
    model: ModelSpec | None,
    notes: list[str],
    findings: tuple[Finding, ...],
    tp_is_sp: bool,
) -> ParsedConfig:
    own = own_values(settings, model, tp_is_sp)
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
        files=tuple(dict.fromkeys([content.path, *(said.file for said in settings.values())])),
        field_values=own,
    )
