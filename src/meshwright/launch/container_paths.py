"""What a job needs inside its container: its recipe or checkout, data, weights and a folder for checkpoints.

A SLURM job mounts the folders itself; a machine elsewhere has none of them, so a note says what to mount.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import msgspec

from meshwright import file_access, models
from meshwright.errors import InputError
from meshwright.frameworks.types import Program
from meshwright.launch import values
from meshwright.launch.job import Job
from meshwright.launch.other_frameworks import PATHS, full_path
from meshwright.recipes.types import RANDOM_WEIGHTS, Recipe

CLAIMED = ("kubernetes",)  # whose mounts name a volume claim in place of a folder
ELSEWHERE = ("kubernetes", "skypilot")  # whose machines have none of the user's folders
WEIGHTS = "/weights"  # an example of a folder in a container
OF_THE_IMAGE = ("bin", "dev", "etc", "lib", "lib64", "proc", "run", "sbin", "sys", "usr", "var")
"""Folders of the system: a container has its own."""
OF_THE_PROGRAM = "the program's folder"
OF_FOLDERS = (OF_THE_PROGRAM, "the framework's checkout", "the tokenizer", "initial weights")
OF_TRAIN = ("--model", "--dataset", "--out")  # options of our train that may name a path


ROWS_IN_MANIFEST = 128 * 1024
"""Bytes of data that a ConfigMap may hold: kubectl apply refuses a manifest of more than 256 KiB."""


def place_of_rows(rows: Mapping[str, str], mounts: Sequence[str], scheduler: str) -> str:
    """Return the folder of a machine elsewhere that has the converted rows; empty if they travel with the job.

    SkyPilot copies the files of a job; a Kubernetes manifest contains small ones, and others need a volume.
    """
    size = sum(len(text.encode()) for text in rows.values())
    if scheduler not in CLAIMED or size <= ROWS_IN_MANIFEST:
        return ""
    if not mounts:
        reason = f"{', '.join(rows)}: {size:,} bytes of rows are too many for a manifest: name a volume for them"
        raise InputError(reason, field="--mount", fix=("--mount CLAIM:/data",))
    return values.mount(mounts[0]).path


def copy_note(rows: Iterable[str], folder: str, place: str, mounts: Sequence[str]) -> str:
    """Return where the rows that a manifest does not contain must be before the job starts."""
    claim = values.mount(mounts[0]).source
    names = ", ".join(str(PurePosixPath(folder) / name) for name in rows)
    return f"copy {names} to {place} of the volume {claim} before the job starts: it reads the rows there"


class Needed(NamedTuple):
    """A folder that a job reads or writes."""

    folder: str
    what: str
    mounted: bool  # the job cannot do without it, or it is on this machine: it is mounted


def with_mounts(recipe: Recipe, job: Job) -> Job:
    """Return a SLURM job in a container with the folders it needs mounted, unless a --mount provides them."""
    if not job.image:
        return job
    found: list[str] = []
    for one in _needed(recipe, job):
        covered = any(PurePosixPath(one.folder).is_relative_to(other) for other in found)
        if one.mounted and not covered and not _is_mounted(job, one.folder):
            found = [other for other in found if not PurePosixPath(other).is_relative_to(one.folder)]
            found.append(one.folder)
    folder = _checkpoints(recipe, job)
    made = (folder,) if folder.startswith("/") and not _is_user_mount(job, folder) else ()
    return msgspec.structs.replace(job, binds=tuple(found), makes=made)


def in_container(program: Program, with_out: bool = True) -> Program:
    """Return our train command with full paths: a container has another working folder.

    Without `with_out`, the run folder stays as it is: it is not on this machine.
    """
    argv = list(program.argv)
    for number, word in enumerate(argv):
        key, equals, value = word.partition("=")
        if number and argv[number - 1] in OF_TRAIN:
            option = argv[number - 1]
            argv[number] = full_path(word, new=with_out and option == "--out", bare=option == "--dataset")
        elif equals and key.replace("_", "").replace(".", "").isalpha():
            argv[number] = f"{key}={full_path(value, new=with_out and key == 'checkpoint.folder', bare=key in PATHS)}"
    return msgspec.structs.replace(program, argv=tuple(argv))


def container_notes(recipe: Recipe, job: Job, scheduler: str) -> tuple[str, ...]:
    """Return notes on the paths that a job in a container reads and writes: what is mounted, and what is not."""
    if not (job.image or scheduler in ELSEWHERE):
        return ()
    checkpoints = () if job.finds_ranks and scheduler in ELSEWHERE else _lost_checkpoints(recipe, job, scheduler)
    return (
        *_mounted(recipe, job),
        *_read_paths(recipe, job, scheduler),
        *_weights(recipe, job, scheduler),
        *checkpoints,
    )


def _weights(recipe: Recipe, job: Job, scheduler: str) -> Iterator[str]:
    """Yield a note on the base weights of a fine-tuning elsewhere, which our train does not download."""
    base = recipe.checkpoint.pretrained
    if recipe.goal == "pretrain" or not job.finds_ranks or scheduler not in ELSEWHERE or "--tiny" in job.program.argv:
        return
    if base == RANDOM_WEIGHTS or _is_path(base) or (not base and _is_path(recipe.model)):
        return  # those of a path are a folder that the job reads
    weights = base or models.find(recipe.model).hf_id or recipe.model
    other = f"{_mount(WEIGHTS, scheduler)} checkpoint.pretrained={WEIGHTS}"
    cached = "its Hugging Face cache" if job.image else "the machine's Hugging Face cache"
    needed = f"the {_where(job)} needs the weights {weights}, which train does not download"
    yield f"{needed}: have them in {cached}, or add {other}"


def _is_path(name: str) -> bool:
    return name.startswith(("/", ".", "~")) or (not file_access.closed() and Path(name).exists()) if name else False


def _mounted(recipe: Recipe, job: Job) -> Iterator[str]:
    if job.binds:
        what = {one.folder: one.what for one in reversed(list(_needed(recipe, job)))}
        yield f"mounted into the container: {', '.join(f'{one} ({what[one]})' for one in job.binds)}"


def _read_paths(recipe: Recipe, job: Job, scheduler: str) -> Iterator[str]:
    needed: dict[str, str] = {}
    for one in _needed(recipe, job):
        if not _is_mounted(job, one.folder) and not (scheduler in ELSEWHERE and _is_relative(job, one.folder)):
            needed.setdefault(one.folder, one.what)
    needed = {folder: what for folder, what in needed.items() if not _is_below(folder, needed)}
    needed.pop(_checkpoints(recipe, job), None)
    if job.finds_ranks and job.files:  # the recipe travels with the job
        needed = {folder: what for folder, what in needed.items() if what != "the recipe"}
    if not needed:
        return
    paths = " and ".join(f"{folder} ({what})" for folder, what in needed.items())
    mounts = " ".join(_mount(folder, scheduler) for folder in needed)
    missing = f"if the image does not contain {'it' if len(needed) == 1 else 'them'}, " if job.image else ""
    yield f"the {_where(job)} needs {paths}: {missing}add {mounts}"


def _is_relative(job: Job, folder: str) -> bool:
    """Return whether another framework's job names a folder only by a relative path, as below that of its program.

    The recipe has the full path that it has on this machine.
    """
    argv, texts = job.program.argv, [*job.files.values()]
    if job.finds_ranks or any(folder in text for text in (*argv, *texts)):
        return False
    in_files = {word for text in texts for word in re.split(r"""[\s"'=,]+""", text) if "/" in word}
    words = [PurePosixPath(word.rpartition("=")[2]) for word in (*argv, *in_files)]
    named = {path.parts for word in words for path in (word, word.parent) if path.parts}  # a file of data: its folder
    return any(PurePosixPath(folder).parts[-len(parts) :] == parts for parts in named)


def _needed(recipe: Recipe, job: Job) -> Iterator[Needed]:
    """Yield the folders that the job reads, that of its checkpoints, then others that its command names."""
    argv = job.program.argv
    target = argv[3] if job.finds_ranks and len(argv) > 3 else ""
    inputs = [
        (target, "the recipe"),
        (job.program.checkout, OF_THE_PROGRAM if job.start else "the framework's checkout"),
        *((path, "data") for path in (*recipe.data.blend, *recipe.data.anneal_blend, recipe.data.dataset)),
        (recipe.data.validation, "data"),
        (recipe.data.chat_template, "the chat template"),
        (recipe.model, "the model"),
        (recipe.data.tokenizer, "the tokenizer"),
        (recipe.checkpoint.pretrained, "initial weights"),
    ]
    is_there = bool(job.start) and not _is_here(job.start)  # where relative paths are looked up
    for name, what in inputs:
        path = (
            name
            if file_access.closed() or is_there or what == "the recipe"
            else full_path(name, bare=what != "the model")
        )
        if path.startswith("/"):  # data may be a file, or a prefix of .bin and .idx files: their folder
            folder = _folder(path, is_folder=what in OF_FOLDERS)
            yield Needed(folder, what, what == "data" or _is_here(folder))
    out = _checkpoints(recipe, job)
    if out.startswith("/"):
        yield Needed(out, "checkpoints", True)
    for path, what in (*job.reads.items(), *_command_paths(job.program)):
        if path != target and PurePosixPath(path).name not in job.files and _is_mountable(path):
            folder = _folder(path, is_folder=not PurePosixPath(path).suffix)
            yield Needed(folder, what, _is_here(folder))


def _command_paths(program: Program) -> Iterator[tuple[str, str]]:
    """Yield what may be a path in a job's command and its PYTHONPATH, each with what names it."""
    option = "the program"
    for word in program.argv:
        name, equals, value = word.partition("=")
        is_pair = bool(equals) and "/" not in name
        option = name if is_pair or word.startswith("-") else option
        yield value if is_pair else word, option
    for path in program.env.get("PYTHONPATH", "").split(":"):
        yield path, "PYTHONPATH"


def _is_mountable(path: str) -> bool:
    """Return whether a text is a full path that an image may lack; the folders of the system are its own."""
    parts = PurePosixPath(path).parts
    return path.startswith("/") and len(parts) > 1 and parts[1] not in OF_THE_IMAGE and not set(" $,:") & set(path)


def _folder(path: str, *, is_folder: bool) -> str:
    """Return the folder to mount for a path; `is_folder` decides for a path that is not on this machine."""
    parent = str(PurePosixPath(path).parent)
    is_itself = Path(path).is_dir() if _is_here(path) else is_folder and not _is_here(f"{path}.bin")
    return path if is_itself or parent == "/" else parent


def _is_below(folder: str, others: Iterable[str]) -> bool:
    return any(other != folder and PurePosixPath(folder).is_relative_to(other) for other in others)


def _is_here(path: str) -> bool:
    return not file_access.closed() and Path(path).exists()


def _checkpoints(recipe: Recipe, job: Job) -> str:
    """Return the folder of the checkpoints: --out of our train, else the recipe's; empty for the program's own."""
    argv = job.program.argv
    out = argv[argv.index("--out") + 1] if job.finds_ranks and "--out" in argv[:-1] else ""
    return out or recipe.checkpoint.folder


def _lost_checkpoints(recipe: Recipe, job: Job, scheduler: str) -> Iterator[str]:
    """Yield a note if the folder of the checkpoints does not outlive the container."""
    folder = _checkpoints(recipe, job)
    if job.finds_ranks and "--tiny" in job.program.argv and not folder:
        return
    if job.start and _is_user_mount(job, str(PurePosixPath(job.start) / folder), writes=True):
        return  # the program writes below the folder in which it starts
    named = "--out" if job.finds_ranks else "checkpoint.folder"
    other = f"{named}{' ' if job.finds_ranks else '='}/PATH and {_mount('/PATH', scheduler)}"
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


def _is_user_mount(job: Job, folder: str, writes: bool = False) -> bool:
    mounts = [one for one in map(values.mount, job.mounts) if not (writes and one.options == "ro")]
    return any(PurePosixPath(folder).is_relative_to(one.path) for one in mounts)


def _is_mounted(job: Job, folder: str, writes: bool = False) -> bool:
    own = [PurePosixPath(one) for one in (*job.binds, job.folder or "/-")]
    return _is_user_mount(job, folder, writes) or any(PurePosixPath(folder).is_relative_to(one) for one in own)
