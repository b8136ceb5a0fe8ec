"""The user's own program in an export for its framework: its arguments, changed only where the recipe changes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from meshwright.clusters import Cluster
from meshwright.errors import InputError
from meshwright.frameworks import trl_data
from meshwright.frameworks.mapping import text_of
from meshwright.frameworks.trainer_args import ADAPTER, CHATS, PROGRAM, TRAINER, WRITTEN
from meshwright.frameworks.trainer_fields import EVALUATIONS, OFF
from meshwright.frameworks.types import ExportedConfig, Program, ProgramArguments, SourcedValue, UnmappedField, as_int
from meshwright.recipes.types import Recipe, field_value

VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))")
MEANS = "an argument of your program"
GIVEN_UP = {"warmup_steps": ("warmup_ratio",)}  # arguments that go when another one is set
DATA = ("data.dataset", "data.validation")
READ_BY_LOAD_DATASET = {
    "train_file": "data_files={}",
    "validation_file": "data_files={{'validation': {}}}",
    "dataset_name": "load_dataset({})",
}
"""Argument of a command → what states it in code."""
CONVERTED = ".messages.jsonl"  # the end of a file's name that an export converts
RECOMPUTE, SHARDING = "gradient_checkpointing", "fsdp"


def keep_program(
    program: ProgramArguments, written: ExportedConfig, base: Recipe, own: Cluster, recipe: Recipe, on: Cluster
) -> ExportedConfig:
    """Return an export that runs the user's program, without the file of arguments for another one."""
    changes, lost = _changes(program, base, own, recipe, on)
    named = named_config(program)
    config = _written_config(written, named)
    variables: dict[str, str] = {}
    words = [_word(one, variables) for one in program.argv]
    expanded = {word for word, one in zip(words, program.argv, strict=True) if one.unresolved and _is_expanded(word)}
    in_code = bool(named) and not any(_names(word, named) for word in words)  # which opens its config by that name
    words = [f"{word.removesuffix(named)}{config}" if named and _names(word, named) else word for word in words]
    if fixed := {name: value for name, value in changes.items() if program.place_in_code(name)}:  # ignores flags
        by_argument = {argument: field for field, argument in program.sources.items()}
        lost += [
            UnmappedField(by_argument.get(name, name), value, f"set it in {_in_code(program, name, value)}")
            for name, value in fixed.items()
        ]
        changes = {program.takes.get(name, name): value for name, value in changes.items() if name not in fixed}
    for name, value in changes.items():
        words = _replaced(words, name, value)
    data: dict[str, str] = {}
    notes: tuple[str, ...] = ()
    is_named = program.sources.get("data.dataset") == trl_data.DATASET and f"--{trl_data.CONFIG}" not in words
    if is_named and trl_data.is_trl_script(words) and _is_local(recipe):
        name = f"{recipe.name or 'recipe'}_data.yaml"
        strategy = _strategy(program, changes)
        data = {name: trl_data.data_config(recipe, bool(strategy))}
        if strategy and not recipe.data.validation_part:
            notes = (f"{name} holds out {trl_data.held_out(recipe):.0%} of the data ({trl_data.HELD_OUT}), because "
                f"{strategy} needs a test split; data.validation_part=N holds out another part",)  # fmt: skip
        words = [*_replaced(words, trl_data.DATASET, None), f"--{trl_data.CONFIG}", name]
    carried = {*program.sources, *(field for field in (*TRAINER, "layout.recompute", "schedule.min_lr"))}
    unmapped = tuple(one for one in written.unmapped if one.field not in carried)
    return msgspec.structs.replace(
        written,
        files={
            **{
                named if name == config and in_code else name: text
                for name, text in written.files.items()
                if name not in (*written.program.modules, PROGRAM)
            },
            **data,
        },
        program=Program(
            tuple(words), written.program.env, variables, expanded=tuple(one for one in words if one in expanded)
        ),
        unmapped=(*unmapped, *(one for one in lost if one.field not in {two.field for two in unmapped})),
        notes=(*(one for one in written.notes if PROGRAM not in one and WRITTEN not in one), *notes),
    )


def named_config(program: ProgramArguments) -> str:
    """Return the DeepSpeed config that an argument of the program names; empty if none does.

    A bare --deepspeed turns DeepSpeed on in programs that name the config with --deepspeed_config.
    """
    values = (getattr(program.given.get(name), "value", None) for name in ("deepspeed_config", "deepspeed"))
    return next((value for value in values if isinstance(value, str)), "")


def _written_config(written: ExportedConfig, named: str) -> str:
    """Return the file of an export that replaces the DeepSpeed config which the program names.

    Beside a config of Accelerate it is the file that this one names too; another config stays as it is.
    """
    first = next(iter(written.files))
    if written.framework != "accelerate" or not named:
        return first
    return Path(named).name if Path(named).name in written.files else named


def _names(word: str, named: str) -> bool:
    """Return whether a word of a command is the name of a file, or `--argument=` with it."""
    return word == named or (word.startswith("-") and word.partition("=")[2] == named)


def _strategy(program: ProgramArguments, changes: Mapping[str, Any]) -> str:
    """Return the argument with which a command validates; empty if it does not."""
    for name in EVALUATIONS:
        value = changes.get(name, getattr(program.given.get(name), "value", None))
        if str(value).lower() not in OFF:
            return f"--{name} {value}"
    return ""


def _is_local(recipe: Recipe) -> bool:
    """Return whether the data are a file: of this machine, or converted by the export."""
    return trl_data.is_file(recipe.data.dataset) or recipe.data.dataset.endswith(CONVERTED)


def _changes(
    program: ProgramArguments, base: Recipe, own: Cluster, recipe: Recipe, on: Cluster
) -> tuple[dict[str, Any], list[UnmappedField]]:
    """Return the arguments to write, None for one to remove, and the changed fields that have no argument."""
    found: dict[str, Any] = {}
    lost: list[UnmappedField] = []
    for field, arguments in {**TRAINER, **CHATS, **ADAPTER}.items():
        try:
            before, after = arguments(base), arguments(recipe)
        except InputError:
            continue  # listed by the export
        if before == after:
            continue
        if field not in TRAINER and field not in program.sources:
            lost.append(UnmappedField(field, field_value(recipe, field), "name the argument that your program has"))
            continue
        single = len(before) == 1 and before.keys() == after.keys()
        for name in {**before, **after}:
            if before.get(name) != after.get(name):
                found[program.sources.get(field, name) if single else name] = after.get(name)
    for field in DATA:
        before, after = field_value(base, field), field_value(recipe, field)
        name = program.sources.get(field, "")
        in_code = bool(name and program.place_in_code(name))  # which keeps its relative path
        if name and before != after and not (in_code and before and str(Path(before).resolve()) == after):
            found[name] = after or None
    found |= _changed_batch(program, base, own, recipe, on)
    gone = {other for name in found for other in GIVEN_UP.get(name, ()) if other in program.given}
    return {**found, **dict.fromkeys(gone)}, lost


def _in_code(program: ProgramArguments, name: str, value: Any) -> str:
    """Return an argument as the program's code has it: data are those of its load_dataset."""
    text = READ_BY_LOAD_DATASET.get(name)
    place = program.place_in_code(name)
    return f"{place}: {text.format(repr(value))}" if text and value else program.formatted(name, value)[0]


def _changed_batch(
    program: ProgramArguments, base: Recipe, own: Cluster, recipe: Recipe, on: Cluster
) -> dict[str, Any]:
    """Return the arguments of another batch; the program's own may contradict its config, and then change with it."""
    old, new = _batch(base, own), _batch(recipe, on)
    if (base.train.global_batch_size, base.layout.micro_batch_size) != (
        recipe.train.global_batch_size,
        recipe.layout.micro_batch_size,
    ):
        given = {name: program.given.get(name) for name in old}
        old = {name: value if (one := given[name]) is None else as_int(one) or value for name, value in old.items()}
    return {name: value for name, value in new.items() if value != old[name]}


def _batch(recipe: Recipe, on: Cluster) -> Mapping[str, Any]:
    layout = recipe.layout
    ranks = max(1, on.world // (layout.tp * layout.cp * layout.pp))
    return {
        "per_device_train_batch_size": layout.micro_batch_size,
        "gradient_accumulation_steps": max(1, recipe.train.global_batch_size // (layout.micro_batch_size * ranks)),
        RECOMPUTE: layout.recompute == "full",
    }


def _word(setting: SourcedValue, variables: dict[str, str]) -> str:
    """Return a word of the command; variables that are set when the job runs stay variables."""
    text = str(setting.value)
    if not setting.unresolved or _is_expanded(text):
        return text
    variables.update(dict.fromkeys((found[1] or found[2] for found in VARIABLE.finditer(text)), MEANS))
    return VARIABLE.sub(lambda found: f"${{{found[1] or found[2]}}}", text)


def _is_expanded(text: str) -> bool:
    """Return whether a word has more for the shell than plain variables: a command, or ${NAME%suffix}."""
    return any(sign in VARIABLE.sub("", text) for sign in "$`")


def _replaced(words: list[str], name: str, value: Any) -> list[str]:
    """Return the command with another value of an argument, or without it."""
    flag, text = f"--{name}", text_of(value)
    at = next((n for n, word in enumerate(words) if word.partition("=")[0].replace("-", "_") == f"__{name}"), None)
    if at is None:
        return words if value is None else [*words, flag, text]
    has_value = "=" not in words[at] and at + 1 < len(words) and not words[at + 1].startswith("--")
    return [*words[:at], *(() if value is None else (flag, text)), *words[at + 1 + has_value :]]


def without_argument(words: Sequence[str], name: str) -> list[str]:
    """Return a command without an argument and its value."""
    return _replaced(list(words), name, None)
