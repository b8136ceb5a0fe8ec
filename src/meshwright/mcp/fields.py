"""The inputs of tools: one row each, from which the schema, the reading and the command line's spelling follow."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from meshwright.errors import InputError, unknown

Kind = Literal["text", "text or whole number", "text or number", "whole number", "number", "true or false", "words"]
TYPES: Mapping[Kind, Any] = {
    "text": "string",
    "text or whole number": ["string", "integer"],
    "text or number": ["string", "number"],
    "whole number": "integer",
    "number": "number",
    "true or false": "boolean",
    "words": "array",
}
WORD, LONG = 200, 256 * 1024  # bytes of a name, and of a text such as a config
MOST_WORDS = 60


@dataclass(frozen=True)
class Field:
    """One input of a tool."""

    name: str
    kind: Kind
    text: str
    needed: bool = False
    default: Any = None
    choices: tuple[str, ...] = ()
    examples: tuple[Any, ...] = ()
    least: float | None = None
    most: float | None = None
    longest: int = WORD
    option: str | None = (
        None  # the command line's name for it; "" for a word without one; None: a file there, or nothing
    )


def schema_of(fields: Sequence[Field]) -> dict[str, Any]:
    """The JSON schema of a tool's inputs."""
    return {
        "type": "object",
        "properties": {field.name: _property(field) for field in fields},
        "required": [field.name for field in fields if field.needed],
        "additionalProperties": False,
    }


def _property(field: Field) -> dict[str, Any]:
    limits = {"minimum": field.least, "maximum": field.most, "default": field.default}
    made: dict[str, Any] = {"type": TYPES[field.kind], "description": field.text}
    if field.kind == "words":
        made |= {"items": {"type": "string", "maxLength": field.longest}, "maxItems": MOST_WORDS}
    elif field.kind.startswith("text"):
        made["maxLength"] = field.longest
    made |= {name: value for name, value in limits.items() if value is not None}
    if field.choices:
        made["enum"] = list(field.choices)
    if field.examples:
        made["examples"] = list(field.examples)
    return made


def read(fields: Sequence[Field], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call with every field, defaults filled in; the first mistake is told with its fix."""
    known = {field.name: field for field in fields}
    for name in arguments:
        if name not in known:
            raise unknown("argument", name[:WORD], known)
    return {field.name: _value(field, arguments.get(field.name)) for field in fields}


def _value(field: Field, value: Any) -> Any:
    if value is None:
        if field.needed:
            raise InputError("is needed", field=field.name, fix=fix_of(field))
        return [] if field.kind == "words" else field.default
    if not _is(field.kind, value):
        raise InputError(f"must be {_said(field.kind)}", field=field.name, value=value, fix=fix_of(field))
    for text in value if field.kind == "words" else [value]:
        _refuse_long(field, text)
    if field.kind == "words" and len(value) > MOST_WORDS:
        raise InputError(f"has {len(value)} entries, and at most {MOST_WORDS} are read", field=field.name)
    _refuse_out_of_range(field, value)
    return value


def _is(kind: Kind, value: Any) -> bool:
    """Whether a value is of the kind; true is no number."""
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    is_number = is_whole or (isinstance(value, float) and math.isfinite(value))
    match kind:
        case "text":
            return isinstance(value, str)
        case "text or whole number":
            return isinstance(value, str) or is_whole
        case "text or number":
            return isinstance(value, str) or is_number
        case "whole number":
            return is_whole
        case "number":
            return is_number
        case "true or false":
            return isinstance(value, bool)
        case "words":
            return isinstance(value, list) and all(isinstance(word, str) for word in value)


def _said(kind: Kind) -> str:
    return "a list of texts" if kind == "words" else kind if kind.startswith(("text", "true")) else f"a {kind}"


def _refuse_long(field: Field, value: Any) -> None:
    if not isinstance(value, str):
        return
    size = len(value.encode(errors="surrogatepass"))
    if size > field.longest:
        reason = f"has {size:,} bytes, and at most {field.longest:,} are read"
        raise InputError(reason, field=field.name, value=value, fix=("send less",))


def _refuse_out_of_range(field: Field, value: Any) -> None:
    least, most = field.least, field.most
    if (least is not None and value < least) or (most is not None and value > most):
        raise InputError(f"must be {least:g} to {most:g}", field=field.name, value=value, fix=fix_of(field))


def fix_of(field: Field) -> tuple[str, ...]:
    """What a field may be instead, as it is sent."""
    tried = field.examples or field.choices or ((field.default,) if field.default is not None else ())
    return tuple(f"{field.name}: {json.dumps(example)}" for example in tried[:3])


def words_of(name: str, fields: Sequence[Field], arguments: Mapping[str, Any]) -> list[str]:
    """The words of the command that asks the same; texts are files there, and left to the caller."""
    told = [(field, arguments[field.name]) for field in fields if arguments.get(field.name) not in (None, [], False)]
    plain = [str(value) for field, value in told if field.option == "" and field.kind != "words"]
    named = [word for field, value in told if field.option for word in _named(field, value)]
    overrides = [word for field, value in told if field.option == "" and field.kind == "words" for word in value]
    return [name, *plain, *named, *overrides]


def _named(field: Field, value: Any) -> list[str]:
    return [str(field.option)] if field.kind == "true or false" else [str(field.option), str(value)]
