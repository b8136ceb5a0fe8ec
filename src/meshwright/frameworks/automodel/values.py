"""Values as AutoModel's loader hands them on, and what it drops or puts right before anything is built."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

import msgspec

from meshwright.frameworks.automodel.extra_keys import INSTEAD, STRATEGIES, TOP
from meshwright.frameworks.common import is_int
from meshwright.frameworks.types import Settings, SourcedValue
from meshwright.recipes.key_maps import ConfigKey, composite_keys, config_keys
from meshwright.recipes.key_maps.automodel import PARALLEL_AXES
from meshwright.recipes.key_maps.value_maps import PIPELINE_SCHEDULES as OURS

TABLE = "automodel"

TRANSLATED = {"none": None, "None": None, "true": True, "True": True, "false": False, "False": False}

VARIABLE = re.compile(r"\$\{(?:oc\.env:)?([A-Za-z_]\w*)(?:,([^}]*))?\}")

MATTERS = (
    "distributed.", "step_scheduler.", "optimizer.", "lr_scheduler.", "packed_sequence.", "peft.", "fp8.", "seed",
    "model.", "dataset.seq_len", "dataset.max_length", "clip_grad_norm.", "quantization.",
)  # fmt: skip
"""Keys whose open values are told."""

LONGEST_LITERAL = 1000  # characters; longer text stays text there


def normalised(settings: Settings) -> dict[str, SourcedValue]:
    """Values as their loader hands them on: YAML 1.1, variables with their defaults, literals out of text."""
    found = {key: _resolved(said) for key, said in settings.items()}
    return {key: said if key.startswith(MATTERS) else _as_text(said) for key, said in found.items()}


def _as_text(said: SourcedValue) -> SourcedValue:
    """A value that makes no difference to what is judged, such as a folder or a token."""
    return msgspec.structs.replace(said, unresolved="")


def _resolved(said: SourcedValue) -> SourcedValue:
    value = said.value if said.pyyaml is msgspec.UNSET else said.pyyaml
    if not isinstance(value, str) or said.unresolved:
        return msgspec.structs.replace(said, value=value)
    missing: list[str] = []

    def default(found: re.Match[str]) -> str:
        if found[2] is None:
            missing.append(found[1])
            return found[0]
        return found[2]

    text = VARIABLE.sub(default, value)
    if missing:
        return msgspec.structs.replace(said, unresolved=f"the variable {missing[0]} is set when the job starts")
    return msgspec.structs.replace(said, value=literal(text))


def literal(value: Any) -> Any:
    """Text that spells a number, truth, list or nothing, as that."""
    if not isinstance(value, str):
        return value
    if value in TRANSLATED:
        return TRANSLATED[value]
    if not value or len(value) > LONGEST_LITERAL or value[0] not in "0123456789.+-[({'\"":
        return value
    try:
        found = ast.literal_eval(value)
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        return value
    return list(found) if isinstance(found, tuple) else found if isinstance(found, int | float | list | str) else value


def text_in(settings: Settings, key: str) -> str:
    said = settings.get(key)
    return str(said.value) if said is not None and isinstance(said.value, str) and not said.unresolved else ""


def value_in(settings: Settings, key: str) -> Any:
    said = settings.get(key)
    return None if said is None or said.unresolved else said.value


def size_of(settings: Settings, name: str) -> int:
    """One of their sizes as it holds: unset, nothing and whatever is below 1 count as 1."""
    said = settings.get(f"distributed.{name}_size")
    value = None if said is None or said.unresolved else said.value
    return max(1, value) if is_int(value) else 1


def strategy_of(settings: Settings) -> str:
    """The strategy by its first name; empty when the file names one that there is not."""
    said = settings.get("distributed.strategy")
    if said is None or said.value is None:
        return "fsdp2"
    return STRATEGIES.get(str(said.value).lower(), "")


def kept(settings: Settings) -> dict[str, SourcedValue]:
    """What is left of the settings once all that AutoModel itself drops or puts right is gone."""
    table = config_keys(TABLE)
    joined = {key for joint in composite_keys(TABLE) for key in joint.keys}
    dropped = tuple(_dropped(settings))
    left: dict[str, SourcedValue] = {}
    for key, said in settings.items():
        word = table.get(key)
        if key.startswith(dropped) or _is_unread_block(key):
            continue
        if said.value is None and word and _has_form(word) and key not in joined:
            continue  # nothing said is as good as not saying it
        left[key] = _put_right(key, said)
    return left


def _has_form(word: ConfigKey) -> bool:
    """Whether a key wants a value of some kind, so that nothing cannot be read as one."""
    return bool(word.field or word.type or word.choices) and "null" not in word.values


def _dropped(settings: Settings) -> Iterator[str]:
    yield "rng"
    yield "compile"
    if size_of(settings, "pp") == 1:
        yield "distributed.pipeline"
    if size_of(settings, "ep") == 1:
        yield "distributed.moe"
    if not strategy_of(settings):
        yield "distributed.strategy"
    enabled = settings.get("fp8.enabled")
    if enabled is None or enabled.value is not True:
        yield "fp8."


def _schedule(value: Any) -> str:
    """A schedule that there is: the one named, or the one that was meant."""
    name = str(value).lower()
    return name if name in {their.lower() for their in OURS} else INSTEAD.get(name, "1f1b")


def _is_unread_block(key: str) -> bool:
    top = key.split(".")[0].split("[")[0]
    return top not in TOP and not top.startswith("validation_dataset")


def _put_right(key: str, said: SourcedValue) -> SourcedValue:
    value = said.value
    if key == "distributed.strategy" and isinstance(value, str):
        return msgspec.structs.replace(said, value=value.lower())
    if key == "distributed.pipeline.pp_schedule" and not said.unresolved:
        return msgspec.structs.replace(said, value=_schedule(value))
    below = is_int(value) and value < 1
    if below and key in {*(f"distributed.{name}_size" for name in PARALLEL_AXES), "distributed.dp_replicate_size"}:
        return msgspec.structs.replace(said, value=1)
    if below and key == "distributed.dp_size":
        return msgspec.structs.replace(said, value=None)
    return said
