"""Compare our readers with the frameworks' own parsers: accepted and rejected configs, keys and defaults."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from meshwright.recipes.types import Recipe

MISSING = ...
"""The default of a key whose value there depends on something else, or that must be said."""


@dataclass(frozen=True)
class Config:
    """One config as a framework's parser is handed it."""

    name: str
    origin: Literal["case", "export", "draw"]
    path: str  # its file name
    text: str
    gpus: str | None = None  # as typed: 2x8xH100
    world: int | None = None  # None: neither the file nor the case says how many GPUs there are
    model: str | None = None
    files: Mapping[str, str] = field(default_factory=dict)  # what export wrote, by file name
    words: tuple[str, ...] = ()  # what export says follows torchrun
    env: Mapping[str, str] = field(default_factory=dict)
    recipe: Recipe | None = None  # what was exported


@dataclass(frozen=True)
class Verdict:
    """What the framework's own code says of a config."""

    accepts: bool | None  # None: it was not asked, because it cannot be here
    reason: str = ""  # its error, or why it was not asked


@dataclass(frozen=True)
class Framework:
    """A version of a framework whose own code judges configs here, without GPUs."""

    framework: str  # ours
    needs: str  # such as torchtitan==0.2.2
    module: str  # whose import shows that it is there
    judge: Callable[[Config, Path], Verdict]  # the folder holds the config and what else export wrote
    asks: str  # which of its code is asked, as a sentence
    prepare: Callable[[], None] = lambda: None  # before its modules are imported
    draws: Callable[[], Iterable[Config]] = tuple  # more configs of this version, drawn from a seed
    takes: Callable[[Config], bool] = lambda config: True  # whether the config is in this version's words
    exported: str | None = None  # which of the exported files is handed over; None: the first
    keys: Callable[[], Mapping[str, Any]] | None = None  # its keys as our table spells them, with their defaults
    speaks: Callable[[str], bool] = lambda key: True  # which rows of our table are of this version and of these keys
    later: Mapping[str, str] = field(default_factory=dict)
    """Why its parser does not see what a rule of ours tells: by the beginning of the rule's id."""
    beyond: Mapping[str, str] = field(default_factory=dict)
    """Why a refusal of theirs is none of a config's: by a text in their error."""
    other_defaults: Mapping[str, str] = field(default_factory=dict)
    """Why our default of a key is not the one of their class."""
    other_keys: Mapping[str, str] = field(default_factory=dict)
    """Why a key stands in one list only: by the beginning of its name."""
