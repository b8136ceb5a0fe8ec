"""What Python callers need besides the verbs: results as plain values, and their JSON Schema."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from meshwright.api.responses import Response, to_json
from meshwright.api.schema import error_schema, response_schema
from meshwright.api.verb_function import request_of
from meshwright.api.verbs import VERBS, Verb
from meshwright.errors import InputError, MeshwrightError, unknown
from meshwright.version import SCHEMA


def schema(verb: str) -> dict[str, Any]:
    """Return the JSON Schema of a command's --json object, such as "recommend"; "error" is that of errors.

    Args:
        verb: name of a command, as typed on the command line.
    """
    published = [name for name, one in VERBS.items() if one.surfaces]
    if verb == "error":
        return error_schema()
    if verb not in published:
        raise unknown("verb", verb, [*published, "error"])
    return response_schema(VERBS[verb])


def to_dict(result: object) -> dict[str, Any]:
    """Return what a verb returned, or an error, as the plain values that --json prints.

    Args:
        result: the result of a verb (a plan, a check, a sizing, a run, …), or a MeshwrightError.
    """
    if isinstance(result, MeshwrightError):
        return {"schema": SCHEMA, "error": result.to_dict()}
    if isinstance(result, Response):
        return _plain(result)
    names, request = [one.__name__ for one in type(result).__mro__], request_of(result)
    answering = [verb for verb in VERBS.values() if verb.surfaces and verb.responds]
    called = [verb for verb in answering if request is not None and type(request) is verb.request]
    for verb in called or [one for one in answering if _result_types(one) & {*names}]:
        given = request if type(request) is verb.request else None
        return _plain(verb.named(verb.responds)(result, given))
    if isinstance(result, msgspec.Struct):
        return dict(msgspec.to_builtins(result, enc_hook=str))
    raise InputError("is not a result of Meshwright", field="result", value=type(result).__name__)


def _plain(response: Response) -> dict[str, Any]:
    """Return a response as JSON has it: lists, not tuples, and text as keys."""
    found: dict[str, Any] = json.loads(json.dumps(to_json(response), default=str))
    return found


def _result_types(verb: Verb) -> set[str]:
    """Return the names of the types that a verb may return."""
    return {*str(verb.handler.handle.__annotations__["return"]).split(" | ")}
