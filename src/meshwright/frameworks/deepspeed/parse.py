"""Reading DeepSpeed: its JSON, and commands that start a program with one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright.clusters import Cluster
from meshwright.errors import InputError
from meshwright.frameworks.common import as_int, gpu_request_of
from meshwright.frameworks.deepspeed.keys import REFUSING, TABLE, top_of
from meshwright.frameworks.framework import Content, GpuRequest, ParsedConfig
from meshwright.frameworks.trainer import Arguments, open_referenced_file, parse_arguments, program_fields
from meshwright.frameworks.types import Settings, SourcedValue
from meshwright.recipes.key_maps import config_keys
from meshwright.recipes.key_maps.deepspeed import REMOVED_OPTIMIZERS
from meshwright.recipes.types import Recipe, recipe_fields
from meshwright.recipes.values import bare_type
from meshwright.rules.rule import Finding

if TYPE_CHECKING:
    from meshwright.frameworks.shell import LaunchCommand

MARKS = frozenset(
    ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size", "zero_allow_untested_optimizer")
)
BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
AUTO = "auto: transformers or accelerate fill it in when training starts"
RATES = frozenset(("optimizer.params.lr", "scheduler.params.warmup_max_lr"))
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
"""Arguments of the Trainer that fill in auto, and that any other value must agree with."""


def recognises(content: Content) -> int:
    if content.format == "json":
        return 3 if MARKS & content.top_level_keys() else 0
    return max((_certainty(one) for one in content.launches), default=0)


def _certainty(one: LaunchCommand) -> int:
    if one.launcher == "accelerate" or _config_of(one) is None:
        return 0
    return 1 if Path(str(one.program.value)).name.startswith("pretrain_") else 3


def _config_of(one: LaunchCommand) -> tuple[str, SourcedValue] | None:
    """The argument that names the JSON, and the name."""
    said = parse_arguments(one.args)
    for name in ("deepspeed_config", "deepspeed"):
        if name in said and isinstance(said[name].value, str) and not said[name].value.startswith("-"):
            return name, said[name]
    return None


def parse(content: Content) -> ParsedConfig:
    if content.settings:
        return _parsed(content, content.settings, GpuRequest(), {})
    one = max(content.launches, key=_certainty, default=None)
    config = _config_of(one) if one else None
    if one is None or config is None:
        raise InputError("no command in it names a DeepSpeed config", field="file", value=content.path)
    name, said = config
    settings = open_referenced_file(content, said).settings
    given = parse_arguments(one.args)
    trainer = given if name == "deepspeed" else {}  # transformers' Trainer takes it under this name
    parsed = _parsed(content, _filled(settings, trainer), gpu_request_of(one), given)
    return msgspec.structs.replace(parsed, env=one.env, findings=tuple(_disagreements(settings, trainer)))


def _filled(settings: Settings, given: Arguments) -> dict[str, SourcedValue]:
    """Settings with auto filled in as the Trainer does."""
    found = dict(settings)
    for name, keys in FROM_TRAINER.items():
        for key in keys if name in given and not given[name].unresolved else ():
            if key in found and found[key].value == "auto":
                found[key] = given[name]
    micro, steps = (found.get(key) for key in BATCH[1:])
    if as_int(micro) and as_int(steps) and found.get(BATCH[0]) and found[BATCH[0]].value == "auto":
        del found[BATCH[0]]
    return found


def _disagreements(settings: Settings, given: Arguments) -> Iterator[Finding]:
    """The Trainer refuses a config that says something else than its own arguments."""
    for name, keys in FROM_TRAINER.items():
        for key in keys if name in given else ():
            theirs, mine = settings.get(key), given[name]
            if theirs is None or mine.unresolved or not _numbers(theirs.value, mine.value):
                continue
            if float(theirs.value) != float(mine.value):
                yield Finding(
                    "deepspeed.argument-mismatch",
                    "error",
                    key,
                    f"--{name} {mine.value} and {key}={theirs.value} in {theirs.location} contradict each other",
                    (f'"{key.rsplit(".", 1)[-1]}": "auto"',),
                    file=mine.file,
                    line=mine.line,
                )


def _numbers(*values: Any) -> bool:
    try:
        return all(not isinstance(each, bool) and float(each) is not None for each in values)
    except (TypeError, ValueError):
        return False


def _parsed(content: Content, settings: Settings, asked: GpuRequest, given: Arguments) -> ParsedConfig:
    read = normal(settings)
    program = program_fields(given)
    return ParsedConfig(
        settings=read,
        name=Path(content.path).stem,
        model=program.model,
        goal=program.goal,
        gpu_request=asked,
        files=tuple(dict.fromkeys([content.path, *(said.file for said in settings.values())])),
        field_values={
            **({} if "scheduler.type" in read else {"schedule.min_lr": 0.0}),
            **_left(program.field_values, read),
        },
        unknown_fields=program.unknown_fields,
        notes=tuple(_notes(read)),
    )


def _left(own: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """What a program says where the config does not."""
    said = {"optimizer.lr": bool(RATES & settings.keys()), "schedule.min_lr": "scheduler.type" in settings}
    return {key: value for key, value in own.items() if not said.get(key)}


def normal(settings: Settings) -> dict[str, SourcedValue]:
    """Settings as the table knows them: sections that are gone as one key, auto as open, 2e8 as a whole number."""
    found: dict[str, SourcedValue] = {}
    kind = settings.get("optimizer.type")
    retired = kind is not None and kind.value in REMOVED_OPTIMIZERS  # its params went with it
    for key, said in settings.items():
        top = key.split(".")[0]
        if retired and key.startswith("optimizer.params.") and key not in config_keys(TABLE):
            continue
        gone = config_keys(TABLE).get(top)
        if gone is not None and gone.status == "removed":
            found.setdefault(top, msgspec.structs.replace(said, value={}))
        elif key == "zero_optimization" and isinstance(said.value, bool):
            found["zero_optimization.stage"] = msgspec.structs.replace(said, value=int(said.value))
        elif said.value is not None or key not in config_keys(TABLE):  # null is as if unsaid
            found[key] = _normal(key, said)
    return found


TRUTHS = {"true": True, "1": True, "yes": True, "on": True, "y": True, "t": True}
TRUTHS |= {"false": False, "0": False, "no": False, "off": False, "n": False, "f": False}
"""Texts that the sections which are checked key by key take for true or false."""


def _normal(key: str, said: SourcedValue) -> SourcedValue:
    if said.value == "auto" and not key.startswith("pipeline."):
        return msgspec.structs.replace(said, unresolved=AUTO)
    word = config_keys(TABLE).get(key)
    if word is not None and word.type == "bool" and top_of(key) in REFUSING:
        return msgspec.structs.replace(said, value=TRUTHS.get(str(said.value).lower(), said.value))
    if isinstance(said.value, float) and said.value.is_integer() and abs(said.value) < 2**53 and _takes_whole(key):
        return msgspec.structs.replace(said, value=int(said.value))
    return said


def _takes_whole(key: str) -> bool:
    word = config_keys(TABLE).get(key)
    return word is not None and (
        word.type == "int" or (bool(word.field) and bare_type(recipe_fields()[word.field].type)[0] is int)
    )


def _notes(settings: Settings) -> Iterator[str]:
    moved = {part: settings.get(f"zero_optimization.offload_{part}.device") for part in ("param", "optimizer")}
    away = {part for part, said in moved.items() if said is not None and said.value in ("cpu", "nvme")}
    if away == {"param"}:
        yield "only parameters are moved to the host; memory is told as if the optimizer went with them"
    warm = settings.get("scheduler.type")
    shape = settings.get("scheduler.params.warmup_type")
    if warm is not None and str(warm.value).startswith("Warmup") and (shape is None or shape.value != "linear"):
        yield "the warm-up is logarithmic there; it is taken for a linear one of as many steps"


def sizes(settings: Settings) -> list[int | None]:
    """The batch, the micro batch and the accumulation that are said as numbers."""
    return [as_int(settings.get(key)) or None for key in BATCH]


def counted_ranks(recipe: Recipe, parsed: ParsedConfig, world: int) -> int:
    """Ranks that train_batch_size counts: those of tensor parallelism too, though they read the same samples."""
    return max(1, world // (recipe.layout.pp * (as_int(parsed.settings.get("sequence_parallel_size")) or 1)))


def data_ranks(recipe: Recipe, parsed: ParsedConfig, world: int) -> int:
    """Ranks that read different samples."""
    return max(1, counted_ranks(recipe, parsed, world) // recipe.layout.tp)


def complete(recipe: Recipe, parsed: ParsedConfig, on: Cluster) -> Recipe:
    """The third of batch, micro batch and accumulation follows from the other two and the ranks."""
    batch, micro, steps = sizes(parsed.settings)
    counted, ranks = counted_ranks(recipe, parsed, on.world), data_ranks(recipe, parsed, on.world)
    if micro is None and batch is not None:
        micro = max(1, batch // counted // (steps or 1))
    size = micro or recipe.layout.micro_batch_size
    if batch is None or (steps is not None and micro is not None):
        batch = size * (steps or 1) * counted
    return msgspec.structs.replace(
        recipe,
        train=msgspec.structs.replace(recipe.train, global_batch_size=max(1, batch * ranks // counted)),
        layout=msgspec.structs.replace(recipe.layout, micro_batch_size=size),
    )
