"""A local file as the data of TRL's own scripts: named in a --config file, because --dataset_name takes none.

TRL passes --dataset_name to load_dataset, which reads a folder or a dataset of the hub; a file is data_files of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePath

from meshwright import file_access
from meshwright.frameworks.trainer_program import READERS
from meshwright.recipes.types import Recipe

DATASET, CONFIG = "dataset_name", "config"
SCRIPTS = ("sft.py", "trl.scripts.sft")


def is_trl_script(words: Sequence[str]) -> bool:
    """Return whether a command runs TRL's own script for fine-tuning."""
    return any(word in SCRIPTS or PurePath(word).name in SCRIPTS for word in words[:2])


def is_file(name: str) -> bool:
    """Return whether a dataset is a data file of this machine."""
    path = Path(name).expanduser()
    return not file_access.closed() and path.suffix.lower() in READERS and path.is_file()


def data_config(recipe: Recipe) -> str:
    """Return the --config file that names the data, and the part that is held out for validation."""
    data = recipe.data
    lines = ["datasets:", f"  - path: {READERS[Path(data.dataset).suffix.lower()]}", f"    data_files: {data.dataset}"]
    lines += [f"    split: {data.split or 'train'}"]
    if recipe.train.eval_every and data.validation_part:
        lines.append(f"test_split_size: {data.validation_part}")
    return "\n".join((*lines, ""))
