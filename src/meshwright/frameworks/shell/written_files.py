"""Config files that a script writes before it trains: here-documents, copies, and templates filled in by sed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from meshwright.errors import InputError
from meshwright.frameworks.shell.expand import Expander
from meshwright.frameworks.shell.sourced import Sourced, Unreadable
from meshwright.frameworks.shell.syntax import HereDocument, Pipeline, Simple
from meshwright.frameworks.shell.values import MAX_TEXT_CHARS, Field, Piece, WrittenFile
from meshwright.frameworks.shell.words import Source, WordReader

WRITERS = ("tee", "cp", "sed")
CONFIGS = (".json", ".yaml", ".yml", ".toml")
OPEN, CLOSE = "\ue000", "\ue001"  # around text that is known only when the script runs
BEFORE_VALUE = (":", ",", "[", CLOSE)
_UNKNOWN = re.compile(f"{OPEN}([^{CLOSE}]*){CLOSE}")
_STRING_OR_UNKNOWN = re.compile(rf'"(?:[^"\\]|\\.)*"|{OPEN}[^{CLOSE}]*{CLOSE}', re.DOTALL)
_BRE_SPECIAL = re.compile(r"[\[\]*^$]")
_ERE_SPECIAL = re.compile(r"[\[\]*^$+?(){}|]")


class ShellFiles(NamedTuple):
    """What the text of a written file is taken from: variables, files that are there, and files written before."""

    expander: Expander
    sourced: Sourced
    written: dict[str, WrittenFile]


class _Text(msgspec.Struct, frozen=True):
    text: str
    file: str
    line: int  # of its first line


def record(shell: ShellFiles, pipeline: Pipeline) -> None:
    """Keep the text of the config file that a command writes, if it is known without running it."""
    steps = [one for one in pipeline.statements if isinstance(one, Simple) and one.words]
    if not steps or len(steps) < len(pipeline.statements):
        return
    last = steps[-1]
    if last.output is None and "".join(part.text for part in last.words[0]) not in WRITERS:
        return  # most commands: their words are not expanded again
    words = [field for word in last.words for field in shell.expander.fields(word)]
    names = list(_targets(shell, last, words))
    names = [one for one in names if one.text.lower().endswith(CONFIGS)]
    if not names:
        return
    try:
        found = _output(shell, steps)
    except (Unreadable, InputError):
        found = None
    for name in names:
        before = shell.written.pop(name.text, None)
        if found is None or len(found.text) > MAX_TEXT_CHARS or (last.appends and before is not None):
            continue
        shown = _as_json(found.text) if name.text.lower().endswith(".json") else found.text
        text = "\n" * (found.line - 1) + _UNKNOWN.sub(lambda one: one[1], shown)
        shell.written[name.text] = WrittenFile(text, found.file)


def _targets(shell: ShellFiles, last: Simple, words: list[Field]) -> Iterator[Field]:
    """Yield the files that a command writes."""
    if last.output is not None:
        yield shell.expander.text(last.output)
    name, rest = words[0].text if words else "", [one for one in words[1:] if not one.text.startswith("-")]
    if name == "tee":
        yield from rest
    elif name == "cp" and len(rest) == 2:
        yield rest[1]
    elif name == "sed" and any(re.match("-[Ern]*i|--in-place", one.text) for one in words[1:]):
        yield from rest[-1:]


def _output(shell: ShellFiles, steps: list[Simple]) -> _Text | None:
    """Return what a pipeline prints; None if that is known only when it runs."""
    found: _Text | None = None
    for step in steps:
        words = [field for word in step.words for field in shell.expander.fields(word)]
        name, texts = words[0].text, [one.text for one in words[1:]]
        files = [one for one in words[1:] if not one.text.startswith("-")]
        if name in ("cat", "tee") and step.here_document is not None:
            found = _document(shell, step.here_document)
        elif name == "tee":
            continue
        elif name == "cat":
            found = _opened(shell, files[0]) if len(files) == 1 else found if not files else None
        elif name == "cp" and len(files) == 2:
            found = _opened(shell, files[0])
        elif name == "echo":
            printed = " ".join(_marked(one.pieces) for one in words[1:] if one.text not in ("-e", "-n"))
            found = _Text(printed, step.location.file, step.location.line) if "\\" not in printed else None
        elif name == "sed":
            commands, operands, extended = _sed_arguments(words[1:])
            if operands:
                found = _opened(shell, operands[-1]) if len(operands) == 1 else None
            found = None if found is None or "-n" in texts else _edited(found, commands, extended)
        else:
            return None
        if found is None:
            return None
    return found


def _document(shell: ShellFiles, document: HereDocument) -> _Text | None:
    """Return a here-document with its variables expanded."""
    if not document.lines:
        return None
    first = document.lines[0]
    text = "".join(one for one, _, _ in document.lines)
    if document.quoted:
        return _Text(text, first[2], first[1])
    escaped = [re.sub(r'(\\?)"', lambda one: '\\\\\\"' if one[1] else '\\"', one) for one, _, _ in document.lines]
    starts = [0]
    for one in escaped[:-1]:
        starts.append(starts[-1] + len(one))
    reader = WordReader(Source("".join(escaped), starts, [(line, file) for _, line, file in document.lines]))
    expanded = shell.expander.text(reader.parts("double"))
    return _Text(_marked(expanded.pieces), first[2], first[1])


def _marked(pieces: tuple[Piece, ...]) -> str:
    return "".join(f"{OPEN}{one.text}{CLOSE}" if one.unresolved else one.text for one in pieces)


def _opened(shell: ShellFiles, name: Field) -> _Text | None:
    """Return the text of a file that is there, or that the script has written."""
    if name.text in shell.written:
        before = shell.written[name.text]
        return _Text(before.text.lstrip("\n"), before.file, len(before.text) - len(before.text.lstrip("\n")) + 1)
    if not name.text.lower().endswith(CONFIGS):
        return None
    text, shown = shell.sourced.open(name, name.line, name.file)
    shell.sourced.close()
    return _Text(text, shown, 1)


def _sed_arguments(words: list[Field]) -> tuple[list[str], list[Field], bool]:
    """Return sed's commands, its files, and whether its patterns are extended."""
    commands: list[str] = []
    operands: list[Field] = []
    at, extended = 0, False
    while at < len(words):
        text = words[at].text
        if text in ("-e", "--expression") and at + 1 < len(words):
            commands.append(_marked(words[at + 1].pieces))
            at += 1
        elif text.startswith("-") and len(text) > 1:
            extended = extended or bool(re.match("-[ni]*[Er]", text))
        else:
            operands.append(words[at])
        at += 1
    if not commands and operands:
        commands.append(_marked(operands.pop(0).pieces))
    return commands, operands, extended


def _edited(source: _Text, commands: list[str], extended: bool) -> _Text | None:
    """Return a text after substitutions; None if a command is another one or has a pattern that is not read."""
    text = source.text
    for command in commands:
        for found in _substitutions(command):
            if found is None:
                return None
            wanted, put, flags = found
            pattern = _pattern(wanted, extended)
            if pattern is None or re.search(r"\\\d", put) or set(flags) - set("gI"):
                return None
            count = 0 if "g" in flags else 1
            plain = re.sub(r"\\(.)", r"\1", put)
            text = "\n".join(_substituted(pattern, plain, line, count) for line in text.split("\n"))
    return msgspec.structs.replace(source, text=text)


def _substituted(pattern: re.Pattern[str], put: str, line: str, count: int) -> str:
    return pattern.sub(lambda one: put.replace("&", one[0]), line, count)


def _substitutions(command: str) -> Iterator[tuple[str, str, str] | None]:
    """Yield pattern, replacement and flags of each s command; None for another command."""
    at = 0
    while at < len(command):
        if command[at] in "; \n\t":
            at += 1
            continue
        if command[at] != "s" or at + 1 >= len(command):
            yield None
            return
        sign, at = command[at + 1], at + 2
        parts: list[str] = []
        while len(parts) < 2:
            start = at
            while at < len(command) and command[at] != sign:
                if command[at] == OPEN:  # its text is no part of the command
                    at = max(at, command.find(CLOSE, at))
                at += 2 if command[at] == "\\" and at + 1 < len(command) else 1
            if at >= len(command):
                yield None
                return
            parts.append(command[start:at].replace(f"\\{sign}", sign))
            at += 1
        flags = re.compile(r"[A-Za-z0-9]*").match(command, at)
        at = flags.end() if flags else at
        yield parts[0], parts[1], flags[0] if flags else ""


def _pattern(text: str, extended: bool) -> re.Pattern[str] | None:
    """Return a pattern of sed without repetitions, sets and anchors; None for another one."""
    literal = re.sub(r"\\([^A-Za-z0-9])", "", text)
    special = _ERE_SPECIAL if extended else _BRE_SPECIAL
    if not text or special.search(literal) or re.search(r"\\[A-Za-z0-9]", text) or OPEN in text:
        return None
    parts = re.findall(r"\\.|.", text, re.DOTALL)
    return re.compile("".join("." if one == "." else re.escape(one[-1]) for one in parts))


def _as_json(text: str) -> str:
    """Return a text of JSON in which an unknown value is a string; unknown text elsewhere is left out."""

    def put(found: re.Match[str]) -> str:
        if not found[0].startswith(OPEN):
            return found[0]
        if not text[: found.start()].rstrip().endswith(BEFORE_VALUE):
            return ""
        inside = found[0][1:-1].replace("\\", "\\\\").replace('"', '\\"')
        return f'"{inside}"'

    return _STRING_OR_UNKNOWN.sub(put, text)
