"""The folder in which a job starts the user's own program, as the user's script does: its relative paths are there."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec

from meshwright import file_access
from meshwright.errors import InputError
from meshwright.frameworks.export_recipe import ARGUMENTS_FILE
from meshwright.frameworks.file_import import ImportedFile
from meshwright.frameworks.framework import Content
from meshwright.frameworks.job_folders import changed_folder, job_folders
from meshwright.frameworks.load import content_of, open_file
from meshwright.frameworks.patch_program import named_config
from meshwright.frameworks.script_folders import is_file
from meshwright.frameworks.types import Program, ProgramArguments


def start_folder(framework: str, content: Content, program: Program, files: Collection[str]) -> Path | None:
    """Return the folder in which the user's script starts its own program; None if it is not known here.

    An absolute folder to which the script changes may be one of another machine. Programs of a framework's
    checkout start in the folder of the job, where its configs are.
    """
    if not is_own(framework, program, files) or file_access.closed():
        return None
    moved = changed_folder(content)
    stated = Path(str(moved.value)) if moved is not None and not moved.unresolved else Path()
    if stated.is_absolute() and not stated.is_dir():
        return stated
    script = _file_of(program)
    if Path(script).is_absolute():
        return stated if stated.is_absolute() else None
    return next((one.resolve() for one in job_folders(content, script) if is_file(one / script)), None)


def is_own(framework: str, program: Program, files: Collection[str]) -> bool:
    """Return whether a program is the user's own, not one of a framework or of an export."""
    return framework in ARGUMENTS_FILE and program.argv[0] not in files and "$" not in program.argv[0]


def _file_of(program: Program) -> str:
    """Return the file of a program; a module is one of the folder in which it starts, unless it is installed."""
    is_module = program.argv[0] == "-m" and len(program.argv) > 1
    return f"{program.argv[1].replace('.', '/')}.py" if is_module else program.argv[0]


def start_of(own: ImportedFile | None) -> Path | None:
    """Return the folder of this machine in which a file starts its own program; None without one, or if not here."""
    words = () if own is None else own.settings.parsed.program.argv
    if own is None or not words:
        return None
    return start_folder(own.framework.name, own.content, Program(tuple(str(one.value) for one in words)), ())


def with_full_names(program: Program, files: Collection[str], folder: str) -> Program:
    """Return a program that starts in another folder than that of its files: it names them by their full paths."""
    full = {name: str(Path(folder).resolve() / name) for name in files}

    def named(word: str) -> str:
        option, equals, value = word.partition("=")
        is_pair = bool(equals) and option.startswith("-") and value in full
        return f"{option}={full[value]}" if is_pair else full.get(word, word)

    argv = tuple(named(word) for word in program.argv)
    env = {name: full.get(value, value) for name, value in program.env.items()}
    return msgspec.structs.replace(program, argv=argv, env=env)


def config_note(
    given: ProgramArguments, program: Program, files: Mapping[str, str], start: Path, folder: str
) -> tuple[str, ...]:
    """Return the warning that a program opens its own config in place of the written one, if they differ."""
    name = named_config(given)
    if name not in files or any(name in word for word in (*program.argv, *program.env.values())):
        return ()
    try:
        own, written = open_file(start / name), content_of(files[name], name)
    except (InputError, OSError):
        return ()
    values = [{key: one.value for key, one in config.settings.items()} for config in (own, written)]
    if values[0] == values[1]:
        return ()
    script = Path(program.argv[0]).name
    path = Path(folder).resolve() / name
    return (f"warning: {script} opens {name} in {start}, not the written one: set deepspeed='{path}' in {script}",)
