"""The page of the doctor: a log's curves with the findings marked on them, and a summary to share."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from meshwright import api
from meshwright.api import run_requests
from meshwright.errors import InputError
from meshwright.web import charts, example_files, presenters
from meshwright.web.errors import error_of
from meshwright.web.routes_html import Answer, ask_form, form_fields, page, verb_fields

router = APIRouter(include_in_schema=False)
DOCTOR = verb_fields(run_requests.Doctor, "curves", "baseline")


@router.api_route("/doctor", methods=["GET", "POST"])
async def doctor(request: Request) -> HTMLResponse:
    """Diagnose a log; without one show an example, or the summary in a shared link."""
    form = await form_fields(request, (*DOCTOR, "shared"))
    if form["shared"]:
        return await _shared(request, form["shared"])
    fields = {name: form[name] for name in DOCTOR}
    example = not any(fields.values())
    if example:
        fields |= {"log": example_files.log(), **example_files.LOG_FIELDS}
    found, error = await (_example(request, fields) if example else ask_form(request, "doctor", fields, curves=True))
    shown: dict[str, Any] = {}
    if found:
        shared = api.shareable(found)
        shown = {
            "specs": charts.curves(found.get("curves", ()), found["findings"]),
            "counts": presenters.counted(found["findings"]),
            "text": shared.text,
            "token": shared.token,
        }
    return await page(request, "doctor.html", form=fields, found=found, error=error, example=example, **shown)


async def _example(request: Request, fields: dict[str, str]) -> tuple[Answer, Answer | None]:
    """Return the diagnosis of the shipped log, made once: other logs are private, and their diagnoses are not kept."""
    state = request.app.state
    if not hasattr(state, "example_diagnosis"):
        found, error = await ask_form(request, "doctor", fields, curves=True)
        if not found:
            return found, error
        state.example_diagnosis = found
    return state.example_diagnosis, None


async def _shared(request: Request, token: str) -> HTMLResponse:
    """Show the summary that a link contains."""
    shown: dict[str, Any] = {"form": dict.fromkeys(DOCTOR, ""), "found": Answer(), "error": None, "example": False}
    try:
        shown["summary"] = api.read_shared(token)
    except InputError as error:
        shown["error"] = error_of(error)["error"]
    return await page(request, "doctor.html", **shown)
