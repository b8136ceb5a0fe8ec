"""Parse a launch script without executing it."""

from __future__ import annotations

from pathlib import Path

from meshwright.frameworks.shell.builtins import run_command
from meshwright.frameworks.shell.grammar import Parser
from meshwright.frameworks.shell.interpreter import Interpreter
from meshwright.frameworks.shell.launcher import find_launches
from meshwright.frameworks.shell.sbatch import read_sbatch, slurm_variables
from meshwright.frameworks.shell.sourced import Sourced
from meshwright.frameworks.shell.values import MAX_FILE_BYTES, Script, script_error
from meshwright.frameworks.shell.variables import ShellState
from meshwright.frameworks.shell.words import Source


def read_script(text: str, where: str, folder: Path | None = None) -> Script:
    """Parse a launch script; sourced files are resolved relative to `folder`.

    If it starts no training but other scripts, these are read with it, unless several of them train.
    """
    if len(text) > MAX_FILE_BYTES:
        raise script_error(where, 1, f"the script is longer than {MAX_FILE_BYTES} characters")
    try:
        script = _read(text, where, folder)
        if not script.called or find_launches(script):
            return script
        followed = _read(text, where, folder, follows_called=True)
        trained = {one.program.file for one in find_launches(followed)}
        return followed if len(trained) == 1 else script
    except RecursionError as error:  # the nesting limits apply first unless the caller's stack is deep already
        raise script_error(where, 1, "the script nests too deeply") from error


def _read(text: str, where: str, folder: Path | None, follows_called: bool = False) -> Script:
    unix = text.replace("\r\n", "\n")
    sbatch, unread = read_sbatch(unix, where)
    state = ShellState(where, slurm_variables(sbatch), in_job=bool(sbatch))
    if unix != text:
        line = text[: text.index("\r\n")].count("\n") + 1
        state.note(
            "\\r",
            line,
            where,
            "the file has Windows line endings; bash treats the \\r as part of the last word of each line",
        )
    parser = Parser(Source.of_file(unix, where))
    block = parser.script()
    for one in (*unread, *parser.warnings):
        state.note(one.what, one.line, one.file, one.reason)
    interp = Interpreter(state, Sourced(where, folder, len(text)), run_command)
    interp.follows_called = follows_called
    interp.run_block(block)
    variables = {name: value.to_value() for name, value in state.values.items()}
    unresolved = tuple(state.unresolved.values())
    return Script(
        tuple(interp.commands),
        variables,
        sbatch or interp.job,
        unresolved,
        tuple(interp.possible),
        frozenset(interp.possible_flags),
        interp.written,
        tuple(dict.fromkeys(interp.called)),
        tuple(interp.sourced.texts),
        (*parser.cut, *dict.fromkeys(interp.cut)),
        tuple(interp.sourced.choices),
    )
