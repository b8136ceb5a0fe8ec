"""NAME=value in all its forms."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from meshwright.frameworks.shell.syntax import Assignment
from meshwright.frameworks.shell.unreached import adds_to_itself
from meshwright.frameworks.shell.values import Field
from meshwright.frameworks.shell.variables import Value, array_value, text_value

if TYPE_CHECKING:
    from meshwright.frameworks.shell.interpreter import Walker

CHANGED = re.compile(
    r"([A-Za-z_][A-Za-z0-9_]*)[ \t]*(?:[-+*/%&|^]?=(?!=)|<<=|>>=|\+\+|--)|(?:\+\+|--)[ \t]*([A-Za-z_]\w*)"
)


def changed_by_arithmetic(text: str) -> list[str]:
    """The variables that an arithmetic expression assigns to."""
    return [found[1] or found[2] for found in CHANGED.finditer(text)]


def assigned(walker: Walker, assignment: Assignment, kind: str = "") -> Value:
    """The value that a variable gets."""
    if assignment.value is None:
        return _array(walker, assignment, kind)
    pieces = walker.expander.pieces(assignment.value)
    old = walker.memory.look_up(assignment.name)
    if assignment.key is not None:
        return _keyed(walker, assignment, Field(pieces, *assignment.place), old)
    if not assignment.append or old is None:
        return text_value(pieces, *assignment.place)
    first = old.fields["0"].pieces if "0" in old.fields else ()
    grown = Field(first + pieces, *assignment.place)
    if old.kind == "text":
        return Value("text", {"0": grown}, *assignment.place)
    return Value(old.kind, {**old.fields, "0": grown}, old.line, old.file)


def _array(walker: Walker, assignment: Assignment, kind: str) -> Value:
    old = walker.memory.look_up(assignment.name)
    keeps = assignment.append and old is not None
    kind = "map" if kind == "map" or (old is not None and old.kind == "map") else "array"
    keyed = any(element.key is not None for element in assignment.elements)
    fields = list(old.fields.values()) if keeps and old is not None else []
    if kind == "array" and not keyed:
        for element in assignment.elements:
            fields.extend(walker.expander.fields(element.word))
        return array_value(fields, *assignment.place)
    entries = dict(old.fields) if keeps and old is not None else {}
    for element in assignment.elements:
        place = (element.word[0].line, element.word[0].file) if element.word else assignment.place
        key = walker.expander.text(element.key).text if element.key is not None else str(len(entries))
        entries[key] = Field(walker.expander.pieces(element.word), *place)
    return Value(kind, entries, *assignment.place)


def _keyed(walker: Walker, assignment: Assignment, field: Field, old: Value | None) -> Value:
    key = walker.expander.text(assignment.key or ()).text
    entries = dict(old.fields) if old is not None else {}
    if assignment.append and key in entries:
        field = Field(entries[key].pieces + field.pieces, field.line, field.file)
    entries[key] = field
    walker.memory.spend(len(entries), *assignment.place)
    kind = "map" if (old is not None and old.kind == "map") or not key.isdigit() else "array"
    return Value(kind, entries, *assignment.place)


def assign(walker: Walker, assignment: Assignment, kind: str = "", export: bool = False) -> None:
    """Carry out an assignment; one that builds on itself in a loop has no value that one round can tell."""
    value = assigned(walker, assignment, kind)
    walker.memory.store(assignment.name, value, export or walker.exports_all)
    if walker.loops and value.kind == "text" and adds_to_itself(assignment):
        walker.memory.hide(assignment.name, f"{assignment.name} grows in a loop", *assignment.place)
