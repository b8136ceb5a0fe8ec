"""Wrong paths of a run, found before torch is imported or a process is started."""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from meshwright.errors import InputError, closest
from meshwright.file_access import missing_path
from meshwright.hub import hub_cache, is_cached, tokenizer_download
from meshwright.models import not_a_model
from meshwright.recipes import overrides as override
from meshwright.recipes.several_datasets import blend_of as blend_of
from meshwright.recipes.several_datasets import listed_sources, several_datasets_error
from meshwright.recipes.types import Recipe, field_value

MOCK_NAMES = ("mock", "llm-pretrain-mock")
FILE_SUFFIXES = (
    *(".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".txt", ".gz", ".zst", ".bin", ".idx", ".jinja"),
)
PRETRAINED = "checkpoint.pretrained"
CHECKPOINTS = "checkpoints"  # the folder of checkpoints in a run
_TOKENIZER = tokenizer_download("{name}")
FOLDERS: Mapping[str | None, tuple[str, ...]] = {  # for a path that does not exist
    "tokenizer": ("--tokenizer FOLDER", "--tokenizer bytes"),
    "data.tokenizer": ("data.tokenizer=FOLDER", "data.tokenizer=bytes"),
    PRETRAINED: (f"{PRETRAINED}=FOLDER", f"{PRETRAINED}=random"),
}
DOWNLOADS: Mapping[str | None, tuple[str, ...]] = {  # for an id that is not in the local cache
    "tokenizer": (_TOKENIZER, *FOLDERS["tokenizer"]),
    "data.tokenizer": (_TOKENIZER, *FOLDERS["data.tokenizer"]),
    PRETRAINED: ("hf download {name}", f"{PRETRAINED}=FOLDER"),
}
DATASET, BLEND = "data.dataset", "data.blend"
STAND_INS: Mapping[str, Any] = {
    DATASET: "mock",
    BLEND: {},
    "data.validation": "",
    "data.tokenizer": "",
    "data.chat_template": "",
    PRETRAINED: "",
}
"""What a trial on another machine uses in place of a path that is not there."""
NOT_A_FOLDER = ("random", "bytes")  # values of checkpoint.pretrained and data.tokenizer


def check_run_paths(recipe: Recipe, out: str | None) -> None:
    """Raise InputError for a dataset, tokenizer, template, folder of weights or run folder that cannot be right."""
    data = recipe.data
    if (several := several_files_error(recipe)) is not None:
        raise several
    for name in data.blend or {data.dataset: 1.0}:
        _check_dataset(name, recipe.goal)
    if looks_like_path(data.validation):
        _check_dataset(data.validation, recipe.goal, "data.validation")
    check_folder(data.tokenizer, "data.tokenizer")
    check_pretrained(recipe.checkpoint.pretrained)
    if data.chat_template and not Path(data.chat_template).expanduser().exists():
        raise missing_path(data.chat_template, "data.chat_template")
    if out is not None:
        check_out(out)
        _check_writable(Path(out).expanduser())


def with_stand_ins(recipe: Recipe, typed: Collection[str]) -> tuple[Recipe, dict[str, str]]:
    """Return a trial's recipe without data and weights that are elsewhere, and the missing path by field.

    A path that the user typed stays, and one that is nearly that of a file here: train reports it.
    """
    sources, missing = recipe.data.blend or {recipe.data.dataset: 1.0}, dict[str, str]()
    absent = [name for name in sources if _is_elsewhere(name, DATASET, recipe.goal)]
    if absent and not {DATASET, BLEND} & {*typed} and several_files_error(recipe) is None:
        missing[BLEND if recipe.data.blend else DATASET] = absent[0]
    for key in STAND_INS:
        name = field_value(recipe, key)
        if isinstance(name, str) and key not in typed and key != DATASET and _is_elsewhere(name, key, recipe.goal):
            missing[key] = name
    values = {key: STAND_INS[key] for key in missing}
    return override.change(recipe, values | ({DATASET: MOCK_NAMES[0]} if BLEND in missing else {}))[0], missing


def _is_elsewhere(name: str, field: str, goal: str) -> bool:
    """Return whether a name is a path that is not on this machine, and nearly none that is."""
    is_data = field in (DATASET, "data.validation")
    is_path = looks_like_path(name) or (bool(name) and is_data and goal == "pretrain" and name not in MOCK_NAMES)
    here = any(Path(f"{Path(name).expanduser()}{end}").exists() for end in (("", ".bin", ".idx") if is_data else ("",)))
    return is_path and not here and not missing_path(name, field).fix


def check_out(out: str) -> None:
    """Raise InputError for a folder inside a run: a checkpoint of it, or its exported model."""
    path = Path(out).expanduser()
    for one in (path, *path.parents):
        run, exported = one.parent, one.name == "model" and (one / "config.json").is_file()
        if (one.name == CHECKPOINTS or exported) and _has_checkpoints(run):
            reason = f"is inside the run {run}; train resumes from the latest checkpoint of the folder --out"
            raise InputError(
                reason, field="--out", value=out, fix=(f"--out {shlex.quote(str(run))}", "--out NEW_FOLDER")
            )


def _has_checkpoints(run: Path) -> bool:
    folder = run / CHECKPOINTS
    return (folder / "latest").is_file() or any(folder.glob("step-*/manifest.json"))


def check_pretrained(name: str) -> None:
    """Raise InputError for weights to start from that are missing, or adapters, a run or a checkpoint."""
    check_folder(name, PRETRAINED)
    if name and name not in NOT_A_FOLDER and (error := not_a_model(name, PRETRAINED)) is not None:
        raise error


def check_folder(name: str, field: str) -> None:
    """Raise InputError for a folder that does not exist, unless it is the id of a downloaded model."""
    if not name or name in NOT_A_FOLDER or Path(name).expanduser().exists():
        return
    if is_cached(name) and not looks_like_path(name):
        return
    if looks_like_path(name) or "/" not in name:
        raise _missing_download(missing_path(name, field))


def _missing_download(error: InputError) -> InputError:
    """Return the error of a missing folder; a word such as gpt2 may also be the id of a model of the hub."""
    name, download = str(error.value), DOWNLOADS.get(error.field)
    if download is None or (looks_like_path(name) and error.fix):
        return error
    if looks_like_path(name):
        return InputError(error.reason, field=error.field, value=name, fix=FOLDERS.get(error.field, ()))
    reason = f"no such folder, and no model of this id in the local Hugging Face cache ({hub_cache()})"
    fix = (*error.fix, *(one.format(name=name) for one in download))
    return InputError(reason, field=error.field, value=name, fix=fix)


def looks_like_path(name: str) -> bool:
    """Return whether a name can only be a path: an id has at most one slash, after a name that is no folder here."""
    path = Path(name).expanduser()
    if not name:
        return False
    if path.is_absolute() or name.startswith((".", "~")) or name.endswith(os.sep) or name.count("/") > 1:
        return True
    return ("/" in name and path.parent.is_dir()) or path.suffix.lower() in FILE_SUFFIXES or path.exists()


def _check_dataset(name: str, goal: str, field: str = "data.dataset") -> None:
    path = Path(name).expanduser()
    if name in MOCK_NAMES or path.exists():
        return
    if goal == "pretrain":  # files only; a prefix names a pair of files
        if not any(Path(f"{path}{ending}").exists() for ending in (".bin", ".idx")):
            raise _no_dataset(name, field)
        return
    from meshwright.engine.data.dataset_registry import in_data_folder
    from meshwright.engine.data.registered import REGISTRY

    if name in REGISTRY or in_data_folder(name) is not None:
        return
    if looks_like_path(name) or "/" not in name:
        raise _no_dataset(name, field, tuple(REGISTRY))


def several_files(name: str, folder: Path | None = None) -> tuple[str, ...]:
    """Return the files, also relative to a folder, that a name lists, with weights or without; empty for any other."""
    parts = [Path(part).expanduser() for part in listed_sources(name)]
    places = [next((one for one in (part, (folder or Path()) / part) if one.exists()), None) for part in parts]
    return tuple(str(place) for place in places if place is not None) if all(places) else ()


def several_files_error(recipe: Recipe) -> InputError | None:
    """Return the error for a dataset that lists several files, which train reads as a blend or as a folder."""
    data = recipe.data
    return None if data.blend else several_datasets_error(data.dataset, recipe.train.epochs)


def _no_dataset(name: str, field: str, known: tuple[str, ...] = ()) -> InputError:
    error = missing_path(name, field)
    if error.fix:
        return InputError(error.reason, field=field, value=name, fix=[f"{field}={one}" for one in error.fix])
    near = closest(name, known)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    of_hub = () if near or "/" in name or Path(name).suffix else (f"--dataset OWNER/{name}: a dataset of the hub",)
    fix = (*(f"{field}={one}" for one in near), *of_hub, "--dataset FILE or FOLDER", "--dataset mock")
    return InputError(f"dataset not found{hint or f': {error.reason}'}", field=field, value=name, fix=fix)


def _check_writable(out: Path) -> None:
    """Raise InputError for a run folder that cannot be created."""
    existing = out
    while not existing.exists() and existing.parent != existing:
        existing = existing.parent
    if not existing.is_dir():
        raise InputError(f"{existing} is a file, not a folder", field="--out", value=str(out), fix=("another folder",))
    if not os.access(existing, os.W_OK | os.X_OK):
        raise InputError(f"{existing} is not writable", field="--out", value=str(out), fix=("another folder",))
