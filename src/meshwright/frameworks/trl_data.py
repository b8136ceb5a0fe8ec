"""A local file as the data of TRL's own scripts: named in a --config file, because --dataset_name takes none.

TRL passes --dataset_name to load_dataset, which reads a folder or a dataset of the hub; a file is data_files of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePath

from meshwright import file_access
from meshwright.frameworks import accelerate_options
from meshwright.frameworks.trainer_program import READERS, VALIDATION_PART
from meshwright.recipes.types import Recipe

DATASET, CONFIG = "dataset_name", "config"
MIXTURE = "datasets"  # of a --config file; TRL then ignores --dataset_name
HELD_OUT = "test_split_size"
ENVIRONMENT = "env"  # section of a --config file: variables that TRL sets
SCRIPTS = ("sft.py", "trl.scripts.sft")


def is_trl_script(words: Sequence[str]) -> bool:
    """Return whether a command runs TRL's own script for fine-tuning."""
    return any(word in SCRIPTS or PurePath(word).name in SCRIPTS for word in words[:2])


def is_of_command(key: str) -> bool:
    """Return whether a key of a --config file is no argument: a variable, or an option of Accelerate's launcher."""
    return key.split(".")[0] == ENVIRONMENT or key in accelerate_options.IN_FILE


def is_file(name: str) -> bool:
    """Return whether a dataset is a data file of this machine."""
    path = Path(name).expanduser()
    return not file_access.closed() and path.suffix.lower() in READERS and path.is_file()


def held_out(recipe: Recipe) -> float:
    """Return the part of the data that is held out for validation: TRL does not start to evaluate without one."""
    return recipe.data.validation_part or VALIDATION_PART


def data_config(recipe: Recipe, validates: bool) -> str:
    """Return the --config file that names the data, and the part that is held out if the command validates."""
    data = recipe.data
    lines = ["datasets:", f"  - path: {READERS[Path(data.dataset).suffix.lower()]}", f"    data_files: {data.dataset}"]
    lines += [f"    split: {data.split or 'train'}"]
    if validates:
        lines.append(f"{HELD_OUT}: {held_out(recipe)}")
    return "\n".join((*lines, ""))
