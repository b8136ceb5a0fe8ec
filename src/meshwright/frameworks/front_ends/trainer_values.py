"""Values that transformers, bitsandbytes or peft refuse whatever front end passes them, and keys that must be set."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from meshwright.frameworks.front_ends.describe import FrontEnd
from meshwright.frameworks.front_ends.half_precision import HALVES
from meshwright.frameworks.front_ends.keys import find_key
from meshwright.frameworks.key_table import WORDS, KeyTable
from meshwright.frameworks.types import Settings, SourcedValue
from meshwright.rules.rule import Finding, Severity

POSITIVE = {
    "per_device_train_batch_size": "a batch has at least one sample",
    "gradient_accumulation_steps": "a step has at least one micro batch",
    "num_train_epochs": "nothing would be trained",
    "max_length": "a sample has at least one token",
    "cutoff_len": "a sample has at least one token",
    "lora_r": "peft refuses a rank below 1",
    "lora_rank": "peft refuses a rank below 1",
    "lora_alpha": "peft multiplies the adapters' output by it, so that 0 trains nothing",
}
"""Arguments that must be above 0, with the reason."""
DEFAULTS = {
    **dict.fromkeys(("per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs"), 1),
    **dict.fromkeys(("max_length", "cutoff_len"), 2048),
    **dict.fromkeys(("lora_r", "lora_rank"), 8),
    "lora_alpha": 16,
}
"""What replaces 0 or -1 in a fix: the libraries' defaults, and one epoch."""
NOT_NEGATIVE = {
    "learning_rate": "",
    "warmup_steps": ": transformers' Trainer refuses to start",
    "weight_decay": ": torch's optimizers refuse it",
}
SHARES = {"warmup_ratio": "it is a share of all steps", "lora_dropout": "torch refuses another probability"}
"""Arguments that must be between 0 and 1, with the reason."""
BY_DEFAULT_AT_0 = {("llama-factory", "lora_alpha")}  # hparams/finetuning_args.py: lora_alpha or lora_rank * 2
PERCENT = 100
EXCLUSIVE = {
    HALVES: "transformers accepts one of bf16 and fp16",
    ("load_in_4bit", "load_in_8bit"): "weights are loaded in 4 or in 8 bits, not in both",
}
WORD = re.compile(r"(?!(?i:inf|nan|none|null)$)[A-Za-z]\w*")  # no variable that is filled in later
UNLIMITED, SEVERAL = "max_length", 2  # keys of another release from which a file is for it
TABLES = ("map", "list")  # types of keys that have keys of their own


def refused_values(one: FrontEnd, values: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield values that the libraries refuse: key, reason, and the value to write instead; empty if there is none."""
    for key, value in values.items():
        argument = one.names.get(key, "")
        if _was_unlimited(one, values, key):
            continue
        number = _number(value)
        if number is None:
            if argument == "learning_rate" and _is_word(one, key, value):
                yield key, "expected a number", ""
        elif argument in POSITIVE and number <= 0 and not (number == 0 and (one.name, argument) in BY_DEFAULT_AT_0):
            if argument != "num_train_epochs" or (_number(values.get("max_steps")) or 0) <= 0:
                yield key, f"must be above 0: {POSITIVE[argument]}", _above_zero(argument, number)
        elif argument in NOT_NEGATIVE and number < 0:
            yield key, f"must not be negative{NOT_NEGATIVE[argument]}", f"{-number:g}"
        elif (name := argument or key) in SHARES and not 0 <= number <= 1:
            yield key, f"must be in [0, 1]: {SHARES[name]}", _share(number)
    for (first, second), reason in EXCLUSIVE.items():
        if (first, second) == HALVES and one.keeps_one_half:
            continue
        if all(str(values.get(key)).lower() == "true" for key in (first, second)):
            yield second, f"{first} is true as well: {reason}", "false"


def quoted_numbers(one: FrontEnd, values: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield numbers in quotes of a front end that passes them on as text: OmegaConf reads 1e-4 as a number, not "1e-4".

    LLaMA-Factory: hparams/parser.py, and parse_dict of transformers' HfArgumentParser, which converts nothing.
    """
    for key, value in values.items():
        row = one.table.find("", key)
        if row is not None and row.types == ("float",) and isinstance(value, str) and _number(value) is not None:
            reason = f"in quotes it is text, and {one.title} passes it on as text: the training stops with a TypeError"
            yield key, reason, value.strip()


def _above_zero(argument: str, number: float) -> str:
    """Return the number without its sign; for 0 and -1, what the libraries have by default."""
    return f"{-number:g}" if number < -1 else str(DEFAULTS[argument])


def _share(number: float) -> str:
    """Return a percentage as a share; empty for a number that is none."""
    return f"{number / 100:g}" if 1 < number <= PERCENT else ""


def _is_word(one: FrontEnd, key: str, value: Any) -> bool:
    """Return whether a number is a word, and its schema does not say so: that of Axolotl takes text and converts it."""
    row = one.table.find("", key)
    return (
        row is not None and "str" in row.types and isinstance(value, str) and WORD.fullmatch(value.strip()) is not None
    )


def _was_unlimited(one: FrontEnd, values: Mapping[str, Any], key: str) -> bool:
    """Return whether a length of -1 means no limit, as in ms-swift before 3.0, whose other keys the file has."""
    if key != UNLIMITED or _number(values[key]) != -1:
        return False
    return sum(one.table.find("", name) is None for name in values) >= SEVERAL


def missing_keys(one: FrontEnd, settings: Settings, keys: set[str]) -> Iterator[Finding]:
    """Yield the keys without which the front end does not start; one of several is enough."""
    first = next(iter(settings.values()), SourcedValue("", 1, ""))
    infers = any(key in settings and settings[key].value for key in one.infers_with)
    for names in one.required:
        if not any(name in keys for name in names):
            message = f"{one.title} requires {' or '.join(names)}{' to train' * infers}"
            severity: Severity = "warning" if infers else "error"
            yield Finding("key.missing", severity, names[0], message, (), first.file, 1)
    for name in one.usual:
        if not any(one.names.get(key) == one.names[name] for key in keys):
            message = f"{one.title} requires {name}, here or as an argument of its command"
            yield Finding("key.missing", "warning", name, message, (), first.file, 1)


def tables_for_values(known: KeyTable, settings: Settings) -> Iterator[Finding]:
    """Yield keys of a number, switch or text that have keys below them."""
    reported: set[str] = set()
    for key, setting in settings.items():
        name = key.partition(".")[0]
        if name == key or name in reported or "[" in name:
            continue
        _, _, found = find_key(known, name)
        types = found.types if found is not None else ()
        if not types or set(types) & set(TABLES) or name in known.owners:
            continue
        reported.add(name)
        expected = " or ".join(dict.fromkeys(WORDS[kind] for kind in types if kind in WORDS))
        message = f"{name} has keys below it; expected {expected}"
        yield Finding("value.invalid", "error", name, message, (), setting.file, setting.line)


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except ValueError:
        return None
