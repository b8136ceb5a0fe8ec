"""Notes of a job: its length, its storage, and what it does not keep of the user's file."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

import msgspec

from meshwright import frameworks
from meshwright.api import run_requests as requests
from meshwright.api.exports import Exported
from meshwright.api.targets import Job
from meshwright.display import plural
from meshwright.frameworks import CheckResult
from meshwright.frameworks.common import KEEP_ALL
from meshwright.frameworks.types import Program
from meshwright.notes import note
from meshwright.planner import case_of
from meshwright.planner.plan import OPEN_LENGTH
from meshwright.planner.storage import storage_of
from meshwright.recipes import overrides as override
from meshwright.recipes.format_override import format_override
from meshwright.recipes.types import Recipe


def note_length(job: Job, recipe: Recipe, overrides: Sequence[str] = ()) -> None:
    """Say that a recipe file does not say how long it trains."""
    text = job.open_length(recipe)
    if text and job.open_length(override.apply(recipe, overrides)):
        note(text)


def note_length_of_plan(job: Job, recipe: Recipe, overrides: Sequence[str]) -> None:
    """Say how long the job of a model trains if only its recipe says it."""
    typed = override.requested(recipe, overrides)
    if job.plan is not None and recipe.train.steps and not {"train.steps", "train.epochs"} & typed.keys():
        recipe = override.apply(recipe, overrides)
        tokens = recipe.train.steps * recipe.train.global_batch_size * recipe.data.seq_length
        length = f"{plural(recipe.train.steps, 'step')}, {tokens / 1e9:,.1f} billion tokens"
        length = f"{recipe.train.epochs:g} epochs" if recipe.train.epochs else length
        note(f"the job trains {length}, as in {job.plan.base.name}: write train.steps=N for another length")


def run_seconds(checked: CheckResult) -> float:
    """Return the estimated time of all steps; 0 for epochs, whose steps follow from the data."""
    recipe, estimate = checked.recipe, checked.estimate
    known = estimate is not None and checked.exists and not recipe.train.epochs
    return recipe.train.steps * float(estimate.step_s) if known and estimate is not None else 0.0


def print_notes(checked: CheckResult) -> None:
    for text in checked.notes:
        note(text)


def storage_note(exported: Exported) -> tuple[str, ...]:
    """Return what the checkpoints of the job take on disk; none for a program that saves by itself."""
    checked = exported.checked
    if exported.written.framework in ("deepspeed", "accelerate"):
        return ()
    recipe = checked.recipe
    found = storage_of(case_of(recipe, checked.model, checked.cluster, checked.engine))
    if recipe.train.epochs or any(one.field == OPEN_LENGTH for one in exported.job.assumed(checked.engine)):
        most = recipe.checkpoint.keep
        are_kept = f"at most {most:,} kept" if most < KEEP_ALL else "all kept"
        why = "the samples of an epoch" if recipe.train.epochs else "the steps"
        one = f"{found.checkpoint_gib:,.1f} GiB per checkpoint, {are_kept}"
        return (f"storage: {one} (checkpoint.keep); no total: {why} are not known here",)
    gib = found.checkpoints_gib
    total = f"{gib / 1024:,.1f} TiB" if gib >= 1024 else f"{gib:,.1f} GiB"
    kept = f"{found.kept:,} checkpoint{'s' if found.kept != 1 else ''} of {found.checkpoint_gib:,.1f} GiB kept"
    return (f"storage: {kept}, {total} with the one being written (checkpoint.keep)",)


def without_arguments_of(program: Program, exported: Exported) -> Exported:
    """Return the export without the lost settings that the job's program sets itself, such as saving on a signal."""
    lost = tuple(one for one in exported.not_imported if format_override(one.key, one.value) not in program.argv)
    return msgspec.structs.replace(exported, not_imported=lost)


def not_kept(exported: Exported) -> tuple[str, ...]:
    """Return the settings of another framework's file that the job does not have, and what was assumed."""
    assumed = tuple(f"assumed: {one.message}" for one in exported.job.assumed(exported.checked.engine))
    dropped = (f"not kept: {one.file}:{one.line} {one.key}={one.value}: {one.reason}" for one in exported.not_imported)
    return (*assumed, *dropped)


def comments(exported: Exported, files: Mapping[str, str]) -> tuple[str, ...]:
    """Return the comments of the job's script: what it does not have, unless a config of the job says so itself."""
    lines = frameworks.lost_lines(exported.written.unmapped, exported.not_imported)
    return tuple(line for line in lines if not any(line in text for text in files.values()))


def sbatch_not_kept(exported: Exported, request: requests.Launch, scheduler: str) -> tuple[str, ...]:
    """Return the user's #SBATCH options, without the container, that the new job lacks, and how to keep them."""
    from meshwright.frameworks.shell.containers import PYXIS
    from meshwright.launch.slurm import repeated_options

    source = exported.job.imported
    script = None if source is None else source.content.script
    if source is None or script is None or not script.sbatch:
        return ()
    options = {name: "" if one.value in (None, True) else str(one.value) for name, one in script.sbatch.items()}
    extra = {text.removeprefix("--").partition("=")[0] for text in request.sbatch}
    extra |= {"requeue"} if scheduler == "slurm" and request.requeue else set()
    options = {name: value for name, value in options.items() if name not in extra and not name.startswith(PYXIS)}
    found = repeated_options(options, lambda name: getattr(request, name, None) or getattr(request, f"{name}_s", None))
    if not found:
        return ()
    lost, words = [text for text, _ in found], [word for _, words in found for word in words]
    named = " ".join(text for text, one in found if one) if not all(one for _, one in found) else "them"
    named = "it" if len(lost) == 1 else named
    keep = f"; {shlex.join(words)} keeps {named}" if scheduler == "slurm" and words else ""
    per_task = next((text for text, _ in found if text.startswith("--cpus-per-task")), "")
    keep += f"; {per_task}: use --cpus-per-rank N, the cores of one GPU" if scheduler == "slurm" and per_task else ""
    return (f"not kept: #SBATCH {' '.join(lost)} of {source.content.path}{keep}",)


def container_not_kept(exported: Exported, request: requests.Launch, scheduler: str) -> tuple[str, ...]:
    """Return the container in which the user's script starts its program if the job has none, and how to keep it."""
    from meshwright.frameworks.shell.containers import container_of
    from meshwright.launch.slurm import repeated_mount

    source = exported.job.imported
    script = None if source is None else source.content.script
    found = None if script is None or request.image else container_of(script)
    if source is None or found is None:
        return ()
    words = ["--image", "IMAGE" if "$" in found.image or not found.image else found.image]
    words += ["--container-kind", found.kind] if found.kind else []
    for text in found.mounts:
        words += ["--mount", repeated_mount(text)]
    keep = f"; {shlex.join(words)} keeps the container" if scheduler == "slurm" else ""
    return (f"not kept: {found.words} of {source.content.path}: the job runs without a container{keep}",)
