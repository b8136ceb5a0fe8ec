"""What a path holds that somebody calls a checkpoint, and its model as transformers' own."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from meshwright.engine.faults import RunError
from meshwright.engine.train import TINY_WEIGHTS
from meshwright.engine.warning_filters import no_progress
from meshwright.errors import InputError, first_line
from meshwright.recipes.types import Recipe

Kind = Literal["model", "adapters", "checkpoint", "run"]
FIELD = "checkpoint"
ADAPTERS = "adapter_config.json"


class Found(msgspec.Struct, frozen=True):
    """A folder and what it is: a Hugging Face model, adapters for one, one checkpoint of ours, or a run with some."""

    kind: Kind
    path: Path


def inspect(path: str) -> Found:
    """What a path is."""
    from meshwright.engine.checkpoint.folder import MANIFEST

    folder = Path(path).expanduser()
    if not folder.exists():
        from meshwright.engine import hf_io

        return Found("model", hf_io.find_folder(path))
    if folder.is_file():
        folder = folder.parent
    for kind, name in (*MARKS, ("checkpoint", MANIFEST)):
        if (folder / name).exists():
            return Found(kind, folder)
    raise InputError(
        "holds neither a Hugging Face model (config.json), adapters (adapter_config.json), a checkpoint of ours "
        "nor a run with checkpoints",
        field=FIELD,
        value=path,
        fix=("name the folder that `meshwright train --out` was given", "name a folder with config.json"),
    )


MARKS: tuple[tuple[Kind, str], ...] = (
    ("adapters", ADAPTERS),
    ("run", "checkpoints"),
    ("model", "config.json"),
)


def newest(found: Found) -> Path:
    """The checkpoint that was named, or the newest good one of a run; every file of it is verified."""
    from meshwright.engine.checkpoint import Folder
    from meshwright.engine.checkpoint.load import find_latest_valid, find_problems

    if found.kind == "run":
        good = find_latest_valid(Folder(found.path))
        if good is None:
            raise InputError("the run has no checkpoint yet", field=FIELD, value=str(found.path))
        return good
    problems = find_problems(found.path)
    if problems:
        raise RunError(f"{found.path} is damaged: {'; '.join(problems)}", fix=("name another checkpoint of the run",))
    return found.path


def recipe_of(checkpoint: Path) -> tuple[Recipe, dict[str, Any]]:
    """The recipe that a checkpoint was trained by, as far as it determines the weights, and the model's config."""
    from meshwright.engine.checkpoint.metadata import read_state

    state = read_state(checkpoint)
    content: dict[str, Any] = {"name": state.recipe or "training", "cluster": "1xH100"}
    config: dict[str, Any] = {}
    for key, value in state.contract.items():
        section, _, name = key.partition(".")
        if section == "config":
            config[name] = value
        elif name:
            content.setdefault(section, {})[name] = value
        else:
            content[key] = value
    try:
        return msgspec.convert(content, Recipe), config
    except msgspec.ValidationError as error:
        raise RunError(f"{checkpoint} was written by another version: {error}") from None


def start_of(checkpoint: Path, recipe: Recipe) -> Path | None:
    """The folder that the training of a checkpoint started from; None where it started from random weights."""
    from meshwright.engine.initial_weights import weights_folder

    made = checkpoint.parent.parent / TINY_WEIGHTS
    return made if made.is_dir() else weights_folder(recipe)


def has_adapters(found: Found) -> bool:
    """Whether there is something to merge into a model."""
    if found.kind in ("run", "checkpoint"):
        return recipe_of(newest(found))[0].goal == "peft"
    return found.kind == "adapters"


def load_model(folder: Path, dtype: Any = "auto") -> Any:
    """A model folder, or adapters put onto the model they are for, as a transformers model ready to be asked."""
    if not _are_adapters(folder):
        return _transformers_model(folder, dtype)
    from peft import PeftModel

    from meshwright.engine.hf_io.peft import WEIGHTS_FILE

    _check_files(folder, WEIGHTS_FILE)
    _refuse_named_code(folder)
    return PeftModel.from_pretrained(_transformers_model(base_of(folder), dtype), str(folder)).eval()


def tokenizer_of(folder: Path) -> Path:
    """The folder with the tokenizer of a model: its own, or of adapters without one that of their model."""
    from meshwright.engine.hf_io import has_tokenizer

    return folder if has_tokenizer(folder) or not _are_adapters(folder) else base_of(folder)


def base_of(adapters: Path) -> Path:
    """The folder of the model that adapters are for."""
    from meshwright.engine import hf_io
    from meshwright.engine.hf_io.find import read_json

    named = str(read_json(adapters / ADAPTERS).get("base_model_name_or_path") or "")
    beside = (adapters / named).resolve()
    return beside if named and beside.is_dir() else hf_io.find_folder(named)


def _are_adapters(folder: Path) -> bool:
    return (folder / ADAPTERS).exists()


def _refuse_named_code(adapters: Path) -> None:
    """Refuses adapters for which the peft library would import a module that their config names."""
    from meshwright.engine.hf_io.find import read_json

    if read_json(adapters / ADAPTERS).get("megatron_config"):
        raise InputError(
            f"{ADAPTERS} has a megatron_config, which names code to be imported",
            field=FIELD,
            value=str(adapters),
            fix=("save the adapters from a model without Megatron's layers",),
        )


def _check_files(folder: Path, single: str) -> None:
    """Refuses files that are pickled, damaged or outside the folder: transformers and peft would follow an index."""
    from meshwright.engine.hf_io.files import SafetensorsFolder

    files = SafetensorsFolder(folder, single)
    files.open_all()
    files.close()


def _transformers_model(folder: Path, dtype: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    from meshwright.engine.hf_io.find import WEIGHTS

    _check_files(folder, WEIGHTS)
    safe: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        config = AutoConfig.from_pretrained(folder, **safe)
        kind: Any = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
        with no_progress():
            return kind.from_pretrained(folder, dtype=dtype, use_safetensors=True, **safe).eval()
    except (OSError, ValueError) as error:
        raise InputError(first_line(error), field=FIELD, value=str(folder)) from None
