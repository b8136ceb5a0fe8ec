"""Packages whose names are imported on first use, so that a command loads only the modules that it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(package: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package: names by the module of meshwright that defines them.

    A module of the package must not have one of these names: importing it would hide the function.
    """
    modules = {name: module for module, listed in names.items() for name in listed.split()}

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"meshwright.{modules[name]}"), name)

    return load
