"""Parse DeepSpeed JSON configs and the commands that reference one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright.clusters import Cluster
from meshwright.errors import InputError
from meshwright.frameworks.common import gpu_request_of
from meshwright.frameworks.constructors import constructor_findings
from meshwright.frameworks.deepspeed.client_optimizer import replaced_optimizer
from meshwright.frameworks.deepspeed.format_override import format_setting
from meshwright.frameworks.deepspeed.keys import STRICT_SECTIONS, TABLE, top_level_key
from meshwright.frameworks.deepspeed.unused_schedule import SCHEDULES, unused_schedule
from meshwright.frameworks.framework import Content, GpuRequest, ParsedConfig
from meshwright.frameworks.model_match import find_model
from meshwright.frameworks.to_recipe import MODEL_ARGUMENTS
from meshwright.frameworks.trainer import (
    Arguments,
    MissingConfigError,
    command_arguments,
    is_on,
    missing_config,
    open_deepspeed_config,
    parse_arguments,
    program_fields,
    refused_arguments,
    start_findings,
    unknown_arguments,
    unknown_names,
)
from meshwright.frameworks.trainer_calls import uses_trl
from meshwright.frameworks.trainer_fields import OPEN_ARGUMENTS, TRL_DEFAULTS, is_trainer, is_trl
from meshwright.frameworks.trainer_files import file_arguments, names_deepspeed, started_program, written_beside
from meshwright.frameworks.types import ProgramArguments, Settings, SourcedValue, as_int
from meshwright.recipes.key_maps import config_keys
from meshwright.recipes.key_maps.deepspeed import REMOVED_OPTIMIZERS
from meshwright.recipes.types import Recipe, recipe_fields
from meshwright.recipes.values import bare_type
from meshwright.rules.rule import Finding

if TYPE_CHECKING:
    from meshwright.frameworks.shell import LaunchCommand

MARKER_KEYS = frozenset(
    ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size", "zero_allow_untested_optimizer")
)
BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
AUTO_REASON = "transformers or accelerate fill it in when training starts"
WARMUP = "schedule.warmup_steps"
BETAS = "optimizer.params.betas"
LR_KEYS = frozenset(("optimizer.params.lr", "scheduler.params.warmup_max_lr"))
FROM_TRAINER: Mapping[str, tuple[str, ...]] = {
    "per_device_train_batch_size": ("train_micro_batch_size_per_gpu",),
    "gradient_accumulation_steps": ("gradient_accumulation_steps",),
    "max_grad_norm": ("gradient_clipping",),
    "learning_rate": ("optimizer.params.lr", "scheduler.params.warmup_max_lr"),
    "weight_decay": ("optimizer.params.weight_decay",),
    "adam_epsilon": ("optimizer.params.eps",),
    "warmup_steps": ("scheduler.params.warmup_num_steps",),
    "max_steps": ("scheduler.params.total_num_steps",),
    "bf16": ("bf16.enabled",),
    "fp16": ("fp16.enabled",),
}
"""Trainer arguments that fill in auto; any other value must agree with them."""
OTHER_HALF = {"bf16": "fp16", "fp16": "bf16"}
DEFAULT_ARGUMENTS: Mapping[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "max_grad_norm": 1.0,
    "learning_rate": 5e-5,
    "weight_decay": 0.0,
    "adam_epsilon": 1e-8,
    "warmup_steps": 0,
    "fp16": False,
    "bf16": False,
}
"""Their values if a command does not set them."""
FIXED: Mapping[str, Any] = {"scheduler.params.warmup_min_lr": 0, "amp.enabled": False}
"""Values that fill in auto whatever the arguments are."""
OF_HIDDEN: Mapping[str, Callable[[int], int]] = {
    "zero_optimization.reduce_bucket_size": lambda hidden: hidden * hidden,
    "zero_optimization.stage3_prefetch_bucket_size": lambda hidden: int(0.9 * hidden * hidden),
    "zero_optimization.stage3_param_persistence_threshold": lambda hidden: 10 * hidden,
}
"""Values that fill in auto from the model's hidden size."""


def detect(content: Content) -> int:
    if content.format == "json":
        return 3 if MARKER_KEYS & content.top_level_keys() else 0
    if content.format == "python":
        return 3 if names_deepspeed(content) else 0
    return max((_certainty(content, one) for one in content.launches), default=0)


def _certainty(content: Content, launch: LaunchCommand) -> int:
    if launch.launcher == "accelerate" or _config_of(content, launch) is None:
        return 0
    return 1 if Path(str(launch.program.value)).name.startswith("pretrain_") else 3


def _config_of(content: Content, launch: LaunchCommand) -> tuple[str, SourcedValue] | None:
    """Return the argument that names the JSON, and its value: of the command, or of the program that it starts."""
    own = started_program(content, launch.program)
    given = parse_arguments(launch.args)
    arguments = {**(file_arguments(own, given) if own is not None else {}), **given}
    for name in ("deepspeed_config", "deepspeed"):
        if name in arguments and isinstance(arguments[name].value, str) and not arguments[name].value.startswith("-"):
            return name, arguments[name]
    return None


def parse(content: Content) -> ParsedConfig:
    if content.settings:
        written = written_beside(content)
        return _of_program(content, written, content.settings) if written else parse_json(content, {})
    if content.format == "python":
        path = file_arguments(content).get("deepspeed")
        if path is None:
            raise InputError("names no DeepSpeed config", field="file", value=content.path)
        settings, missing = _referenced(content, "deepspeed=", "deepspeed", path)
        parsed = _of_program(content, content, settings)
        return msgspec.structs.replace(parsed, findings=(*missing, *parsed.findings))
    launch = max(content.launches, key=lambda one: _certainty(content, one), default=None)
    config = _config_of(content, launch) if launch else None
    if launch is None or config is None:
        raise InputError("contains no command with a DeepSpeed config", field="file", value=content.path)
    name, path = config
    settings, missing = _referenced(content, f"--{name}", name, path)
    own, given = started_program(content, launch.program), parse_arguments(launch.args)
    command = command_arguments("deepspeed", own, given, content.assigned)
    arguments = {name: path} | dict(command.arguments)  # the config that is named decides, read or not
    trainer_arguments = arguments if name == "deepspeed" else {}  # the argument of transformers' Trainer
    script, trl = str(launch.program.value), own is not None and uses_trl(own)
    by_trl = trl or is_trl(arguments, script)
    filled = _fill_auto(settings, trainer_arguments, by_trl)
    defaults = dict(_trainer_defaults(settings, trainer_arguments, by_trl)) if command.fixed_in else {}
    parsed = _parsed(content, filled, gpu_request_of(launch), arguments, fine_tuning=trl, script=script, trl=trl)
    program = msgspec.structs.replace(_with_fills(parsed, settings, trainer_arguments), argv=launch.argv)
    program = msgspec.structs.replace(
        program, fixed_in=command.fixed_in, takes=command.takes, switches=command.switches
    )
    note = () if own is None else (f"the arguments of the program are read from {own.path}",)
    return msgspec.structs.replace(
        parsed,
        program=program,
        env=launch.env,
        findings=(
            *missing,
            *_disagreements(settings, trainer_arguments, program, defaults),
            *unused_schedule(settings, trainer_arguments),
            *replaced_optimizer(settings, trainer_arguments, program),
            *refused_arguments("deepspeed", given, own),
            *unknown_arguments(given, own),
            *constructor_findings(own),
            *command.findings,
            *start_findings(trainer_arguments, parsed.model, script),
            *unknown_names("deepspeed", trainer_arguments),
        ),
        notes=(*parsed.notes, *note),
    )


def _stand_in(path: SourcedValue, of_trainer: bool) -> dict[str, SourcedValue]:
    """Return what is known of a config that is not here: its stage is open, arguments of the Trainer fill in auto."""
    auto = msgspec.structs.replace(path, value="auto", unresolved="")
    unknown = msgspec.structs.replace(path, unresolved=path.unresolved or f"{path.value} was not found")
    dtypes = ("bf16.enabled", "fp16.enabled") if of_trainer else ()
    return {
        **dict.fromkeys(BATCH, auto if of_trainer else unknown),
        **dict.fromkeys(dtypes, auto),
        "zero_optimization.stage": unknown,
    }


def parse_json(
    content: Content, arguments: Arguments, fine_tuning: bool = False, script: str = "", trl: bool = False
) -> ParsedConfig:
    """Return a JSON config with the arguments of the program that reads it, which fill in auto."""
    filled = _fill_auto(content.settings, arguments, trl)
    parsed = _parsed(content, filled, arguments=arguments, fine_tuning=fine_tuning, script=script, trl=trl)
    program = _with_fills(parsed, content.settings, arguments)
    return msgspec.structs.replace(
        parsed,
        findings=(
            *_disagreements(content.settings, arguments, program, {}),
            *unused_schedule(content.settings, arguments),
            *replaced_optimizer(content.settings, arguments, program),
        ),
        program=program,
    )


def _referenced(content: Content, flag: str, name: str, path: SourcedValue) -> tuple[Settings, tuple[Finding, ...]]:
    """Return the settings of the config that a command or program names, or of one in its place with a finding."""
    try:
        return open_deepspeed_config(content, path).settings, ()
    except MissingConfigError:
        return _stand_in(path, name == "deepspeed"), (missing_config(content, flag, path),)


def _of_program(content: Content, program: Content, settings: Settings) -> ParsedConfig:
    """Return a config with the arguments that a Python file passes to the Trainer."""
    arguments = file_arguments(program)
    trl = uses_trl(program)
    filled = _fill_auto(settings, arguments, trl)
    parsed = _parsed(content, filled, arguments=arguments, fine_tuning=trl, trl=trl)
    note = () if program is content else (f"the arguments of the program are read from {program.path}",)
    filling = _with_fills(parsed, settings, arguments)
    return msgspec.structs.replace(
        parsed,
        name=Path(program.path).stem.removesuffix("_args"),
        files=tuple(dict.fromkeys([*parsed.files, program.path])),
        findings=(
            *_disagreements(settings, arguments, filling, dict(_trainer_defaults(settings, arguments, trl))),
            *unused_schedule(settings, arguments),
            *replaced_optimizer(settings, arguments, filling),
            *constructor_findings(program),
            *start_findings(arguments, parsed.model),
            *unknown_names("deepspeed", arguments),
        ),
        notes=(*parsed.notes, *note),
        program=filling,
    )


def _fill_auto(settings: Settings, arguments: Arguments, trl: bool = False) -> dict[str, SourcedValue]:
    """Return the settings with auto filled in as the Trainer does."""
    filled, given = dict(settings), arguments
    arguments = {**dict(_trainer_defaults(settings, arguments, trl)), **arguments}
    for name, keys in FROM_TRAINER.items():
        for key in keys if name in arguments and not arguments[name].unresolved else ():
            if key in filled and filled[key].value == "auto":
                value = arguments[name].value
                filled[key] = given[name] if name in given else msgspec.structs.replace(filled[key], value=value)
    if is_trainer(arguments):
        fixed = {**FIXED, **{key: of(hidden) for key, of in OF_HIDDEN.items() if (hidden := _hidden(arguments))}}
        for key, value in fixed.items():
            if key in filled and filled[key].value == "auto":
                filled[key] = msgspec.structs.replace(filled[key], value=value)
    if is_trainer(arguments) and getattr(filled.get(BETAS), "value", None) == "auto":
        names = (("adam_beta1", 0.9), ("adam_beta2", 0.999))
        betas = [arguments[name].value if name in arguments else default for name, default in names]
        if not any(arguments[name].unresolved for name, _ in names if name in arguments):
            filled[BETAS] = msgspec.structs.replace(filled[BETAS], value=[float(one) for one in betas])
    if is_trainer(arguments):
        filled |= dict(_added_halves(filled, arguments))
        filled |= dict(_refused_halves(settings, filled))
    open_sizes = [key for key in BATCH if key in filled and filled[key].value == "auto"]
    if len(open_sizes) == 1 and all(as_int(filled.get(key)) for key in BATCH if key not in open_sizes):
        del filled[open_sizes[0]]  # it follows from the other two
    return filled


def _added_halves(filled: Settings, arguments: Arguments) -> Iterator[tuple[str, SourcedValue]]:
    """Yield the half-precision format that Accelerate's DeepSpeedPlugin turns on where a config has no such section."""
    sections = {top_level_key(key) for key in filled}
    for name in OTHER_HALF:
        names = {name, "bfloat16"} if name == "bf16" else {name}
        if is_on(arguments, name) and not arguments[name].unresolved and not names & sections:
            yield f"{name}.enabled", msgspec.structs.replace(arguments[name], value=True)


def _refused_halves(settings: Settings, filled: Settings) -> Iterator[tuple[str, SourcedValue]]:
    """Yield as off one of two half-precision formats of which an argument turns one on.

    The Trainer stops before DeepSpeed reads them, at two arguments or at a config that contradicts one. What is off
    is what is off after the fix of that finding: fp16, or the format that the config states.
    """
    on = [key for name in OTHER_HALF for key in FROM_TRAINER[name] if _is_true(filled, key)]
    stated = [key for key in on if _is_true(settings, key)]
    if len(on) == len(OTHER_HALF) and on != stated:
        off = stated[0] if stated else on[-1]
        yield off, msgspec.structs.replace(filled[off], value=False)


def _is_true(settings: Settings, key: str) -> bool:
    return key in settings and not settings[key].unresolved and str(settings[key].value).lower() == "true"


def _hidden(arguments: Arguments) -> int:
    """Return the hidden size of the model that arguments name; 0 if it is unknown."""
    named = next((arguments[name] for name in MODEL_ARGUMENTS if name in arguments), None)
    model = find_model(str(named.value)) if named is not None and not named.unresolved else None
    return model.hidden if model is not None else 0


def _with_fills(parsed: ParsedConfig, settings: Settings, arguments: Arguments) -> ProgramArguments:
    """Return the arguments with the keys that they fill in, which are auto, and those that they repeat."""
    if not is_trainer(arguments):
        return parsed.program
    autos = {key for key, one in settings.items() if one.value == "auto"}
    of_key = {key: name for name, keys in FROM_TRAINER.items() for key in keys}
    return msgspec.structs.replace(
        parsed.program,
        fills={key: name for key, name in of_key.items() if key in autos},
        repeats={key: name for key, name in of_key.items() if key in settings.keys() - autos and name in arguments},
    )


def _trainer_defaults(settings: Settings, arguments: Arguments, trl: bool) -> Iterator[tuple[str, SourcedValue]]:
    """Yield the Trainer's own values of arguments that a command does not have."""
    where = next(iter(settings.values()), None)
    if where is None or not is_trainer(arguments):
        return
    half = {"bf16": not is_on(arguments, "fp16")}  # TRL's default
    defaults = {**DEFAULT_ARGUMENTS, **({"learning_rate": TRL_DEFAULTS["optimizer.lr"], **half} if trl else {})}
    for name, value in defaults.items():
        if name not in arguments and not (name == "warmup_steps" and "warmup_ratio" in arguments):
            yield name, msgspec.structs.replace(where, value=value)


def _disagreements(
    settings: Settings, arguments: Arguments, program: ProgramArguments, defaults: Settings
) -> Iterator[Finding]:
    """Yield a finding for each value that contradicts a Trainer argument; the Trainer rejects those.

    `defaults` are the values of the arguments that its constructor call leaves out: those must agree as well.
    """
    defaults = {**dict(_other_halves(arguments)), **({} if OPEN_ARGUMENTS in arguments else defaults)}
    are_refused = all(
        _is_true(arguments, name) for name in OTHER_HALF
    )  # before the Trainer compares them with a config
    for name, keys in FROM_TRAINER.items():
        if are_refused and name in OTHER_HALF:
            continue
        argument = arguments.get(name, defaults.get(name))
        for key in keys if argument is not None and not argument.unresolved else ():
            configured = settings.get(key)
            if configured is None or argument is None or not contradict(configured.value, argument.value):
                continue
            by_default = name not in arguments
            where = arguments.get("deepspeed", configured) if by_default else argument
            other = OTHER_HALF.get(name, "")
            why = f", as --{other} is on," if is_on(arguments, other) else ", the default,"
            yield Finding(
                "deepspeed.argument-mismatch",
                "error",
                key,
                f"--{name} {argument.value}{why if by_default else ''} and {key}={configured.value} in "
                f"{configured.location} disagree",
                _agreeing(settings, arguments, program, name, key),
                file=where.file,
                line=where.line,
            )


def _compared(arguments: Arguments) -> Mapping[str, tuple[str, ...]]:
    """Return the keys that the Trainer compares with arguments; it refuses bf16 with fp16 before it compares them."""
    if all(_is_true(arguments, name) for name in OTHER_HALF):
        return {name: keys for name, keys in FROM_TRAINER.items() if name not in OTHER_HALF}
    return FROM_TRAINER


def _other_halves(arguments: Arguments) -> Iterator[tuple[str, SourcedValue]]:
    """Yield that a half-precision format is off if the other one is on: the Trainer refuses both."""
    for name, other in OTHER_HALF.items():
        if is_on(arguments, name) and not arguments[name].unresolved and other not in arguments:
            yield other, msgspec.structs.replace(arguments[name], value=False)


def contradict(configured: Any, argument: Any) -> bool:
    """Return whether two values of the same kind, switches or numbers, differ."""
    switches = isinstance(configured, bool) and isinstance(argument, bool)
    return (switches or _are_numbers(configured, argument)) and float(configured) != float(argument)


def _agreeing(
    settings: Settings, arguments: Arguments, program: ProgramArguments, name: str, key: str
) -> tuple[str, ...]:
    """Return the change that makes a key and its argument agree: auto, or the argument with the config's value.

    A default gives way to what the config states, and a batch to the other sizes of the file.
    """
    configured, argument = settings[key], arguments.get(name)
    others = (settings.get(other) for other in BATCH if key in BATCH and other != key)
    is_fixed = any(as_int(other) for other in others)  # the file's other sizes go with its own value
    other_half = OTHER_HALF.get(name, "")
    gives_way = argument is None and not (other_half and is_on(arguments, other_half))
    if is_fixed or gives_way:
        in_code = argument is None or argument.file.endswith(".py")
        return program.formatted(name, configured.value) if in_code else (f"--{name} {configured.value}",)
    switches = isinstance(configured.value, bool)
    return (format_setting(key, "auto") if switches else f'"{key.rsplit(".", 1)[-1]}": "auto"',)


def _are_numbers(*values: Any) -> bool:
    try:
        return all(not isinstance(value, bool) and float(value) is not None for value in values)
    except (TypeError, ValueError):
        return False


def _parsed(
    content: Content,
    settings: Settings,
    gpu_request: GpuRequest | None = None,
    arguments: Arguments | None = None,
    fine_tuning: bool = False,
    script: str = "",
    trl: bool = False,
) -> ParsedConfig:
    normalized = normalize(settings)
    program = program_fields(content, arguments or {}, fine_tuning, script, trl)
    return ParsedConfig(
        settings=normalized,
        name=Path(content.path).stem,
        model=program.model,
        goal=program.goal,
        goal_open=program.goal == "pretrain",  # no argument names a model to start from
        gpu_request=gpu_request or GpuRequest(),
        files=tuple(dict.fromkeys([content.path, *(setting.file for setting in settings.values())])),
        field_values={
            **({} if "scheduler.type" in normalized else {"schedule.min_lr": 0.0}),
            **_program_values(program.field_values, normalized),
        },
        unknown_fields=program.unknown_fields,
        program=program.arguments,
        suppressed_rules=program.suppressed_rules,
        notes=(*_notes(normalized), *program.notes),
    )


def _program_values(field_values: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """Return the program's values for fields that the config does not set."""
    resolved = {key for key, setting in settings.items() if not setting.unresolved}
    is_set = {row.field for key, row in config_keys(TABLE).items() if key in resolved and row.field}
    is_set |= {"optimizer.lr"} if LR_KEYS & resolved else set()
    is_set |= {"optimizer.beta1", "optimizer.beta2"} if "optimizer.params.betas" in resolved else set()
    found = {key: value for key, value in field_values.items() if key not in is_set}
    scheduler = settings.get("scheduler.type")
    if scheduler is None:
        return found
    found = {key: value for key, value in found.items() if not key.startswith("schedule.") or key == WARMUP}
    if any(key.startswith("scheduler.") and setting.unresolved for key, setting in settings.items()):
        return {**found, "schedule.name": SCHEDULES.get(str(scheduler.value), "constant"), "schedule.min_lr": 0.0}
    found.pop(WARMUP, None)
    return found


def normalize(settings: Settings) -> dict[str, SourcedValue]:
    """Return settings as the key map expects them: removed sections as one key, auto as unresolved, 2e8 as an int."""
    normalized: dict[str, SourcedValue] = {}
    optimizer = settings.get("optimizer.type")
    optimizer_removed = optimizer is not None and optimizer.value in REMOVED_OPTIMIZERS  # its params were removed too
    for key, setting in settings.items():
        top = key.split(".")[0]
        if optimizer_removed and key.startswith("optimizer.params.") and key not in config_keys(TABLE):
            continue
        config_key = config_keys(TABLE).get(top)
        if config_key is not None and config_key.status == "removed":
            enabled = settings.get(f"{top}.enabled")
            is_off = setting.value is False or (enabled is not None and enabled.value is False)
            normalized.setdefault(top, msgspec.structs.replace(setting, value=False if is_off else {}))
        elif key == "zero_optimization" and isinstance(setting.value, bool):
            normalized["zero_optimization.stage"] = msgspec.structs.replace(setting, value=int(setting.value))
        elif setting.value is not None or key not in config_keys(TABLE):  # null counts as unset
            normalized[key] = _normalize_value(key, setting)
    return normalized


BOOL_STRINGS = {"true": True, "1": True, "yes": True, "on": True, "y": True, "t": True}
BOOL_STRINGS |= {"false": False, "0": False, "no": False, "off": False, "n": False, "f": False}
"""Strings that the strict sections accept as booleans."""


def _normalize_value(key: str, setting: SourcedValue) -> SourcedValue:
    if setting.value == "auto" and not key.startswith("pipeline."):
        return msgspec.structs.replace(setting, unresolved=AUTO_REASON)
    config_key = config_keys(TABLE).get(key)
    if config_key is not None and config_key.type == "bool" and top_level_key(key) in STRICT_SECTIONS:
        return msgspec.structs.replace(setting, value=BOOL_STRINGS.get(str(setting.value).lower(), setting.value))
    if (
        isinstance(setting.value, float)
        and setting.value.is_integer()
        and abs(setting.value) < 2**53
        and _is_int_key(key)
    ):
        return msgspec.structs.replace(setting, value=int(setting.value))
    return setting


def _is_int_key(key: str) -> bool:
    config_key = config_keys(TABLE).get(key)
    return config_key is not None and (
        config_key.type == "int"
        or (bool(config_key.field) and bare_type(recipe_fields()[config_key.field].type)[0] is int)
    )


def _notes(settings: Settings) -> Iterator[str]:
    devices = {part: settings.get(f"zero_optimization.offload_{part}.device") for part in ("param", "optimizer")}
    offloaded = {part for part, device in devices.items() if device is not None and device.value in ("cpu", "nvme")}
    if offloaded == {"param"} and as_int(settings.get("zero_optimization.stage")) == 3:
        yield "only parameters are offloaded; memory is estimated as if the optimizer were too"
    scheduler = settings.get("scheduler.type")
    warmup_type = settings.get("scheduler.params.warmup_type")
    if (
        scheduler is not None
        and str(scheduler.value).startswith("Warmup")
        and (warmup_type is None or warmup_type.value != "linear")
    ):
        yield "DeepSpeed's warmup is logarithmic; it is modeled as linear with the same number of steps"


def batch_sizes(settings: Settings) -> list[int | None]:
    """Return batch, micro batch and accumulation steps; None if not set to a number."""
    return [as_int(settings.get(key)) or None for key in BATCH]


def counted_ranks(recipe: Recipe, parsed: ParsedConfig, world: int) -> int:
    """Return the ranks that train_batch_size counts: tensor-parallel ranks too, though they read the same samples."""
    return max(1, world // (recipe.layout.pp * (as_int(parsed.settings.get("sequence_parallel_size")) or 1)))


def data_ranks(recipe: Recipe, parsed: ParsedConfig, world: int) -> int:
    """Return the ranks that read different samples."""
    return max(1, counted_ranks(recipe, parsed, world) // recipe.layout.tp)


def complete(recipe: Recipe, parsed: ParsedConfig, on: Cluster) -> Recipe:
    """Derive the missing one of batch, micro batch and accumulation steps."""
    batch, micro, steps = batch_sizes(parsed.settings)
    counted, ranks = counted_ranks(recipe, parsed, on.world), data_ranks(recipe, parsed, on.world)
    if micro is None and batch is not None:
        micro = max(1, batch // counted // (steps or 1))
    size = micro or recipe.layout.micro_batch_size
    if batch is None:  # a stated batch stays where it does not fit the ranks, whose number may be what is wrong
        batch = size * (steps or 1) * counted
    return msgspec.structs.replace(
        recipe,
        train=msgspec.structs.replace(recipe.train, global_batch_size=max(1, batch * ranks // counted)),
        layout=msgspec.structs.replace(recipe.layout, micro_batch_size=size),
    )
