"""Commands that change how a script goes on: export, test, source, eval, exit and the like."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from meshwright.errors import InputError
from meshwright.frameworks.shell.assign import assign, assigned, changed_by_arithmetic
from meshwright.frameworks.shell.conditions import Operand, Test
from meshwright.frameworks.shell.grammar import Grammar
from meshwright.frameworks.shell.launch_prefixes import command_name, unwrap
from meshwright.frameworks.shell.sourced import Unreadable
from meshwright.frameworks.shell.syntax import Simple
from meshwright.frameworks.shell.values import Field, Outcome, Piece
from meshwright.frameworks.shell.variables import Value, text_value
from meshwright.frameworks.shell.words import Source

if TYPE_CHECKING:
    from meshwright.frameworks.shell.interpreter import Walker

Builtin = Callable[["Walker", Simple, list[Field]], Outcome]
# Commands that are asked for their answer rather than run for what they do.
QUERIES = {"which", "type", "hash", "grep", "egrep", "fgrep", "pgrep", "cmp", "diff", "nvidia-smi", "id", "ls"}
SHELLS = {"bash", "sh", "zsh", "dash", "ksh"}
READS_INPUT = {"bash", "sh", "zsh", "sbatch", "srun", "ssh", "docker", "singularity", "apptainer"}
DEEPEST_TEXT = 4  # eval and bash -c inside each other
NAMED = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def declare(walker: Walker, simple: Simple, fields: list[Field]) -> Outcome:
    """export, declare, local, readonly."""
    name = fields[0].text
    flags = "".join(field.text[1:] for field in fields[1:] if field.text.startswith("-"))
    export = name == "export" or "x" in flags
    kind = "map" if "A" in flags else ""
    if "n" in flags and name == "export":
        export = False
    own = name in ("local", "declare", "typeset") and "g" not in flags
    for assignment in simple.declared:
        if own:
            _keep_outer(walker, assignment.name)
        assign(walker, assignment, kind, export)
    for field in fields[1:]:
        if field.text.startswith("-") or field.why:
            continue
        known, equals, text = field.text.partition("=")
        if not NAMED.fullmatch(known):
            continue
        if own:
            _keep_outer(walker, known)
        if equals:  # it came out of a variable
            walker.memory.store(known, text_value((Piece(text, field.line, field.file),), *field[1:]), export)
        elif export:
            walker.memory.export(known)
        elif kind == "map" or "a" in flags:
            walker.memory.store(known, Value(kind or "array", {}, *simple.place))
    return Outcome.YES


def test(walker: Walker, simple: Simple, fields: list[Field]) -> Outcome:
    """[ … ] and test."""
    operands = fields[1:-1] if fields[0].text == "[" and fields[-1].text == "]" else fields[1:]
    signs = {"-a": "&&", "-o": "||", "!": "!", "(": "(", ")": ")"}
    tokens: list[str | Operand] = []
    for index, field in enumerate(operands):
        joins = field.text in ("-a", "-o") and 0 < index < len(operands) - 1
        is_sign = not field.why and (joins or field.text in ("!", "(", ")")) and len(operands) > 1
        tokens.append(signs[field.text] if is_sign else Operand(field))
    return Outcome.of(Test(tokens, lambda name: walker.memory.look_up(name) is not None).verdict())


def leave(walker: Walker, simple: Simple, fields: list[Field]) -> Outcome:
    """exit, return, break, continue: nothing behind them is reached."""
    flows = {"exit": "exit", "return": "return", "break": "break", "continue": "break"}
    walker.flow = flows[fields[0].text]
    return Outcome.YES


def forget(walker: Walker, simple: Simple, fields: list[Field]) -> Outcome:
    """unset."""
    for field in fields[1:]:
        walker.memory.forget(field.text)
    return Outcome.YES


def shift(walker: Walker, simple: Simple, fields: list[Field]) -> Outcome:
    count = int(fields[1].text) if len(fields) > 1 and re.fullmatch("[0-9]{1,5}", fields[1].text) else 1
    if walker.memory.arguments is not None:
        walker.memory.arguments = walker.memory.arguments[count:]
    return Outcome.YES


def set_options(walker: Walker, simple: Simple, fields: list[Field]) -> Outcome:
    """set: options of the shell, or new arguments behind --."""
    walker.emit(simple, fields)
    texts = [field.text for field in fields]
    if "--" in texts:
        walker.memory.arguments = fields[texts.index("--") + 1 :]
    for switch, on in (("-a", True), ("+a", False)):
        if switch in texts:
            walker.exports_all = on
    if "allexport" in texts:
        walker.exports_all = texts[texts.index("allexport") - 1] == "-o"
    return Outcome.YES


def let(walker: Walker, simple: Simple, fields: list[Field]) -> Outcome:
    for field in fields[1:]:
        for name in changed_by_arithmetic(field.text):
            walker.unknown(name, f"let sets {name} when the script runs", simple.place)
    return Outcome.RAN


def read_input(walker: Walker, simple: Simple, fields: list[Field]) -> Outcome:
    """read, mapfile, getopts and printf -v: their variables are known only when the script runs."""
    walker.emit(simple, fields)
    name = fields[0].text
    if name == "printf" and (len(fields) < 3 or fields[1].text != "-v"):
        return Outcome.RAN
    for field in fields[2:3] if name == "printf" else fields[1:]:
        if NAMED.fullmatch(field.text):
            walker.unknown(field.text, f"{name} sets {field.text} when the script runs", simple.place)
    return Outcome.RAN


def certain(walker: Walker, simple: Simple, fields: list[Field]) -> Outcome:
    return Outcome.NO if fields[0].text == "false" else Outcome.YES


def source(walker: Walker, simple: Simple, fields: list[Field]) -> Outcome:
    """source and its short form, the dot: follow that file too."""
    line, file = simple.place
    if len(fields) < 2:
        return Outcome.RAN
    name = fields[1]
    if name.text.rpartition("/")[2] == "activate":  # of a virtual environment: it says nothing about training
        walker.emit(simple, fields)
        return Outcome.RAN
    try:
        text, shown = walker.sourced.open(name, line, file)
    except Unreadable as error:
        walker.emit(simple, fields)
        walker.memory.note(f"source {name.text}", line, file, f"the sourced file is not read: {error}")
        return Outcome.RAN
    grammar = Grammar(Source.of_file(text.replace("\r\n", "\n"), shown))
    try:
        block = grammar.script()
    except InputError as error:
        if walker.sourced.is_beside():
            raise
        walker.sourced.close()
        walker.memory.note(f"source {name.text}", line, file, f"the sourced file is not read: {error.reason}")
        return Outcome.RAN
    _pass_on(walker, grammar)
    arguments = walker.memory.arguments
    if len(fields) > 2:
        walker.memory.arguments = fields[2:]
    walker.run_block(block)
    walker.memory.arguments = arguments
    walker.flow = "" if walker.flow == "return" else walker.flow
    walker.sourced.close()
    return Outcome.RAN


def _pass_on(walker: Walker, grammar: Grammar) -> None:
    for one in grammar.suspicions:
        walker.memory.note(one.what, one.line, one.file, one.reason)


def evaluate(walker: Walker, simple: Simple, fields: list[Field]) -> Outcome:
    """Follow the text behind the command of this name as the commands it holds."""
    walker.emit(simple, fields)
    pieces: list[Piece] = []
    for field in fields[1:]:
        if pieces:
            pieces.append(Piece(" ", field.line, field.file))
        pieces.extend(field.pieces)
    return _run_text(walker, tuple(pieces), simple)


def _run_text(walker: Walker, pieces: tuple[Piece, ...], simple: Simple) -> Outcome:
    """Follow commands that stand in a text; every letter keeps the line it was written on."""
    line, file = simple.place
    if not pieces:
        return Outcome.YES
    text = "".join(piece.text for piece in pieces)
    if walker.texts >= DEEPEST_TEXT:
        walker.memory.note(text[:200], line, file, "commands in texts in texts are not read that deep")
        return Outcome.RAN
    starts = [0]
    for piece in pieces[:-1]:
        starts.append(starts[-1] + len(piece.text))
    walker.memory.spend(len(text) // 4, line, file)
    grammar = Grammar(Source(text, starts, [(piece.line, piece.file) for piece in pieces]))
    try:
        block = grammar.script()
    except InputError as error:
        walker.memory.note(text[:200], line, file, f"the text is not understood as commands: {error.reason}")
        return Outcome.RAN
    _pass_on(walker, grammar)
    walker.texts += 1
    outcome = walker.run_block(block)
    walker.texts -= 1
    return outcome


def call(walker: Walker, name: str, simple: Simple, fields: list[Field]) -> Outcome:
    """Follow the body of a function once."""
    memory = walker.memory
    if name in walker.running:
        memory.note(name, *simple.place, f"the function {name} calls itself, which is followed once")
        return Outcome.RAN
    arguments = memory.arguments
    walker.local.append({})
    for assignment in simple.assignments:
        value = assigned(walker, assignment)
        _keep_outer(walker, assignment.name)
        memory.store(assignment.name, value, export=True)
    memory.arguments = fields[1:]
    walker.running.append(name)
    walker.depth += 1
    outcome = walker.run_statement(walker.functions[name])
    walker.depth -= 1
    walker.running.pop()
    memory.arguments = arguments
    walker.flow = "" if walker.flow == "return" else walker.flow
    for known, (outer, exported) in walker.local.pop().items():
        memory.forget(known)
        if outer is not None:
            memory.store(known, outer, exported)
    return outcome


def _keep_outer(walker: Walker, name: str) -> None:
    """Remember what a variable was outside the function that now has one of its own."""
    if walker.local:
        outer = (walker.memory.values.get(name), name in walker.memory.exported)
        walker.local[-1].setdefault(name, outer)


def ran(walker: Walker, simple: Simple, fields: list[Field]) -> Outcome:
    """Any other program: list it, and look into a bash -c or at the end that exec makes."""
    command = walker.emit(simple, fields)
    if simple.here_document and any(command_name(word) in READS_INPUT for word in command.words):
        reason = "the commands of a here-document are not read"
        walker.memory.note(fields[0].text, *simple.place, reason)
    own = command.words[len(walker.around) :]
    start = unwrap(own).start
    if start < len(own) and command_name(own[start]) in SHELLS:
        _look_into(walker, simple, fields, start)
    if fields[0].text == "exec" and len(fields) > 1:
        walker.flow = "exit"
    if fields[0].text in QUERIES or (fields[0].text == "command" and len(fields) > 1 and fields[1].text == "-v"):
        return Outcome.UNKNOWN
    return Outcome.RAN


def _look_into(walker: Walker, simple: Simple, fields: list[Field], shell: int) -> None:
    """Follow bash -c 'text': a new shell, which knows exported variables only."""
    at = shell + 1
    while at < len(fields) and fields[at].text[:1] in ("-", "+") and not re.fullmatch("-[a-zA-Z]*c", fields[at].text):
        at += 2 if re.fullmatch("[-+][a-zA-Z]*[oO]", fields[at].text) else 1
    if at + 1 >= len(fields) or not re.fullmatch("-[a-zA-Z]*c", fields[at].text):
        return
    memory, around, functions, loops = walker.memory, walker.around, walker.functions, walker.loops
    saved = memory.saved(*simple.place)
    prefixed = {one.name: assigned(walker, one) for one in simple.assignments}
    memory.values = {name: value for name, value in memory.values.items() if name in memory.exported} | prefixed
    memory.exported |= set(prefixed)
    memory.arguments = fields[at + 3 :]
    walker.functions, walker.around = {}, around + tuple(field.to_value() for field in fields[:shell])
    _run_text(walker, fields[at + 1].pieces, simple)
    walker.functions, walker.around, walker.loops = functions, around, loops
    walker.flow = ""
    memory.restore(saved)


BUILTINS: dict[str, Builtin] = {
    **dict.fromkeys(("export", "declare", "local", "readonly", "typeset"), declare),
    **dict.fromkeys(("[", "test"), test),
    **dict.fromkeys(("exit", "return", "break", "continue"), leave),
    **dict.fromkeys(("read", "mapfile", "readarray", "getopts", "printf"), read_input),
    **dict.fromkeys((":", "true", "false"), certain),
    **dict.fromkeys(("source", "."), source),
    "unset": forget,
    "shift": shift,
    "set": set_options,
    "let": let,
    "eval": evaluate,
}
