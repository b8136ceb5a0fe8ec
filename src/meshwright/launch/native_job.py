"""Launch requests for our own engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import msgspec

from meshwright import config_io, file_access, models
from meshwright.clusters import Cluster, cluster, file_as_typed, file_of_cluster, is_missing_file, with_file
from meshwright.errors import InputError
from meshwright.frameworks.common import short_training_notes
from meshwright.frameworks.types import Program
from meshwright.launch import other_frameworks, values
from meshwright.launch.build_job import REMOTE_FILES, LaunchRequest, mock_data, plain_name
from meshwright.launch.job import find_scheduler
from meshwright.launch.kubernetes import MAX_NAME
from meshwright.recipes import files, overrides
from meshwright.recipes.case import model_of
from meshwright.recipes.format_override import format_override
from meshwright.recipes.types import Recipe, field_value
from meshwright.rules import Finding

CLUSTER_FILE = "cluster.toml"  # the copy of a recipe's cluster file in the folder of its job
FOLDER = "checkpoint.folder"


class Checked(msgspec.Struct, frozen=True):
    """A training as it was checked."""

    recipe: Recipe
    cluster: Cluster
    findings: tuple[Finding, ...] = ()
    run_s: float = 0.0  # estimated seconds of all steps; 0 if unknown


class Training(msgspec.Struct, frozen=True):
    """The arguments of `meshwright train`."""

    target: str  # recipe name or file
    dataset: str | None = None
    model: str | None = None
    tiny: bool = False
    out: str | None = None
    overrides: Sequence[str] = ()
    text: str | None = None  # of a recipe that was imported from another framework's file
    notes: tuple[str, ...] = ()
    accept_changes: bool = False

    @property
    def known_overrides(self) -> list[str]:
        """The overrides known now; `micro_batch_size=auto` is resolved when the run starts."""
        return known(self.overrides) + ([f"data.dataset={self.dataset}"] if self.dataset else [])


def known(overrides: Sequence[str]) -> list[str]:
    """Return the overrides without `micro_batch_size=auto`."""
    return [text for text in overrides if not text.replace(" ", "").endswith("micro_batch_size=auto")]


def with_full_paths(training: Training, recipe: Recipe, scheduler: str) -> tuple[Training, Recipe]:
    """Return a training and its recipe for a job with a folder of its own: paths of this folder in full.

    The run folder of a machine elsewhere stays as it is: it is not on this machine.
    """
    local = find_scheduler(scheduler) not in REMOTE_FILES
    changes = [_in_full(recipe, text, local) if known([text]) else text for text in training.overrides]
    out = _new_path(training.out) if training.out and local else training.out
    dataset = other_frameworks.full_path(training.dataset) if training.dataset else training.dataset
    recipe = other_frameworks.with_full_paths(recipe)
    if models.is_path(recipe.model):
        recipe = msgspec.structs.replace(recipe, model=_new_path(recipe.model))
    if recipe.checkpoint.folder and local:
        recipe = overrides.change(recipe, {FOLDER: _new_path(recipe.checkpoint.folder)})[0]
    return msgspec.structs.replace(training, overrides=changes, out=out, dataset=dataset), recipe


def _in_full(recipe: Recipe, text: str, local: bool) -> str:
    """Return an override with full paths; one without paths as it was typed."""
    values = overrides.requested(recipe, [text])
    full = other_frameworks.with_full_values(values)
    if values.get(FOLDER) and local:
        full[FOLDER] = _new_path(values[FOLDER])
    changed = next((key for key in values if full[key] != values[key]), None)
    return text if changed is None else format_override(changed, full[changed])


def _new_path(text: str) -> str:
    return str(Path(text).expanduser().resolve())


class Restarts(NamedTuple):
    """The run folder of a job that may be restarted, the overrides with which it resumes, and a note on both."""

    out: str | None
    overrides: list[str]
    notes: tuple[str, ...] = ()


def restarts(
    recipe: Recipe, out: str | None, changes: Sequence[str], scheduler: str, options: Mapping[str, Any]
) -> Restarts:
    """Return what a restarted job needs: without a folder of its own, every restart would begin at step 1 in a new one.

    A container needs a folder too, because its working folder is lost with it.
    """
    where, again = find_scheduler(scheduler), bool(options.get("max_restarts"))
    if where == "slurm":
        again = bool(options.get("requeue", True))
    more = (
        other_frameworks.resuming(recipe, changes, "--no-requeue" if where == "slurm" else "remove --max-restarts")
        if again
        else []
    )
    if out or recipe.checkpoint.folder or not (again or (where == "slurm" and options.get("image"))):
        return Restarts(out, more)
    name = str(options.get("name") or plain_name(recipe.name))
    mounts = [values.mount(text) for text in options.get("mounts", ())] if where in REMOTE_FILES else []
    kept = [one.path for one in mounts if one.options != "ro" and (where == "kubernetes" or "://" in one.source)]
    found = str(PurePosixPath(kept[0] if kept else "", "runs", name))
    why = "a restarted job resumes from its checkpoints" if again else "the container's own folders are lost with it"
    return Restarts(found, more, (f"run folder: {found} ({why}; --out names another)",))


def default_name(recipe: str, scheduler: str) -> str:
    """Return the name of a job whose name nobody typed: as Kubernetes and SkyPilot allow it there."""
    return values.dns_name("--name", recipe, MAX_NAME, False) if find_scheduler(scheduler) in REMOTE_FILES else recipe


def request_for(
    training: Training, scheduler: str, recipe: Recipe, gpus: str | int | None, check: Callable[[], Checked]
) -> LaunchRequest:
    """Return the launch request of a training with its findings; a tiny one is checked when it starts."""
    is_file = files.is_file(training.target)
    if is_file and training.text is None:
        training = _with_paths_of_file(training, recipe)
    cluster_file = file_of_cluster(recipe.cluster)
    moves = (
        find_scheduler(scheduler) == "slurm"
        and bool(cluster_file)
        and not Path(file_as_typed(recipe.cluster)).is_absolute()
    )
    copies = is_file and (training.text is not None or moves or find_scheduler(scheduler) in REMOTE_FILES)
    target = Path(training.target).name if copies else str(Path(training.target).resolve())
    text = training.text if training.text is not None or not copies else _text(training.target)
    copied = {} if text is None else _with_cluster(target, text, recipe.cluster)
    found = _tiny(training, recipe, gpus) if training.tiny else check()
    return LaunchRequest(
        recipe=found.recipe,
        cluster=found.cluster,
        engine="meshwright",
        program=program(training, target if is_file else training.target),
        files=copied,
        reads={cluster_file: "the cluster file"} if is_file and cluster_file and not copied else {},
        findings=found.findings,
        saves=not training.tiny or training.out is not None,
        notes=()
        if training.tiny
        else (*training.notes, *mock_data(found.recipe), *short_training_notes(found.recipe, model_of(found.recipe))),
        run_s=found.run_s,
    )


def _with_paths_of_file(training: Training, recipe: Recipe) -> Training:
    """Return a training whose command has the full paths of what its recipe file names by a relative path.

    They are relative to the current folder, and the job runs in another one.
    """
    full = other_frameworks.with_full_paths(recipe)
    typed = {*overrides.requested(recipe, known(training.overrides)), *(["data.dataset"] if training.dataset else [])}
    moved = [key for key in (*other_frameworks.PATHS, *other_frameworks.BLENDS) if key not in typed]
    changes = [
        format_override(key, field_value(full, key))
        for key in moved
        if field_value(full, key) != field_value(recipe, key)
    ]
    model = training.model
    if model is None and models.is_path(recipe.model) and Path(recipe.model).expanduser().exists():
        model = _new_path(recipe.model)
        model = None if model == recipe.model else model
    return msgspec.structs.replace(training, overrides=[*training.overrides, *changes], model=model)


def program(training: Training, target: str) -> Program:
    """Return the `meshwright train` command of a training."""
    options = [
        word
        for option, value in (("--model", training.model), ("--dataset", training.dataset), ("--out", training.out))
        if value
        for word in (option, value)
    ]
    flags = [*(["--tiny"] if training.tiny else []), *(["--accept-changes"] if training.accept_changes else [])]
    return Program(argv=("-m", "meshwright", "train", target, *options, *flags, *training.overrides))


def _tiny(training: Training, recipe: Recipe, gpus: str | int | None) -> Checked:
    if gpus is None:
        reason = "a tiny run has no reference cluster: set the number of ranks"
        raise InputError(reason, field="--gpus", fix=("--gpus 2", "--gpus 2x1xH100 (two nodes of one)"))
    return Checked(overrides.apply(recipe, training.known_overrides), cluster(str(gpus)))


def _with_cluster(target: str, text: str, named: str) -> dict[str, str]:
    """Return the files of a copied recipe: with a copy of its cluster file, because its path is of this machine."""
    cluster_file = file_of_cluster(named)
    if not cluster_file or is_missing_file(named):  # which the run does not need
        return {target: text}
    name = CLUSTER_FILE if target != CLUSTER_FILE else f"of_{CLUSTER_FILE}"
    changed = config_io.edit(text, files.SUFFIXES[Path(target).suffix.lower()], {"cluster": with_file(named, name)})
    return {target: changed, name: _text(cluster_file, "cluster")}


def _text(path: str, field: str = "recipe") -> str:
    if (sent := file_access.text_of(path, field)) is not None:
        return sent
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise InputError(f"cannot be read: {error}", field=field, value=path) from None
