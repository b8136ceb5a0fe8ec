"""Verification cards: what was tried of a recipe, with what outcome, when, and with which versions.

A card is a JSON file. It carries a fingerprint of the recipe and its model's facts, so that anybody can tell whether
it still speaks of the recipe that is shipped.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import msgspec

from meshwright.recipes import index
from meshwright.recipes.case import model_of
from meshwright.recipes.types import Recipe

CHECKS = ("rules", "estimate", "dryrun", "tiny")
# What is only told about a model: other words for the same facts make no card old.
TOLD = ("source", "published_total", "published_active", "aliases")
FINGERPRINT_DIGITS = 16

CheckName = Literal["rules", "estimate", "dryrun", "tiny"]
Outcome = Literal["ok", "failed", "not applicable"]
Figures = TypeVar("Figures")


class Judged(msgspec.Struct, frozen=True):
    """What the rules say of the recipe on its own cluster: names of rules by severity."""

    findings: dict[str, tuple[str, ...]]


class Estimated(msgspec.Struct, frozen=True):
    """What the cost model says of the recipe on its own cluster."""

    fits: bool
    memory_gib: dict[str, float]  # by part, total and capacity
    step_s: float
    tokens_per_s_per_gpu: float
    mfu: float
    band: dict[str, float]  # per cent, of the step and of memory


class Sent(msgspec.Struct, frozen=True):
    """All collectives of one kind over one axis in a step of the worst rank."""

    axis: str
    kind: str
    ranks: int
    count: int
    gib: float


class Traced(msgspec.Struct, frozen=True):
    """One rank that the dry run executed."""

    rank: int
    stands_for: tuple[int, ...]  # pipeline ranks
    allocated_gib: float
    reserved_gib: float
    exact: bool
    traced: str


class Executed(msgspec.Struct, frozen=True):
    """What the dry run found at full size on the recipe's own cluster; of the rank that needs most."""

    world: int
    fits: bool
    worst: int  # rank
    pp_rank: int  # of that rank
    memory_gib: dict[str, float]  # by part, overhead, total and capacity
    reserved_gib: float
    peak_phase: str
    peak_at: str
    flops: dict[str, float]
    collectives: tuple[Sent, ...]
    ranks: tuple[Traced, ...]
    cpu_s: float
    difference_gib: dict[str, float]  # to the estimate of the same pipeline rank, part by part


class Trained(msgspec.Struct, frozen=True):
    """A few steps at laptop size on two processes, against the same steps on one."""

    layout: str
    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    loss_difference: float | None  # the largest of a step, relative; None where one of two values is no number
    norm_difference: float | None
    tolerance: float
    learns: bool


class Check(msgspec.Struct, Generic[Figures], frozen=True):
    """One thing that was tried: its outcome, the reason where it is not ok, and the figures it gave."""

    outcome: Outcome
    date: str
    versions: dict[str, str]
    seconds: float  # it took
    reason: str = ""
    figures: Figures | None = None


class Checks(msgspec.Struct, frozen=True):
    """What was tried; None where it was not yet."""

    rules: Check[Judged] | None = None
    estimate: Check[Estimated] | None = None
    dryrun: Check[Executed] | None = None
    tiny: Check[Trained] | None = None


class VerificationReport(msgspec.Struct, frozen=True):
    """All that was tried of one recipe."""

    recipe: str
    family: str
    model: str
    goal: str
    cluster: str
    fingerprint: str
    withdrawn: str = ""  # why nobody should use it, where a check failed and the recipe cannot be mended; by hand
    checks: Checks = Checks()

    @property
    def failed(self) -> list[str]:
        """The checks that failed."""
        return [name for name in CHECKS if (check := self.check(name)) is not None and check.outcome == "failed"]

    @property
    def missing(self) -> list[str]:
        """The checks that were not tried yet."""
        return [name for name in CHECKS if self.check(name) is None]

    @property
    def date(self) -> str:
        """The day of the latest check."""
        return max((check.date for name in CHECKS if (check := self.check(name)) is not None), default="")

    def check(self, name: str) -> Check[Any] | None:
        """What was tried under this name."""
        found: Check[Any] | None = getattr(self.checks, name)
        return found

    def with_check(self, name: str, check: Check[Any]) -> VerificationReport:
        """The card with one check made anew; one that found the same as before keeps its day."""
        known = self.check(name)
        if known is not None and _undated(known) == _undated(check):
            return self
        return msgspec.structs.replace(self, checks=msgspec.structs.replace(self.checks, **{name: check}))


def _undated(check: Check[Any]) -> Check[Any]:
    return msgspec.structs.replace(check, date="", seconds=0.0)


def fingerprint(recipe: Recipe) -> str:
    """A short name for all values of a recipe and all facts of its model."""
    model = {name: value for name, value in msgspec.to_builtins(model_of(recipe)).items() if name not in TOLD}
    text = json.dumps({"recipe": msgspec.to_builtins(recipe), "model": model}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:FINGERPRINT_DIGITS]


def new_card(name: str) -> VerificationReport:
    """The card of a recipe of which nothing was tried yet."""
    recipe = index.load(name)
    return VerificationReport(
        recipe.name, index.family(name), recipe.model, recipe.goal, recipe.cluster, fingerprint(recipe)
    )


def card_of(folder: Path, name: str) -> VerificationReport:
    """The card of a recipe; an empty one where there is none or it is older than the recipe."""
    card = read(folder, name)
    return new_card(name) if card is None or is_stale(card) else card


def is_stale(card: VerificationReport) -> bool:
    """Whether the recipe or its model was changed after the card was made."""
    return card.fingerprint != fingerprint(index.load(card.recipe))


def is_fresh(check: Check[Any] | None, versions: dict[str, str]) -> bool:
    """Whether a check need not be made again: it did not fail, and nothing it ran on has another version."""
    return check is not None and check.outcome != "failed" and check.versions == versions


def path_of(folder: Path, name: str) -> Path:
    """The file of a recipe's card."""
    return folder / f"{name}.json"


def read(folder: Path, name: str) -> VerificationReport | None:
    """The card of a recipe as it lies in the folder; None where there is none."""
    path = path_of(folder, name)
    return msgspec.json.decode(path.read_bytes(), type=VerificationReport) if path.exists() else None


def read_all(folder: Path) -> list[VerificationReport]:
    """Every card of a folder, by name."""
    return [msgspec.json.decode(path.read_bytes(), type=VerificationReport) for path in sorted(folder.glob("*.json"))]


def write(folder: Path, card: VerificationReport) -> Path:
    """Writes a card; whoever reads meanwhile, or is left by an interruption, finds the old one or the new one."""
    folder.mkdir(parents=True, exist_ok=True)
    path = path_of(folder, card.recipe)
    text = msgspec.json.format(msgspec.json.encode(card), indent=1) + b"\n"
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=".card-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return path
