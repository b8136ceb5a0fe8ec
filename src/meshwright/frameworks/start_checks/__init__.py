"""Checks that training programs make of their arguments at start, as far as a file or command alone decides them.

One table per program: a condition over its keys, the message, the settings that fix it, and the place upstream.
"""

from collections.abc import Collection

from meshwright.frameworks.start_checks.axolotl import AXOLOTL
from meshwright.frameworks.start_checks.evaluate import Style, broken_checks
from meshwright.frameworks.start_checks.llama_factory import LLAMA_FACTORY
from meshwright.frameworks.start_checks.ms_swift import MS_SWIFT
from meshwright.frameworks.start_checks.trainer import CHOICES, TRAINER, TRAINER_CHOICES
from meshwright.frameworks.start_checks.trl import CONVERSATIONS, METHODS, SCRIPTS, SFT_KEYS, TRL
from meshwright.frameworks.start_checks.types import StartCheck, Table

TABLES: dict[str, tuple[Table, ...]] = {
    "axolotl": (AXOLOTL, TRAINER_CHOICES),
    "llama-factory": (LLAMA_FACTORY, TRAINER, TRAINER_CHOICES),
    "ms-swift": (MS_SWIFT, TRAINER, TRAINER_CHOICES),
    "trl": (TRL, SCRIPTS, CONVERSATIONS, TRAINER, TRAINER_CHOICES),
    "trainer": (TRAINER, CONVERSATIONS),
}
"""The tables of each program; those built on transformers' Trainer have its checks too."""


def tables_of(name: str, keys: Collection[str], subcommand: str = "") -> tuple[Table, ...]:
    """Return the tables of a front end's command or YAML file; the first of all is that of supervised fine-tuning."""
    first, *others = TABLES[name]
    is_open = name == "trl" and not subcommand and not {*SFT_KEYS} & {*keys}  # a YAML file for any of TRL's trainings
    if not is_open and subcommand in ("", "sft", "pt", "train"):
        return first, *others
    own = METHODS.get(subcommand) if name == "trl" else None
    return (*((own,) if own is not None else ()), *others)


__all__ = ["CHOICES", "TABLES", "TRAINER_CHOICES", "StartCheck", "Style", "Table", "broken_checks", "tables_of"]
