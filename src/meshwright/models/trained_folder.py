"""Folders that training leaves and that are not a model with a config.json: adapters, runs and checkpoints."""

from __future__ import annotations

import shlex
from itertools import count
from pathlib import Path

from meshwright import file_access, json_text
from meshwright.errors import InputError

CONFIG, ADAPTERS, METRICS = "config.json", "adapter_config.json", "metrics.jsonl"
RUN_MODEL, CHECKPOINTS = "model", "checkpoints"  # folders of a run
PRETRAINED = "checkpoint.pretrained"


def not_a_model(path: str | Path, field: str) -> InputError | None:
    """Return the error for adapters, a run or a checkpoint in place of a model folder; None for any other folder."""
    folder = Path(path).expanduser()
    if not file_access.is_dir(folder) or (folder / CONFIG).is_file():
        return None
    inner = folder / RUN_MODEL
    is_run = (folder / METRICS).is_file()
    if (folder / ADAPTERS).is_file():
        return _merge_first(path, field, "contains adapters")
    if is_run and (inner / ADAPTERS).is_file():
        return _merge_first(path, field, f"is a run that trained adapters ({Path(path) / RUN_MODEL})")
    if is_run and (inner / CONFIG).is_file():
        used = _usage(field, str(Path(path) / RUN_MODEL))
        return InputError("is a run folder; its model is in the folder model", field, str(path), [used])
    if is_run or (folder.parent.name == CHECKPOINTS and folder.name.startswith("step-")):
        what = "is a run folder without an exported model" if is_run else "is a checkpoint, not a model folder"
        adapters = _trained_adapters(folder if is_run else folder.parent.parent)
        return _convert_first(path, field, what, " --merge" if adapters else "")
    return None


def _trained_adapters(run: Path) -> bool:
    """Return whether a run trains adapters: by its exported model, or by the first line of its metrics."""
    if (run / RUN_MODEL / ADAPTERS).is_file():
        return True
    try:
        with (run / METRICS).open(encoding="utf-8") as lines:
            found = json_text.loads(lines.readline())
    except (OSError, ValueError):
        return False
    settings = found.get("settings") if isinstance(found, dict) else None
    return isinstance(settings, dict) and settings.get("goal") == "peft"


def _merge_first(path: str | Path, field: str, what: str) -> InputError:
    return _convert_first(path, field, f"{what}, not a whole model: merge them into their base model first", " --merge")


def _convert_first(path: str | Path, field: str, reason: str, option: str) -> InputError:
    out = _free_name("merged" if option else "exported")
    fix = f"meshwright convert {shlex.quote(str(path))} {out}{option}"
    return InputError(reason, field, str(path), [f"{fix}, then use {_usage(field, out)}"])


def _usage(field: str, folder: str) -> str:
    """Return how a command names a folder: as the weights to start from, or as its model."""
    if field.endswith("pretrained"):
        return f"{PRETRAINED}={folder}"
    return folder if folder.startswith((".", "~", "/")) else f"./{folder}"


def _free_name(name: str) -> str:
    """Return a name that no file or folder has here: convert does not overwrite."""
    return next(one for number in count(1) if not Path(one := name if number == 1 else f"{name}{number}").exists())
