"""One call of a tool, from its arguments to the object and the lines that answer it."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from meshwright import api
from meshwright.errors import InputError, MeshwrightError
from meshwright.mcp import rendering
from meshwright.mcp.fields import fix_of
from meshwright.mcp.tools import TOOLS, Tool

MOST_BYTES = 768 * 1024  # of one answer


class Reply(NamedTuple):
    """What goes back: an object, a few lines, and whether it is an error."""

    found: dict[str, Any]
    text: str
    failed: bool = False


def reply(name: str, arguments: Mapping[str, Any]) -> Reply:
    """The answer of a tool; mistakes and faults are answers too."""
    try:
        return _answered(name, arguments)
    except MeshwrightError as error:
        return failed(error, _fixes(error, TOOLS[name], arguments))
    except (MemoryError, RecursionError):
        return failed(InputError("needs more memory than one question may take", fix=("ask for less",)))
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        return failed(InputError(f"a fault of ours: {type(error).__name__}", fix=("report it as an issue",)))


def failed(error: MeshwrightError, fixes: Sequence[str] | None = None) -> Reply:
    """An error as the command line tells it, with these fixes where they are spelled otherwise."""
    details = error.to_dict()
    if fixes is not None:
        details["fix"] = [*fixes]
    return Reply({"schema": api.SCHEMA, "error": details}, rendering.error(details), True)


def _fixes(error: MeshwrightError, tool: Tool, arguments: Mapping[str, Any]) -> Sequence[str]:
    """Ways out with the inputs of a tool, not the options of a command; a field's examples where there is none."""
    inputs = {field.option: field.name for field in tool.fields if field.option}
    spelled = []
    for fix in error.fix:
        option, _, value = fix.partition(" ")
        spelled.append(f"{inputs[option]}: {json.dumps(value)}" if value and option in inputs else fix)
    sent = {field: str(arguments.get(field.name)) for field in tool.fields if field.name == error.field}
    tried = [fix for field, value in sent.items() if value == str(error.value) for fix in fix_of(field)]
    return spelled or tried


def _answered(name: str, arguments: Mapping[str, Any]) -> Reply:
    tool = TOOLS[name]
    answer = tool.answer(arguments)
    written = json.dumps(answer, default=str)
    if len(written) > MOST_BYTES:
        smaller = [field.name for field in tool.fields if field.name in ("top", "limit")]
        raise InputError(
            f"the answer has {len(written):,} bytes, and at most {MOST_BYTES:,} are sent",
            fix=[f"a smaller {field}" for field in smaller] or ["ask for less"],
        )
    return Reply(json.loads(written), tool.tell(answer))
