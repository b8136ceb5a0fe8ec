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
            yield _of_text(cut, content) if cut.in_text else _finding(cut, lines)


def _of_text(cut: CutCommand, content: Content) -> Finding:
    """Return the finding for line breaks inside the text of bash -c, which usually come from a variable."""
    held = content.script.variables if content.script else {}
    texts = {name: str(one.value) for name, one in held.items() if isinstance(one.value, str)}
    name = next((name for name, text in texts.items() if "\n" in text and cut.flags[0] in text.split()), "")
    source = f"line breaks of {name}" if name else "line breaks in its text"
    does = "is" if len(cut.flags) == 1 else "are"
    message = (
        f"{source} end the command that line {cut.before} gives to a shell: {some(cut.flags, 3)} {does} not passed to "
        f"it, and bash reports {cut.flags[0]}: command not found"
    )
    place = f"{name} (line {held[name].line})" if name else "the text"
    return Finding(
        RULE, "error", cut.flags[0], message, (), cut.file, cut.line, f"end every line of {place} with a backslash"
    )


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
