"""Extensions: folders in which a team keeps its own GPUs, models, recipes, rules and framework keys.

An extension is a folder with any of gpus.toml, models.json, recipes/*.toml, recipes.py, rules.py and keys.toml. It is
found through $MESHWRIGHT_EXTENSIONS (a list of folders), in ~/.config/meshwright/extensions, or as an installed package
named meshwright_ext_*. Packages are found by name, not by entry points: reading the metadata of all installed packages
takes 0.09 s, a quarter of the time of an answer; listing folders takes less than a millisecond.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from meshwright.errors import InputError, first_line

VARIABLE = "MESHWRIGHT_EXTENSIONS"
PREFIX = "meshwright_ext_"
MODULES = "meshwright_extensions"  # name of the package that Python files of extensions are loaded into


@cache
def folders() -> tuple[Path, ...]:
    """Return the folders of all extensions: listed ones first, then the user's, then installed packages."""
    listed = [Path(text).expanduser() for text in os.environ.get(VARIABLE, "").split(os.pathsep) if text]
    for path in listed:
        if not path.is_dir():
            raise InputError("is not a folder", field=VARIABLE, value=str(path), fix=(f"unset {VARIABLE}",))
    config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "meshwright" / "extensions"
    found = [*listed, *_children(config, ""), *(p for place in sys.path for p in _children(Path(place), PREFIX))]
    return tuple(dict.fromkeys(path.resolve() for path in found))


def _children(place: Path, prefix: str) -> list[Path]:
    """Return the folders in a folder whose names start with the prefix."""
    try:
        names = [name for name in os.listdir(place) if name.startswith(prefix) and name[:1] not in "._"]
    except OSError:  # sys.path lists zip files and folders that do not exist
        return []
    return [place / name for name in sorted(names) if "." not in name and (place / name).is_dir()]


def files(pattern: str) -> list[Path]:
    """Return the files of all extensions that match a pattern, e.g. recipes/*.toml."""
    return [path for folder in folders() for path in sorted(folder.glob(pattern))]


def name_of(path: Path) -> str:
    """Return the name of the extension that a file belongs to."""
    folder = next(folder for folder in folders() if path.is_relative_to(folder))
    return folder.name.removeprefix(PREFIX)


def tables(pattern: str) -> list[tuple[Path, Mapping[str, Any]]]:
    """Return the TOML files that match a pattern, parsed."""
    return [(path, _parsed(path)) for path in files(pattern)]


def _parsed(path: Path) -> Mapping[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise invalid(path, first_line(error)) from error


@cache
def modules(kind: str) -> tuple[ModuleType, ...]:
    """Import the Python files of this kind (recipes or rules) and return them; their decorators register."""
    return tuple(_module(kind, path) for path in files(f"{kind}.py"))


def _module(kind: str, path: Path) -> ModuleType:
    name = f"{MODULES}.{kind}.{name_of(path)}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise invalid(path, f"{type(error).__name__}: {first_line(error)}") from error
    return module


def invalid(path: Path, reason: str) -> InputError:
    """Return the error for a broken file of an extension."""
    return InputError(reason, field="extension", value=str(path), fix=(f"correct {path.name}", f"unset {VARIABLE}"))


def add_new(
    known: dict[str, Any], path: Path, entries: Iterable[tuple[str, Any]], what: Callable[[str], str] = str
) -> None:
    """Add an extension's entries to a catalogue; a name that exists already is an error, never an override."""
    for name, entry in entries:
        if name in known:
            raise invalid(path, f"{what(name)} exists already; give it another name")
        known[name] = entry
