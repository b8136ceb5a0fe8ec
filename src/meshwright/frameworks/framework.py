"""Types of the framework readers: file contents, parsed configs, rules and the framework itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec
from msgspec import UNSET

from meshwright.clusters import Cluster
from meshwright.frameworks.types import ProgramArguments, Settings, SourcedValue
from meshwright.models import ModelSpec
from meshwright.recipes.case import Case
from meshwright.recipes.key_maps import config_keys
from meshwright.recipes.types import Engine, Goal, Recipe
from meshwright.rules.rule import Finding, Severity

if TYPE_CHECKING:
    from meshwright.config_io import RepeatedKey
    from meshwright.frameworks.shell import LaunchCommand, Script

Format = Literal["yaml", "toml", "json", "python", "shell"]


class Content(msgspec.Struct, frozen=True):
    """A file parsed by its format, before its framework is known."""

    path: str  # as the user named it
    text: str
    format: Format
    folder: Path | None = None  # where referenced files are looked up; None: not allowed
    settings: Settings = {}  # for YAML, TOML and JSON
    script: Script | None = None  # for shell scripts
    launches: tuple[LaunchCommand, ...] = ()  # training programs that a script starts
    beside: Mapping[str, str] = {}  # texts of files in its folder that are not written yet
    assigned: Mapping[str, str | None] = {}  # by fixes at the end of a Python file, as text; None: unset
    repeated: tuple[RepeatedKey, ...] = ()  # keys that a YAML file sets twice

    @property
    def all_text(self) -> str:
        """The text of the file, and of a script also of those that it sources or starts."""
        return "\n".join((self.text, *self.script.texts)) if self.script and self.script.texts else self.text

    def top_level_keys(self) -> frozenset[str]:
        """Return the top-level keys of a structured file."""
        return frozenset(key.split(".")[0].split("[")[0] for key in self.settings)


class GpuRequest(msgspec.Struct, frozen=True):
    """GPUs that a file requests; any part may be unknown."""

    nodes: int | None = None
    gpus_per_node: int | None = None
    world_size: int | None = None  # if only the total is given
    gpu: str = ""
    source: SourcedValue | None = None  # the setting they come from
    is_example: bool = False  # of a command in a comment, which may be started on more nodes

    @property
    def count(self) -> int | None:
        """Total number of GPUs, if known."""
        if self.world_size is not None:
            return self.world_size
        return self.nodes * self.gpus_per_node if self.nodes and self.gpus_per_node else None

    def text(self, gpu: str) -> str:
        """Return the GPUs as --gpus takes them, of this type: 4x8xH100, or 8xH100 on one node; empty if unknown."""
        count, size = self.count, self.gpus_per_node
        if count is None:
            return ""
        several = bool(size) and count > (size or 0) and count % (size or 1) == 0
        return f"{count // (size or 1)}x{size}x{gpu}" if several else f"{count}x{gpu}"


OF_PROGRAM = ("data.", "optimizer.", "schedule.", "train.", "checkpoint.", "peft.")
"""Fields that a training program sets where its config covers sharding and precision only."""
NOT_ESTIMATED = "memory is not estimated"  # note of a file that trains a known model in a way that is not estimated


class ParsedConfig(msgspec.Struct, frozen=True):
    """A file parsed by its framework: settings by canonical key, and the recipe's model and goal."""

    settings: Settings
    name: str = "config"
    model: ModelSpec | None = None
    goal: Goal = "pretrain"
    goal_open: bool = False  # the file does not name the goal: `goal` is assumed
    base: Recipe | None = None  # shipped recipe that the file derives from; its values are then the defaults
    gpu_request: GpuRequest = GpuRequest()
    job_gpus: GpuRequest = GpuRequest()  # of the SLURM job, if its launcher is given numbers of its own
    env: Settings = {}
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()  # assumptions, as sentences
    files: tuple[str, ...] = ()  # that were opened
    field_values: Mapping[str, Any] = {}  # recipe fields derived from the file that no key-map row covers
    mappable: Settings | None = None  # `settings` without valid values that have no counterpart here; None: all of them
    engine: Engine | None = None  # if it depends on the file
    unknown_fields: tuple[
        str, ...
    ] = ()  # recipe fields set by the training program, not the file: checked for all values
    assumed: tuple[
        str, ...
    ] = ()  # recipe fields that the file leaves open, with assumed values: no error rests on them
    vocabulary: int | None = None  # that a placeholder tokenizer gives the model while this file is run
    suppressed_rules: tuple[str, ...] = ()  # rules of ours that do not apply to this file
    program: ProgramArguments = ProgramArguments()  # of the Trainer and of programs like it
    version: str = ""  # of the framework, if its exports have a program for each of several versions
    possible_keys: frozenset[str] = frozenset()  # that a script sets under a condition known only at run time
    stated_with: Mapping[str, str] = {}  # key that follows from another one → the key that the file has
    entry: str = ""  # name of the training program, if a script starts one
    referenced: ParsedConfig | None = None  # the DeepSpeed config that a config of Accelerate names

    def leaves_to_program(self, field: str) -> bool:
        """Return whether a training program that was not read sets this field, unless the file does."""
        return field in self.unknown_fields or (bool(self.unknown_fields) and field.startswith(OF_PROGRAM))


class Problem(msgspec.Struct, frozen=True):
    """A violation of a framework's own rule."""

    message: str
    fix: tuple[str, ...] = ()  # in the framework's syntax
    key: str = ""  # the framework's key; empty: the first of the rule's keys that is set
    severity: Severity | None = None  # if it differs from the rule's


class RuleContext(msgspec.Struct, frozen=True):
    """The input of a framework's own rules."""

    framework: Framework
    parsed: ParsedConfig
    recipe: Recipe
    case: Case | None  # None: the model is unknown
    cluster: Cluster | None  # None: the GPUs are unknown

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, else the framework's default, else `default`."""
        setting = self.parsed.settings.get(key)
        if setting is not None:
            return default if setting.unresolved else setting.value
        config_key = config_keys(self.framework.key_map).get(key)
        return default if config_key is None or config_key.default is UNSET else config_key.default

    def is_set(self, key: str) -> bool:
        """Return whether the file sets this key."""
        return key in self.parsed.settings

    def written(self, key: str, value: Any) -> str:
        """Return a setting as this file has it, for a fix."""
        return self.framework.format_setting(key, value)

    def keys_under(self, prefix: str) -> list[str]:
        """Return the keys the file sets below a prefix, such as `compile`."""
        return [key for key in self.parsed.settings if key == prefix or key.startswith((f"{prefix}.", f"{prefix}["))]


Check = Callable[[RuleContext], Iterable[Problem] | Problem | None]


class FrameworkRule(msgspec.Struct, frozen=True):
    """A framework-specific check that our own rules cannot express."""

    id: str  # framework.what-is-wrong
    severity: Severity
    keys: tuple[str, ...]  # the framework's keys it checks
    check: Check
    symptom: str  # what the user would see
    cause: str
    supersedes: tuple[str, ...] = ()  # rules of ours that report the same problem less precisely

    def findings(self, ctx: RuleContext) -> Iterator[Finding]:
        """Run the check and yield its problems as findings with their file and line."""
        found = self.check(ctx)
        for problem in () if found is None else (found,) if isinstance(found, Problem) else found:
            key = problem.key or next((key for key in self.keys if ctx.is_set(key)), self.keys[0] if self.keys else "")
            setting = ctx.parsed.settings.get(key) or ctx.parsed.env.get(key) or ctx.parsed.program.given.get(key)
            files = ctx.parsed.files
            yield Finding(
                self.id,
                problem.severity or self.severity,
                key,
                problem.message,
                problem.fix,
                file=setting.file if setting else files[0] if files else "",
                line=setting.line if setting else 0,
            )


def rule_of(
    framework: str,
    name: str,
    keys: str,
    check: Check,
    symptom: str,
    cause: str,
    severity: Severity = "error",
    supersedes: tuple[str, ...] = (),
) -> FrameworkRule:
    """Return a rule of a framework with its keys in one text."""
    return FrameworkRule(f"{framework}.{name}", severity, tuple(keys.split()), check, symptom, cause, supersedes)


class ComputedDifference(NamedTuple):
    """A key with which a file's model computes something else than the published model."""

    key: str
    found: Any
    expected: Any
    also: Mapping[str, Any]  # further keys of the fix
    of_weights: bool  # matters only to weights that were trained with it


class Framework(msgspec.Struct, frozen=True):
    """A supported framework: how its configs are detected, parsed, checked and written."""

    name: str  # on the command line: megatron-lm
    title: str
    version: str  # of the framework
    engine: Engine
    inputs: tuple[str, ...]  # supported inputs, for the docs
    detect: Callable[[Content], int]  # 0: not this framework; the highest score wins
    parse: Callable[[Content], ParsedConfig]
    format_setting: Callable[[str, Any], str]  # one setting in the framework's syntax
    formatter_for: Callable[[Content], Callable[[str, Any], str]] | None = None  # if the syntax depends on the file
    display_key: Callable[[str], str] = lambda key: key  # a key as users write it
    rules: tuple[FrameworkRule, ...] = ()
    complete: Callable[[Recipe, ParsedConfig, Cluster], Recipe] | None = (
        None  # sets fields derived from the number of GPUs
    )
    derived_fields: tuple[str, ...] = ()  # recipe fields without a key: derived from others
    batch_follows: tuple[str, ...] = ()  # recipe fields from which the global batch follows if a file does not set it
    accumulation_key: str = ""  # key with the micro batches per step, if no key sets the global batch
    rejects_unknown: Callable[[str], bool] = lambda key: True  # whether an unknown key is an error or ignored
    other_names: Mapping[str, str] = {}  # keys of other libraries that users write → this framework's key
    is_extra_key: Callable[[str], bool] = lambda key: False  # keys that exist but are not in the key map
    keys_of: str = ""  # the framework whose key map it shares, if it has none of its own
    own_overrides: Callable[[Content, list[str]], tuple[Content, list[str]]] = lambda content, texts: (content, texts)
    """The file with the overrides that are keys of the framework's own table, and the other overrides."""
    own_settings: Callable[[ParsedConfig, Mapping[str, Any], Recipe], Mapping[str, Any]] = (
        lambda parsed, settings, recipe: settings
    )
    """Settings of its key map as keys of its own files, where those differ; the recipe is what they make."""
    readable_data: Callable[[Recipe], tuple[Recipe, Mapping[str, str]]] = lambda recipe: (recipe, {})
    """The recipe with local datasets that the framework reads, and the converted files that it then names."""

    computed_differences: Callable[[ParsedConfig, ModelSpec, Recipe], Iterable[ComputedDifference]] = (
        lambda parsed, model, recipe: ()
    )
    """What a file's model computes differently from a published one, beyond the fields of every framework."""

    @property
    def key_map(self) -> str:
        """Module name of its key map in meshwright.recipes.key_maps."""
        return (self.keys_of or self.name).replace("-", "_")
