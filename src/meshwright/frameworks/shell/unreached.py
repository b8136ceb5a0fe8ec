"""Static analysis of commands that are not executed because their condition is unknown."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from meshwright.frameworks.shell.syntax import (
    Assignment,
    Block,
    Case,
    Condition,
    Function,
    Group,
    If,
    Loop,
    Pipeline,
    Simple,
    Statement,
)
from meshwright.frameworks.shell.words import Word

OUTPUT_ONLY = {"echo", "printf"}
REPORTS = {*OUTPUT_ONLY, "cat", ":", "true", "set"}


def literal(word: Word) -> str:
    """Return the text of a purely literal word, or an empty string."""
    return "".join(part.text for part in word) if all(part.kind == "text" for part in word) else ""


def blocks_of(statement: Statement) -> Iterator[Block]:
    """Yield the blocks of a compound command."""
    if isinstance(statement, If):
        for condition, body in statement.branches:
            yield condition or ()
            yield body
    elif isinstance(statement, Loop):
        yield statement.condition
        yield statement.body
    elif isinstance(statement, Case):
        yield from (arm.body for arm in statement.arms)
    elif isinstance(statement, Group):
        yield statement.body


def simple_commands(statements: Iterator[Statement]) -> Iterator[Simple]:
    """Yield every nested simple command; function bodies are skipped, they run only when called."""
    pending = list(statements)
    while pending:
        statement = pending.pop()
        if isinstance(statement, Simple):
            yield statement
        elif not isinstance(statement, Function):
            pending += [each for block in blocks_of(statement) for each in statements_of(block)]


def statements_of(block: Block) -> Iterator[Statement]:
    return (statement for chain in block for _, pipeline in chain.links for statement in pipeline.statements)


def may_exit(statements: Iterator[Statement]) -> bool:
    """Return whether these commands may exit the script."""
    return any(simple.words and literal(simple.words[0]) == "exit" for simple in simple_commands(statements))


def only_reports(statements: Sequence[Statement]) -> bool:
    """Return whether commands print something and exit with an error, as a check of the script's input does."""
    flat: list[Statement] = []
    for one in statements:
        flat += statements_of(one.body) if isinstance(one, Group) and not one.subshell else [one]
    words = [[literal(word) for word in one.words] for one in flat if isinstance(one, Simple)]
    if len(words) != len(flat) or not words or any(not one for one in words):
        return False
    *before, last = words
    failing = last[0] == "exit" and len(last) == 2 and last[1] not in ("0", "")
    return failing and all(one[0] in REPORTS or "usage" in one[0].lower() for one in before)


def mentions(word: Word, name: str) -> bool:
    """Return whether a word uses a variable."""
    for part in word:
        parameter = part.parameter
        if parameter and (parameter.name == name or mentions(parameter.word, name)):
            return True
        if part.kind == "arithmetic" and (name in part.text or mentions(part.inner, name)):
            return True
    return False


def appends_to_itself(assignment: Assignment) -> bool:
    """Return whether the new value contains the old one, as in A+=… and A="$A …"."""
    if assignment.append or assignment.key is not None:
        return True
    words = [assignment.value] if assignment.value is not None else [element.word for element in assignment.elements]
    return any(mentions(word, assignment.name) for word in words)


def overwritten(statements: Iterator[Statement]) -> Iterator[str]:
    """Yield the variables that these commands would overwrite."""
    for simple in simple_commands(statements):
        if simple.words and not simple.declared:
            continue
        for assignment in (*simple.assignments, *simple.declared):
            if not appends_to_itself(assignment):
                yield assignment.name


FLAG = re.compile(r"(?<![\w-])--[A-Za-z][\w-]*")


def assigned_flags(statements: Iterator[Statement]) -> Iterator[str]:
    """Yield the flags in values that these commands would give to variables."""
    for simple in simple_commands(statements):
        for one in (*simple.assignments, *simple.declared):
            words = [one.value] if one.value is not None else [element.word for element in one.elements]
            yield from FLAG.findall(" ".join("".join(part.text for part in word) for word in words))


def tested_for_empty(block: Block | Pipeline) -> str:
    """Return NAME of a lone test [ -z "$NAME" ], or an empty string."""
    if not isinstance(block, Pipeline):
        if len(block) != 1 or len(block[0].links) != 1:
            return ""
        block = block[0].links[0][1]
    if block.negated or len(block.statements) != 1:
        return ""
    statement = block.statements[0]
    words: list[str | Word] = []
    if isinstance(statement, Condition):
        words = list(statement.tokens)
    elif isinstance(statement, Simple) and statement.words and literal(statement.words[0]) == "[":
        words = list(statement.words[1:-1])
    if len(words) != 2 or isinstance(words[0], str) or isinstance(words[1], str) or literal(words[0]) != "-z":
        return ""
    parameters = [part.parameter for part in words[1] if part.text]
    found = parameters[0] if len(parameters) == 1 else None
    return found.name if found and not found.operator and not found.index and not found.length else ""


def only_sets(statements: Iterator[Statement], name: str) -> bool:
    """Return whether commands only assign this variable, like ${NAME:-value}."""
    sets = False
    for statement in statements:
        if not isinstance(statement, Simple):
            return False
        assigned = [one.name for one in (*statement.assignments, *statement.declared)]
        if any(one != name for one in assigned):
            return False
        sets = sets or bool(assigned)
        if statement.words and not statement.declared and literal(statement.words[0]) not in OUTPUT_ONLY:
            return False
    return sets
