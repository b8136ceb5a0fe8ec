"""Resolves a dataset name: a path, $MESHWRIGHT_DATA, the local Hugging Face cache or the hub."""

from __future__ import annotations

import os
from pathlib import Path

from meshwright.engine.data.files import FIELD, Rows, find_rows, require_package
from meshwright.engine.data.registered import REGISTRY, RegisteredDataset
from meshwright.errors import InputError, closest, first_line
from meshwright.file_access import missing_path, neighbours
from meshwright.hub import hub_reachable
from meshwright.notes import note


def open_rows(name: str, split: str, streaming: bool = False) -> Rows:
    """Open the rows of a dataset given by path, short name or hub id."""
    path = Path(name).expanduser()
    if path.exists():
        if name in REGISTRY:
            note(f"dataset {name} is {path.resolve()}, not the registered dataset {REGISTRY[name].hub_id}")
        found = find_rows(path, split, name)
        if found.format_note:
            note(found.format_note)
        return found
    if path.is_absolute() or name.startswith((".", "~")) or name.endswith("/") or name.count("/") > 1:
        raise missing_path(name, FIELD)
    known = REGISTRY.get(name)
    if known is None and "/" not in name:
        known = RegisteredDataset("")
    registered = known or RegisteredDataset(name)
    folder = in_data_folder(name)
    if folder is not None:
        return find_rows(_config_folder(folder, registered), split, name)
    if not registered.hub_id:
        raise _not_found(name, "")
    return _from_hub(name, registered, split, streaming)


def _config_folder(folder: Path, registered: RegisteredDataset) -> Path:
    """Return the subfolder of a configuration: hub repositories keep one folder per configuration."""
    inner = folder / registered.config
    return inner if registered.config and inner.is_dir() else folder


def dataset_columns(name: str, recipe_columns: dict[str, str]) -> dict[str, str]:
    """Return the columns set in the recipe, or those of a registered dataset."""
    return recipe_columns or (REGISTRY[name].columns if name in REGISTRY else {})


def in_data_folder(name: str) -> Path | None:
    """Return the folder or file of that name in $MESHWRIGHT_DATA."""
    root = os.environ.get("MESHWRIGHT_DATA", "")
    if not root:
        return None
    short = name.rsplit("/", 1)[-1]
    for candidate in (short, f"{short}.jsonl", f"{short}.parquet"):
        path = Path(root).expanduser() / candidate
        if path.exists():
            return path
    return None


def _from_hub(name: str, registered: RegisteredDataset, split: str, streaming: bool) -> Rows:
    datasets = require_package("datasets")
    reachable = hub_reachable()
    try:
        if reachable:
            found = datasets.load_dataset(
                registered.hub_id, registered.config or None, split=split, streaming=streaming
            )
            return Rows(name, dataset=found)
        return _from_cache(name, registered, split)
    except Exception as error:  # offline, gated, unknown or corrupt: report where we searched and what to do
        reason = first_line(error) if reachable else "unreachable, or HF_HUB_OFFLINE is set"
        raise _not_found(name, registered.hub_id, reason) from None


def _from_cache(name: str, registered: RegisteredDataset, split: str) -> Rows:
    """Open a dataset prepared or downloaded before, without contacting the hub (whose retries take half a minute)."""
    from huggingface_hub import snapshot_download

    cached = require_package("datasets.packaged_modules.cache.cache")
    identity = {
        "dataset_name": registered.hub_id.rpartition("/")[2],
        "repo_id": registered.hub_id,
        "version": "auto",
        "hash": "auto",
    }
    try:
        prepared = cached.Cache(config_name=registered.config or None, **identity)
        return Rows(name, dataset=prepared.as_dataset(split=split))
    except ValueError:  # never prepared, but its files may have been downloaded
        folder = snapshot_download(registered.hub_id, repo_type="dataset", local_files_only=True)
    return find_rows(_config_folder(Path(folder), registered), split, name)


def _not_found(name: str, hub_id: str, hub_error: str = "") -> InputError:
    root = os.environ.get("MESHWRIGHT_DATA", "")
    searched = [f"the path {name}", f"{root}/{name}" if root else "$MESHWRIGHT_DATA (not set)"]
    fix = [f"{FIELD}=FILE or FOLDER of JSONL, JSON, CSV, TSV or Parquet", "--dataset mock"]
    hint = ""
    if hub_id:
        searched += ["the local Hugging Face cache", f"the hub as {hub_id}: {hub_error}"]
        fix.insert(
            0, f"hf download {hub_id} --repo-type dataset --local-dir {root or 'FOLDER'}/{name.rsplit('/', 1)[-1]}"
        )
        if not root:
            fix.insert(1, "export MESHWRIGHT_DATA=FOLDER")
    if suggestions := [*neighbours(Path(name)), *([] if hub_id else closest(name, REGISTRY))]:
        hint = f"; did you mean {' or '.join(suggestions)}?"
        fix = [f"{FIELD}={one}" for one in suggestions] + fix
    reason = f"dataset not found{hint} (searched {'; '.join(searched)})"
    return InputError(reason, field=FIELD, value=name, fix=tuple(fix))
