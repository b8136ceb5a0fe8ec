"""The files that a command checks: those named, and those of folders and globs that a framework reads."""

from __future__ import annotations

import glob
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from meshwright import file_access, frameworks
from meshwright.api.inputs import TEXT_BYTES
from meshwright.api.resolve import is_file
from meshwright.api.responses import Part
from meshwright.api.suppression import is_baseline
from meshwright.api.targets import is_target
from meshwright.errors import InputError
from meshwright.models import is_config, not_a_model
from meshwright.recipes.dataset_file import DATA_FILES, is_dataset_file
from meshwright.recipes.run_folder import is_run_folder

CONFIG_SUFFIXES = (".sh", ".bash", ".sbatch", ".slurm", ".yaml", ".yml", ".toml", ".json", ".py")
LEFT_OUT = ("__pycache__", "node_modules", "site-packages")  # folders without configs, as are hidden ones
OF_A_MODEL = ("tokenizer.json", "vocab.json", "model.safetensors.index.json", "trainer_state.json")
"""Files of a model folder that are large or have keys of a config."""
LAUNCHERS = re.compile(
    r"torchrun|torch\.distributed|\bsrun\b|accelerate launch|deepspeed|meshwright train|pretrain_gpt"
)

TRAINS = re.compile(
    r"batch_?size|learning_rate|seq(?:uence)?_len|\b(?:lr|bf16|fp16|fsdp)\b|(?:zero|fsdp|peft|lora)_|_parallel|optimizer:"
    r"|train_iters|max_steps|num_(?:train_)?epochs|base_model|model_name_or_path|distributed_type|deepspeed|\[training\]"
    + f"|{LAUNCHERS.pattern}"
)
"""What a config of a framework has at least one of: a file without any that cannot be read is another program's."""


class SkippedFile(Part, frozen=True, kw_only=True):
    """A file of a folder or glob that is not checked."""

    file: str
    reason: str


STANDARD_INPUT = "-"


class Targets(msgspec.Struct, frozen=True):
    """What to check."""

    names: tuple[str, ...]
    optional: frozenset[str]  # files that are skipped if no framework reads them
    several: bool  # files of a folder or glob, or more than one word


def is_checked(word: str) -> bool:
    """Return whether a word of a command line names something to check: also a folder, or a glob."""
    return is_target(word) or is_glob(word) or file_access.is_dir(word)


def is_glob(word: object) -> bool:
    """Return whether a word is a pattern of file names and no file itself."""
    return isinstance(word, str) and glob.has_magic(word) and not os.path.exists(word)


def is_config_folder(word: object) -> bool:
    """Return whether a word is a folder of configs: no model, run, checkpoint or adapters."""
    if not isinstance(word, str) or not file_access.is_dir(word) or is_run_folder(word):
        return False
    return not_a_model(word, "target") is None and not _has_config(word)


def is_model_with_configs(word: object) -> bool:
    """Return whether a word is a model folder that also has files which train: each of them is checked too."""
    if not isinstance(word, str) or not file_access.is_dir(word) or is_run_folder(word) or not _has_config(word):
        return False
    return any(not is_config(file) and not why_skipped(file, None) for file in _files_in(word))


def _has_config(folder: str) -> bool:
    return (Path(folder).expanduser() / "config.json").is_file()


def expand(words: Sequence[str], skip_unknown: bool = False, baselines: Sequence[str | None] = ()) -> Targets:
    """Return the targets of a command line, each once; raise InputError for a folder or glob without any.

    The baselines of the command are no targets, also if they are in a folder that is checked.
    """
    baseline_paths = {os.path.realpath(os.path.expanduser(one)) for one in baselines if one}
    found: dict[str, None] = {}
    optional: set[str] = set()
    for word in words:
        if word == STANDARD_INPUT:
            reason = "standard input is not read: findings name the file and its lines, and its ending is its format"
            fix = ("cat > train.yaml && meshwright check train.yaml", "meshwright check FILE")
            raise InputError(reason, field="target", value=word, fix=fix)
        if is_glob(word) or is_config_folder(word):
            matching = sorted(_matches(word) if is_glob(word) else _files_in(word))
            files = [one for one in matching if os.path.realpath(one) not in baseline_paths]
            if not files:
                raise _nothing_in(word)
            optional.update(file for file in files if file not in words)
            found |= dict.fromkeys(files)
        elif is_model_with_configs(word):
            own = os.path.normpath(Path(word).expanduser() / "config.json")
            others = (file for file in sorted(_files_in(word)) if os.path.realpath(file) not in baseline_paths)
            files = [own, *(file for file in others if file != own)]
            optional.update(file for file in files[1:] if file not in words)
            found |= dict.fromkeys(files)
        else:
            optional.update([word] if skip_unknown and os.path.isfile(word) else ())
            found[word] = None
    alone = len(words) == 1 and tuple(found) == tuple(words) and not optional
    return Targets(tuple(found), frozenset(optional), not alone)


def _nothing_in(word: str) -> InputError:
    """Return the error for a folder or glob without configs; a folder of data is checked with a recipe."""
    if is_glob(word):
        return InputError("no file matches", field="target", value=word, fix=("meshwright check FILE",))
    found, fix = f"has no {', '.join(CONFIG_SUFFIXES)} file", "meshwright check FILE"
    data = next(_files_in(word, (*DATA_FILES, ".txt")), None)
    if data is not None:
        found += f", but data ({data}), which is checked with the recipe that trains on it"
        fix = shlex.join(["meshwright", "check", "RECIPE", "--gpus", "1xH100", f"data.dataset={word}"])
    return InputError(found, field="target", value=word, fix=(fix,))


def nothing_checked(words: Sequence[str], skipped: Sequence[SkippedFile]) -> InputError:
    """Return the error for folders and globs without a file that a framework reads."""
    first = skipped[0]
    more = f", and {len(skipped) - 1} more" if len(skipped) > 1 else ""
    reason = f"no framework reads a file of it: {first.file}: {first.reason}{more}"
    fix = (f"meshwright check {first.file} --framework NAME",)
    return InputError(reason, field="target", value=" ".join(words), fix=fix)


def _matches(pattern: str) -> Iterator[str]:
    found = glob.iglob(os.path.expanduser(pattern), recursive=True)
    return (path for path in found if os.path.isfile(path))


def _files_in(folder: str, suffixes: tuple[str, ...] = CONFIG_SUFFIXES) -> Iterator[str]:
    """Yield the files of a folder and its folders that may be configs; links to folders are not followed."""
    for place, folders, names in os.walk(Path(folder).expanduser()):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in LEFT_OUT]
        for name in names:
            path = os.path.normpath(os.path.join(place, name))
            if name.lower().endswith(suffixes) and not name.startswith(".") and os.path.isfile(path):  # no pipe
                yield path


def why_skipped(file: str, framework: str | None) -> str:
    """Return why a file of a folder is not checked; empty if it is, or if only its check can say what is wrong."""
    if is_dataset_file(file):
        return "a dataset; name it alone to check its rows"
    if is_config(file) and not is_file(file):
        return "a model's config.json"
    if Path(file).name in OF_A_MODEL:
        return "a file of a model"
    if file.endswith(".json") and is_baseline(file):
        return "a baseline of known findings; --baseline reads it"
    if not is_file(file):
        return "no framework reads this kind of file"
    try:
        content = frameworks.open_file(file)
    except InputError as error:
        is_script = frameworks.SUFFIXES.get(Path(file).suffix.lower(), "shell") == "shell"
        text = _start(file) if file.lower().endswith(CONFIG_SUFFIXES) else ""
        return "" if (LAUNCHERS if is_script else TRAINS).search(text) else error.reason
    try:
        frameworks.framework_of(content, framework, front_ends=True)
    except InputError as error:
        return error.reason
    return ""


def _start(file: str) -> str:
    """Return the start of a file that is no config: enough to see whether it trains."""
    with open(file, "rb") as opened:
        return opened.read(TEXT_BYTES).decode(errors="replace").replace("\0", "")  # of UTF-16
