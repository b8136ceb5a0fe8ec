"""Assignments: NAME=value, NAME+=value, NAME[key]=value, NAME=( … )."""

from __future__ import annotations

import re

from meshwright.frameworks.shell.expand import Expander
from meshwright.frameworks.shell.syntax import Assignment
from meshwright.frameworks.shell.unreached import appends_to_itself
from meshwright.frameworks.shell.values import Field
from meshwright.frameworks.shell.variables import Value, array_value, text_value

ARITHMETIC_ASSIGNMENT = re.compile(
    r"([A-Za-z_][A-Za-z0-9_]*)[ \t]*(?:[-+*/%&|^]?=(?!=)|<<=|>>=|\+\+|--)|(?:\+\+|--)[ \t]*([A-Za-z_]\w*)"
)


def assigned_by_arithmetic(text: str) -> list[str]:
    """Return the variables that an arithmetic expression assigns to."""
    return [found[1] or found[2] for found in ARITHMETIC_ASSIGNMENT.finditer(text)]


def assigned_value(expander: Expander, assignment: Assignment, kind: str = "") -> Value:
    """Return the value that an assignment gives its variable."""
    if assignment.value is None:
        return _array(expander, assignment, kind)
    pieces = expander.pieces(assignment.value)
    old = expander.state.look_up(assignment.name)
    if assignment.key is not None:
        return _keyed(expander, assignment, Field(pieces, *assignment.location), old)
    if not assignment.append or old is None:
        return text_value(pieces, *assignment.location)
    first = old.fields["0"].pieces if "0" in old.fields else ()
    grown = Field(first + pieces, *assignment.location)
    if old.kind == "text":
        return Value("text", {"0": grown}, *assignment.location)
    return Value(old.kind, {**old.fields, "0": grown}, old.line, old.file)


def _array(expander: Expander, assignment: Assignment, kind: str) -> Value:
    old = expander.state.look_up(assignment.name)
    keeps = assignment.append and old is not None
    kind = "map" if kind == "map" or (old is not None and old.kind == "map") else "array"
    keyed = any(element.key is not None for element in assignment.elements)
    fields = list(old.fields.values()) if keeps and old is not None else []
    if kind == "array" and not keyed:
        for element in assignment.elements:
            fields.extend(expander.fields(element.word))
        return array_value(fields, *assignment.location)
    entries = dict(old.fields) if keeps and old is not None else {}
    for element in assignment.elements:
        location = (element.word[0].line, element.word[0].file) if element.word else assignment.location
        key = expander.text(element.key).text if element.key is not None else str(len(entries))
        entries[key] = Field(expander.pieces(element.word), *location)
    return Value(kind, entries, *assignment.location)


def _keyed(expander: Expander, assignment: Assignment, field: Field, old: Value | None) -> Value:
    key = expander.text(assignment.key or ()).text
    entries = dict(old.fields) if old is not None else {}
    if assignment.append and key in entries:
        field = Field(entries[key].pieces + field.pieces, field.line, field.file)
    entries[key] = field
    expander.state.spend(len(entries), *assignment.location)
    kind = "map" if (old is not None and old.kind == "map") or not key.isdigit() else "array"
    return Value(kind, entries, *assignment.location)


def assign(expander: Expander, assignment: Assignment, kind: str = "", export: bool = False) -> None:
    """Execute an assignment. One that appends to itself in a loop is unknown: loop bodies are followed once."""
    value = assigned_value(expander, assignment, kind)
    expander.state.store(assignment.name, value, export or expander.state.exports_all)
    if not expander.state.loop_depth:
        return
    grows = appends_to_itself(assignment)
    if grows and value.kind == "text" and assignment.name not in expander.state.set_in_loop:
        expander.state.mark_unknown(assignment.name, f"{assignment.name} grows in a loop", *assignment.location)
    elif not grows:
        expander.state.set_in_loop.add(assignment.name)
