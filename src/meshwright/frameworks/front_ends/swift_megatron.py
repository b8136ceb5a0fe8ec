"""Trainings of ms-swift on Megatron-LM, `megatron sft`: their layout and batch are those of Megatron-LM's arguments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from meshwright.clusters import Cluster
from meshwright.frameworks.accelerate.keys import format_setting
from meshwright.frameworks.framework import Content, ParsedConfig
from meshwright.frameworks.front_ends.older_keys import OPPOSITE, SWIFT_MEGATRON
from meshwright.frameworks.megatron_lm.parse import pipeline_fields
from meshwright.frameworks.schedule_units import with_lengths
from meshwright.frameworks.types import ProgramArguments, Settings, SourcedValue, as_int
from meshwright.recipes.key_maps import config_keys
from meshwright.recipes.types import Recipe

KEY_MAP = "ms_swift_megatron"
TABLE = KEY_MAP
TUNER = {"tuner_type": "full"}  # where none is set; `swift sft` then trains LoRA
LENGTH = "max_length"
OF_TRAINER = ("peft.", "data.", "checkpoint.pretrained", "train.freeze")
"""Fields that its arguments set as those of `swift sft` do."""
ITS_OWN = ("data.packing-unsupported", "peft.qwen3-next")
"""Rules on Megatron-Bridge's data and adapters, in whose place it has its own."""
RATES = {"peft": 1e-4}  # by goal, of a command that names none
RATE = 1e-5


def parsed(found: ParsedConfig, given: Settings, is_command: bool) -> ParsedConfig:
    """Return a command or file with the layout, the batch and the schedule that Megatron-LM's arguments set.

    `found` is the same one as `swift sft` reads it.
    """
    settings = dict(_settings(given))
    fields = {key: value for key, value in found.field_values.items() if key.startswith(OF_TRAINER)}
    fields = {key: value for key, value in fields.items() if key not in _set_by(settings)}
    if "lr" not in settings:
        fields["optimizer.lr"] = RATES.get(found.goal, RATE)
    if found.model is not None:
        fields |= pipeline_fields(settings, found.model.num_layers)
    return msgspec.structs.replace(
        found,
        settings=settings,
        mappable=None,
        engine="megatron",
        field_values=fields,
        unknown_fields=(),
        assumed=() if LENGTH in settings else ("data.seq_length",),
        suppressed_rules=(*found.suppressed_rules, *ITS_OWN),
        program=ProgramArguments(is_command=is_command),
    )


def _settings(given: Settings) -> Iterator[tuple[str, SourcedValue]]:
    """Yield the arguments that describe the training, also under the names of older releases."""
    renamed = {old: new for old, (_, new) in SWIFT_MEGATRON.items() if new and not new.startswith(OPPOSITE)}
    known = config_keys(KEY_MAP)
    tp = given.get("tensor_model_parallel_size")
    for key, setting in given.items():
        name = renamed.get(key, key)
        if name not in known or (name != key and name in given) or setting.value is None:
            continue
        if name == "sequence_parallel" and (tp is None or as_int(tp) == 1):
            continue  # turned off
        yield name, setting


def _set_by(settings: Settings) -> set[str]:
    return {row.field for key, row in config_keys(KEY_MAP).items() if key in settings}


def complete(recipe: Recipe, found: ParsedConfig, cluster: Cluster) -> Recipe:
    """Set the lengths that are a share of the training."""
    return with_lengths(KEY_MAP, recipe, found.settings)


def formatter_for(content: Content) -> Any:
    """Return how a setting is written: as a flag with its value, or as a line of YAML."""
    return _flag if content.format == "shell" else format_setting


def _flag(key: str, value: Any) -> str:
    if value is None:
        return f"without --{key}"
    values = value if isinstance(value, list | tuple) else [value]
    return " ".join([f"--{key}", *(str(one).lower() if isinstance(one, bool) else str(one) for one in values)])


def written(found: ParsedConfig, settings: Mapping[str, Any], recipe: Recipe) -> Mapping[str, Any]:
    """Return settings as the command takes them: lists as words."""
    if not found.program.is_command:
        return settings
    return {key: " ".join(map(str, one)) if isinstance(one, list | tuple) else one for key, one in settings.items()}
