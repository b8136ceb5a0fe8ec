"""Commands of a script that end before their last flags: a line is not continued, and the next is a command."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from meshwright.errors import some
from meshwright.frameworks.framework import Content
from meshwright.rules.rule import Finding

if TYPE_CHECKING:  # a script's interpreter, which only files need
    from meshwright.frameworks.shell.values import Command

RULE = "launch.cut-command"
FLAG = re.compile(r"--?[A-Za-z][\w.-]*")  # no command of a script starts with a dash
REASONS = (
    (re.compile(r".*\\[ \t]+"), "blanks follow its backslash"),
    (re.compile(r".*\\[ \t]+#.*"), "a comment follows its backslash"),
    (re.compile(r"\s*"), "it is empty"),
    (re.compile(r"\s*#.*"), "it is a comment"),
    (re.compile(r".*"), "it has no backslash at its end"),
)
"""Why a line is not continued; the first that fits it."""


def cut_findings(content: Content) -> Iterator[Finding]:
    """Yield the places where a command ends though its flags continue."""
    if content.script is None:
        return
    seen: set[tuple[str, int]] = set()
    commands = sorted((*content.script.commands, *content.script.possible), key=lambda one: one.line)
    for command in commands:
        first = command.words[0]
        place = first.file, first.line
        if place in seen or first.unresolved or not FLAG.match(str(first.value)):
            continue
        seen.add(place)
        yield _finding(content, command, _before(commands, command))


def _before(commands: list[Command], cut: Command) -> Command | None:
    """Return the command whose flags these are; None if another file has it."""
    first = cut.words[0]
    before = [
        one
        for one in commands
        if one.line < first.line and one.words[0].file == first.file and not FLAG.match(str(one.words[0].value))
    ]
    return before[-1] if before else None


def _finding(content: Content, cut: Command, before: Command | None) -> Finding:
    first = cut.words[0]
    flags = [found[0] for word in cut.words if (found := FLAG.match(str(word.value)))]
    line, reason = _end_of(content, first.line) if first.file == content.path else (first.line - 1, "")
    named = f" of line {before.line}" if before is not None else ""
    why = f": {reason}" if reason else ""
    does = "is" if len(flags) == 1 else "are"
    message = (
        f"line {line} ends the command{named}{why}; {some(flags, 3)} {does} not passed to it, and bash reports "
        f"{first.value}: command not found"
    )
    no_fix = f"end line {line} with a backslash and nothing behind it"
    if reason in ("it is empty", "it is a comment"):
        no_fix = f"remove line {line}, or move it above the command"
    return Finding(RULE, "warning", flags[0], message, (), first.file, first.line, no_fix)


def _end_of(content: Content, line: int) -> tuple[int, str]:
    """Return the last line of the command before a line, and why it is not continued."""
    lines = content.text.splitlines()
    above = line - 1
    text = lines[above - 1] if 0 < above <= len(lines) else ""
    return above, next(reason for pattern, reason in REASONS if pattern.fullmatch(text))
