"""Detects the type of a checkpoint path and loads its model with transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from meshwright.engine.faults import RunError
from meshwright.engine.hooks import CLASS_KEY, LOSS_KEY
from meshwright.engine.run_template import with_kept_template
from meshwright.engine.warning_filters import no_progress
from meshwright.errors import InputError, closest, first_line
from meshwright.extras import require
from meshwright.notes import note
from meshwright.recipes.types import Recipe

CheckpointType = Literal["model", "adapters", "checkpoint", "run", "megatron"]
FIELD = "source"
ADAPTERS = "adapter_config.json"


class FoundCheckpoint(msgspec.Struct, frozen=True):
    """A folder and its type: a Hugging Face model, adapters, a Meshwright or Megatron checkpoint, or a run."""

    type: CheckpointType
    path: Path
    step: int | None = None  # of a run's checkpoint
    best_step: int | None = None  # of a run's checkpoint with a lower validation loss than this one


def find_checkpoint(path: str, which: str | None = None, megatron: bool = False) -> FoundCheckpoint:
    """Return the model of a path; of a run, one of its checkpoints: `best`, `latest` (the default) or a step."""
    found = inspect(path)
    if found.type == "megatron":
        if not megatron:
            reason = "is a Megatron checkpoint; convert it first"
            raise InputError(reason, field=FIELD, value=path, fix=(f"meshwright convert {path} OUT",))
        return found
    if found.type != "run":
        if which is not None:
            raise InputError(
                f"chooses among the checkpoints of a run, but {path} is not a run folder",
                field="--checkpoint",
                value=which,
                fix=("use the --out folder of `meshwright train`", "leave out --checkpoint"),
            )
        return found
    chosen = resolve_checkpoint(found) if which in (None, "latest") else _chosen_checkpoint(found.path, str(which))
    return _with_steps(chosen, found.path, which)


def _with_steps(chosen: Path, run: Path, which: str | None) -> FoundCheckpoint:
    """Return the checkpoint of a run; note that another one has a lower validation loss, unless it was asked for."""
    from meshwright.engine.checkpoint.folder import Folder
    from meshwright.engine.checkpoint.metadata import read_state

    step, folder = read_state(chosen).step, Folder(run)
    best = folder.best()
    if best is None or best == step or best not in folder.steps():
        return FoundCheckpoint("checkpoint", chosen, step)
    if which is None:
        note(
            f"step {step} is used, the latest checkpoint of {run}; the one with the lowest validation loss is step "
            f"{best}: --checkpoint best"
        )
    return FoundCheckpoint("checkpoint", chosen, step, best)


def _chosen_checkpoint(run: Path, which: str) -> Path:
    """Return the best checkpoint of a run or that of a step."""
    from meshwright.engine.checkpoint.folder import Folder

    folder = Folder(run)
    steps = [str(step) for step in folder.steps()]
    number = which.removeprefix("step-").lstrip("0") or which
    if number in steps:
        return resolve_checkpoint(FoundCheckpoint("checkpoint", folder.step_path(int(number))))
    best = folder.best()
    listed = f"the run has checkpoints of step {', '.join(steps)}" if steps else "the run has no checkpoint yet"
    if which != "best":
        choices = ["latest", *(["best"] if best is not None else []), *steps]
        hint = "".join(f"; did you mean {one}?" for one in closest(which, choices)[:1])
        fixes = tuple(f"--checkpoint {one}" for one in choices)
        raise InputError(f"no such checkpoint; {listed}{hint}", field="--checkpoint", value=which, fix=fixes)
    if best is None:
        raise InputError(
            f"the run has no best checkpoint: it did not validate, or checkpoint.keep_best=false; {listed}",
            field="--checkpoint",
            value=which,
            fix=("--checkpoint latest", "train with train.eval_every=N"),
        )
    if str(best) not in steps:
        raise RunError(f"the best checkpoint of {run}, step {best}, is missing; {listed}", fix=("--checkpoint latest",))
    return resolve_checkpoint(FoundCheckpoint("checkpoint", folder.step_path(best)))


def inspect(path: str) -> FoundCheckpoint:
    """Detect the checkpoint type of a path."""
    from meshwright.engine.checkpoint.folder import BEST, LATEST, MANIFEST
    from meshwright.engine.megatron_io.to_hf import is_megatron

    folder = Path(path).expanduser()
    if folder.name in (BEST, LATEST) and (folder.parent.parent / "checkpoints").is_dir():
        return find_checkpoint(str(folder.parent.parent), folder.name)
    if not folder.exists():
        return FoundCheckpoint("model", _published_model(path))
    if folder.is_file():
        folder = folder.parent
    for checkpoint_type, name in (*MARKER_FILES, ("checkpoint", MANIFEST)):
        if (folder / name).exists():
            return FoundCheckpoint(checkpoint_type, folder)
    if is_megatron(folder):
        return FoundCheckpoint("megatron", folder)
    raise InputError(
        "is neither a Hugging Face model (config.json), adapters (adapter_config.json), a Meshwright checkpoint, "
        "a run with checkpoints nor a Megatron checkpoint",
        field=FIELD,
        value=path,
        fix=("use the --out folder of `meshwright train`", "use a folder with config.json"),
    )


def _published_model(path: str) -> Path:
    """Return the local folder of a Hugging Face id; a path that does not exist is reported as such."""
    from meshwright.engine import hf_io
    from meshwright.file_access import neighbours

    try:
        return hf_io.find_folder(path)
    except InputError as error:
        near = neighbours(Path(path).expanduser())
        hint = f"; did you mean {near[0]}?" if near else ""
        reason = f"no such run, checkpoint or model folder{hint} ({error.reason})"
        fix = (*near[:1], "use the --out folder of `meshwright train`", *error.fix[:1])
        raise InputError(reason, field=FIELD, value=path, fix=fix) from None


MARKER_FILES: tuple[tuple[CheckpointType, str], ...] = (
    ("adapters", ADAPTERS),
    ("run", "checkpoints"),
    ("model", "config.json"),
)


def resolve_checkpoint(found: FoundCheckpoint) -> Path:
    """Return the checkpoint, or the latest valid one of a run; every file of it is verified."""
    from meshwright.engine.checkpoint.folder import Folder
    from meshwright.engine.checkpoint.load import find_latest_valid, find_problems

    if found.type == "run":
        latest = find_latest_valid(Folder(found.path))
        if latest is None:
            raise InputError("the run has no checkpoint yet", field=FIELD, value=str(found.path))
        return latest
    problems = find_problems(found.path)
    if problems:
        raise RunError(f"{found.path} is corrupt: {'; '.join(problems)}", fix=("use another checkpoint of the run",))
    return found.path


def recipe_of(checkpoint: Path) -> tuple[Recipe, dict[str, Any]]:
    """Return the recipe of a checkpoint, reconstructed from its contract fields, and the model's config."""
    from meshwright.engine.checkpoint.metadata import read_state

    state = read_state(checkpoint)
    content: dict[str, Any] = {"name": state.recipe or "training", "cluster": "1xH100"}
    config: dict[str, Any] = {}
    for key, value in state.contract.items():
        section, _, name = key.partition(".")
        if section == "config":
            config[name] = value
        elif key == CLASS_KEY:
            class_name, exported = str(value).rpartition(".")[2], checkpoint.parent.parent / "model"
            raise InputError(
                f"was trained with {value}, a class of the program that trained it; only that program can build it",
                field=FIELD,
                value=str(checkpoint),
                fix=(f"in that program, {class_name}.from_pretrained('{exported}'), if the run has ended",),
            )
        elif key == LOSS_KEY:
            continue
        elif name:
            content.setdefault(section, {})[name] = value
        else:
            content[key] = value
    try:
        recipe = msgspec.convert(content, Recipe)
    except msgspec.ValidationError as error:
        raise RunError(f"{checkpoint} was written by another version: {error}") from None
    return with_kept_template(recipe, checkpoint.parent.parent), config


def initial_weights_of(checkpoint: Path, recipe: Recipe) -> Path | None:
    """Return the folder of a checkpoint's initial weights; None if they were random."""
    from meshwright.engine.checkpoint.folder import TINY_WEIGHTS
    from meshwright.engine.initial_weights import weights_folder

    tiny_weights = checkpoint.parent.parent / TINY_WEIGHTS
    return tiny_weights if tiny_weights.is_dir() else weights_folder(recipe)


def base_of(checkpoint: Path, recipe: Recipe) -> str:
    """Return the folder or id of a checkpoint's initial weights, even if they are gone; empty if they were random."""
    from meshwright.models import find

    try:
        folder = initial_weights_of(checkpoint, recipe)
    except InputError:
        return recipe.checkpoint.pretrained or find(recipe.model).hf_id or recipe.model
    return str(folder) if folder is not None else ""


def has_adapters(found: FoundCheckpoint) -> bool:
    """Return whether there are adapters to merge."""
    if found.type in ("run", "checkpoint"):
        return recipe_of(resolve_checkpoint(found))[0].goal == "peft"
    return found.type == "adapters"


def is_pretrained_only(found: FoundCheckpoint) -> bool:
    """Return whether a run pretrained these weights, or continued to: it saw plain text, no turns of a conversation."""
    from meshwright.engine.checkpoint.folder import Folder

    if found.type == "checkpoint":
        return recipe_of(found.path)[0].goal == "pretrain"
    run = Folder(found.path.absolute().parent)  # of a model that a run exported
    if found.type != "model" or found.path.name != "model" or not run.steps():
        return False
    return recipe_of(run.step_path(run.steps()[-1]))[0].goal == "pretrain"


def load_model(folder: Path, dtype: Any = "auto") -> Any:
    """Load a model folder, or adapters with their base model, as a transformers model in eval mode."""
    if not _are_adapters(folder):
        return _transformers_model(folder, dtype)
    require("adapters", "peft")
    from peft import PeftModel

    from meshwright.engine.hf_io.peft import WEIGHTS_FILE

    _check_files(folder, WEIGHTS_FILE)
    _check_no_imports(folder)
    return PeftModel.from_pretrained(_transformers_model(base_model_of(folder), dtype), str(folder)).eval()


def tokenizer_of(folder: Path) -> Path:
    """Return the folder with a model's tokenizer; for adapters without one, that of the base model."""
    from meshwright.engine.hf_io import has_tokenizer

    return folder if has_tokenizer(folder) or not _are_adapters(folder) else base_model_of(folder)


def require_tokenizer(folder: Path, path: str, fix: str = "") -> Path:
    """Return the folder with a model's tokenizer; raise if it has none. `path` is what the user named."""
    from meshwright.engine.hf_io import has_tokenizer

    found = tokenizer_of(folder)
    if has_tokenizer(found):
        return found
    named = Path(path).expanduser()
    files = (
        f"copy tokenizer.json and tokenizer_config.json into {named / 'model' if (named / 'model').is_dir() else path}"
    )
    raise InputError(
        "the model has no tokenizer: it was not trained on text, or its tokenizer is no longer where it was",
        field=FIELD,
        value=path,
        fix=(fix or f"{files}, then use that folder",),
    )


def base_model_of(adapters: Path) -> Path:
    """Return the folder of the adapters' base model."""
    from meshwright.engine import hf_io
    from meshwright.engine.hf_io.find import read_json

    base = str(read_json(adapters / ADAPTERS).get("base_model_name_or_path") or "")
    relative = (adapters / base).resolve()
    return relative if base and relative.is_dir() else hf_io.find_folder(base)


def _are_adapters(folder: Path) -> bool:
    return (folder / ADAPTERS).exists()


def _check_no_imports(adapters: Path) -> None:
    """Raise if peft would import a module named in the adapters' config."""
    from meshwright.engine.hf_io.find import read_json

    if read_json(adapters / ADAPTERS).get("megatron_config"):
        raise InputError(
            f"{ADAPTERS} has a megatron_config, which makes peft import the module it names",
            field=FIELD,
            value=str(adapters),
            fix=("save the adapters from a model without Megatron's layers",),
        )


def _check_files(folder: Path, single: str) -> None:
    """Raise on pickled or corrupt files and paths outside the folder: transformers and peft would follow an index."""
    from meshwright.engine.hf_io.files import SafetensorsFolder

    files = SafetensorsFolder(folder, single)
    files.open_all()
    files.close()


def _transformers_model(folder: Path, dtype: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    from meshwright.engine.hf_io.find import WEIGHTS, read_json
    from meshwright.hub import CONFIG
    from meshwright.models import load_config, require_known_class

    _check_files(folder, WEIGHTS)
    values = load_config(folder)
    require_known_class(values, str(folder), FIELD)
    renamed = values.get("model_type") != read_json(folder / CONFIG).get("model_type")
    safe: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        config = AutoConfig.for_model(**values) if renamed else AutoConfig.from_pretrained(folder, **safe)
        model_class: Any = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
        with no_progress():
            return model_class.from_pretrained(folder, config=config, dtype=dtype, use_safetensors=True, **safe).eval()
    except (OSError, ValueError) as error:
        raise InputError(first_line(error), field=FIELD, value=str(folder)) from None
