"""Commands of a script that end before their last flags: a line is not continued, and the next is a command."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from meshwright.errors import some
from meshwright.frameworks.framework import Content
from meshwright.rules.rule import Finding

if TYPE_CHECKING:  # a script's interpreter, which only files need
    from meshwright.frameworks.shell.values import CutCommand

RULE = "launch.cut-command"
EMPTY, COMMENT = "it is empty", "it is a comment"
REASONS = (
    (re.compile(r".*\\[ \t]+"), "blanks follow its backslash"),
    (re.compile(r".*\\[ \t]+#.*"), "a comment follows its backslash"),
    (re.compile(r"\s*"), EMPTY),
    (re.compile(r"\s*#.*"), COMMENT),
    (re.compile(r".*"), "it has no backslash at its end"),
)
"""Why a line is not continued; the first that fits it."""


def cut_findings(content: Content) -> Iterator[Finding]:
    """Yield the places where a command ends though its flags continue.

    Flags that follow no command are a file of arguments, whose lines are not continued.
    """
    lines = content.text.splitlines()
    for cut in () if content.script is None else content.script.cut:
        if cut.before:
            yield _finding(cut, lines)


def _finding(cut: CutCommand, lines: list[str]) -> Finding:
    line = cut.line - 1
    text = lines[line - 1] if 0 < line <= len(lines) else ""
    reason = next(why for pattern, why in REASONS if pattern.fullmatch(text))
    does = "is" if len(cut.flags) == 1 else "are"
    message = (
        f"line {line} ends the command of line {cut.before}: {reason}; {some(cut.flags, 3)} {does} not passed to it, "
        f"and bash reports {cut.flags[0]}: command not found"
    )
    is_apart = reason in (EMPTY, COMMENT)
    remedy = f"remove line {line}, or move it above the command"
    no_fix = remedy if is_apart else f"end line {line} with a backslash and nothing behind it"
    return Finding(RULE, "warning", cut.flags[0], message, (), cut.file, cut.line, no_fix)
