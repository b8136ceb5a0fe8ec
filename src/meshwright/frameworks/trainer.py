"""Arguments of programs built on transformers' Trainer, for configs that do not name a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from meshwright.errors import InputError
from meshwright.frameworks.framework import Content
from meshwright.frameworks.load import open_file
from meshwright.frameworks.model_match import find_model
from meshwright.frameworks.types import SourcedValue, as_int
from meshwright.models import ModelSpec
from meshwright.recipes.types import Goal

Arguments = Mapping[str, SourcedValue]
"""Program arguments by name, with underscores; a flag without a value is True."""
MODELS = ("model_name_or_path", "model_name", "model", "pretrained_model_name_or_path")
LENGTHS = ("max_seq_length", "model_max_length", "max_length", "cutoff_len", "block_size", "max_seq_len")
ADAPTERS = ("use_peft", "use_lora", "lora_r", "lora_rank", "lora_alpha", "lora_enable", "peft", "load_in_4bit")
PROGRAM_ONLY = ("data.seq_length", "layout.recompute")
"""Recipe fields that only the program sets."""


DEFAULTS = {"optimizer.lr": 5e-5, "schedule.min_lr": 0.0, "data.dataset": "the program's fields"}
"""Fine-tuning values assumed if neither the config nor an argument sets them."""


class ProgramFields(msgspec.Struct, frozen=True):
    """Recipe fields from a program's arguments."""

    model: ModelSpec | None
    goal: Goal
    field_values: Mapping[str, Any]
    unknown_fields: tuple[str, ...]


def parse_arguments(argv: Sequence[SourcedValue]) -> dict[str, SourcedValue]:
    """Parse `--name value`, `--name=value` and `--name`."""
    found: dict[str, SourcedValue] = {}
    name = ""
    for setting in argv:
        text = str(setting.value)
        if text.startswith("--"):
            name, equals, value = text[2:].replace("-", "_", text[2:].partition("=")[0].count("-")).partition("=")
            found[name] = msgspec.structs.replace(setting, value=value if equals else True)
            name = "" if equals else name
        elif name:
            found[name] = setting
            name = ""
    return {key: _typed(setting) for key, setting in found.items()}


def _typed(setting: SourcedValue) -> SourcedValue:
    texts = {"true": True, "false": False}
    value = texts.get(str(setting.value).lower(), setting.value) if not setting.unresolved else setting.value
    return msgspec.structs.replace(setting, value=value)


def is_on(args: Arguments, *names: str) -> bool:
    """Return whether one of these flags is on."""
    return any(name in args and args[name].value not in (False, "no", "none") for name in names)


def program_fields(args: Arguments) -> ProgramFields:
    """Return the model, goal and recipe fields that a program's arguments set."""
    model = next((find_model(str(args[name].value)) for name in MODELS if name in args), None)
    fields: dict[str, Any] = {}
    length = next((size for name in LENGTHS if (size := as_int(args.get(name)))), None)
    if length:
        fields["data.seq_length"] = length
    if "gradient_checkpointing" in args and not args["gradient_checkpointing"].unresolved:
        fields["layout.recompute"] = "full" if is_on(args, "gradient_checkpointing") else "none"
    rate = args.get("learning_rate")
    if rate is not None and not rate.unresolved:
        with suppress(ValueError):
            fields |= {"optimizer.lr": float(rate.value), "schedule.min_lr": 0.0}
    tuned = is_on(args, *ADAPTERS) or str(getattr(args.get("finetuning_type"), "value", "")) == "lora"
    goal: Goal = "peft" if tuned else "sft" if any(name in args for name in MODELS[:1]) else "pretrain"
    defaults = {} if goal == "pretrain" else DEFAULTS
    return ProgramFields(model, goal, {**defaults, **fields}, tuple(key for key in PROGRAM_ONLY if key not in fields))


MAX_PARENTS = 3


def open_referenced_file(content: Content, setting: SourcedValue) -> Content:
    """Open the file that a script references, relative to its directory or a parent directory."""
    folder = content.folder
    folders = [folder, *list(folder.resolve().parents)[:MAX_PARENTS]] if folder is not None else []
    found = next((path for parent in folders if _is_file(path := parent / str(setting.value))), None)
    if setting.unresolved or found is None:
        reason = setting.unresolved or "file not found"
        name = str(setting.value)
        raise InputError(
            f"the config referenced at {setting.location} cannot be read: {reason}", field="file", value=name
        )
    return open_file(found)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # for example, the name is too long
        return False
