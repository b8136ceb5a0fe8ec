"""Python files that construct a Trainer's arguments: those that export writes, and a user's program with literals."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from meshwright.errors import InputError
from meshwright.frameworks.framework import Content
from meshwright.frameworks.load import open_file, program_path
from meshwright.frameworks.program_values import ProgramValues
from meshwright.frameworks.stated_arguments import stated_arguments
from meshwright.frameworks.trainer_args import PROGRAM, WRITTEN, file_of
from meshwright.frameworks.trainer_calls import SUFFIX, other_half
from meshwright.frameworks.types import SourcedValue


def file_arguments(content: Content, given: Mapping[str, SourcedValue] | None = None) -> dict[str, SourcedValue]:
    """Return the arguments of the Trainer, TRL, PEFT and Unsloth that a Python file states, by the names of commands.

    Literals, constants and defaults of the program's options are read; everything else is listed as computed by the
    program. `given` are the options of the command that starts it. An export writes two files, the program and its
    arguments: they are read together.
    """
    found = stated_arguments(content, given)
    other = other_half(content)
    found = found if other is None else {**stated_arguments(other, given), **found}
    return _with_assigned(found, content) if content.assigned else found


def _with_assigned(found: Mapping[str, SourcedValue], content: Content) -> dict[str, SourcedValue]:
    """Return the arguments with those that fixes set or remove."""
    changed = {name: one for name, one in found.items() if content.assigned.get(name, "") is not None}
    for name, text in content.assigned.items():
        if text is not None:
            line = found[name].line if name in found else 0
            changed[name] = SourcedValue(_literal(text), line, content.path)
    return changed


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text  # a string without its quotes


def written_arguments(content: Content) -> Content | None:
    """Return the file of arguments of an export: itself, or that which an exported program imports."""
    if WRITTEN in content.text and content.path.endswith(SUFFIX):
        return content
    return other_half(content) if Path(content.path).name == PROGRAM else None


def started_program(content: Content, program: SourcedValue) -> Content | None:
    """Return the Python file that a script starts, if it is beside the script and constructs arguments of a Trainer."""
    named = path = program_path(content, program)
    if path is None or named is None:
        return None
    if path.name == PROGRAM and not path.is_file():  # an export without a program: its arguments are beside the job
        path = _arguments_beside(content) or path
    try:
        found = open_file(path) if path.is_file() else None
    except (InputError, OSError):
        return None
    if found is None or (path != named and WRITTEN not in found.text):
        return None
    return found if file_arguments(found) else None


def _arguments_beside(content: Content) -> Path | None:
    """Return the exported file of arguments beside a job: the one of the job's name, else the first."""
    own = file_of(Path(content.path).stem)
    found = [one for one in sorted(Path(content.folder or ".").glob(f"*{SUFFIX}")) if one.is_file()]
    return next((one for one in found if one.name == own), found[0] if found else None)


PARSERS = frozenset(
    (
        *("absl", "argparse", "chz", "click", "cyclopts", "defopt", "docopt", "draccus", "fire", "getopt", "hydra"),
        *(
            "jsonargparse",
            "optparse",
            "plac",
            "pydantic_settings",
            "pyrallis",
            "simple_parsing",
            "tap",
            "typer",
            "tyro",
        ),
    )
)
"""Modules that parse the arguments of a command."""
PARSES = frozenset(
    (
        *("ArgumentParser", "HfArgumentParser", "LightningCLI", "TrlParser", "argv", "orig_argv", "from_cli"),
        *("parse_args", "parse_args_and_config", "parse_args_into_dataclasses", "parse_known_args"),
        *("exec", "eval", "runpy"),  # other code, which may parse them
    )
)
"""Names with which a program reads the arguments of its command."""


def parses_arguments(content: Content) -> bool:
    """Return whether a program may read the arguments of its command: by itself, or in a module beside it.

    A program that cannot be parsed, or that executes or starts other code, may.
    """
    pending, seen = [content], {content.path}
    while pending:
        one = pending.pop()
        try:
            tree = ast.parse(one.text)
        except (SyntaxError, ValueError, RecursionError):
            return True
        named = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        named |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        imported = set(_imports(tree))
        named |= {name.rpartition(".")[2] for name in imported}
        if (
            named & PARSES
            or named & {"exec", "eval", "runpy"}
            or {name.partition(".")[0] for name in imported} & PARSERS
        ):
            return True
        for path in _modules_beside(one, imported):
            if str(path) not in seen:
                seen.add(str(path))
                try:
                    pending.append(open_file(path))
                except (InputError, OSError):
                    return True
    return False


OPEN_PARSERS = ("HfArgumentParser", "TrlParser", "parse_known_args", "add_argument_group", "argv", "exec", "eval")
"""Names of a program whose parser may take more than the options that its own file adds."""


def own_options(content: Content) -> dict[str, bool]:
    """Return the options of a program whose argparse parser takes no others, and whether each has no value.

    A program whose parser may take more options has none here.
    """
    try:
        tree = ast.parse(content.text)
    except (SyntaxError, ValueError, RecursionError):
        return {}
    named = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    named |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    closed = "ArgumentParser" in named and "parse_args" in named and not named & {*OPEN_PARSERS}
    if not closed or any(_modules_beside(content, set(_imports(tree)))):
        return {}
    return {one.name: one.is_switch for several in ProgramValues(tree).options.values() for one in several}


def _imports(tree: ast.Module) -> Iterator[str]:
    """Yield the dotted names of what a file imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module or ''}.{one.name}".strip(".") for one in node.names)


def _modules_beside(content: Content, imported: Iterable[str]) -> Iterator[Path]:
    """Yield the files of modules that lie in a program's own folder, or in packages of it."""
    for name in imported if content.folder is not None else ():
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            path = Path(content.folder or ".").joinpath(*parts[:count])
            yield from (one for one in (path.with_suffix(".py"), path / "__init__.py") if one.is_file())


def names_deepspeed(content: Content) -> bool:
    """Return whether a file passes the path of a DeepSpeed config to the Trainer."""
    path = file_arguments(content).get("deepspeed")
    return path is not None and isinstance(path.value, str) and not path.unresolved


def written_beside(content: Content) -> Content | None:
    """Return the arguments file that an export wrote with this config; None if there is none."""
    if content.folder is None:
        return None
    name, own = Path(content.path).name, module_name(Path(content.path).stem)
    for path in sorted(content.folder.glob(f"*{SUFFIX}")):
        found = open_file(path)
        if WRITTEN in found.text and (path.name == own or f'deepspeed="{name}"' in found.text):
            return found
    return None


def config_beside(content: Content) -> Path | None:
    """Return the YAML file that an export wrote with this arguments file."""
    if content.folder is None or WRITTEN not in content.text:
        return None
    arguments = written_arguments(content)
    own = Path((content if arguments is None else arguments).path).name
    return next((path for path in sorted(content.folder.glob("*.yaml")) if module_name(path.stem) == own), None)


def module_name(stem: str) -> str:
    """Return the name of the arguments file of a recipe, which is that of a module."""
    return f"{stem.replace('-', '_').replace('.', '_')}{SUFFIX}"
