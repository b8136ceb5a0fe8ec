"""Meshwright: tell it your model, your GPUs and your goal; it picks the recipe, sizes it, checks it and says why.

Every command is a function here: `dir(meshwright)` lists them, `help(meshwright.recommend)` documents one, and
docs/python.md has an example of each. Names are loaded on first use; only what trains or dry-runs imports torch.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from meshwright.version import VERSION

if TYPE_CHECKING:
    from meshwright.api import (
        accuracy,
        bench,
        calibrate,
        check,
        compare,
        convert,
        diagnose,
        estimate,
        evaluate,
        explain,
        export,
        find_model,
        find_recipes,
        generate,
        import_file,
        inspect,
        plan,
        recipe,
        recommend,
        rehearse,
        samples,
        share,
        size,
        tokenize,
        train,
    )
    from meshwright.api import cluster as cluster
    from meshwright.api import dryrun as dry_run
    from meshwright.api import gpu_catalogue as list_gpus
    from meshwright.api import launch as launch_job
    from meshwright.api import model_catalogue as list_models
    from meshwright.api import rule_catalogue as list_rules
    from meshwright.api.python import schema, to_dict
    from meshwright.errors import InputError, MeshwrightError, OutputError
    from meshwright.extras import MissingPackageError
    from meshwright.planner import Plan
    from meshwright.recipes.types import Recipe

__version__ = VERSION
__all__ = [
    "InputError",
    "MeshwrightError",
    "MissingPackageError",
    "OutputError",
    "Plan",
    "Recipe",
    "accuracy",
    "bench",
    "calibrate",
    "check",
    "cluster",
    "compare",
    "convert",
    "diagnose",
    "dry_run",
    "estimate",
    "evaluate",
    "explain",
    "export",
    "find_model",
    "find_recipes",
    "generate",
    "import_file",
    "inspect",
    "launch_job",
    "list_gpus",
    "list_models",
    "list_rules",
    "plan",
    "recipe",
    "recommend",
    "rehearse",
    "samples",
    "schema",
    "share",
    "size",
    "to_dict",
    "tokenize",
    "train",
]

# Some commands have the name of a package (meshwright.launch), so their functions are named otherwise.
COMMANDS = {
    "dryrun": "dry_run",
    "doctor": "diagnose",
    "launch": "launch_job",
    "recipes": "find_recipes",
    "models": "list_models",
    "gpus": "list_gpus",
    "import": "import_file",  # a keyword of Python
    "rules": "list_rules",
}
"""Command → function, where the names differ."""
_HOMES = {
    "InputError": "errors.InputError",
    "MeshwrightError": "errors.MeshwrightError",
    "OutputError": "errors.OutputError",
    "MissingPackageError": "extras.MissingPackageError",
    "Plan": "planner.Plan",
    "Recipe": "recipes.types.Recipe",
    "dry_run": "api.dryrun",
    "launch_job": "api.launch",
    "list_gpus": "api.gpu_catalogue",
    "list_models": "api.model_catalogue",
    "list_rules": "api.rule_catalogue",
    "schema": "api.python.schema",
    "to_dict": "api.python.to_dict",
}
"""Public name → module and attribute, where they differ from `api` and the name."""


def __getattr__(name: str) -> Any:
    """Names are loaded on first use, so that importing the package costs nothing."""
    if name not in __all__:
        other = COMMANDS.get(name.replace("_", ""))
        hint = f"; the function of `meshwright {name}` is meshwright.{other}" if other else ""
        raise AttributeError(f"module 'meshwright' has no attribute {name!r}{hint}")
    from importlib import import_module

    module, _, attribute = _HOMES.get(name, f"api.{name}").rpartition(".")
    return getattr(import_module(f"meshwright.{module}"), attribute)


class _Command(ModuleType):
    """A package with the name of a command: a call of it says which function the command is."""

    def __call__(self, *args: Any, **values: Any) -> Any:
        name = self.__name__.rpartition(".")[2]
        raise TypeError(
            f"meshwright.{name} is a package; the function of `meshwright {name}` is meshwright.{COMMANDS[name]}"
        )


class _Root(ModuleType):
    """This package, which gets its subpackages as attributes when they are imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in COMMANDS and type(value) is ModuleType:
            value.__class__ = _Command
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Root


def __dir__() -> list[str]:
    """List the public names, loaded or not; not what this module imports for itself."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
