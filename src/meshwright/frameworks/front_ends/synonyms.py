"""A front end's key for what another front end, transformers or peft names differently: lora_r and lora_rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache

from meshwright.frameworks.front_ends.describe import FRONT_ENDS, METHOD_KEYS, SAME, FrontEnd
from meshwright.frameworks.key_table import KeyTable
from meshwright.recipes.key_maps import hugging_face
from meshwright.recipes.types import recipe_fields
from meshwright.similar import closest

SHORT = {
    **dict.fromkeys(("epochs", "n_epochs", "train_epochs"), "num_train_epochs"),
    **dict.fromkeys(("lr", "learn_rate"), "learning_rate"),
    **dict.fromkeys(("grad_accum", "grad_accum_steps", "accumulation_steps"), "gradient_accumulation_steps"),
    **dict.fromkeys(("seq_len", "seq_length", "max_seq_len", "context_length"), "max_length"),
}
"""Other trainers' names → the Trainer's and TRL's arguments."""
ADAPTER_PARTS = "peft."  # section of the fields whose names are also written alone: rank, alpha, dropout


def synonym(known: KeyTable, owner: str, name: str) -> str:
    """Return the key of a table that sets what another front end's key sets; empty if it has none."""
    wanted = _meanings(name)
    if not wanted:
        return ""
    found = [key for key in known.owners.get(owner, ()) if wanted & _meanings(key)]
    return found[0] if len(found) == 1 else _nearest(name, found)


def key_for(one: FrontEnd, known: KeyTable, argument: str) -> str:
    """Return a front end's key for an argument of the Trainer, TRL or peft; empty if it has none."""
    own = [key for key, meant in one.names.items() if meant == argument != key and known.find("", key)]
    if own or known.find("", argument):
        return own[0] if own else argument
    wanted = _meanings(argument)
    read = [key for key in one.names if key not in SAME and known.find("", key) and wanted & _meanings(key)]
    return read[0] if read else synonym(known, "", argument)


def in_front_end(name: str, arguments: Mapping[str, str], table: KeyTable | None = None) -> tuple[str, ...]:
    """Return arguments of the Trainer as lines of a front end's file, with the plugins that they need."""
    one = FRONT_ENDS[name]
    known = table or one.table
    lines: list[str] = []
    for argument, value in arguments.items():
        key = key_for(one, known, argument)
        if not key:
            return ()
        lines += [f"plugins: [{plugin}]" for start, plugin in one.plugins.items() if key.startswith(start)]
        lines.append(f"{key}: {value}")
    return tuple(lines)


def _nearest(name: str, found: list[str]) -> str:
    near = closest(name, found, 1)
    return near[0] if near else found[0] if found else ""


@cache
def _meanings(name: str) -> frozenset[str]:
    """Return what a key sets: fields of the recipe, and arguments of the Trainer, TRL and peft."""
    if name in METHOD_KEYS:
        return frozenset(("peft.method",))
    name = SHORT.get(name, name)
    arguments = {one.names[name] for one in FRONT_ENDS.values() if name in one.names}
    alone = f"{ADAPTER_PARTS}{name}"
    return frozenset((*arguments, *_fields((name, *arguments)), *((alone,) if alone in recipe_fields() else ())))


def _fields(names: Iterable[str]) -> Iterable[str]:
    return [row.field for row in hugging_face.KEYS if row.key in names and row.field]
