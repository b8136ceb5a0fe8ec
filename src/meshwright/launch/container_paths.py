"""What another framework's job needs inside its container: its checkout, data, weights and a folder for checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

from meshwright.launch import values
from meshwright.launch.job import Job
from meshwright.recipes.types import Recipe

CLAIMED = ("kubernetes",)  # whose mounts name a volume claim in place of a folder
ELSEWHERE = ("kubernetes", "skypilot")  # whose machines have none of the user's folders


def container_notes(recipe: Recipe, job: Job, scheduler: str) -> tuple[str, ...]:
    """Return notes on the paths that a job in a container reads and writes, and no mount provides."""
    if job.finds_ranks or not (job.image or scheduler in ELSEWHERE):
        return ()
    return (*_read_paths(recipe, job, scheduler), *_checkpoints(recipe, job, scheduler))


def _read_paths(recipe: Recipe, job: Job, scheduler: str) -> Iterator[str]:
    needed = {folder: what for folder, what in _inputs(recipe, job) if not _is_mounted(job, folder)}
    if not needed:
        return
    paths = " and ".join(f"{folder} ({what})" for folder, what in needed.items())
    mounts = " ".join(_mount(folder, scheduler) for folder in needed)
    missing = "if the image does not contain it, " if job.image else ""
    yield f"the {_where(job)} needs {paths}: {missing}add {mounts}"


def _inputs(recipe: Recipe, job: Job) -> Iterator[tuple[str, str]]:
    """Yield the folders that the job reads, with what is in them."""
    checkout = next(iter(job.program.env.get("PYTHONPATH", "").split(":")), "")
    if checkout:
        yield checkout, "the framework's checkout"
    for path in (*recipe.data.blend, recipe.data.dataset):
        if path.startswith("/"):  # a prefix of .bin and .idx files, or a file: its folder
            yield str(PurePosixPath(path).parent), "data"
    for path, what in ((recipe.data.tokenizer, "the tokenizer"), (recipe.checkpoint.pretrained, "initial weights")):
        if path.startswith("/"):
            yield path, what


def _checkpoints(recipe: Recipe, job: Job, scheduler: str) -> Iterator[str]:
    """Yield a note if the folder of the checkpoints does not outlive the container."""
    folder = recipe.checkpoint.folder
    other = f"checkpoint.folder=/PATH and {_mount('/PATH', scheduler)}"
    if folder.startswith("/"):
        if not _is_mounted(job, folder, writes=True):
            yield f"checkpoints in {folder} are lost with the {_where(job)}: add {_mount(folder, scheduler)}"
    elif not job.folder:
        here = "--write DIR, which the job then runs in and mounts, or " if scheduler == "slurm" else ""
        yield f"checkpoints go to a folder of the {_where(job)} and are lost with it: add {here}{other}"


def _where(job: Job) -> str:
    return "container" if job.image else "machine"


def _mount(folder: str, scheduler: str) -> str:
    return f"--mount {'CLAIM' if scheduler in CLAIMED else folder}:{folder}"


def _is_mounted(job: Job, folder: str, writes: bool = False) -> bool:
    mounts = [one for one in map(values.mount, job.mounts) if not (writes and one.options == "ro")]
    places = [PurePosixPath(one.path) for one in mounts]
    return any(PurePosixPath(folder).is_relative_to(place) for place in (*places, PurePosixPath(job.folder or "/-")))
