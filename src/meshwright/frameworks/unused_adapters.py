"""Settings of adapters in a training of all weights: a LoRA rank without what turns LoRA on."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

import msgspec

from meshwright.frameworks.trainer_fields import ADAPTERS_OFF, ROWS
from meshwright.frameworks.types import SourcedValue
from meshwright.rules.rule import Finding

BITS = ("load_in_4bit", "load_in_8bit")  # of the frozen weights
ADAPTERS = ("use_peft", "use_lora", "lora_r", "lora_rank", "lora_alpha", "lora_enable", "peft", *BITS)
PEFT_CONFIG = 'peft_config=LoraConfig(task_type="CAUSAL_LM")'  # of TRL's trainers
_ADAPTERS = re.compile(r"peft|lora|adapter", re.IGNORECASE)
EMPTY = ("", "none", "null", "false")


def is_of_adapters(argument: str) -> bool:
    """Return whether an argument of TRL or peft sets adapters."""
    return argument in ROWS and ROWS[argument].field.startswith("peft.")


def names_adapters(program: str) -> bool:
    """Return whether a program may add adapters: by peft, by a library on top of it, or by a function of its own."""
    return _ADAPTERS.search(program) is not None


def without_adapters(arguments: Mapping[str, SourcedValue]) -> Mapping[str, SourcedValue]:
    """Return the arguments without those of adapters if the program adds none with them."""
    if ADAPTERS_OFF not in arguments:
        return arguments
    return {name: one for name, one in arguments.items() if not is_of_adapters(name) and name not in ADAPTERS}


def unused_of_program(arguments: Mapping[str, SourcedValue], given: Collection[str]) -> Iterator[Finding]:
    """Yield that options of adapters, and of quantized weights, were given without the one that adds adapters."""
    off = arguments.get(ADAPTERS_OFF)
    if off is None:
        return
    turned_on = str(off.value).removeprefix("none without ")
    names = [name for name in given if is_of_adapters(name)]
    is_option = turned_on.startswith("--")
    for one in (
        *unused_adapters(arguments, names, turned_on, is_meant=False, flag="--"),
        *quantized_without_adapters(arguments, turned_on, ""),
    ):
        yield one if is_option else msgspec.structs.replace(one, fix=())


def unused_adapters(
    arguments: Mapping[str, SourcedValue], names: Collection[str], turned_on: str, is_meant: bool, flag: str = ""
) -> Iterator[Finding]:
    """Yield that a training of all weights ignores settings of adapters.

    `names` are the settings of adapters, `turned_on` is what turns adapters on, and `flag` the start of a name as it
    is written. `is_meant`: the file states that it trains all weights.
    """
    given = [name for name in names if str(arguments[name].value).lower() not in EMPTY and name not in BITS]
    if not given:
        return
    first, shown = arguments[given[0]], ", ".join(f"{flag}{name}" for name in given)
    does = "have" if len(given) > 1 else "has"
    if is_meant:
        message = f"{shown} {does} no effect: all weights are trained"
        yield Finding("key.unused", "advice", given[0], message, (), first.file, first.line)
    else:
        message = f"{shown} {does} no effect without {turned_on}: all weights are trained"
        yield Finding("key.unused", "warning", given[0], message, (turned_on,), first.file, first.line)


def quantized_without_adapters(arguments: Mapping[str, SourcedValue], turned_on: str, flag: str) -> Iterator[Finding]:
    """Yield that the Trainer refuses to train weights in few bits that have no adapters."""
    for name in BITS:
        if name in arguments and str(arguments[name].value).lower() not in EMPTY:
            one = arguments[name]
            message = f"{flag}{name} needs {turned_on}: the Trainer refuses to train quantized weights without adapters"
            yield Finding("value.invalid", "error", name, message, (turned_on,), one.file, one.line)
