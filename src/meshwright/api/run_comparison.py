"""Compare finished or running trainings by their logs: settings that differ, losses, speed and memory."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from meshwright import doctor, file_access, json_text
from meshwright.api.responses import Part
from meshwright.display import Readable, Row, field_rows, plural, titled
from meshwright.doctor.formats.json_records import STEP
from meshwright.doctor.match_recipe import described, logged_model, same_model
from meshwright.doctor.reading import METRICS, TRAINER_STATE
from meshwright.doctor.run import Run, Step
from meshwright.doctor.run_stats import deviation, median_of
from meshwright.errors import InputError
from meshwright.frameworks.common import KEEP_ALL
from meshwright.models import ModelSpec
from meshwright.recipes.types import Recipe, field_value, recipe_fields

LOGS = (".log", ".out")
OWN_LINE = b'{"kind":'
MAX_LINE = 1 << 16
NOISE_LINES = 50  # at the end of a run, from which the noise of its loss is taken
FEW_VALIDATIONS = 6  # below, their noise is not known
SAME = 0.005  # of a validation loss: a smaller difference needs repeated runs
SIGMAS = 2.0


class ComparedRun(Part, frozen=True, kw_only=True):
    """One run of a comparison; None where its log has no such figure."""

    name: str
    rank: int | None  # None if the runs cannot be ranked
    recipe: str | None
    where: str
    steps: int
    total_steps: int | None
    first_loss: float | None
    last_loss: float | None  # None also if it is NaN or infinite
    best_validation_loss: float | None
    best_validation_step: int | None
    last_validation_loss: float | None
    validation: str | None  # the data of the validation
    step_s: float | None
    tokens_per_s_per_gpu: float | None
    mfu: float | None
    memory_gib: float | None
    seconds: float | None  # of all steps together


class RunSide(Readable, msgspec.Struct, frozen=True):
    """A run's figures and its recipe, if its log has it."""

    figures: ComparedRun
    recipe: Recipe | None
    batch_noise: float | None = None  # of the training loss between lines
    validation_noise: float | None = None  # of the validation loss between validations
    changed: Mapping[str, str] = {}  # recipe fields that a resume changed, with both values in words
    model: ModelSpec | None = None  # that its log names or describes

    @property
    def name(self) -> str:
        """Folder or log of the run, as it was named."""
        return self.figures.name

    @property
    def rank(self) -> int | None:
        """1 for the best run; None if the runs cannot be ranked."""
        return self.figures.rank

    def summary(self) -> Sequence[Row]:
        """Return the figures of the run."""
        return field_rows(self.figures)

    @property
    def line(self) -> str:
        """The run on one line: rank, name, length, losses and speed."""
        one = self.figures
        figures = {
            "last loss": one.last_loss,
            "best validation loss": one.best_validation_loss,
            "s per step": one.step_s,
            "tokens/s/GPU": one.tokens_per_s_per_gpu,
            "GiB": one.memory_gib,
        }
        known = [f"{name} {value:,.4g}" for name, value in figures.items() if value is not None]
        return f"{f'{one.rank}. ' if one.rank else ''}{one.name}: {', '.join([plural(one.steps, 'step'), *known])}"


class RunComparison(Readable, msgspec.Struct, frozen=True):
    """Runs in the order of the request, and ranked by loss."""

    sides: tuple[RunSide, ...]
    of: Literal["runs"] = "runs"

    @property
    def ranked(self) -> tuple[RunSide, ...]:
        """The runs, best first; empty if their losses cannot be compared, which the answer explains."""
        known = [one for one in self.sides if one.rank is not None]
        return tuple(sorted(known, key=lambda one: one.rank or 0))

    @property
    def answer(self) -> str:
        """Which run is best and by what, in a sentence or two."""
        return answer(self.sides)

    @property
    def differences(self) -> list[Difference]:
        """The recipe fields whose values differ; empty also if a log does not have its recipe."""
        return run_differences(self.sides)

    def summary(self) -> list[Row]:
        """Return the runs with their figures, what differs between them, and the answer."""
        differ = [f"{one.field}: {' | '.join(map(str, one.values))}" for one in self.differences]
        shown = self.ranked or self.sides
        return [*titled("Runs", [one.line for one in shown]), *titled("Differ", differ), ("Result", self.answer)]


class Difference(Part, frozen=True, kw_only=True):
    """A recipe field whose value differs between targets, in their order."""

    field: str
    kind: str
    values: Sequence[Any]


class Validation(msgspec.Struct):
    """A validation line of metrics.jsonl."""

    kind: str
    step: int = 0
    loss: float | None = None
    validation: dict[str, Any] | None = None  # of a header: dataset and samples


def is_run(name: object) -> bool:
    """Return whether a name is the folder of a run, its metrics.jsonl or a log."""
    if not isinstance(name, str) or file_access.closed():
        return False
    path = Path(name).expanduser()
    if file_access.is_dir(path):
        return any((path / one).is_file() for one in (METRICS, TRAINER_STATE))
    with suppress(OSError, ValueError):
        if path.suffix == ".jsonl" and path.is_file():
            with path.open("rb") as file:
                first = file.readline(MAX_LINE)
                return first.startswith(OWN_LINE) or STEP.search(first.decode(errors="replace")) is not None
        return path.is_file() and (path.suffix in LOGS or path.name == TRAINER_STATE)
    return False


def compared_runs(names: Sequence[str]) -> tuple[RunSide, ...]:
    """Return the figures of runs, in the order of their names; the best is first by rank."""
    if len(set(names)) == 1:
        fix = (f"meshwright compare {names[0]} OTHER_RUN", f"meshwright doctor {names[0]}")
        raise InputError("is one run: name a second one to compare it with", field="target", value=names[0], fix=fix)
    sides = [_side(name) for name in dict.fromkeys(names)]
    key = _key(sides)
    order = [side.figures.name for side in sorted(sides, key=key)]
    return tuple(
        msgspec.structs.replace(
            one, figures=msgspec.structs.replace(one.figures, rank=order.index(one.figures.name) + 1)
        )
        if key is not _unknown
        else one
        for one in sides
    )


def not_all_runs(names: Sequence[object]) -> InputError:
    """Return the error for runs beside recipes or models."""
    other = next(str(one) for one in names if not is_run(one))
    runs = [str(one) for one in names if is_run(one)]
    reason = (
        f"is not a run, and {runs[0]} is one: compare runs with runs, or recipes and models with each other; "
        "evaluate --base measures the model that a run started from"
    )
    fix = ("use the --out folder of `meshwright train`", f"meshwright evaluate {shlex.quote(runs[0])} --base")
    return InputError(reason, field="target", value=other, fix=fix)


def _side(name: str) -> RunSide:
    run = doctor.read(Path(name).expanduser())
    stats = doctor.RunStats(run)
    steps = list({one.step: one for one in run.steps}.values())  # a repeated step counts as in the latest start
    losses = [one.loss for one in steps if one.loss is not None]
    validations, data = _validations(Path(name).expanduser())
    best = min(validations, key=lambda one: one[1], default=None)
    header = run.header
    figures = ComparedRun(
        name=name,
        rank=None,
        recipe=header.recipe_name or None,
        where=_where(run),
        steps=run.last_step,
        total_steps=header.total_steps,
        first_loss=next((loss for loss in losses if math.isfinite(loss)), None),
        last_loss=losses[-1] if losses and math.isfinite(losses[-1]) else None,
        best_validation_loss=best[1] if best else None,
        best_validation_step=best[0] if best else None,
        last_validation_loss=validations[-1][1] if validations else None,
        validation=data,
        step_s=stats.step_s,
        tokens_per_s_per_gpu=stats.tokens_per_s,
        mfu=median_of(one.mfu for one in stats.steady),
        memory_gib=stats.peak_gib,
        seconds=_seconds(steps),
    )
    return RunSide(
        figures,
        header.recipe,
        _noise(losses[-NOISE_LINES:]),
        _noise([loss for _, loss in validations], FEW_VALIDATIONS),
        _changed_on_resume(Path(name).expanduser()),
        logged_model(run),
    )


def _noise(values: Sequence[float], least: int = 5) -> float | None:
    """Return how much values vary around their trend, from second differences; None if there are too few."""
    finite = [value for value in values if math.isfinite(value)]
    return deviation(np.diff(finite, 2)) / math.sqrt(6) if len(finite) >= least else None


def _where(run: Run) -> str:
    ranks = run.header.world or 1
    if not run.header.on_gpu:
        return f"CPU, {ranks} rank{'s' * (ranks > 1)}"
    return run.header.gpus or run.header.gpu or "unknown GPUs"


def _seconds(steps: Sequence[Step]) -> float | None:
    timed = [one.seconds * one.covers for one in steps if one.seconds is not None]
    return sum(timed) if timed else None


def _validations(path: Path) -> tuple[list[tuple[int, float]], str | None]:
    """Return steps and losses of a run's validations, and the data they are over."""
    file = path / METRICS if path.is_dir() else path
    found: dict[int, float] = {}
    data = None
    with suppress(OSError), file.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if not line.startswith(('{"kind":"validation"', '{"kind":"header"')):
                continue
            with suppress(msgspec.DecodeError):
                one = json_text.decode(line, type=Validation)
                if one.validation:
                    data = f"{one.validation.get('dataset')}, {plural(one.validation.get('samples') or 0, 'sample')}"
                if one.kind == "validation" and one.loss is not None and math.isfinite(one.loss):
                    found[one.step] = one.loss
    return sorted(found.items()), data


def _by_validation(one: RunSide) -> float:
    return math.inf if one.figures.best_validation_loss is None else one.figures.best_validation_loss


def _by_loss(one: RunSide) -> float:
    return math.inf if one.figures.last_loss is None else one.figures.last_loss


def _unknown(one: RunSide) -> float:
    return 0.0


def _key(sides: Sequence[RunSide]) -> Callable[[RunSide], float]:
    """Return what ranks runs: the best validation loss over the same data, else the last loss on the same data."""
    validated = all(one.figures.best_validation_loss is not None for one in sides)
    if validated and len({one.figures.validation for one in sides}) == 1:
        return _by_validation
    return _by_loss if _same_data(sides) and any(one.figures.last_loss is not None for one in sides) else _unknown


def _why_no_validation(sides: Sequence[RunSide]) -> str:
    """Return why runs are not ranked by their validation losses."""
    without = [one.figures.name for one in sides if one.figures.best_validation_loss is None]
    if len(without) == len(sides):
        return "no run logged a validation loss"
    return f"{', '.join(without)} logged no validation loss" if without else "the validation losses are of other data"


def _same_data(sides: Sequence[RunSide]) -> bool:
    """Return whether all runs train on the same data; logs that do not name it are taken to."""
    known = [one.recipe.data for one in sides if one.recipe is not None]
    return all((one.dataset, one.blend) == (known[0].dataset, known[0].blend) for one in known)


def answer(sides: Sequence[RunSide]) -> str:
    """Return which run is best and by what, in a sentence or two."""
    key = _key(sides)
    if key is _unknown:
        why = "their losses are over different data" if not _same_data(sides) else "their logs have no loss"
        return f"The runs are not ranked: {why}. Validate all of them on one file: data.validation=FILE."
    best, second = (one.figures for one in sorted(sides, key=key)[:2])
    tied = [one.figures.name for one in sides if f"{key(one):.4g}" == f"{min(map(key, sides)):.4g}"]
    if len(tied) > 1:
        kind = "validation" if key is _by_validation else "last"
        text = f"{', '.join(tied)} have the same {kind} loss, the lowest: {min(map(key, sides)):.4g}."
    elif key is _by_validation:
        text = f"{best.name} has the lowest validation loss: {best.best_validation_loss:.4g} in step "
        text += f"{best.best_validation_step}, {second.name} {second.best_validation_loss:.4g}."
    else:
        other = "none or NaN" if second.last_loss is None else f"{second.last_loss:.4g}"
        text = f"{best.name} has the lowest last loss: {best.last_loss:.4g}, {second.name} {other}."
    if key is _by_loss:
        text += f" This is the training loss of one batch: {_why_no_validation(sides)}"
        text += "; train.eval_every=N with data.validation_part=0.1 validates."
    text += "" if len(tied) > 1 else _within_noise(sorted(sides, key=key)[:2], key is _by_validation)
    return text + _other_models(sides) + _lengths(sides)


def _lengths(sides: Sequence[RunSide]) -> str:
    """Return that runs differ in length; empty if they do not."""
    if len({one.figures.steps for one in sides}) == 1:
        return ""
    lengths = ", ".join(f"{one.figures.name} {one.figures.steps:,}" for one in sides)
    return f" The runs differ in length: {lengths} steps."


def _other_models(sides: Sequence[RunSide]) -> str:
    """Return that runs are of different models; empty if they are not, or not known to be."""
    known = [(one.name, one.model) for one in sides if one.model is not None]
    if not known or all(same_model(known[0][1], model) for _, model in known):
        return ""
    named = ", ".join(f"{name} of {described(model)}" for name, model in known)
    return f" The runs are of different models ({named}): losses compare only with the same data and tokenizer."


def _within_noise(best: Sequence[RunSide], validated: bool) -> str:
    """Return that the two best runs differ by no more than their losses vary; empty if they differ by more."""
    losses = [one.figures.best_validation_loss if validated else one.figures.last_loss for one in best]
    if losses[0] is None or losses[1] is None:
        return ""
    gap = losses[1] - losses[0]
    noises = [one.validation_noise if validated else one.batch_noise for one in best]
    known = [one for one in noises if one is not None]
    seeds = "another train.seed may change the order"
    if len(known) == len(noises) and gap <= SIGMAS * math.hypot(*known):
        varied = f"the losses vary by ±{max(known):.2g} between {'validations' if validated else 'batches'}"
        return f" They differ within noise: by {gap:.2g}, and {varied}; {seeds}."
    if validated and len(known) < len(noises) and gap <= SAME * losses[0]:
        few = "there are too few validations to tell more"
        return f" They differ within noise: by less than {SAME:.1%}, and {few}; {seeds}."
    return ""


def run_differences(sides: Sequence[RunSide]) -> list[Difference]:
    """Return the fields whose values differ between runs or changed in one; empty if a log does not have its recipe."""
    recipes = [one.recipe for one in sides if one.recipe is not None]
    if len(recipes) != len(sides):
        return []
    found = {one.field: one for one in differences(recipes)}
    for key in sorted({key for one in sides for key in one.changed} - found.keys()):  # changed to what others have
        values = [_used_value(recipe, key) for recipe in recipes]
        found[key] = Difference(field=key, kind=recipe_fields()[key].kind, values=values)
    return [_with_changes(one, sides) for one in found.values()]


def _with_changes(difference: Difference, sides: Sequence[RunSide]) -> Difference:
    """Return a difference with the values that a run had before a resume, and the step from which it has another."""
    values = [one.changed.get(difference.field, value) for one, value in zip(sides, difference.values, strict=True)]
    return msgspec.structs.replace(difference, values=values)


def _changed_on_resume(path: Path) -> dict[str, str]:
    """Return the recipe fields that a run's later starts changed: the old value, and the new one from which step."""
    file = path / METRICS if path.is_dir() else path
    starts: list[tuple[dict[str, Any], int]] = []
    with suppress(OSError), file.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if not line.startswith(('{"kind":"step"', '{"kind":"header"')):
                continue
            if line.startswith('{"kind":"step"') and (not starts or starts[-1][1]):
                continue
            with suppress(msgspec.DecodeError):
                one = json_text.decode(line, type=dict[str, Any])
                if one["kind"] == "header":
                    starts.append((one.get("settings") or {}, 0))
                else:
                    starts[-1] = (starts[-1][0], int(one["step"]))
    used = [start for start in starts if start[1] and start[0]]
    found: dict[str, str] = {}
    for (before, _), (after, step) in pairwise(used):
        for key in recipe_fields():
            old, new = (_value_at(values, key) for values in (before, after))
            if old != new and None not in (old, new):
                found[key] = f"{found.get(key, old)}, {new} from step {step}"
    return found


def _value_at(settings: Mapping[str, Any], key: str) -> Any:
    section, _, name = key.partition(".")
    part = settings.get(section)
    return part.get(name) if isinstance(part, dict) else None


def _used_value(recipe: Recipe, key: str) -> Any:
    """Return the value of a field as the training uses it: n/a for adapters that a recipe does not train."""
    if key == "data.dataset" and recipe.data.blend:
        return "the blend"
    if key == "checkpoint.keep" and recipe.checkpoint.keep >= KEEP_ALL:
        return "all"
    return "n/a" if key.startswith("peft.") and recipe.goal != "peft" else field_value(recipe, key)


def differences(recipes: Sequence[Recipe]) -> list[Difference]:
    """Return the fields whose values differ between recipes."""
    found = []
    for field in ("model", "goal", "cluster"):
        values = [getattr(one, field) for one in recipes]
        if any(value != values[0] for value in values):
            found.append(Difference(field=field, kind="contract" if field != "cluster" else "layout", values=values))
    for key, info in recipe_fields().items():
        by_epochs = [key == "train.steps" and one.train.epochs > 0 for one in recipes]  # their steps are not used
        values = ["by epochs" if e else _used_value(one, key) for e, one in zip(by_epochs, recipes, strict=True)]
        if any(value != values[0] for value in values):
            found.append(Difference(field=key, kind=info.kind, values=values))
    return found
