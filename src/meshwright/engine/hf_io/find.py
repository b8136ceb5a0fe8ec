"""Finds Hugging Face model folders by path or by the id of a cached download. Never uses the network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from meshwright.errors import InputError
from meshwright.file_access import missing_path, neighbours
from meshwright.hub import CONFIG, cached_snapshot, hub_cache
from meshwright.json_text import decode_float
from meshwright.models import not_a_model

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
FIELD = "pretrained"


def find_folder(pretrained: str) -> Path:
    """Return the model folder of a path, or of an id in the local Hugging Face cache."""
    path = Path(pretrained).expanduser()
    if path.is_dir():
        if not (path / CONFIG).is_file():
            raise not_a_model(pretrained, FIELD) or InputError(
                f"{path} has no {CONFIG}, so it is not a Hugging Face model folder",
                field=FIELD,
                value=pretrained,
                fix=("use the folder with config.json and the safetensors files",),
            )
        return path
    if path.exists():
        raise InputError(
            f"{path} is a file, not a folder", field=FIELD, value=pretrained, fix=(f"{FIELD}={path.parent}",)
        )
    if path.is_absolute() or pretrained.startswith((".", "~")) or pretrained.endswith("/") or pretrained.count("/") > 1:
        raise missing_path(pretrained, FIELD, "no such folder")
    return _downloaded(pretrained)


def has_weights(folder: Path) -> bool:
    """Return whether a folder contains weights, in any format."""
    return any(any(folder.glob(pattern)) for pattern in ("*.safetensors", *PICKLED))


def transformer_folder(folder: Path) -> Path:
    """Return the transformer subfolder of a diffusion pipeline; any other folder unchanged."""
    inner = folder / "transformer"
    return inner if (inner / CONFIG).is_file() and not (folder / CONFIG).exists() else folder


def _downloaded(model_id: str) -> Path:
    """Return the newest downloaded snapshot of a hub model; raise InputError if it has no weights."""
    folder = cached_snapshot(model_id)
    if folder is None or not has_weights(folder):
        near = neighbours(Path(model_id))
        missing = "no model of that id" if folder is None else f"only {CONFIG} of that id, without weights,"
        raise InputError(
            f"no folder {model_id}{f' (did you mean {near[0]}?)' if near else ''}, and {missing} in "
            f"{hub_cache()}; weights are not downloaded automatically",
            field=FIELD,
            value=model_id,
            fix=(
                *near[:1],
                f"hf download {model_id}",
                f"{FIELD}=path of a folder with config.json and safetensors files",
            ),
        )
    return folder


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file."""
    try:
        values = json.loads(path.read_text(encoding="utf-8-sig"), object_hook=decode_float)
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}", field=FIELD, fix=("download the folder again",)) from None
    if not isinstance(values, dict):
        raise InputError(f"{path} is not a JSON object", field=FIELD, fix=("download the folder again",))
    return values
