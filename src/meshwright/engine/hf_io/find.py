"""Where a Hugging Face folder is: a path, or an id that was downloaded before. Nothing is fetched over the network."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from meshwright.errors import InputError

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
FIELD = "pretrained"


def find(pretrained: str) -> Path:
    """The folder of a path, or of an id in the local Hugging Face cache."""
    path = Path(pretrained).expanduser()
    if path.is_dir():
        if not (path / CONFIG).is_file():
            raise InputError(
                f"{path} has no {CONFIG}, so it is no Hugging Face model folder",
                field=FIELD,
                value=pretrained,
                fix=("name the folder that holds config.json and the safetensors files",),
            )
        return path
    if path.exists():
        raise InputError(
            f"{path} is a file",
            field=FIELD,
            value=pretrained,
            fix=(f"{FIELD}={path.parent}",),
        )
    if path.is_absolute() or pretrained.startswith((".", "~")) or pretrained.count("/") > 1:
        raise InputError("there is no such folder", field=FIELD, value=pretrained, fix=("check the path",))
    return _downloaded(pretrained)


def transformer_folder(folder: Path) -> Path:
    """Of a diffusion pipeline's folder the folder of what is trained; any other folder itself."""
    inner = folder / "transformer"
    return inner if (inner / CONFIG).is_file() and not (folder / CONFIG).exists() else folder


def _downloaded(model_id: str) -> Path:
    """The newest downloaded revision of a model of the hub."""
    cache = _cache()
    model = cache / f"models--{model_id.replace('/', '--')}"
    snapshots = model / "snapshots"
    named = model / "refs" / "main"
    found = [snapshots / named.read_text().strip()] if named.is_file() else []
    if not any(one.is_dir() for one in found) and snapshots.is_dir():
        found = sorted((one for one in snapshots.iterdir() if one.is_dir()), key=lambda one: one.stat().st_mtime)
    folder = next((one for one in reversed(found) if (one / CONFIG).is_file()), None)
    if folder is None:
        raise InputError(
            f"there is no folder {model_id}, and {cache} does not hold a model of that id; nothing is downloaded here",
            field=FIELD,
            value=model_id,
            fix=(f"hf download {model_id}", f"{FIELD}=the path of a folder with config.json and safetensors files"),
        )
    return folder


def _cache() -> Path:
    """The hub's cache folder, from the environment variables of the huggingface_hub library."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    return Path(named or Path(home) / "hub").expanduser()


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}", field=FIELD, fix=("download the folder again",)) from None
    if not isinstance(values, dict):
        raise InputError(f"{path} holds no JSON object", field=FIELD, fix=("download the folder again",))
    return values
