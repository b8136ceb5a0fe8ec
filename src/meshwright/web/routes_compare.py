"""The page of comparisons: one training on all engines, or two plans side by side."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from meshwright.api import requests
from meshwright.api.summary import layout_summary
from meshwright.web import charts, presenters, quick_choices
from meshwright.web.routes_html import ASK, Answer, FormFields, ask, ask_form, form_fields, layout_view, page

router = APIRouter(include_in_schema=False)
PLAN = ("model", "gpus", "goal", "seq", "engine", "overrides")
OTHER = tuple(f"{name}_b" for name in PLAN)
OF_ENGINES = ("gpus", "goal", "seq")  # fields of the comparison of engines besides its target and overrides


@router.get("/compare")
async def compare(request: Request) -> HTMLResponse:
    """Compare engines for one plan; with any field of a second plan, compare the two plans."""
    form = await form_fields(request, (*PLAN, *OTHER))
    if not any(form.values()):
        form |= quick_choices.DEFAULT
    first = {name: form[name] for name in PLAN}
    second = {name: form[f"{name}_b"] for name in PLAN}
    if any(second.values()):
        shown = await _two_plans(request, first, {name: second[name] or first[name] for name in PLAN})
    else:
        shown = await _engines(request, first)
    return await page(request, "comparison.html", form=form, permalink=presenters.query(form), **shown)


async def _engines(request: Request, form: FormFields) -> dict[str, Any]:
    """Return the comparison of engines."""
    asked = {"target": form["model"], "overrides": form["overrides"], **{name: form[name] for name in OF_ENGINES}}
    found, error = await ask_form(request, "compare", asked)
    if error:
        error = {**error, "field": "model" if error["field"] == "target" else error["field"]}
        return {"error": error, "fixes": quick_choices.applied_fixes(error, form)}
    return {
        "error": None,
        "found": found,
        "spec": charts.sides(found["sides"]),
        "words_of": layout_summary,
        "plan_with": lambda engine: presenters.query({**form, "engine": engine}),
        "cli": presenters.command("compare", requests.Compare, asked),
    }


async def _two_plans(request: Request, first: FormFields, second: FormFields) -> dict[str, Any]:
    """Return two plans side by side."""
    found = await asyncio.gather(*(_plan(request, form) for form in (first, second)))
    sides = [{"slot": slot, **one} for slot, one in zip(("A", "B"), found, strict=True)]
    answers: list[Answer] = [one["answer"] for one in sides if one["answer"]]
    differing = presenters.differing(*answers) if len(answers) == 2 else None
    faster = presenters.faster_side(*answers) if len(answers) == 2 else ""
    cli = "\n".join(one["cli"] for one in sides if one["answer"])
    return {"error": None, "sides": sides, "fields": differing, "answer": faster, "cli": cli}


async def _plan(request: Request, form: FormFields) -> dict[str, Any]:
    kept = {name: value for name, value in form.items() if name in ASK}
    try:
        overrides = presenters.split_overrides(form["overrides"])
    except ValueError:
        overrides = [form["overrides"]]  # reported as an override that cannot be read
    fields = {name: value for name, value in kept.items() if value and name != "overrides"}
    answer, error = await ask(request, "recommend", {**fields, "overrides": overrides, "explain": True})
    if not answer:
        return {"answer": None, "error": error}
    return {
        "answer": answer,
        "error": None,
        **layout_view(answer),
        "ask": presenters.query(kept),
        "cli": presenters.command("recommend", requests.Recommend, kept),
        "pipeline": None,
        "title": f"{answer['question']['model']} on {answer['question']['gpus']}, {answer['question']['goal']}",
    }
