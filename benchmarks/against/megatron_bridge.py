"""Compare keys and recipe names with Megatron-Bridge's own config classes.

Only names and defaults are compared: building a recipe needs the model config from the Hub. Packages that need a GPU
(Transformer Engine, ModelOpt, the resiliency extension) are mocked. Needs, besides torch: the dependencies of
Megatron-Core, hydra-core.
"""

from __future__ import annotations

import functools
import itertools
import re
import sys
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.against import Config, ReferenceParser, Verdict, default_of

MOCKED = ("transformer_engine", "transformer_engine_torch", "modelopt", "nvidia_resiliency_ext", "apex")
RECIPE_SECTIONS = ("model", "dataset", "peft", "env_vars")
"""Sections whose class depends on the recipe."""
OPTIONAL = ("megatron.energon",)


class _Any(type):
    """A mock class: every attribute is another mock class."""

    def __getattr__(cls, name: str) -> Any:
        return _mock_class(cls, name)


def _mock_class(where: Any, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    mocked = _Any(name, (), {"__init__": lambda self, *args, **options: None})
    setattr(where, name, mocked)
    return mocked


class _MockModule(ModuleType):
    """A mock module: every attribute is a mock class."""

    def __getattr__(self, name: str) -> Any:
        return _mock_class(self, name)


class _MockFinder(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        mocked = name.split(".")[0] in MOCKED or name.startswith(OPTIONAL)
        return ModuleSpec(name, self, is_package=True) if mocked else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = _MockModule(spec.name)
        module.__version__ = "2.19.0"
        return module

    def exec_module(self, module: ModuleType) -> None: ...


def prepare() -> None:
    """Mock packages that need a GPU, and a decorator that Python 3.11 lacks."""
    sys.meta_path.insert(0, _MockFinder())
    if not hasattr(typing, "override"):
        typing.override = lambda method: method  # type: ignore[attr-defined]


def evaluate(config: Config, folder: Path) -> Verdict:
    """Check the recipe name and keys of a config."""
    if config.argv:
        return _check_command(config.argv)
    if not config.path.endswith((".yaml", ".yml")):
        return Verdict(None, "a command or program: its recipe would have to be built")
    import yaml

    sections = yaml.safe_load((folder / config.path).read_text()) or {}
    return _check_keys(
        f"{section}.{name}" for section, values in sections.items() if isinstance(values, dict) for name in values
    )


def _check_command(argv: Sequence[str]) -> Verdict:
    """Check the recipe and overrides of an exported command."""
    after = dict(itertools.pairwise(argv))
    recipe = after.get("--recipe", "")
    if recipe and recipe not in recipes():
        return Verdict(False, f"no recipe {recipe}")
    return _check_keys(
        word.partition("=")[0].lstrip("+~") for word in argv if "=" in word and not word.startswith("--")
    )


def _check_keys(named: Iterable[str]) -> Verdict:
    known = keys()
    sections = {key.partition(".")[0] for key in known} - set(RECIPE_SECTIONS)
    wrong = [key for key in named if key.partition(".")[0] in sections and ".".join(key.split(".")[:2]) not in known]
    wrong = [key for key in wrong if not key.partition(".")[2].startswith("_")]
    return Verdict(not wrong, f"no field {', '.join(wrong)}" if wrong else "")


@functools.cache
def recipes() -> frozenset[str]:
    """Return all recipe names found in its source files; nothing is imported."""
    from megatron import bridge

    root = Path(next(iter(bridge.__path__)))
    texts = (path.read_text() for part in ("recipes", "perf_recipes") for path in (root / part).rglob("*.py"))
    return frozenset(name for text in texts for name in re.findall(r"\b(\w+_config)\b", text))


@functools.cache
def keys() -> Mapping[str, Any]:
    """Return the fields of every config section with their defaults."""
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
        f"{section}.{one.name}": default_of(one)
        for section, config_class in sections.items()
        for one in fields(config_class)
        if one.init
    }


def _classes(hint: Any) -> Iterator[Any]:
    inner = typing.get_args(hint)
    if inner:
        for one in inner:
            yield from _classes(one)
    elif isinstance(hint, type):
        yield hint


REFERENCE = ReferenceParser(
    framework="megatron-bridge",
    needs="megatron-bridge==0.6.2",
    module="megatron.bridge.training.config",
    evaluate=evaluate,
    prepare=prepare,
    runs_code="recipe names, and names and defaults of the fields of its config sections; nothing is built",
    keys=keys,
    detected_later={
        "megatron-bridge.two-formats": "rejected by validate(), which needs GPUs",
        "moe.experts-divide": "rejected when the model is built",
        "dispatch.overlap-interleaving": "rejected when the model's config is finalized",
        "graphs.router-recompute": "rejected when the model's config is finalized",
        "offload.": "rejected when the optimizer config is validated",
    },
    not_config_errors={"no recipe": "the recipe was added or renamed after this version"},
    other_keys={
        "--": "a flag of the runner",
        "dataset.": "fields of other dataset classes",
        "mixed_precision": "a section that may be a preset name",
        "model.freeze_": "fields of vision-language models",
    },
)
