"""Megatron-Bridge against its own config classes: what a saved run config or an override may name, and its recipes.

Only names and defaults are compared: a recipe needs the model's config from the Hub to be built. Packages that need a
GPU (Transformer Engine, ModelOpt, the resiliency extension) are there by name. Besides torch: what Megatron-Core needs,
hydra-core.
"""

from __future__ import annotations

import functools
import itertools
import re
import sys
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import Field, fields, is_dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.against import MISSING, Config, Framework, Verdict

ABSENT = ("transformer_engine", "transformer_engine_torch", "modelopt", "nvidia_resiliency_ext", "apex")
OF_THE_RECIPE = ("model", "dataset", "peft", "env_vars")
"""Sections whose class is the recipe's choice."""
OPTIONAL = ("megatron.energon",)


class _Any(type):
    """A class that has every attribute, each of them such a class."""

    def __getattr__(cls, name: str) -> Any:
        return _made(cls, name)


def _made(where: Any, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    made = _Any(name, (), {"__init__": lambda self, *args, **options: None})
    setattr(where, name, made)
    return made


class _Nothing(ModuleType):
    """A module that has every class, each of them empty."""

    def __getattr__(self, name: str) -> Any:
        return _made(self, name)


class _Absent(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        absent = name.split(".")[0] in ABSENT or name.startswith(OPTIONAL)
        return ModuleSpec(name, self, is_package=True) if absent else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        made = _Nothing(spec.name)
        made.__version__ = "2.19.0"
        return made

    def exec_module(self, module: ModuleType) -> None: ...


def prepare() -> None:
    """Stand-ins for packages that need a GPU, and for a decorator that Python 3.11 lacks."""
    sys.meta_path.insert(0, _Absent())
    if not hasattr(typing, "override"):
        typing.override = lambda method: method  # type: ignore[attr-defined]


def judge(config: Config, folder: Path) -> Verdict:
    """The recipe and the keys that a config names, against those that there are."""
    if config.words:
        return _named(config.words)
    if not config.path.endswith((".yaml", ".yml")):
        return Verdict(None, "a command or a program: its recipe would have to be built")
    import yaml

    said = yaml.safe_load((folder / config.path).read_text()) or {}
    return _fields(
        f"{section}.{name}" for section, values in said.items() if isinstance(values, dict) for name in values
    )


def _named(words: Sequence[str]) -> Verdict:
    """What a command that we wrote names: a recipe and overrides."""
    after = dict(itertools.pairwise(words))
    recipe = after.get("--recipe", "")
    if recipe and recipe not in recipes():
        return Verdict(False, f"no recipe {recipe}")
    return _fields(word.partition("=")[0].lstrip("+~") for word in words if "=" in word and not word.startswith("--"))


def _fields(named: Iterable[str]) -> Verdict:
    known = keys()
    sections = {key.partition(".")[0] for key in known} - set(OF_THE_RECIPE)
    wrong = [key for key in named if key.partition(".")[0] in sections and ".".join(key.split(".")[:2]) not in known]
    wrong = [key for key in wrong if not key.partition(".")[2].startswith("_")]
    return Verdict(not wrong, f"no field {', '.join(wrong)}" if wrong else "")


@functools.cache
def recipes() -> frozenset[str]:
    """The names of its recipes, old and new, by what its files define and pass on; nothing is imported."""
    from megatron import bridge

    root = Path(next(iter(bridge.__path__)))
    texts = (path.read_text() for part in ("recipes", "perf_recipes") for path in (root / part).rglob("*.py"))
    return frozenset(name for text in texts for name in re.findall(r"\b(\w+_config)\b", text))


@functools.cache
def keys() -> Mapping[str, Any]:
    """The fields of every section of a run, with their defaults."""
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.bridge.peft.lora import LoRA
    from megatron.bridge.training import config as training

    sections: dict[str, type] = {"model": GPTModelProvider, "peft": LoRA}
    hints = typing.get_type_hints(training.ConfigContainer)
    for one in fields(training.ConfigContainer):
        found = next((each for each in _classes(hints[one.name]) if is_dataclass(each)), None)
        if found is not None and one.name not in sections:
            sections[one.name] = found
    return {
        f"{section}.{one.name}": _default(one) for section, made in sections.items() for one in fields(made) if one.init
    }


def _classes(hint: Any) -> Iterator[Any]:
    inner = typing.get_args(hint)
    if inner:
        for one in inner:
            yield from _classes(one)
    elif isinstance(hint, type):
        yield hint


def _default(one: Field[Any]) -> Any:
    if one.default is not NO_DEFAULT and isinstance(one.default, bool | int | float | str | None):
        return one.default
    return MISSING


FRAMEWORK = Framework(
    framework="megatron-bridge",
    needs="megatron-bridge==0.6.2",
    module="megatron.bridge.training.config",
    judge=judge,
    prepare=prepare,
    asks="the names of its recipes and the names and defaults of the fields of its sections; nothing is built",
    keys=keys,
    later={
        "megatron-bridge.two-formats": "refused by validate(), which needs GPUs",
        "moe.experts-divide": "refused when the model is built",
        "offload.": "refused when the optimizer's config is checked",
    },
    beyond={"no recipe": "that recipe came or was renamed after this version"},
    other_keys={
        "--": "a flag of its runner",
        "dataset.": "fields of data sets of other classes",
        "mixed_precision": "a section that is a name",
        "model.freeze_": "fields of models with a vision tower",
    },
)
