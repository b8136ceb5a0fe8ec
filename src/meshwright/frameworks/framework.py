"""What a framework is, and what a file is while it is being read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from msgspec import UNSET

from meshwright.clusters import Cluster
from meshwright.frameworks.types import Settings, SourcedValue
from meshwright.models import ModelSpec
from meshwright.recipes.case import Case
from meshwright.recipes.key_maps import config_keys
from meshwright.recipes.types import Engine, Goal, Recipe
from meshwright.rules.rule import Finding, Severity

if TYPE_CHECKING:
    from meshwright.frameworks.shell import LaunchCommand, Script

Format = Literal["yaml", "toml", "json", "python", "shell"]


class Content(msgspec.Struct, frozen=True):
    """A file as its format says, before anybody knows whose it is."""

    path: str  # as the user names it
    text: str
    format: Format
    folder: Path | None = None  # where files that it names are looked for; None: nowhere
    settings: Settings = {}  # of YAML, TOML and JSON
    script: Script | None = None  # of shell scripts
    launches: tuple[LaunchCommand, ...] = ()  # the trainings a script starts

    def top_level_keys(self) -> frozenset[str]:
        """The names at the top of a structured file."""
        return frozenset(key.split(".")[0].split("[")[0] for key in self.settings)


class GpuRequest(msgspec.Struct, frozen=True):
    """GPUs as a file names them: any part may be unknown."""

    nodes: int | None = None
    gpus_per_node: int | None = None
    world_size: int | None = None  # where only the total is said
    gpu: str = ""
    source: SourcedValue | None = None  # where

    @property
    def count(self) -> int | None:
        """All GPUs, when that is known."""
        if self.world_size is not None:
            return self.world_size
        return self.nodes * self.gpus_per_node if self.nodes and self.gpus_per_node else None


class ParsedConfig(msgspec.Struct, frozen=True):
    """What a framework makes of a file: their settings by their canonical keys, and the head of a recipe."""

    settings: Settings
    name: str = "config"
    model: ModelSpec | None = None
    goal: Goal = "pretrain"
    base: Recipe | None = None  # the shipped recipe that the file starts from; their defaults are then its values
    gpu_request: GpuRequest = GpuRequest()
    env: Settings = {}
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()  # what was assumed, as sentences
    files: tuple[str, ...] = ()  # that were read
    field_values: Mapping[
        str, Any
    ] = {}  # values of our own fields that follow from the file and that no table row says
    mappable: Settings | None = None  # as the table reads them, where some are right there and have no words here
    engine: Engine | None = None  # what runs it, where that depends on the file
    unknown_fields: tuple[str, ...] = ()  # our fields that the program sets, not the file: judged whatever their value
    suppressed_rules: tuple[str, ...] = ()  # rules of ours that a setting without words here answers


class Problem(msgspec.Struct, frozen=True):
    """What a framework's own rule found."""

    message: str
    fix: tuple[str, ...] = ()  # in their spelling
    key: str = ""  # their key at fault; the rule's first said key when empty
    severity: Severity | None = None  # when it differs from the rule's


class RuleContext(msgspec.Struct, frozen=True):
    """A file as a framework's own rules see it."""

    framework: Framework
    parsed: ParsedConfig
    recipe: Recipe
    case: Case | None  # None when the file does not say which model it trains
    cluster: Cluster | None  # None when nobody has said the GPUs

    def get(self, key: str, otherwise: Any = None) -> Any:
        """The value of one of their keys: as said, or their default; `otherwise` when neither is known."""
        said = self.parsed.settings.get(key)
        if said is not None:
            return otherwise if said.unresolved else said.value
        word = config_keys(self.framework.key_map).get(key)
        return otherwise if word is None or word.default is UNSET else word.default

    def is_set(self, key: str) -> bool:
        """Whether the file says this key."""
        return key in self.parsed.settings

    def keys_under(self, prefix: str) -> list[str]:
        """The keys the file says below a prefix, such as `compile`."""
        return [key for key in self.parsed.settings if key == prefix or key.startswith((f"{prefix}.", f"{prefix}["))]


class FrameworkRule(msgspec.Struct, frozen=True):
    """A check of another framework's file that our own rules cannot make, in their words."""

    id: str  # framework.what-is-wrong
    severity: Severity
    keys: tuple[str, ...]  # their keys that it speaks of
    check: Callable[[RuleContext], Iterable[Problem] | Problem | None]
    symptom: str  # what the user would see there
    cause: str
    supersedes: tuple[str, ...] = ()  # rules of ours that say the same less exactly; untold where this one speaks


class Framework(msgspec.Struct, frozen=True):
    """Another framework's config language."""

    name: str  # as typed: megatron-lm
    title: str
    version: str  # of the framework that it speaks
    engine: Engine
    inputs: tuple[str, ...]  # what can be read, as words for the docs
    detect: Callable[[Content], int]  # 0: not at all; the surest wins
    parse: Callable[[Content], ParsedConfig]
    format_setting: Callable[[str, Any], str]  # one setting as it stands in their file or command
    formatter_for: Callable[[Content], Callable[[str, Any], str]] | None = (
        None  # where that is not the same in every file
    )
    display_key: Callable[[str], str] = lambda key: key  # one of their keys as a user types it
    rules: tuple[FrameworkRule, ...] = ()
    complete: Callable[[Recipe, ParsedConfig, Cluster], Recipe] | None = (
        None  # fields that follow from the number of GPUs
    )
    derived_fields: tuple[str, ...] = ()  # fields of ours that cannot be said there: they follow from others
    rejects_unknown: Callable[[str], bool] = lambda key: (
        True
    )  # whether an unknown key of theirs is an error or just unread
    is_extra_key: Callable[[str], bool] = lambda key: False  # keys that exist there and that the table leaves out

    @property
    def key_map(self) -> str:
        """The name of its table of words."""
        return self.name.replace("-", "_")
