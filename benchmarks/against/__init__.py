"""Compare our readers with the frameworks' own parsers: accepted and rejected configs, keys and defaults."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import Field, dataclass, field
from pathlib import Path
from typing import Any, Literal

from meshwright.recipes.types import Recipe

MISSING = ...
"""The default of a key that is required or depends on other settings."""


@dataclass(frozen=True)
class Config:
    """One config, as passed to a framework's parser."""

    name: str
    origin: Literal["case", "export", "draw"]
    path: str  # its file name
    text: str
    gpus: str | None = None  # such as 2x8xH100
    world: int | None = None  # None: the number of GPUs is unknown
    model: str | None = None
    files: Mapping[str, str] = field(default_factory=dict)  # exported files by name
    argv: tuple[str, ...] = ()  # exported program: what follows torchrun
    env: Mapping[str, str] = field(default_factory=dict)
    recipe: Recipe | None = None  # the exported recipe


@dataclass(frozen=True)
class Verdict:
    """The result of the framework's own code for a config."""

    accepts: bool | None  # None: it could not be run here
    reason: str = ""  # its error, or why it was not run


@dataclass(frozen=True)
class ReferenceParser:
    """A framework version whose own parser and checks run here, without GPUs."""

    framework: str  # our name for it
    needs: str  # pip requirement, such as torchtitan==0.2.2
    module: str  # importing it shows that it is installed
    evaluate: Callable[[Config, Path], Verdict]  # the folder contains the config and other exported files
    runs_code: str  # which of its code runs, as a sentence
    prepare: Callable[[], None] = lambda: None  # runs before its modules are imported
    random_configs: Callable[[], Iterable[Config]] = tuple  # random configs with a fixed seed
    accepts_config: Callable[[Config], bool] = lambda config: True  # whether the config is for this version
    exported: str | None = None  # exported file to use; None: the first
    keys: Callable[[], Mapping[str, Any]] | None = None  # its keys as in our key map, with defaults
    covers_key: Callable[[str], bool] = lambda key: True  # which rows of our key map this version covers
    detected_later: Mapping[str, str] = field(default_factory=dict)
    """Why its parser misses a finding of ours, by prefix of the rule id."""
    not_config_errors: Mapping[str, str] = field(default_factory=dict)
    """Why an error is not caused by the config, by a text in the error."""
    other_defaults: Mapping[str, str] = field(default_factory=dict)
    """Why our default of a key differs from its class."""
    other_keys: Mapping[str, str] = field(default_factory=dict)
    """Why a key is in one list only, by prefix of its name."""


def default_of(one: Field[Any]) -> Any:
    """Return the default of a dataclass field if it is a plain value, else MISSING."""
    plain = one.default is not NO_DEFAULT and isinstance(one.default, bool | int | float | str | None)
    return one.default if plain else MISSING
