"""The user's Python modules that a TOML names, such as `[experimental] custom_import`: torchtitan imports them."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from meshwright import config_io
from meshwright.errors import InputError
from meshwright.frameworks.framework import Content
from meshwright.frameworks.torchtitan.own_flavor import CUSTOM_IMPORT
from meshwright.frameworks.types import ExportedConfig, Settings, SourcedValue

KEYS = (CUSTOM_IMPORT, "experimental.custom_args_module", "job.custom_config_module")
OF_THE_JOB = ("torchtitan", "torch")  # installed where the job runs, also if the file is in a checkout of them
MOST_BYTES = 500_000  # of all carried modules: a ConfigMap of Kubernetes has 1 MiB


def module_text(content: Content, setting: SourcedValue | None) -> str | None:
    """Return the text of the module that a setting names, if its file is beside the config."""
    if setting is None or not isinstance(setting.value, str):
        return None
    name = f"{setting.value.replace('.', '/')}.py"
    if name in content.beside:
        return content.beside[name]
    path = next((found for folder in _folders(content, setting) if (found := folder / name).is_file()), None)
    return None if path is None else config_io.read_text(path)


def with_own_modules(content: Content, read: Settings, after: Settings, written: ExportedConfig) -> ExportedConfig:
    """Return an export with the user's modules that its config imports, or with a note on those that are not here.

    `read` are the settings of the user's file, `after` those of the written config.
    """
    files, notes = dict[str, str](), list[str]()
    for key in KEYS:
        setting, name = read.get(key), str(after[key].value) if key in after else ""
        is_theirs = setting is not None and not setting.unresolved and setting.value == name
        if setting is None or not is_theirs or not name or name.split(".")[0] in OF_THE_JOB:
            continue
        if content.folder is None or f"{name}.py" in written.files:
            continue
        found = next((one for folder in _folders(content, setting) if (one := _modules(folder, name))), None)
        if found is None:
            file = setting.file or content.path
            notes.append(
                f"{key.split('.')[1]}={name} is not beside {file}: the job needs it installed or in PYTHONPATH"
            )
            continue
        files |= found
    files = {name: text for name, text in files.items() if name not in written.files}
    program = msgspec.structs.replace(written.program, modules=(*written.program.modules, *files))
    return msgspec.structs.replace(
        written, files={**written.files, **files}, program=program, notes=(*written.notes, *notes)
    )


def _folders(content: Content, setting: SourcedValue) -> tuple[Path, ...]:
    """Return the folders of the file, and of the config that it starts with; none if they may not be read."""
    if content.folder is None:
        return ()
    return (content.folder, Path(setting.file).parent) if setting.file else (content.folder,)


def _modules(folder: Path, name: str) -> Mapping[str, str]:
    """Return the texts of a module in a folder and of those there that it imports; none if they are not carried."""
    found: dict[str, str] = {}
    open_names, seen = [name.split(".")[0]], set[str](OF_THE_JOB)
    try:
        if not _is_there(folder, name):
            return {}
        while open_names:
            top = open_names.pop()
            if top in seen:
                continue
            seen.add(top)
            for path in _files(folder, top):
                found[path.relative_to(folder).as_posix()] = text = config_io.read_text(path)
                open_names += _imported(text)
            if sum(map(len, found.values())) > MOST_BYTES:
                return {}
    except (InputError, OSError):
        return {}
    return found


def _is_there(folder: Path, name: str) -> bool:
    """Return whether a folder has the module or package of a dotted name."""
    path = folder.joinpath(*name.split("."))
    return path.with_name(f"{path.name}.py").is_file() or (path.is_dir() and any(path.glob("*.py")))


def _files(folder: Path, top: str) -> Iterator[Path]:
    """Yield the files of a top-level module or package; a package is imported in place of a module of its name."""
    if (folder / top / "__init__.py").is_file() or not (folder / f"{top}.py").is_file():
        yield from sorted((folder / top).rglob("*.py"))
    else:
        yield folder / f"{top}.py"


def _imported(text: str) -> Iterator[str]:
    """Yield the top-level names of the modules that a text imports; nothing is executed."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (one.name.split(".")[0] for one in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module.split(".")[0]
