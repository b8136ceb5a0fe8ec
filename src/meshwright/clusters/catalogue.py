"""The catalogue of GPU types, found by any usual form of their name."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

from meshwright import extensions
from meshwright.clusters.tables import BadTableError, read_gpu
from meshwright.clusters.types import Gpu
from meshwright.errors import InputError, closest, unknown
from meshwright.toml_tables import TomlTables

_VENDOR_WORDS = re.compile(r"^(?:nvidia|amd|geforce|instinct|tesla|quadro|dgx|hgx)+(?=.)")
_MEMORY_SUFFIX = re.compile(r"(.+)(?:gi?b|g)")  # after a number
LONGEST_MEMORY = 4  # digits
SAME_MEMORY = 0.1  # a driver reports up to a tenth less than the GB on the box


def gpu(name: str) -> Gpu:
    """Return a GPU type by name, ignoring case, separators and vendor (`h100`, `NVIDIA H100 80GB HBM3`)."""
    found = _find(name)
    if found is None:
        names = [known.name for known in gpus()]
        error = unknown("GPU", name.strip()[:80], names, "meshwright gpus")
        if not error.fix and (near := _of_family(name, names)):
            reason = f"unknown GPU {name.strip()[:80]}; did you mean {' or '.join(near)}?{_variant(name, near)}"
            error = InputError(reason, field="GPU", value=error.value, fix=near)
        error.fix = error.fix or closest(re.sub(r"x[0-9]+$", "", name.strip()[:80]), names)  # 8xH100x2 names an H100
        raise error
    return found


def _of_family(name: str, names: list[str]) -> list[str]:
    """Return the GPUs of the same name up to the first dash (A100-40 for A100-60), else of the same model number."""
    family = name.strip().lower().removeprefix("nvidia").strip(" -_").split("-")[0]
    found = [one for one in names if one.lower().split("-")[0] == family]
    return (found or [one for one in names if _model_number(name) and _model_number(one) == _model_number(name)])[:4]


def _variant(name: str, near: list[str]) -> str:
    """Return how to describe a GPU that has another memory than those of its family; empty if its name has none."""
    named = re.search(r"[- x]([0-9]{2,3})(?:gi?b|g)?$", name.strip().lower())
    known = [gpu(one) for one in near]
    if named is None or any(abs(one.memory_gib / int(named[1]) - 1) <= SAME_MEMORY for one in known):
        return ""
    closest_one = min(known, key=lambda one: abs(one.memory_gib - int(named[1])))
    return f' For a variant, a cluster file names what differs: gpu = "{closest_one.name}" and memory_gib = {named[1]}'


def _model_number(name: str) -> str:
    """Return the first number of four or more digits of a GPU's name: 4090 of 4090ti and RTX4090."""
    found = re.search(r"[0-9]{4,}", name)
    return found[0] if found else ""


def is_known(name: str) -> bool:
    """Return whether this is the name of a GPU type."""
    return _find(name) is not None


def _find(name: str) -> Gpu | None:
    """Return a GPU type by name, which may end in its memory (`RTX 3090 24GB`)."""
    key = normalize_name(name)
    found = _named(key)
    if found is not None:
        return found
    sized = _MEMORY_SUFFIX.fullmatch(key)
    return _of_memory(sized[1]) if sized else None


def _of_memory(key: str) -> Gpu | None:
    """Return the GPU type of a name and its memory without a separator: h200141 is h200 and 141, not h20 and 0141."""
    whole = _named(key)  # A100-40 has its memory in its name
    for digits in range(1, LONGEST_MEMORY + 1):
        model, memory = key[:-digits], key[-digits:]
        if not model or not memory.isdigit() or memory.startswith("0"):
            continue
        found = whole or _named(model)
        if found is not None and abs(found.memory_gib / int(memory) - 1) < SAME_MEMORY:
            return found
    return None


@cache
def gpus() -> tuple[Gpu, ...]:
    """Return every GPU type of the catalogue, in file order, then those of extensions."""
    return (*(_shipped(name) for name in _tables()), *dict.fromkeys(_added().values()))


def _named(key: str) -> Gpu | None:
    """Return a GPU type by its normalized name or alias; to parse all tables would take 14 ms."""
    added = _added()
    name = _names().get(key) or (None if key in added else _aliases().get(key))
    return _shipped(name) if name else added.get(key)


@cache
def _tables() -> TomlTables:
    return TomlTables(Path(__file__).with_name("gpus.toml"))


@cache
def _names() -> dict[str, str]:
    return {normalize_name(name): name for name in _tables()}


@cache
def _aliases() -> dict[str, str]:
    return {normalize_name(alias): name for name, listed in _tables().every("aliases").items() for alias in listed}


@cache
def _shipped(name: str) -> Gpu:
    return read_gpu({"name": name, **_tables()[name]})


@cache
def _added() -> dict[str, Gpu]:
    """Return the GPU types of extensions by normalized name and alias."""
    known: dict[str, Any] = dict(_names())
    for path, added in extensions.tables("gpus.toml"):
        try:
            entries = [(normalize_name(name), read_gpu({"name": name, **table})) for name, table in added.items()]
        except (BadTableError, TypeError) as error:
            raise extensions.invalid(path, str(error)) from error
        extensions.add_new(known, path, entries, "GPU type {}".format)
    own = [found for found in known.values() if isinstance(found, Gpu)]
    return {normalize_name(name): found for found in own for name in (found.name, *found.aliases)}


def normalize_name(name: str) -> str:
    """Return a GPU name without case, separators and vendor."""
    return _VENDOR_WORDS.sub("", re.sub(r"[^a-z0-9]", "", name.lower()))
