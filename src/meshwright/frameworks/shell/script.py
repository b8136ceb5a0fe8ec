"""Reads a launch script without running any of it."""

from __future__ import annotations

from pathlib import Path

from meshwright.frameworks.shell.grammar import Grammar
from meshwright.frameworks.shell.interpreter import Walker
from meshwright.frameworks.shell.sbatch import read_sbatch, slurm_variables
from meshwright.frameworks.shell.sourced import Sourced
from meshwright.frameworks.shell.values import LARGEST_FILE, Script, bad
from meshwright.frameworks.shell.variables import Memory
from meshwright.frameworks.shell.words import Source


def read_script(text: str, where: str, folder: Path | None = None) -> Script:
    """Read a launch script; files that it sources are looked for beside it, in the folder."""
    if len(text) > LARGEST_FILE:
        raise bad(where, 1, f"the script is longer than {LARGEST_FILE} characters")
    try:
        return _read(text, where, folder)
    except RecursionError as error:  # the limits on nesting come first, unless the caller is deep already
        raise bad(where, 1, "the script nests too deeply") from error


def _read(text: str, where: str, folder: Path | None) -> Script:
    unix = text.replace("\r\n", "\n")
    sbatch, unread = read_sbatch(unix, where)
    memory = Memory(where, slurm_variables(sbatch), in_job=bool(sbatch))
    if unix != text:
        line = text[: text.index("\r\n")].count("\n") + 1
        memory.note("\\r", line, where, "the file has Windows line ends, which bash takes for a part of each last word")
    grammar = Grammar(Source.of_file(unix, where))
    block = grammar.script()
    for one in (*unread, *grammar.suspicions):
        memory.note(one.what, one.line, one.file, one.reason)
    walker = Walker(memory, Sourced(where, folder, len(text)))
    walker.run_block(block)
    variables = {name: value.said() for name, value in memory.values.items()}
    unresolved = tuple(memory.unresolved.values())
    return Script(tuple(walker.commands), variables, sbatch, unresolved)
