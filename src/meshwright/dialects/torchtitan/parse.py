"""Reading torchtitan: the TOML of the 0.2 line, its command, and the command of today."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright.clusters import Cluster
from meshwright.dialects.contents import open_file
from meshwright.dialects.dialect import Asked, Content, Parsed
from meshwright.dialects.parts import spell_toml, whole
from meshwright.dialects.torchtitan.models import MODULES, PRESETS, flavor_model, preset_model
from meshwright.dialects.torchtitan.spell import flag, flag_today
from meshwright.dialects.types import Said, Settings
from meshwright.errors import InputError, closest
from meshwright.models import ModelSpec
from meshwright.recipes.foreign import Word, words
from meshwright.recipes.foreign.torchtitan import SCHEDULE_NAMES, STEP
from meshwright.recipes.types import Recipe
from meshwright.rules.rule import Finding

if TYPE_CHECKING:
    from meshwright.dialects.shell import Launched

TABLE = "torchtitan"
V02, TODAY = "2026-02-22", "2026-08-21"
"""The last day of the 0.2 line (0.2.2), and the day of the flags of today."""
ONE_STAGE = ("1f1b", "gpipe", "pipelineschedulesingle")
STAGES = {name.lower(): 1 if name.lower() in ONE_STAGE else 2 for name in SCHEDULE_NAMES}
"""Stage chunks of a rank that a schedule has where nobody says how many."""
EVERYTHING = 1_000_000  # checkpoints: as many as there will be
SCRIPT = re.compile(r"run_train\w*\.sh")
OPEN = re.compile(r"(dataloader|validator|tokenizer|encoder|inference|loss|override|profiler|optimizer)\.")
"""Sections of today whose keys depend on what a config function puts there."""
ASKED = re.compile(r"--(job|model|training|parallelism|optimizer|lr_scheduler|checkpoint|compile|metrics)[.]")
RECOMPUTE = re.compile(r"activation[-_]checkpoint:([\w-]+)")
UNKNOWN_PRESET = "the values of this preset are not in the table here"
MAIN = (
    "training.num_tokens_per_microbatch_per_dp_rank", "training.max_context_length", "training.steps",
    "optimizer.param_groups.0.optimizer_kwargs.lr", "activation_checkpoint.mode",
)  # fmt: skip
UNSET_BY_MINUS_1 = (
    "training.global_batch_size", "training.num_tokens_per_train_step", "validation.steps", "validator.steps",
)  # fmt: skip
WORDS_OF_VALUES = {"true": True, "false": False, "none": None, "null": None}


class Run(msgspec.Struct, frozen=True):
    """A training that a script starts."""

    args: tuple[Said, ...]
    env: Settings
    asked: Asked
    place: Said  # the word that names the program
    by_script: bool  # with their run_train.sh, which reads variables


def recognises(content: Content) -> int:
    """How surely a file is torchtitan's."""
    if content.format == "toml":
        sections = content.top()
        if "parallelism" in sections or "model.flavor" in content.settings or "activation_checkpoint" in sections:
            return 3
        return 2 if {"training", "metrics"} <= sections or {"job", "model"} <= sections else 0
    return 3 if any(True for _ in _runs(content)) else 0


def parse(content: Content) -> Parsed:
    """What a file says, by the line of torchtitan that it speaks."""
    if content.format == "toml":
        return _config(content, dict(content.settings))
    runs = list(_runs(content))
    if not runs:
        raise InputError("starts no training of torchtitan", field="file", value=content.path)
    run = runs[0]
    more = (f"the script starts {len(runs)} trainings; the first is read",) if len(runs) > 1 else ()
    flags, findings = _flags(run.args)
    named = _named(run, flags)
    parsed = _of_today(content, run, flags, named) if named else _of_02(content, run, flags)
    return msgspec.structs.replace(
        parsed, findings=(*findings, *parsed.findings), notes=(*more, *parsed.notes), env=run.env, asked=run.asked
    )


def spelling(content: Content) -> Callable[[str, Any], str]:
    """How settings are said in a file or command: TOML, flags of the 0.2 line, or flags of today."""
    if content.format == "toml":
        return spell_toml
    run = next(_runs(content), None)
    return flag if run is None or _named(run, _flags(run.args)[0]) is None else flag_today


def _runs(content: Content) -> Iterator[Run]:
    for one in content.launched:
        if _starts(one):
            yield Run(one.args, one.env, _asked(one.nodes, one.gpus_per_node, one.gpu), one.program, False)
    for command in content.script.commands if content.script else ():
        for place, word in enumerate(command.words):
            if SCRIPT.fullmatch(Path(str(word.value)).name):
                gpus = command.env.get("NGPU") or Said(8, word.line, word.file)
                yield Run(command.words[place + 1 :], command.env, _asked(None, gpus, ""), word, True)
                break


def _starts(one: Launched) -> bool:
    name = str(one.program.value)
    if one.is_module:
        return name == "torchtitan.train"
    asked = any(ASKED.match(str(arg.value).replace("-", "_").replace("__", "--", 1)) for arg in one.args)
    return name.endswith("torchtitan/train.py") or (Path(name).name == "train.py" and asked)


def _asked(nodes: Said | None, per_node: Said | None, gpu: str) -> Asked:
    count, gpus = whole(nodes), whole(per_node)
    return Asked(nodes=count or (1 if gpus and nodes is None else None), gpus_per_node=gpus, gpu=gpu, said=per_node)


def _flags(args: Iterable[Said]) -> tuple[dict[str, Said], tuple[Finding, ...]]:
    """The settings of a command: --section.key value, --section.key=value, --section.flag, --section.no-flag."""
    found: dict[str, Said] = {}
    findings: list[Finding] = []
    rest = list(args)
    while rest:
        said = rest.pop(0)
        text = str(said.value)
        if text.startswith("--"):
            name, equals, value = text[2:].partition("=")
            values = [value] if equals else []
            most = 2 if name.endswith("betas") else 1
            while not equals and rest and not _is_word(rest[0]) and len(values) < most:
                values.append(str(rest[0].value))
                said = msgspec.structs.replace(said, unresolved=said.unresolved or rest[0].unresolved)
                rest.pop(0)
            key, typed = _setting(name.replace("-", "_"), values)
            found[key] = msgspec.structs.replace(said, value=typed)
        elif mode := RECOMPUTE.fullmatch(text):
            found["activation-checkpoint"] = msgspec.structs.replace(said, value=mode[1].replace("-", "_"))
        elif not said.unresolved and text:
            message = f"{text} stands alone: a setting is --section.key value"
            findings.append(
                Finding("torchtitan.stray-word", "error", text, message, (), file=said.file, line=said.line)
            )
    return found, tuple(findings)


def _is_word(said: Said) -> bool:
    text = str(said.value)
    return text.startswith("--") or RECOMPUTE.fullmatch(text) is not None


def _setting(name: str, values: list[str]) -> tuple[str, Any]:
    section, _, last = name.rpartition(".")
    positive = f"{section}.{last.removeprefix('no_')}" if section else last.removeprefix("no_")
    if not values:
        return (positive, False) if last.startswith("no_") and name not in words(TABLE) else (name, True)
    word = words(TABLE).get(name)
    if word is not None and word.takes == "list":
        return name, [_value(item) for value in values for item in value.split(",")]
    return name, _value(values[0]) if len(values) == 1 else [_value(value) for value in values]


def _value(text: str) -> Any:
    plain = text.strip()
    if plain.lower() in WORDS_OF_VALUES:
        return WORDS_OF_VALUES[plain.lower()]
    if re.fullmatch(r"[+-]?[0-9]{1,15}", plain):
        return int(plain)
    return float(plain) if re.fullmatch(r"[+-]?[0-9]{0,15}\.?[0-9]{1,15}([eE][+-]?[0-9]{1,3})?", plain) else text


class Named(msgspec.Struct, frozen=True):
    """The preset that a command of today starts from."""

    module: Said
    config: Said


def _named(run: Run, flags: Mapping[str, Said]) -> Named | None:
    """The preset, when the command speaks today's line."""
    module, config = flags.get("module"), flags.get("config")
    if run.by_script:
        env = run.env
        module, config = module or env.get("MODULE"), config or env.get("CONFIG")
        if module is None and config is None and ("CONFIG_FILE" in env or "job.config_file" in flags):
            return None
        module = module or msgspec.structs.replace(run.place, value="llama3")
        config = config or msgspec.structs.replace(run.place, value="llama3_debugmodel")
    elif module is None and config is None:
        return None
    missing = msgspec.structs.replace(run.place, value="")
    return Named(module or missing, config or missing)


def _of_02(content: Content, run: Run, flags: dict[str, Said]) -> Parsed:
    named = flags.get("job.config_file") or (run.env.get("CONFIG_FILE") if run.by_script else None)
    settings, notes = dict(flags), []
    path = (content.folder or Path()) / str(named.value) if named is not None else None
    if (
        path is not None
        and named is not None
        and not named.unresolved
        and content.folder is not None
        and path.is_file()
    ):
        settings = {**open_file(path).settings, **flags}
    elif named is not None:
        notes.append(f"{named.value} is not here: only what the command says is judged")
    parsed = _config(content, settings, complete=not notes)
    if run.by_script:
        notes.append("run_train.sh of today ignores CONFIG_FILE and reads MODULE and CONFIG")
    return msgspec.structs.replace(parsed, notes=(*parsed.notes, *notes))


def _config(content: Content, settings: dict[str, Said], complete: bool = True) -> Parsed:
    """A TOML of the 0.2 line, with what a command sets on top."""
    notes = ["spoken is torchtitan 0.2 (0.2.2), whose TOML files later versions do not read"]
    if "activation-checkpoint" in settings:
        settings["activation_checkpoint.mode"] = settings.pop("activation-checkpoint")
    extended = [
        settings[key] for key in ("job.custom_config_module", "experimental.custom_args_module") if key in settings
    ]
    if any(str(said.value) for said in extended):
        foreign = sorted(key for key in settings if key not in words(TABLE))
        settings = {key: said for key, said in settings.items() if key in words(TABLE)}
        if foreign:
            notes.append(f"keys of the config module of your own are not judged: {', '.join(foreign)}")
    settings, findings = _of_line(settings, V02)
    named = complete or {"model.name", "model.flavor"} <= settings.keys()
    model = flavor_model(_text(settings, "model.name"), _text(settings, "model.flavor")) if named else None
    return _parsed(content, settings, model, notes, findings, tp_is_sp=True)


def _of_today(content: Content, run: Run, flags: dict[str, Said], named: Named) -> Parsed:
    """A command of today: a preset, and flags on top."""
    notes = [f"spoken is torchtitan of {TODAY}"]
    findings = [*_toml_today(run, flags), *_unknown_preset(named)]
    module, config = str(named.module.value), str(named.config.value)
    recompute = flags.pop("activation-checkpoint", None)
    said, absent = _of_line({k: v for k, v in flags.items() if k not in ("module", "config", "job.config_file")}, TODAY)
    findings += absent
    preset = PRESETS.get(module, {}).get(config)
    base: dict[str, Said] = {}
    at = msgspec.structs.replace(named.config, unresolved="")
    if preset is None and not findings:
        notes.append(f"--module {module} --config {config} is not in the table here: its model and values are unknown")
    elif preset is not None and not preset.known:
        base = {key: msgspec.structs.replace(at, value=config, unresolved=UNKNOWN_PRESET) for key in MAIN}
    elif preset is not None:
        base = {key: msgspec.structs.replace(at, value=value) for key, value in preset.settings.items()}
        for key in ("training.disable_cuda_graphs", "validator.enable"):
            base.setdefault(key, msgspec.structs.replace(at, value=False))
    settings = {**base, **said}
    if recompute is not None:
        settings["activation_checkpoint.mode"] = recompute
    if preset is not None and "activation_checkpoint.selective_ac_option" not in settings:
        settings["activation_checkpoint.selective_ac_option"] = msgspec.structs.replace(at, value="op")
    settings["module"], settings["config"] = named.module, named.config
    tp_is_sp = "parallelism.enable_sequence_parallel" not in settings
    parsed = _parsed(content, settings, preset_model(module, config), notes, tuple(findings), tp_is_sp)
    return msgspec.structs.replace(parsed, own={**parsed.own, "kernels.loss": "chunked"})  # in every preset


def _toml_today(run: Run, flags: Mapping[str, Said]) -> Iterator[Finding]:
    said = flags.get("job.config_file") or (run.env.get("CONFIG_FILE") if run.by_script else None)
    if said is not None:
        key = "job.config_file" if "job.config_file" in flags else "CONFIG_FILE"
        message = f"{key}={said.value}: TOML files are not read since 2026-02-23; a preset and flags say everything"
        fix = ("--module llama3 --config llama3_8b",)
        yield Finding("torchtitan.toml-today", "error", key, message, fix, file=said.file, line=said.line)


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


def _of_line(settings: Mapping[str, Said], day: str) -> tuple[dict[str, Said], tuple[Finding, ...]]:
    """The settings that there are in a line, and a finding for each that is of the other one."""
    kept: dict[str, Said] = {}
    findings: list[Finding] = []
    for key, said in settings.items():
        word = words(TABLE).get(key)
        if word is None and day == TODAY and OPEN.match(key):
            continue
        if word is None or word.fate != "read" or not (why := _absent(word, day)):
            kept[key] = said
            continue
        fix = (word.instead,) if word.instead and day == TODAY else ()
        findings.append(Finding("torchtitan.other-line", "error", key, why, fix, file=said.file, line=said.line))
    return kept, tuple(findings)


def _absent(word: Word, day: str) -> str:
    """Why a key is not there on a day; empty when it is."""
    if word.until and word.until <= day:
        return f"{word.key} is of the 0.2 line and no longer there (until {word.until})"
    if word.since and word.since > day:
        return f"{word.key} is of today's torchtitan (since {word.since}), not of the 0.2 line"
    return ""


def _text(settings: Settings, key: str) -> str:
    said = settings.get(key)
    return str(words(TABLE)[key].default if said is None else "" if said.unresolved else said.value)


def value(settings: Settings, key: str) -> Any:
    """The value of a key as said, or their default."""
    said = settings.get(key)
    if said is not None:
        return None if said.unresolved else said.value
    default = words(TABLE)[key].default
    return None if default is msgspec.UNSET else default


def number(settings: Settings, key: str, otherwise: int = 1) -> int:
    """A whole number that a key holds, or what is to be taken where it holds none."""
    found = value(settings, key)
    return found if isinstance(found, int) and not isinstance(found, bool) else otherwise


def _parsed(
    content: Content,
    settings: dict[str, Said],
    model: ModelSpec | None,
    notes: list[str],
    findings: tuple[Finding, ...],
    tp_is_sp: bool,
) -> Parsed:
    own: dict[str, Any] = {}
    if tp_is_sp:
        own["layout.sp"] = number(settings, "parallelism.tensor_parallel_degree") > 1
    if model is not None and model.moe is not None:
        own["moe.balancing"] = "bias"
    own |= _betas(settings) | _saved(settings) | _stages(settings, model) | _layers_recomputed(settings, model)
    notes += _approximations(settings)
    for key in UNSET_BY_MINUS_1:
        if value(settings, key) == -1:
            del settings[key]
    return Parsed(
        settings=settings,
        name=Path(content.path).stem,
        model=model,
        goal="pretrain",
        findings=findings,
        notes=tuple(notes),
        files=tuple(dict.fromkeys([content.path, *(said.file for said in settings.values())])),
        own=own,
    )


def _betas(settings: Settings) -> dict[str, Any]:
    found = value(settings, "optimizer.param_groups.0.optimizer_kwargs.betas")
    if not isinstance(found, list) or len(found) != 2 or not all(isinstance(b, float) and 0 <= b < 1 for b in found):
        return {}
    return {"optimizer.beta1": found[0], "optimizer.beta2": found[1]}


def _saved(settings: dict[str, Said]) -> dict[str, Any]:
    """Checkpoints are off unless asked for; an interval longer than the run saves at its end only."""
    own: dict[str, Any] = {}
    never = number(settings, "checkpoint.interval", 500) > number(settings, "training.steps", 10000)
    if value(settings, "checkpoint.enable") is not True or never:
        own["checkpoint.save_every"] = 0
    if value(settings, "checkpoint.keep_latest_k") == 0:
        settings.pop("checkpoint.keep_latest_k")
        own["checkpoint.keep"] = EVERYTHING
    return own


def _stages(settings: Settings, model: ModelSpec | None) -> dict[str, Any]:
    """How the layers are cut into stages: listed, by layers per stage, or one or two chunks by the schedule."""
    pp = number(settings, "parallelism.pipeline_parallel_degree")
    if pp <= 1:
        return {}
    listed = value(settings, "parallelism.module_fqns_per_model_part")
    if isinstance(listed, list) and listed and all(isinstance(part, list) for part in listed):
        layers = tuple(sum(str(name).startswith("layers.") for name in part) for part in listed)
        return {"layout.stage_layers": layers, "layout.vp": max(1, len(listed) // pp)}
    first, last = (
        number(settings, f"parallelism.pipeline_parallel_{end}_stage_less_layers") for end in ("first", "last")
    )
    own: dict[str, Any] = {"layout.embedding_as_layer": first > 0, "layout.head_as_layer": last > 0}
    chunks = virtual_stages(settings, model)
    schedule = str(value(settings, "parallelism.pipeline_parallel_schedule")).lower()
    own["layout.vp"] = max(1, chunks // pp) if chunks else STAGES.get(schedule, 2)
    if schedule not in STAGES:  # which is told; nothing else is to follow from it
        own["layout.pp_schedule"] = "interleaved_1f1b"
    return own


def virtual_stages(settings: Settings, model: ModelSpec | None) -> int:
    """Stage chunks that pipeline_parallel_layers_per_stage makes; 0 when it is not said."""
    per_stage = number(settings, "parallelism.pipeline_parallel_layers_per_stage", 0)
    if per_stage <= 0 or model is None:
        return 0
    ends = sum(number(settings, f"parallelism.pipeline_parallel_{end}_stage_less_layers") for end in ("first", "last"))
    return ceil((model.num_layers + ends) / per_stage)


def _layers_recomputed(settings: Settings, model: ModelSpec | None) -> dict[str, Any]:
    """Selective recompute of every nth layer is full recompute of a share of them."""
    every = str(value(settings, "activation_checkpoint.selective_ac_option") or "")
    if value(settings, "activation_checkpoint.mode") != "selective" or not re.fullmatch("[1-9][0-9]{0,5}", every):
        return {}
    if model is None:
        return {}
    stages = max(1, number(settings, "parallelism.pipeline_parallel_degree"))
    return {"layout.recompute": "full", "layout.recompute_layers": ceil(model.num_layers / int(every) / stages)}


def _approximations(settings: Settings) -> list[str]:
    shape, ratio = value(settings, "lr_scheduler.decay_type"), value(settings, "lr_scheduler.decay_ratio")
    notes = ["the sqrt decay is taken for a linear one"] if shape == "sqrt" and ratio is None else []
    if value(settings, "optimizer.early_step_in_backward") is True:
        notes.append("gradients are used up in the backward pass; the estimate counts them as kept")
    return notes


def complete(recipe: Recipe, parsed: Parsed, on: Cluster) -> Recipe:
    """The global batch where it is not said, and whether full copies are all there is."""
    layout, settings = recipe.layout, parsed.settings
    ranks = max(1, on.world // max(1, layout.tp * layout.pp * layout.cp))
    shard = layout.dp_shard if layout.dp_shard > 0 else ranks // layout.dp_replicate
    alone = layout.tp * layout.pp * layout.cp * layout.ep == 1
    if layout.dp_replicate == ranks > 1 and shard == 1 and alone and "config" not in settings:
        copies = msgspec.structs.replace(layout, strategy="ddp", dp_shard=-1, dp_replicate=1)
        recipe = msgspec.structs.replace(recipe, layout=copies)
    if "training.global_batch_size" in settings:
        return recipe
    batch = _rank_batch(recipe, settings) * ranks
    if STEP in settings:  # in whole batches of all ranks; a rule of theirs tells what is left over
        batch *= max(1, round(recipe.train.global_batch_size / batch))
    return msgspec.structs.replace(recipe, train=msgspec.structs.replace(recipe.train, global_batch_size=batch))


def _rank_batch(recipe: Recipe, settings: Settings) -> int:
    """Samples of one data-parallel rank in a step where the global batch is not said."""
    pipelined = recipe.layout.pp > 1
    if "config" in settings:
        micro_batches = number(settings, "parallelism.num_pp_microbatches") if pipelined else 1
        return recipe.layout.micro_batch_size * max(1, micro_batches)
    return max(1, number(settings, "training.local_batch_size", 8)) if pipelined else recipe.layout.micro_batch_size
