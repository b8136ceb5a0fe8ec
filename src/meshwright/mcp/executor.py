"""One call of a tool, from its arguments to the JSON object and the text that answer it."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

from meshwright import api, file_access
from meshwright.api.inputs import fields_of, read, remote_fixes
from meshwright.errors import InputError, MeshwrightError
from meshwright.mcp import compact, rendering
from meshwright.mcp.tools import TOOLS
from meshwright.notes import collected_notes

MAX_BYTES = 768 * 1024  # of one response


class Reply(NamedTuple):
    """The answer to a call: an object, a few lines, and whether it is an error."""

    answer: dict[str, Any]
    text: str
    failed: bool = False


def reply(name: str, arguments: Mapping[str, Any], files: bool = False) -> Reply:
    """Return the answer of a tool; bad input and bugs are answers too. `files` allows paths of this machine."""
    try:
        return _run(name, arguments, files)
    except MeshwrightError as error:
        return failure(error, remote_fixes(error, TOOLS[name].request, arguments))
    except (MemoryError, RecursionError):
        return failure(InputError("needs more memory than one request may use", fix=("request less",)))
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        return failure(InputError(f"internal error: {type(error).__name__}", fix=("report it as an issue",)))


def failure(error: MeshwrightError, fixes: Sequence[str] | None = None) -> Reply:
    """Return the error object, with these fixes if they are given."""
    details = error.to_dict()
    if fixes is not None:
        details["fix"] = [*fixes]
    return Reply({"schema": api.SCHEMA, "error": details}, rendering.error(details), True)


def _run(name: str, arguments: Mapping[str, Any], files: bool) -> Reply:
    tool = TOOLS[name]
    with collected_notes() as notes:
        request, texts = read(tool.request, arguments, "mcp", files=files)
        with nullcontext() if files and not texts else file_access.only(texts):
            full = api.to_json(tool.answer(request))
    answer = compact.answer_of(name, full, request)
    notes = list(dict.fromkeys([*notes, *getattr(request, "notes", ()), *answer.get("notes", ())]))
    if notes:
        answer["notes"] = notes
    encoded = json.dumps(answer, default=str)
    if len(encoded) > MAX_BYTES:
        smaller = [field.name for field in fields_of(tool.request) if field.name in ("top", "limit")]
        raise InputError(
            f"the response has {len(encoded):,} bytes; the limit is {MAX_BYTES:,}",
            fix=[f"a smaller {field}" for field in smaller] or ["request less"],
        )
    text = rendering.text_for(name)({**full, "notes": notes})
    return Reply(json.loads(encoded), text + rendering.last_lines(text, notes, answer["next"]))
