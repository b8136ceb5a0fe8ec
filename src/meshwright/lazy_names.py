"""Packages whose names are imported on first use, so that a command loads only the modules that it runs."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any


class LazyNames:
    """The `__getattr__` of a package: names by the module of meshwright that defines them.

    A module of the package must not have one of these names: importing it would hide the function.
    """

    def __init__(self, package: str, names: Mapping[str, str]) -> None:
        self.package = package
        self.modules = {name: module for module, listed in names.items() for name in listed.split()}

    @property
    def names(self) -> frozenset[str]:
        """All names of the table."""
        return frozenset(self.modules)

    def __call__(self, name: str) -> Any:
        if name not in self.modules:
            raise AttributeError(f"module {self.package!r} has no attribute {name!r}")
        return getattr(import_module(f"meshwright.{self.modules[name]}"), name)
