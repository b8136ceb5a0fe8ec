"""Optimizers and schedules that transformers' Trainer constructs by name, and those that programs built on it add.

TrainingArguments refuses every other name at start: OptimizerNames and SchedulerType. The names of today are in the
tables of keys; those below are of releases that are still in use, or of a program that handles them itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.frameworks.key_table import NULLS, PLACEHOLDER, read_table
from meshwright.frameworks.other_versions import OLDER_ACCEPT
from meshwright.similar import closest

OPTIMIZERS, SCHEDULES = "=optim", "=schedule"  # rows of the tables
ARGUMENTS = {"optim": OPTIMIZERS, "lr_scheduler_type": SCHEDULES}
"""Arguments of TrainingArguments, and the names that they take."""
KEYS: Mapping[str, Mapping[str, str]] = {"axolotl": {"optimizer": OPTIMIZERS, "lr_scheduler": SCHEDULES}}
"""Keys of front ends with names of their own for these arguments, by table."""
_TABLE = Path(__file__).with_name("front_ends") / "trl.tsv"


class _Older(NamedTuple):
    """A name that a release removed."""

    title: str
    version: str  # the first without it
    now: str


OLDER: Mapping[str, _Older] = {
    "adamw_hf": _Older("transformers", "4.50", "adamw_torch"),
    "adamw_apex_fused": _Older("transformers", "5.8", "adamw_torch_fused"),
}
OWN: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("axolotl", OPTIMIZERS): ("optimi_adamw", "ao_adamw_4bit", "ao_adamw_8bit", "ao_adamw_fp8", "adopt_adamw",
        "came_pytorch", "muon", "dion", "sinkgd", "flash_adamw", "flash_adam", "flash_sgd", "flash_sgdw", "flash_lion",
        "q_galore_adamw8bit"),
    ("axolotl", SCHEDULES): ("one_cycle", "rex"),
}  # fmt: skip
"""Names that a front end handles itself: CustomSupportedOptimizers of Axolotl's utils/schemas/enums.py."""
OWN_OLDER: Mapping[tuple[str, str], Mapping[str, _Older]] = {
    ("axolotl", OPTIMIZERS): {"lion_pytorch": _Older("Axolotl", "0.8", "lion_32bit")},
    ("axolotl", SCHEDULES): {"log_sweep": _Older("Axolotl", "0.10", "cosine")},
}


class RefusedName(NamedTuple):
    """A name that no optimizer or schedule has."""

    reason: str
    meant: str  # the name instead; empty if none is near
    removed: bool = False  # an older release has it

    def message(self, title: str, key: str, value: Any) -> str:
        """Return the message about an argument of a program."""
        start = f"{key} {value}: " if self.removed else f"{title} has no {key} {value}; "
        return start + self.reason


def refused_name(key: str, value: Any, table: str = "") -> RefusedName | None:
    """Return why the Trainer, or the front end of a table, refuses the value of a key; None if it does not."""
    kind = KEYS.get(table, ARGUMENTS).get(key)
    text = str(value).strip()
    if kind is None or text.lower() in NULLS or PLACEHOLDER.fullmatch(text):
        return None
    known = (*read_table(_TABLE).owners[kind], *OWN.get((table, kind), ()))
    if text in known:
        return None
    older = {**(OLDER if kind == OPTIMIZERS else {}), **OWN_OLDER.get((table, kind), {})}.get(text)
    if older is not None:
        reason = f"{older.title} has no such name since version {older.version}; {OLDER_ACCEPT} it"
        return RefusedName(reason, older.now, True)
    near = closest(text.lower(), known, 1)
    if near and not _is_variant(text, near[0]):
        return RefusedName(f"did you mean {near[0]}?", near[0])
    return RefusedName(f"allowed: {', '.join(known)}", "")


def _is_variant(name: str, known: str) -> bool:
    """Return whether a name is a known one with a word more: that of a later release, and no typing error."""
    return name.startswith(f"{known}_")
