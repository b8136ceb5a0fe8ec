"""The local Hugging Face cache, without torch and without the network."""

from __future__ import annotations

import os
from pathlib import Path


def hub_cache() -> Path:
    """Return the hub cache folder, from huggingface_hub's environment variables."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    return Path(named or Path(home) / "hub").expanduser()


def base_name(folder: str) -> str:
    """Return the name of a model folder for others: the id of a download, else its path."""
    path = Path(folder).expanduser()
    if hub_cache() not in path.parents:
        return folder
    name = path.relative_to(hub_cache()).parts[0]
    return name.removeprefix("models--").replace("--", "/", 1) if name.startswith("models--") else folder


def is_cached(model_id: str) -> bool:
    """Return whether a model or tokenizer of this id was downloaded."""
    return (hub_cache() / f"models--{model_id.replace('/', '--')}").is_dir()
