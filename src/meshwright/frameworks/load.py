"""Load a file: its format, its settings with line numbers, and the training programs a script starts."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from msgspec import structs

from meshwright import config_io, file_access
from meshwright.errors import InputError
from meshwright.frameworks.cluster_task import task_script
from meshwright.frameworks.framework import Content, Format
from meshwright.frameworks.script_folders import is_file as is_regular_file
from meshwright.frameworks.script_folders import started_from
from meshwright.frameworks.suffixes import SUFFIXES
from meshwright.frameworks.types import SourcedValue
from meshwright.recipes import files
from meshwright.recipes.dataset_file import is_dataset_file
from meshwright.recipes.run_folder import is_run_folder, recipe_of_run

LINE_CHARACTERS = 500  # of a first line: matching stays fast
_COMMENT = re.compile(r"\s*#(?!!)")
_FIRST_LINES: Mapping[Format, re.Pattern[str]] = {
    "python": re.compile(r"#!.*python|(import|from|def|class|async) \w|@\w|[rfub]?(\"\"\"|''')"),
    "yaml": re.compile(r"---\s*$|- |[\"']?[A-Za-z_][\w.\-]*[\"']?\s*:(\s|$)"),
    "toml": re.compile(r"\[[\w.\-\"\[\] ]+\]\s*(#.*)?$|[\"\w.\-]+ *= +\S|[\w.\-]+ +=\S"),
    "shell": re.compile(r"#!|\w+=\S*( |$)|[\w./$\{\}\-]+ (.* )?(-|\\$)|(export|set|source|cd|module|srun|exec) \S"),
}
"""How the first line of a text without a suffix starts that is not a comment."""
_IMPORT = re.compile(r"^(import|from) \w", re.MULTILINE)
_MODULE = re.compile(r"(?!.*\.py$)[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")  # not a file


def open_file(path: str | Path) -> Content:
    """Load a file, or the recipe of a run's folder; raise InputError if it cannot be read safely."""
    if is_run_folder(path):
        return _content_of_run(path)
    file = Path(path)
    if not file_access.closed() and not file_access.exists(file):
        raise file_access.missing_path(file, "file", "cannot be read: there is no such file")
    if is_dataset_file(file):
        fix = (shlex.join(["RECIPE", f"data.dataset={path}"]), shlex.join(["meshwright", "check", str(path)]))
        raise InputError("is a dataset, not a recipe: type the recipe first", field="file", value=path, fix=fix)
    if file.suffix == ".ipynb":
        fix = (shlex.join(["jupyter", "nbconvert", "--to", "script", str(path)]), str(file.with_suffix(".py")))
        raise InputError("is a notebook: its code is read from a Python file", field="file", value=path, fix=fix)
    folder = None if file_access.closed() else file.parent
    return content_of(config_io.read_text(file), str(path), folder=folder)


def program_path(content: Content, program: SourcedValue) -> Path | None:
    """Return the path of the Python file that a script starts, which need not exist; None if its name is unknown.

    It is beside the script, or relative to a folder above it, from which the job is started. A folder that is known
    only when the job runs, such as $SLURM_SUBMIT_DIR, is taken for the script's own.
    """
    value = str(program.value)
    if content.folder is None:
        return None
    if _MODULE.fullmatch(value) and not program.unresolved:  # python -m package.train, from the repository's root
        file = f"{value.replace('.', '/')}.py"
        places = started_from(content.folder, f"{file}/")
        return next((path for one in places if is_regular_file(path := one / file)), None)
    if not value.endswith(".py"):
        return None
    if not program.unresolved:
        found = next(
            (path for one in started_from(content.folder, value) if is_regular_file(path := one / value)), None
        )
        return found or content.folder / value
    name = Path(value).name
    return None if "$" in name or name == ".py" else content.folder / name


def _content_of_run(path: str | Path) -> Content:
    """Return the recipe of a run as content without lines: no file has this text."""
    found = content_of(files.to_text(recipe_of_run(path)), str(path), "toml", Path(path))
    return structs.replace(found, settings={key: structs.replace(one, line=0) for key, one in found.settings.items()})


def content_of(
    text: str,
    path: str,
    format: Format | None = None,
    folder: Path | None = None,
    beside: Mapping[str, str] | None = None,
) -> Content:
    """Parse the text of a file; `path` need not exist. `beside` are texts of files that it may name."""
    format = format or format_of(path, text)
    if format == "shell":
        from meshwright.frameworks.shell import find_launches, read_script

        script = read_script(text, path, folder)
        return Content(path, text, format, folder, script=script, launches=find_launches(script))
    if format == "python":
        return Content(path, text, format, folder)
    if format == "yaml" and (run := task_script(text, path)) is not None:
        from meshwright.frameworks.shell import find_launches, read_script

        script = read_script(run, path, folder)
        return Content(path, text, "shell", folder, script=script, launches=find_launches(script))
    repeated: list[config_io.RepeatedKey] = []
    found = config_io.parse_leaves(text, format, path, repeated)
    settings = {key: SourcedValue(leaf.value, leaf.line, path, pyyaml=leaf.pyyaml) for key, leaf in found.items()}
    return Content(path, text, format, folder, settings=settings, beside=beside or {}, repeated=tuple(repeated))


LOG_SUFFIXES = (".log", ".out", ".err")  # of what a training prints, which doctor reads


def format_of(path: str, text: str) -> Format:
    """Return the format of a file by its suffix, or by its text; a suffix of another format says too much to guess."""
    suffix = Path(path).suffix.lower()
    if suffix in SUFFIXES:
        return SUFFIXES[suffix]
    first = next((line for line in text.splitlines() if line.strip() and not _COMMENT.match(line)), "")
    first = first.lstrip()[:LINE_CHARACTERS]
    found: Format | None = "json" if first.startswith("{") and suffix not in LOG_SUFFIXES else None
    if not found and not suffix:
        found = next((name for name, line in _FIRST_LINES.items() if line.match(first)), None)
        found = "python" if found == "toml" and _IMPORT.search(text) else found  # lr = 3e-4 starts a program, too
    if not found and (first.startswith(("#!", "--")) or "torchrun" in text or "#SBATCH" in text):
        found = "shell"
    if found is None:
        fix = [f"use one of the suffixes {', '.join(SUFFIXES)} in its name"]
        if suffix in LOG_SUFFIXES:
            fix = [f"meshwright doctor {shlex.quote(path)}", *fix]
        raise InputError("has an unknown format", field="file", value=path, fix=fix)
    return found
