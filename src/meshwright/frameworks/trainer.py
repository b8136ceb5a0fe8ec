"""What the arguments of a training program around transformers' Trainer say, beside a config that names no model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from meshwright.errors import InputError
from meshwright.frameworks.common import as_int
from meshwright.frameworks.framework import Content
from meshwright.frameworks.load import open_file
from meshwright.frameworks.model_match import named
from meshwright.frameworks.types import SourcedValue
from meshwright.models import ModelSpec
from meshwright.recipes.types import Goal

Arguments = Mapping[str, SourcedValue]
"""A program's arguments by name, dashes as underscores; a flag without a value is True."""
MODELS = ("model_name_or_path", "model_name", "model", "pretrained_model_name_or_path")
LENGTHS = ("max_seq_length", "model_max_length", "max_length", "cutoff_len", "block_size", "max_seq_len")
ADAPTERS = ("use_peft", "use_lora", "lora_r", "lora_rank", "lora_alpha", "lora_enable", "peft", "load_in_4bit")
OPEN = ("data.seq_length", "layout.recompute")
"""Fields that only the program says."""


USUAL = {"optimizer.lr": 5e-5, "schedule.min_lr": 0.0, "data.dataset": "the program's own"}
"""What fine-tuning with the Trainer takes where neither the config nor an argument says it."""


class ProgramFields(msgspec.Struct, frozen=True):
    """What a program's arguments say of our fields."""

    model: ModelSpec | None
    goal: Goal
    field_values: Mapping[str, Any]
    unknown_fields: tuple[str, ...]


def parse_arguments(words: Sequence[SourcedValue]) -> dict[str, SourcedValue]:
    """`--name value`, `--name=value` and `--name` alone."""
    found: dict[str, SourcedValue] = {}
    name = ""
    for said in words:
        text = str(said.value)
        if text.startswith("--"):
            name, equals, value = text[2:].replace("-", "_", text[2:].partition("=")[0].count("-")).partition("=")
            found[name] = msgspec.structs.replace(said, value=value if equals else True)
            name = "" if equals else name
        elif name:
            found[name] = said
            name = ""
    return {key: _typed(said) for key, said in found.items()}


def _typed(said: SourcedValue) -> SourcedValue:
    texts = {"true": True, "false": False}
    value = texts.get(str(said.value).lower(), said.value) if not said.unresolved else said.value
    return msgspec.structs.replace(said, value=value)


def is_on(given: Arguments, *names: str) -> bool:
    """Whether one of these flags is set."""
    return any(name in given and given[name].value not in (False, "no", "none") for name in names)


def program_fields(given: Arguments) -> ProgramFields:
    """The model, the goal and our fields that a program's arguments name."""
    model = next((named(str(given[name].value)) for name in MODELS if name in given), None)
    own: dict[str, Any] = {}
    length = next((size for name in LENGTHS if (size := as_int(given.get(name)))), None)
    if length:
        own["data.seq_length"] = length
    if "gradient_checkpointing" in given and not given["gradient_checkpointing"].unresolved:
        own["layout.recompute"] = "full" if is_on(given, "gradient_checkpointing") else "none"
    rate = given.get("learning_rate")
    if rate is not None and not rate.unresolved:
        with suppress(ValueError):
            own |= {"optimizer.lr": float(rate.value), "schedule.min_lr": 0.0}
    tuned = is_on(given, *ADAPTERS) or str(getattr(given.get("finetuning_type"), "value", "")) == "lora"
    goal: Goal = "peft" if tuned else "sft" if any(name in given for name in MODELS[:1]) else "pretrain"
    usual = {} if goal == "pretrain" else USUAL
    return ProgramFields(model, goal, {**usual, **own}, tuple(key for key in OPEN if key not in own))


ABOVE = 3


def open_referenced_file(content: Content, said: SourcedValue) -> Content:
    """The file that a script names: beside it, or in a folder above, from where it may be started."""
    folder = content.folder
    places = [folder, *list(folder.resolve().parents)[:ABOVE]] if folder is not None else []
    found = next((path for place in places if _is_file(path := place / str(said.value))), None)
    if said.unresolved or found is None:
        why = said.unresolved or "it is not there"
        name = str(said.value)
        raise InputError(f"the config that {said.location} names cannot be read: {why}", field="file", value=name)
    return open_file(found)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long, say
        return False
