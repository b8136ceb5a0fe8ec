"""The outcome of a check, whatever words the file was written in."""

from __future__ import annotations

import msgspec

from meshwright.clusters import Cluster
from meshwright.costs import Estimate
from meshwright.models import ModelSpec
from meshwright.recipes.types import Recipe
from meshwright.rules import Finding


class UnresolvedValue(msgspec.Struct, frozen=True):
    """A value that only running something would tell."""

    key: str
    text: str
    reason: str
    file: str
    line: int


class CheckResult(msgspec.Struct, frozen=True):
    """What was found in a recipe or in a file of any framework."""

    framework: str
    version: str  # of the framework
    engine: str
    file: str  # empty for a shipped recipe
    recipe: Recipe
    model: ModelSpec | None  # None: nobody said it
    cluster: Cluster | None  # None: nobody said the GPUs
    findings: tuple[Finding, ...]
    estimate: Estimate | None  # None when the model or the GPUs are not known
    unresolved: tuple[UnresolvedValue, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing stands against starting it."""
        return not any(f.severity == "error" for f in self.findings)


class RecipeCheckResult(CheckResult, frozen=True):
    """What was found in a recipe of ours, whose model and GPUs are always known."""

    model: ModelSpec
    cluster: Cluster
    estimate: Estimate
