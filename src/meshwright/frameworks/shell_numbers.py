"""Numbers in a script's arithmetic at which bash ends the script: it has integers only."""

from __future__ import annotations

import re
from collections.abc import Iterator

from meshwright.frameworks.framework import Content
from meshwright.parsing import exact_number
from meshwright.rules.rule import Finding

RULE = "launch.arithmetic"
INSTEAD = "write integers, or compute the value with awk"
MAX_DENOMINATOR = 1_000_000


def arithmetic_findings(content: Content) -> Iterator[Finding]:
    """Yield the numbers at which bash ends the script before it starts the training."""
    for one in () if content.script is None else content.script.unresolved:
        name, literal = one.rejected
        if not literal:
            continue
        value = f"{name}={literal}" if name else literal
        message = f"{one.what}: bash computes with integers only, and ends the script at {value}"
        fix = _fix(one.what, name, literal)
        yield Finding(
            RULE, "error", name, message, (fix,) if fix else (), one.file, one.line, no_fix="" if fix else INSTEAD
        )


def _fix(text: str, name: str, literal: str) -> str:
    """Return the assignment or the expression with an integer; empty if the number has none that is equal."""
    value = exact_number(literal)
    if value is None or value.denominator > MAX_DENOMINATOR:
        return ""
    if value.denominator == 1 and name:
        return f"{name}={value.numerator}"
    if value.denominator == 1:
        return f"{text.replace(literal, str(value.numerator))} in place of {text}"
    factor = re.compile(rf"\*\s*\$?{re.escape(name or literal)}(?![\w.])")
    changed = factor.sub(f"* {value.numerator} / {value.denominator}", text)
    return f"{changed} in place of {text}" if changed != text else ""
