"""Checks that training programs make of their arguments at start, as far as a file or command alone decides them.

One table per program: a condition over its keys, the message, the settings that fix it, and the place upstream.
"""

from collections.abc import Collection

from meshwright.frameworks.start_checks.axolotl import AXOLOTL
from meshwright.frameworks.start_checks.evaluate import Style, broken_checks
from meshwright.frameworks.start_checks.llama_factory import LLAMA_FACTORY
from meshwright.frameworks.start_checks.ms_swift import FINE_TUNING, GENERATED, MS_SWIFT
from meshwright.frameworks.start_checks.trainer import CHOICES, TRAINER, TRAINER_CHOICES
from meshwright.frameworks.start_checks.trl import CONVERSATIONS, GENERATES, GROUPS, METHODS, SCRIPTS, SFT_KEYS, TRL
from meshwright.frameworks.start_checks.types import StartCheck, Table

SHARED = (*TRAINER.defaults, "bf16")  # keys of the Trainer's checks whose defaults a program may replace


def _trainer_of(*tables: Table) -> Table:
    """Return the Trainer's checks with the defaults of a program that passes other ones to it."""
    own = {key: value for table in tables for key, value in table.defaults.items() if key in SHARED}
    return TRAINER._replace(defaults={**TRAINER.defaults, **own})


TABLES: dict[str, tuple[Table, ...]] = {
    "axolotl": (AXOLOTL, TRAINER_CHOICES),
    "llama-factory": (LLAMA_FACTORY, TRAINER, TRAINER_CHOICES),
    "ms-swift": (MS_SWIFT, _trainer_of(MS_SWIFT), TRAINER_CHOICES),
    "trl": (TRL, SCRIPTS, CONVERSATIONS, _trainer_of(SCRIPTS), TRAINER_CHOICES),
    "trainer": (TRAINER, CONVERSATIONS),
    "trl-program": (_trainer_of(SCRIPTS), CONVERSATIONS),
}
"""The tables of each program; those built on transformers' Trainer have its checks too, with the program's defaults."""


def tables_of(name: str, keys: Collection[str], subcommand: str = "") -> tuple[Table, ...]:
    """Return the tables of a front end's command or YAML file; the first of all is that of supervised fine-tuning."""
    first, *others = TABLES[name]
    is_open = name == "trl" and not subcommand and not {*SFT_KEYS} & {*keys}  # a YAML file for any of TRL's trainings
    if is_open and GENERATES in keys:  # a YAML file of GRPO or RLOO
        others.append(GROUPS)
    if not is_open and subcommand in ("", "sft", "pt", "train"):
        return first, *((FINE_TUNING,) if (name, subcommand) == ("ms-swift", "sft") else ()), *others
    own = {"trl": METHODS, "ms-swift": {"rlhf": GENERATED}}.get(name, {}).get(subcommand)
    return (*((own,) if own is not None else ()), *others)


__all__ = ["CHOICES", "TABLES", "TRAINER_CHOICES", "StartCheck", "Style", "Table", "broken_checks", "tables_of"]
