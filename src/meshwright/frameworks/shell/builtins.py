"""Builtin commands, functions and programs: export, test, source, eval, exit, bash -c."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from meshwright.errors import InputError
from meshwright.frameworks.shell.assign import assign, assigned_by_arithmetic, assigned_value
from meshwright.frameworks.shell.conditions import Operand, Test
from meshwright.frameworks.shell.grammar import Parser
from meshwright.frameworks.shell.interpreter import Interpreter, RunCommand
from meshwright.frameworks.shell.launch_prefixes import LAUNCHERS, REMOTE, command_name, unwrap
from meshwright.frameworks.shell.sbatch import read_sbatch
from meshwright.frameworks.shell.sourced import Unreadable
from meshwright.frameworks.shell.syntax import Simple
from meshwright.frameworks.shell.values import CutCommand, ExitStatus, Field, Piece
from meshwright.frameworks.shell.variables import Value, text_value
from meshwright.frameworks.shell.words import Source
from meshwright.frameworks.types import SourcedValue

# Commands run for their exit status, which is unknown here.
QUERIES = {"which", "type", "hash", "grep", "egrep", "fgrep", "pgrep", "cmp", "diff", "nvidia-smi", "id", "ls"}
SHELLS = {"bash", "sh", "zsh", "dash", "ksh"}
READS_INPUT = {"bash", "sh", "zsh", "sbatch", "srun", "ssh", "docker", "singularity", "apptainer"}
SCRIPTS = (".sh", ".bash")
JOBS = (*SCRIPTS, ".sbatch", ".slurm", ".job", ".sub")
MAX_EVAL_DEPTH = 4  # nested eval and bash -c
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def declare(interp: Interpreter, simple: Simple, fields: list[Field]) -> ExitStatus:
    """export, declare, local, readonly."""
    name = fields[0].text
    flags = "".join(field.text[1:] for field in fields[1:] if field.text.startswith("-"))
    export = name == "export" or "x" in flags
    kind = "map" if "A" in flags else ""
    if "n" in flags and name == "export":
        export = False
    is_local = name in ("local", "declare", "typeset") and "g" not in flags
    for assignment in simple.declared:
        if is_local:
            _keep_outer(interp, assignment.name)
        assign(interp.expander, assignment, kind, export)
    for field in fields[1:]:
        if field.text.startswith("-") or field.unresolved:
            continue
        variable, equals, text = field.text.partition("=")
        if not NAME.fullmatch(variable):
            continue
        if is_local:
            _keep_outer(interp, variable)
        if equals:  # it was expanded from a variable
            interp.state.store(variable, text_value((Piece(text, field.line, field.file),), *field[1:]), export)
        elif export:
            interp.state.export(variable)
        elif kind == "map" or "a" in flags:
            interp.state.store(variable, Value(kind or "array", {}, *simple.location))
    return ExitStatus.SUCCESS


def test(interp: Interpreter, simple: Simple, fields: list[Field]) -> ExitStatus:
    """[ … ] and test."""
    operands = fields[1:-1] if fields[0].text == "[" and fields[-1].text == "]" else fields[1:]
    signs = {"-a": "&&", "-o": "||", "!": "!", "(": "(", ")": ")"}
    tokens: list[str | Operand] = []
    for index, field in enumerate(operands):
        joins = field.text in ("-a", "-o") and 0 < index < len(operands) - 1
        is_sign = not field.unresolved and (joins or field.text in ("!", "(", ")")) and len(operands) > 1
        tokens.append(signs[field.text] if is_sign else Operand(field))
    return ExitStatus.of(Test(tokens, lambda name: interp.state.look_up(name) is not None).evaluate())


def jump(interp: Interpreter, simple: Simple, fields: list[Field]) -> ExitStatus:
    """exit, return, break, continue: the commands after them are not reached."""
    flows = {"exit": "exit", "return": "return", "break": "break", "continue": "break"}
    interp.flow = flows[fields[0].text]
    return ExitStatus.SUCCESS


def unset(interp: Interpreter, simple: Simple, fields: list[Field]) -> ExitStatus:
    """unset."""
    for field in fields[1:]:
        interp.state.unset(field.text)
    return ExitStatus.SUCCESS


def shift(interp: Interpreter, simple: Simple, fields: list[Field]) -> ExitStatus:
    count = int(fields[1].text) if len(fields) > 1 and re.fullmatch("[0-9]{1,5}", fields[1].text) else 1
    if interp.state.arguments is not None:
        interp.state.arguments = interp.state.arguments[count:]
    return ExitStatus.SUCCESS


def set_options(interp: Interpreter, simple: Simple, fields: list[Field]) -> ExitStatus:
    """set: shell options, or new arguments after --."""
    interp.emit(simple, fields)
    texts = [field.text for field in fields]
    if "--" in texts:
        interp.state.arguments = fields[texts.index("--") + 1 :]
    for switch, on in (("-a", True), ("+a", False)):
        if switch in texts:
            interp.state.exports_all = on
    if "allexport" in texts:
        interp.state.exports_all = texts[texts.index("allexport") - 1] == "-o"
    return ExitStatus.SUCCESS


def let(interp: Interpreter, simple: Simple, fields: list[Field]) -> ExitStatus:
    for field in fields[1:]:
        for name in assigned_by_arithmetic(field.text):
            interp.state.mark_unknown(name, f"let sets {name} at run time", *simple.location)
    return ExitStatus.RAN


def read_input(interp: Interpreter, simple: Simple, fields: list[Field]) -> ExitStatus:
    """read, mapfile, getopts and printf -v: their variables are known only at run time."""
    interp.emit(simple, fields)
    name = fields[0].text
    if name == "printf" and (len(fields) < 3 or fields[1].text != "-v"):
        return ExitStatus.RAN
    document = simple.here_document
    if name == "read" and document is not None and document.quoted and "-d" in [field.text for field in fields]:
        pieces = tuple(Piece(*one) for one in document.lines)  # read -r -d '' NAME <<'EOF': all of the text
        interp.state.store(fields[-1].text, text_value(pieces, *simple.location))
        return ExitStatus.RAN
    for field in fields[2:3] if name == "printf" else fields[1:]:
        if NAME.fullmatch(field.text):
            interp.state.mark_unknown(field.text, f"{name} sets {field.text} at run time", *simple.location)
    return ExitStatus.RAN


def constant(interp: Interpreter, simple: Simple, fields: list[Field]) -> ExitStatus:
    return ExitStatus.FAILURE if fields[0].text == "false" else ExitStatus.SUCCESS


def source(interp: Interpreter, simple: Simple, fields: list[Field]) -> ExitStatus:
    """source and `.`: interpret the file too."""
    line, file = simple.location
    if len(fields) < 2:
        return ExitStatus.RAN
    name = fields[1]
    if name.text.rpartition("/")[2] == "activate":  # a virtual environment: irrelevant to the training
        interp.emit(simple, fields)
        return ExitStatus.RAN
    try:
        text, shown = interp.sourced.open(name, line, file)
    except Unreadable as error:
        interp.emit(simple, fields)
        interp.state.note(f"source {name.text}", line, file, f"the sourced file is not read: {error}")
        return ExitStatus.RAN
    parser = Parser(Source.of_file(text.replace("\r\n", "\n"), shown))
    try:
        block = parser.script()
    except InputError as error:
        if interp.sourced.is_beside():
            raise
        interp.sourced.close()
        interp.state.note(f"source {name.text}", line, file, f"the sourced file is not read: {error.reason}")
        return ExitStatus.RAN
    _report_warnings(interp, parser)
    arguments = interp.state.arguments
    if len(fields) > 2:
        interp.state.arguments = fields[2:]
    interp.run_block(block)
    interp.state.arguments = arguments
    interp.flow = "" if interp.flow == "return" else interp.flow
    interp.sourced.close()
    return ExitStatus.RAN


def _report_warnings(interp: Interpreter, parser: Parser) -> None:
    for one in parser.warnings:
        interp.state.note(one.what, one.line, one.file, one.reason)


def evaluate(interp: Interpreter, simple: Simple, fields: list[Field]) -> ExitStatus:
    """eval: interpret the argument text as commands."""
    interp.emit(simple, fields)
    pieces: list[Piece] = []
    for field in fields[1:]:
        if pieces:
            pieces.append(Piece(" ", field.line, field.file))
        pieces.extend(field.pieces)
    return _run_text(interp, tuple(pieces), simple)


def _run_text(interp: Interpreter, pieces: tuple[Piece, ...], simple: Simple) -> ExitStatus:
    """Interpret commands in a text; every character keeps its source line."""
    line, file = simple.location
    if not pieces:
        return ExitStatus.SUCCESS
    text = "".join(piece.text for piece in pieces)
    if interp.eval_depth >= MAX_EVAL_DEPTH:
        interp.state.note(text[:200], line, file, "eval and bash -c are nested too deeply")
        return ExitStatus.RAN
    starts = [0]
    for piece in pieces[:-1]:
        starts.append(starts[-1] + len(piece.text))
    interp.state.spend(len(text) // 4, line, file)
    parser = Parser(Source(text, starts, [(piece.line, piece.file) for piece in pieces]))
    try:
        block = parser.script()
    except InputError as error:
        interp.state.note(text[:200], line, file, f"the text cannot be parsed as commands: {error.reason}")
        return ExitStatus.RAN
    _report_warnings(interp, parser)
    if first := next((one for one in parser.cut if one.before), None):
        flags = tuple(flag for one in parser.cut for flag in one.flags)
        interp.cut.append(CutCommand(first.line, first.file, flags, line, in_text=True))
    interp.eval_depth += 1
    outcome = interp.run_block(block)
    interp.eval_depth -= 1
    return outcome


def _call(interp: Interpreter, name: str, simple: Simple, fields: list[Field]) -> ExitStatus:
    """Call a function; recursive calls are not followed."""
    state = interp.state
    if name in interp.call_stack:
        state.note(name, *simple.location, f"the recursive call of {name} is not followed")
        return ExitStatus.RAN
    arguments = state.arguments
    interp.local.append({})
    for assignment in simple.assignments:
        value = assigned_value(interp.expander, assignment)
        _keep_outer(interp, assignment.name)
        state.store(assignment.name, value, export=True)
    state.arguments = fields[1:]
    interp.call_stack.append(name)
    interp.depth += 1
    outcome = interp.run_statement(interp.functions[name])
    interp.depth -= 1
    interp.call_stack.pop()
    state.arguments = arguments
    interp.flow = "" if interp.flow == "return" else interp.flow
    for variable, (outer, exported) in interp.local.pop().items():
        state.unset(variable)
        if outer is not None:
            state.store(variable, outer, exported)
    return outcome


def _keep_outer(interp: Interpreter, name: str) -> None:
    """Save the outer value of a variable that becomes local."""
    if interp.local:
        outer = (interp.state.values.get(name), name in interp.state.exported)
        interp.local[-1].setdefault(name, outer)


def _run_program(interp: Interpreter, simple: Simple, fields: list[Field]) -> ExitStatus:
    """Record a program; interpret bash -c, and stop after exec."""
    command = interp.emit(simple, fields)
    words = command.words[len(interp.prefix) :]
    unwrapped = unwrap(words)
    start = unwrapped.start
    inner = command_name(words[start]) if start < len(words) else ""
    if inner in LAUNCHERS and (shell := _shell_of_launcher(words[start:])):  # torchrun --no-python bash -c '…'
        start, inner = start + shell, command_name(words[start + shell])
    submits = "sbatch" in unwrapped.options
    if inner in SHELLS:
        _run_shell(interp, simple, fields, start)
    elif inner.endswith(JOBS if submits else SCRIPTS):
        _run_file(interp, simple, fields, start, start, unwrapped.options.get("sbatch"))
    elif start == len(words) - 1 and " " in str(words[start].value) and REMOTE & unwrapped.options.keys():
        _run_text_in_shell(interp, simple, fields, start, start)  # ssh HOST "cd FOLDER && torchrun …"
    if simple.here_document and ((inner in SHELLS and start == len(words) - 1) or (submits and start == len(words))):
        _run_document(interp, simple, fields[: start if inner else 0])
    elif simple.here_document and any(command_name(word) in READS_INPUT for word in command.words):
        reason = "commands in a here-document are not parsed"
        interp.state.note(fields[0].text, *simple.location, reason)
    if fields[0].text == "exec" and len(fields) > 1:
        interp.flow = "exit"
    if fields[0].text in QUERIES or (fields[0].text == "command" and len(fields) > 1 and fields[1].text == "-v"):
        return ExitStatus.UNKNOWN
    return ExitStatus.RAN


def _shell_of_launcher(words: Sequence[SourcedValue]) -> int | None:
    """Return the index of the shell that a launcher starts on every rank, with --no-python; None if it starts none."""
    texts = [str(word.value) for word in words]
    if not {"--no_python", "--no-python"} & set(texts):
        return None
    starts = (at for at, word in enumerate(words) if command_name(word) in SHELLS)
    return next((at for at in starts if texts[at + 1 : at + 2] == ["-c"]), None)


def _run_document(interp: Interpreter, simple: Simple, prefix: list[Field]) -> None:
    """Interpret bash <<EOF as a new shell; variables of this one are in its text unless the delimiter is quoted."""
    document = simple.here_document
    if document is None:
        return
    state, before, functions, loops = interp.state, interp.prefix, interp.functions, interp.state.loop_depth
    snapshot = state.snapshot(*simple.location)
    if document.quoted:
        state.values = {name: value for name, value in state.values.items() if name in state.exported}
    pieces = tuple(
        Piece(text if document.quoted else text.replace("\\$", "$"), line, file) for text, line, file in document.lines
    )
    interp.functions, interp.prefix = {}, before + tuple(field.to_value() for field in prefix)
    _run_text(interp, pieces, simple)
    interp.functions, interp.prefix, interp.state.loop_depth = functions, before, loops
    interp.flow = ""
    state.restore(snapshot)


def _run_shell(interp: Interpreter, simple: Simple, fields: list[Field], shell: int) -> None:
    """Interpret bash -c 'text' or bash FILE as a new shell, which sees exported variables only."""
    at = shell + 1
    while at < len(fields) and fields[at].text[:1] in ("-", "+") and not re.fullmatch("-[a-zA-Z]*c", fields[at].text):
        at += 2 if re.fullmatch("[-+][a-zA-Z]*[oO]", fields[at].text) else 1
    if at + 1 < len(fields) and re.fullmatch("-[a-zA-Z]*c", fields[at].text):
        _run_text_in_shell(interp, simple, fields, shell, at + 1)
    elif at < len(fields) and fields[at].text.endswith(SCRIPTS):
        _run_file(interp, simple, fields, shell, at)


def _run_text_in_shell(interp: Interpreter, simple: Simple, fields: list[Field], shell: int, text: int) -> None:
    """Interpret the text of a new shell; what follows it are its arguments."""
    with _new_shell(interp, simple, fields[:shell]):
        interp.state.arguments = fields[text + 2 :]
        if text + 1 < len(fields):  # bash -c '"$0" "$@"' torchrun …: the first word after the text is $0
            interp.state.values["0"] = text_value(fields[text + 1].pieces, *fields[text + 1][1:])
        _run_text(interp, fields[text].pieces, simple)


def _run_file(
    interp: Interpreter,
    simple: Simple,
    fields: list[Field],
    shell: int,
    file: int,
    sbatch: Mapping[str, SourcedValue] | None = None,
) -> None:
    """Record a script that is started in a new shell, and interpret it if such scripts are followed.

    `sbatch` are the options with which it is submitted as a job.
    """
    name, here = fields[file], simple.location
    interp.called.append(name.text)
    if not interp.follows_called:
        return
    try:
        text, shown = interp.sourced.open(name, *here)
    except (Unreadable, InputError) as error:
        reason = error.reason if isinstance(error, InputError) else error
        interp.state.note(name.text, *here, f"the script is not read: {reason}")
        return
    unix = text.replace("\r\n", "\n")
    parser = Parser(Source.of_file(unix, shown))
    with _new_shell(interp, simple, fields[: 0 if sbatch is not None else shell]):
        if sbatch is not None:
            interp.submit({**read_sbatch(unix, shown)[0], **sbatch})
        interp.state.arguments = fields[file + 1 :]
        interp.run_block(parser.script())
    _report_warnings(interp, parser)
    interp.sourced.close()


@contextmanager
def _new_shell(interp: Interpreter, simple: Simple, prefix: list[Field]) -> Iterator[None]:
    """A shell of its own, started by the words of `prefix`: it sees exported variables, and changes none of ours."""
    state, before, functions, loops = interp.state, interp.prefix, interp.functions, interp.state.loop_depth
    snapshot = state.snapshot(*simple.location)
    words = tuple(field.to_value() for field in prefix)
    given = {one.name: assigned_value(interp.expander, one) for one in simple.assignments}
    for name, one in unwrap(words).env.items():
        given[name] = text_value((Piece(str(one.value), one.line, one.file, one.unresolved),), one.line, one.file)
    slurm = state.slurm, state.in_job
    state.values = {name: value for name, value in state.values.items() if name in state.exported}
    for name, value in given.items():
        state.store(name, value, export=True)
    interp.functions, interp.prefix = {}, before + words
    yield
    state.slurm, state.in_job = slurm
    interp.functions, interp.prefix, state.loop_depth = functions, before, loops
    interp.flow = ""
    state.restore(snapshot)


BUILTINS: dict[str, RunCommand] = {
    **dict.fromkeys(("export", "declare", "local", "readonly", "typeset"), declare),
    **dict.fromkeys(("[", "test"), test),
    **dict.fromkeys(("exit", "return", "break", "continue"), jump),
    **dict.fromkeys(("read", "mapfile", "readarray", "getopts", "printf"), read_input),
    **dict.fromkeys((":", "true", "false"), constant),
    **dict.fromkeys(("source", "."), source),
    "unset": unset,
    "shift": shift,
    "set": set_options,
    "let": let,
    "eval": evaluate,
}


def run_command(interp: Interpreter, simple: Simple, fields: list[Field]) -> ExitStatus:
    """Run a builtin, call a function, or record a program."""
    name = "" if fields[0].unresolved else fields[0].text
    if name in BUILTINS:
        return BUILTINS[name](interp, simple, fields)
    if name in interp.functions:
        return _call(interp, name, simple, fields)
    return _run_program(interp, simple, fields)
