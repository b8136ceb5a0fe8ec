"""Our own engine as a program that schedulers start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from meshwright.clusters import Cluster, cluster
from meshwright.errors import InputError
from meshwright.frameworks.types import Program
from meshwright.launch.build_job import SHIPPING, LaunchRequest
from meshwright.launch.job import find_way
from meshwright.recipes import files, overrides
from meshwright.recipes.types import Recipe
from meshwright.rules import Finding

Judged = tuple[Recipe, Cluster, tuple[Finding, ...]]


class Training(msgspec.Struct, frozen=True):
    """What `meshwright train` is told, wherever it runs."""

    target: str  # a recipe's name or file
    dataset: str | None = None
    model: str | None = None
    tiny: bool = False
    out: str | None = None
    overrides: Sequence[str] = ()

    @property
    def settled(self) -> list[str]:
        """The overrides that are known now; a micro batch of `auto` is found when the run starts."""
        known = [text for text in self.overrides if not text.replace(" ", "").endswith("micro_batch_size=auto")]
        return known + ([f"data.dataset={self.dataset}"] if self.dataset else [])


def asked(
    training: Training, on: str, recipe: Recipe, gpus: str | int | None, judge: Callable[[], Judged]
) -> LaunchRequest:
    """A training with what the rules say of it; a tiny one is of another size, and judged when it starts."""
    read_here = files.is_file(training.target)
    ships = read_here and find_way(on) in SHIPPING
    target = Path(training.target).name if ships else str(Path(training.target).resolve())
    found, where, findings = _tiny(training, recipe, gpus) if training.tiny else judge()
    return LaunchRequest(
        recipe=found,
        cluster=where,
        engine="meshwright",
        program=program(training, target if read_here else training.target),
        files={target: _text(training.target)} if ships else {},
        findings=findings,
        keeps=not training.tiny or training.out is not None,
    )


def program(training: Training, target: str) -> Program:
    """`meshwright train` of a recipe, with what was asked for."""
    options = [
        word
        for option, value in (("--model", training.model), ("--dataset", training.dataset), ("--out", training.out))
        if value
        for word in (option, value)
    ]
    tiny = ["--tiny"] if training.tiny else []
    return Program(argv=("-m", "meshwright", "train", target, *options, *tiny, *training.overrides))


def _tiny(training: Training, recipe: Recipe, gpus: str | int | None) -> Judged:
    if gpus is None:
        reason = "a tiny run has no GPUs of its own: say how many ranks"
        raise InputError(reason, field="--gpus", fix=("--gpus 2", "--gpus 2x1xH100 (two nodes of one)"))
    return overrides.apply(recipe, training.settled), cluster(str(gpus)), ()


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InputError(f"cannot be read: {error}", field="recipe", value=path) from None
