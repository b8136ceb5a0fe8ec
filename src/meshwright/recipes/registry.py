"""The decorator that registers a function as a recipe, and the registry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import msgspec

from meshwright import extensions
from meshwright.recipes.types import Recipe

Builder = Callable[[], Recipe]
Purpose = Literal["production", "trial", "smoke_test"]
"""What a recipe is for: a full training, a short run that tries a layout, or a check that everything starts."""

LIBRARY = (
    "deepseek", "diffusion", "gemma", "glm", "gpt", "kempner", "llama", "ministral", "moonshot", "nemotron", "olmoe",
    "qwen", "qwen_moe", "qwen_vl", "sizes",
)  # fmt: skip
BENCHMARKS = (
    "deepseek_v3", "gpt_oss", "kimi_k2", "llama3_70b", "llama3_8b", "llama31_405b", "nemotron", "qwen35_vl",
    "qwen3_235b", "qwen3_30b", "qwen3_next", "qwen3_vl", "wan",
)  # fmt: skip


class Published(msgspec.Struct, frozen=True):
    """The originally published values of a recipe; None where they are not published.

    If the shipped recipe had to change to be legal and fit, `start` has the original values of other fields by flat
    name, and `gpus` the original GPU count. `measured` names the source of a step time of exactly this layout.
    """

    tp: int | None = None
    pp: int | None = None
    cp: int | None = None
    ep: int | None = None
    gpus: int | None = None
    seq: int | None = None
    start: Mapping[str, Any] = msgspec.field(default_factory=dict)
    measured: str = ""


class Registered(msgspec.Struct, frozen=True):
    """A recipe function with its family, originally published values and purpose."""

    name: str
    family: str
    published: Published
    build: Builder
    purpose: Purpose = "production"


_REGISTRY: dict[str, Registered] = {}


def recipe(
    *, family: str, published: Published | None = None, purpose: Purpose = "production"
) -> Callable[[Builder], Builder]:
    """Register a function without arguments as the recipe of its name."""

    def register(function: Builder) -> Builder:
        name = function.__name__
        if name in _REGISTRY and _REGISTRY[name].build.__module__ != function.__module__:
            raise ValueError(f"recipe {name} is registered twice")

        built: list[Recipe] = []  # recipes are frozen, so one build is shared

        def build() -> Recipe:
            if not built:
                built.append(msgspec.structs.replace(function(), name=name))
            return built[0]

        build.__name__ = build.__qualname__ = name
        build.__module__, build.__doc__ = function.__module__, function.__doc__
        _REGISTRY[name] = Registered(name, family, published or Published(), build, purpose)
        return build

    return register


@lru_cache(maxsize=1)
def library() -> Mapping[str, Registered]:
    """Return the library recipes by name, without importing the benchmarks."""
    shipped = {name: found for file in LIBRARY for name, found in _of_module(f"meshwright.recipes.library.{file}")}
    for path in extensions.files("recipes/*.toml"):
        extensions.add_new(shipped, path, [(path.stem, _from_file(path))], "recipe {}".format)
    for module in extensions.modules("recipes"):
        extensions.add_new(shipped, Path(str(module.__file__)), _of_module(module.__name__), "recipe {}".format)
    return shipped


def _from_file(path: Path) -> Registered:
    """Register a recipe file of an extension; it is read at first use, because its base is another recipe."""

    @lru_cache(maxsize=1)
    def build() -> Recipe:
        files = import_module("meshwright.recipes.files")  # by name: it imports the registry for a file's base
        recipe: Recipe = files.from_file(path)
        return msgspec.structs.replace(recipe, name=path.stem)

    return Registered(path.stem, extensions.name_of(path), Published(), build)


@lru_cache(maxsize=1)
def registry() -> Mapping[str, Registered]:
    """Return all recipes by name, including benchmarks."""
    benchmarks = (_of_module(f"meshwright.recipes.benchmarks.{file}") for file in BENCHMARKS)
    return {**library(), **{name: found for module in benchmarks for name, found in module}}


def _of_module(module: str) -> list[tuple[str, Registered]]:
    import_module(module)
    return [(name, found) for name, found in _REGISTRY.items() if found.build.__module__ == module]
