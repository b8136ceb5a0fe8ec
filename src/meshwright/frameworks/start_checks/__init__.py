"""Checks that training programs make of their arguments at start, as far as a file or command alone decides them.

One table per program: a condition over its keys, the message, the settings that fix it, and the place upstream.
"""

from meshwright.frameworks.start_checks.axolotl import AXOLOTL
from meshwright.frameworks.start_checks.evaluate import Style, broken_checks
from meshwright.frameworks.start_checks.llama_factory import LLAMA_FACTORY
from meshwright.frameworks.start_checks.ms_swift import MS_SWIFT
from meshwright.frameworks.start_checks.trainer import TRAINER
from meshwright.frameworks.start_checks.trl import TRL
from meshwright.frameworks.start_checks.types import StartCheck, Table

TABLES: dict[str, tuple[Table, ...]] = {
    "axolotl": (AXOLOTL,),
    "llama-factory": (LLAMA_FACTORY, TRAINER),
    "ms-swift": (MS_SWIFT, TRAINER),
    "trl": (TRL, TRAINER),
    "trainer": (TRAINER,),
}
"""The tables of each program; those built on transformers' Trainer have its checks too."""

__all__ = ["TABLES", "StartCheck", "Style", "Table", "broken_checks"]
