"""The web UI: forms for the same requests as the command line, and their responses as HTML."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.exceptions import HTTPException

from meshwright import __version__, api
from meshwright.api import requests
from meshwright.api.argument_names import unknown_arguments
from meshwright.api.inputs import SHOWN_BYTES, fields_of, texts_of
from meshwright.api.inputs import Request as ApiRequest
from meshwright.api.rehearsal_file import FIELD as REHEARSAL
from meshwright.api.requests import CONFIG
from meshwright.api.summary import layout_summary
from meshwright.errors import InputError
from meshwright.web import charts, presenters, quick_choices, rehearsal_view
from meshwright.web.errors import error_of, to_error
from meshwright.web.example_files import SCRIPT, SCRIPT_GPUS, SCRIPT_NAME
from meshwright.web.routes_api import dispatcher_of
from meshwright.web.templates import render

router = APIRouter(include_in_schema=False)

TRACKING = ("utm_", "fbclid", "gclid", "ref")  # what others append to links


def verb_fields(request: type[ApiRequest], *leave_out: str) -> tuple[str, ...]:
    """Return what a verb takes over HTTP, texts included: a page's form and its URL take the same."""
    named = [field.name for field in fields_of(request) if "http" in field.input.surfaces]
    return tuple(name for name in dict.fromkeys((*named, *texts_of(request))) if name not in leave_out)


ASK = verb_fields(requests.Recommend, "explain")
EXPLORE = verb_fields(requests.Plan, "top", "everything")
SCALE = verb_fields(requests.Scale)
CHECK = (*verb_fields(requests.Check, "target", "corrected"), "example")
VERBATIM = ("text", "config")  # kept with their leading spaces: findings have lines and columns
FILTERS = ("only", "most", "color")  # of the chart of layouts, kept in its link
MAX_FIELDS = 200
TOP = 10
EXAMPLE_RECIPE = "llama3_8b_pretrain_config"
FormFields = dict[str, str]
Answer = dict[str, Any]


async def form_fields(request: Request, names: Sequence[str]) -> FormFields:
    """Return the fields of a form, from the query or the body; a field that the page does not have is an error."""
    pairs = list(request.query_params.multi_items())
    if request.method == "POST":
        body = (await request.body()).decode("utf-8", "replace")
        try:
            pairs += parse_qsl(body, keep_blank_values=True, max_num_fields=MAX_FIELDS)
        except ValueError:
            raise HTTPException(413, f"a form has at most {MAX_FIELDS} fields") from None
    found = dict.fromkeys(names, "")
    for name, value in pairs:
        if name in found:
            found[name] = _stripped(name, value)
        elif not name.lower().startswith(TRACKING):
            raise UnknownFieldError(unknown_arguments({name[:SHOWN_BYTES]: value}, {one: f"--{one}" for one in names}))
    return found


class UnknownFieldError(Exception):
    """A URL or form has a field that the page does not have."""

    def __init__(self, error: InputError) -> None:
        super().__init__(error.reason)
        self.error = error


async def show_unknown_field(request: Request, error: Exception) -> HTMLResponse:
    """Show which field of a URL is unknown, and what was meant."""
    found = error_of(error.error)["error"] if isinstance(error, UnknownFieldError) else None
    return await page(request, "missing.html", error=found, what="field on this page", back=request.url.path)


def _stripped(name: str, value: str) -> str:
    return value if name in VERBATIM and value.strip() else value.strip()


async def page(request: Request, template: str, status: int | None = None, **shown: Any) -> HTMLResponse:
    """Return a page: 422 with an error, but 200 if htmx requested it, so that the error is shown in its place."""
    fragment = request.headers.get("hx-request") == "true"
    status = status or (422 if shown.get("error") else 200)
    text = await asyncio.to_thread(
        render, template, version=__version__, path=request.url.path, frameworks=presenters.FRAMEWORKS, **shown
    )
    return HTMLResponse(text, 200 if fragment else status, {"cache-control": "no-cache", "vary": "hx-request"})


async def ask(request: Request, verb: str, arguments: Mapping[str, Any]) -> tuple[Answer, Answer | None]:
    """Return the response to a request, empty if there is an error, and the error."""
    reply = await dispatcher_of(request).ask(verb, arguments)
    return (reply.data, None) if reply.ok else ({}, reply.data["error"])


async def ask_form(request: Request, verb: str, form: FormFields, **more: Any) -> tuple[Answer, Answer | None]:
    """Return the response to the request of a form."""
    try:
        arguments = form_arguments(form, **more)
    except ValueError as error:
        failed = to_error(str(error).lower(), "overrides", form["overrides"], ("layout.tp=4 layout.pp=2",))
        return {}, failed["error"]
    return await ask(request, verb, arguments)


def form_arguments(form: FormFields, **more: Any) -> dict[str, Any]:
    """Return a form as arguments of its verb; a config.json takes the place of a model's name."""
    fields: dict[str, Any] = {name: value for name, value in form.items() if value}
    if "config" in fields or "recipe" in fields:
        fields = {name: value for name, value in fields.items() if name not in ("model", "target")}
    if "overrides" in fields:
        fields["overrides"] = presenters.split_overrides(fields["overrides"])
    return {**fields, **more}


def layout_view(answer: Answer) -> dict[str, Any]:
    """Return what is shown of a layout: memory and step time by part, and a line."""
    return {
        "memory": presenters.memory(answer["estimate"], answer["memory_by_stage_gib"]),
        "step": presenters.step(answer["estimate"]),
        "words": layout_summary(answer["layout"], answer["question"]["engine"], with_value=True),
    }


@router.api_route("/", methods=["GET", "POST"])
async def recommend(request: Request) -> HTMLResponse:
    """Recommend a recipe; before the user has asked, for the default question."""
    form = await form_fields(request, ASK)
    if not any(form.values()):
        form |= quick_choices.DEFAULT
    plan, error = Answer(), None
    if not (form["model"] or form["config"]):
        reason = "type a model's name or Hugging Face id, choose one below, or drop its config.json"
        error = to_error(reason, "model", fix=quick_choices.MODELS[:3])["error"]
    else:
        plan, error = await ask_form(request, "recommend", form, explain=True)
    shown = _recommended(plan, form) if plan else {}
    return await page(
        request,
        "ask.html",
        form=form,
        error=error,
        fixes=quick_choices.applied_fixes(error, form) if error else None,
        chips=quick_choices.chips(form, plan["question"] if plan else None),
        **shown,
    )


def _recommended(plan: Answer, form: FormFields) -> dict[str, Any]:
    own, linked = bool(form["config"]), presenters.linkable(form)
    return {
        "plan": plan,
        **layout_view(plan),
        "counts": presenters.counted(plan["findings"]),
        "cli": presenters.command("recommend", requests.Recommend, {**form, "model": CONFIG if own else form["model"]}),
        "permalink": presenters.query(form),
        "try_with": (lambda overrides: presenters.with_override(form, overrides)) if linked else None,
        "would_fit": quick_choices.would_fit(plan, form),
        "explore": _query(EXPLORE, {**form, "target": form["model"], "model": ""}),
        "compare": _query(("model", "gpus", "goal", "seq", "overrides"), form),
        "scale": _query(SCALE, {**form, "gpu": quick_choices.split_cluster(plan["question"]["gpus"])[1]}),
    }


@router.get("/glossary")
async def glossary(request: Request) -> HTMLResponse:
    """Show all terms."""
    return await page(request, "glossary.html")


def _query(names: Sequence[str], form: Mapping[str, str]) -> str:
    """Return the query of another page: the fields that it has too."""
    return presenters.query({name: value for name, value in form.items() if name in names})


@router.api_route("/ask/commands", methods=["GET", "POST"])
async def commands(request: Request) -> HTMLResponse:
    """Show the plan as one framework's files and command."""
    form = await form_fields(request, (*ASK, "to"))
    written, error = await ask_form(request, "write", form)
    refused = str(error["field"]).startswith("layout.") if error else not written["ok"]
    sized = _sized_for(form) if refused else ""
    return await page(request, "commands.html", written=written, error=error, to=form["to"], sized=sized)


def _sized_for(form: FormFields) -> str:
    """Return the query of the plan that a framework's engine runs; empty for the engine that is asked about."""
    asked = {name: form[name] for name in ASK}
    engine = api.engine_of(form["to"])
    is_other = engine != (form["engine"] or api.ENGINES[0])
    return presenters.query({**asked, "engine": engine}) if is_other and presenters.linkable(asked) else ""


@router.api_route("/explore", methods=["GET", "POST"])
async def explore(request: Request) -> HTMLResponse:
    """Plot all layouts that fit, memory against speed; before the user has asked, for the default question."""
    form = await form_fields(request, (*EXPLORE, "a", "b", *FILTERS))
    if not any(form.values()):
        form |= {name: value for name, value in quick_choices.DEFAULT.items() if name != "model"}
        form["target"] = quick_choices.DEFAULT["model"]
    fields = {name: form[name] for name in EXPLORE}
    plans, error = await ask_form(request, "plan", fields, top=TOP, everything=True)
    shown: dict[str, Any] = {"plans": plans, "fixes": quick_choices.applied_fixes(error, fields) if error else None}
    if plans:
        arguments = {**fields, "target": fields["target"] or CONFIG, "top": TOP}
        shown["cli"] = presenters.command("plan", requests.Plan, arguments)
        shown["marks"] = await _marks(request, fields, plans)
        first = plans["plans"][0]
        question = presenters.question_of(first)
        asked = first["question"]
        points = await asyncio.to_thread(
            api.measured_points, asked["model"], asked["gpus"], asked["goal"], first["contract"]
        )
        shown["measured"] = [] if fields["config"] else [api.to_json(one) for one in points]
        data = presenters.table_of(plans.get("fitting", []))
        shown |= {
            "spec": charts.layouts(plans, shown["marks"], shown["measured"]),
            "data": data,
            "filters": presenters.layout_filters(data),
            "on_frontier": presenters.frontier_size(plans.get("fitting", [])),
            "words_of": layout_summary,
            "open_query": "" if fields["config"] else presenters.query({**question, **_budget(fields)}),
        }
        shown["opened"] = lambda one: presenters.opened(one, plans, fields)
    return await page(
        request,
        "explore.html",
        form=fields,
        chosen={"a": form["a"], "b": form["b"]},
        error=error,
        permalink=presenters.query(form),
        **shown,
    )


def _budget(fields: FormFields) -> FormFields:
    return {name: fields[name] for name in presenters.BUDGET}


async def _marks(request: Request, fields: FormFields, plans: Answer) -> list[dict[str, Any]]:
    """Return the recommended layout of the same question, and the published one: what to mark in the chart."""
    question = presenters.question_of(plans["plans"][0])
    asked = {**{name: fields[name] for name in ("config", "recipe", "overrides", *presenters.BUDGET)}, **question}
    found, _ = await ask_form(request, "recommend", asked)
    if not found or found["recipe"]["name"] != plans["plans"][0]["recipe"]["name"]:
        return []
    engine = found["question"]["engine"]
    rows = []
    if found["estimate"]["fits"]:
        gib, step_s = found["estimate"]["memory_gib"]["total"], found["estimate"]["step_s"]
        words = layout_summary(found["layout"], engine)
        row = {"total_gib": gib, "step_s": step_s, "words": words, "why": ""}
        rows.append({"label": "recommended", "layout": presenters.formatted_layout(found["layout"]), **row})
    published = found.get("published")
    if published and not published["kept"]:
        words = " ".join(f"{name} {value}" for name, value in published["layout"].items())
        row = {name: published[name] for name in ("total_gib", "step_s", "why")}
        layout = presenters.formatted_layout(published["layout"])
        label = "published, measured" if published["measured"] else "published"
        rows.append({"label": label, "words": words, "layout": layout, **row, "why": f"{row['why']}."})
    elif published and rows:
        rows[0]["label"] = f"recommended = published{', measured' if published['measured'] else ''}"
    return rows


@router.api_route("/explore/compare", methods=["GET", "POST"])
async def compare(request: Request) -> HTMLResponse:
    """Show one or two layouts in full: memory, time, findings and the pipeline over time."""
    form = await form_fields(request, (*EXPLORE, "a", "b"))
    fields = {name: form[name] for name in EXPLORE}
    slots = [name for name in ("a", "b") if form[name]]
    found = await asyncio.gather(*(_one_layout(request, fields, form[slot]) for slot in slots))
    sides = [{"slot": slot.upper(), **one} for slot, one in zip(slots, found, strict=True)]
    answers = [one["answer"] for one in sides if one["answer"]]
    differing = presenters.differing(*answers) if len(answers) == 2 else None
    return await page(request, "compare.html", sides=sides, fields=differing)


@router.post("/explore/rehearsal")
async def rehearsal(request: Request) -> HTMLResponse:
    """Show the timeline of a rehearsal's file: passes of every pipeline rank, and collectives."""
    form = await form_fields(request, (REHEARSAL,))
    try:
        shown = await asyncio.to_thread(rehearsal_view.timeline, form[REHEARSAL])
    except InputError as error:
        return await page(request, "rehearsal.html", error=error_of(error)["error"])
    return await page(request, "rehearsal.html", error=None, **shown)


async def _one_layout(request: Request, fields: FormFields, overrides: str) -> dict[str, Any]:
    """Return one layout's estimate and its step over time."""
    form = {**fields, "overrides": f"{fields['overrides']} {overrides}".strip()}
    answer, error = await ask_form(request, "estimate", form)
    if not answer:
        return {"answer": None, "error": error}
    shown: dict[str, Any] = {
        "answer": answer,
        "error": None,
        **layout_view(answer),
        "ask": _query(ASK, {**form, "model": form["target"]}),
        "cli": presenters.command("estimate", requests.Estimate, {**form, "target": form["target"] or CONFIG}),
        "pipeline": None,
    }
    if answer["layout"]["pp"] > 1:
        line, _ = await ask_form(request, "schedule", form)
        shown["pipeline"] = presenters.pipeline(line) if line else None
    return shown


@router.get("/scale/progress")
async def scale_progress(request: Request) -> JSONResponse:
    """Return what the search of a form is doing, while the form waits for its reply."""
    form = await form_fields(request, SCALE)
    try:
        fields = form_arguments(form, **_gpu_types(form))
    except ValueError:
        fields = {}
    return JSONResponse(
        {"stage": dispatcher_of(request).stage_of("scale", fields)}, headers={"cache-control": "no-store"}
    )


def _gpu_types(form: FormFields) -> dict[str, Any]:
    """Return the GPU types of the form as the list that the verb takes."""
    types = form["gpu"].replace(",", " ").split()
    return {"gpu": types} if types else {}  # a missing argument has its own error


@router.api_route("/scale", methods=["GET", "POST"])
async def scale(request: Request) -> HTMLResponse:
    """Plot speed, days and cost against the number of GPUs."""
    form = await form_fields(request, SCALE)
    found, error = Answer(), None
    if any(form.values()):
        found, error = await ask_form(request, "scale", form, **_gpu_types(form))
    series = found.get("series", [])
    sized = {**form, "model": form["model"] or CONFIG}
    return await page(
        request,
        "scale.html",
        form=form,
        found=found,
        error=error,
        fixes=quick_choices.applied_fixes(error, form) if error else None,
        specs=charts.scaling(series),
        titles={name: row[0] for name, row in charts.SCALED.items()},
        plain={one["gpu"]: next((s for s in one["sizes"] if s["fits"] and not s["host_gib"]), None) for one in series},
        plan_query=lambda one: _query(
            ASK, {**form, "gpus": f"{one['most_efficient']['nodes']}x{one['gpu'].split('x')[-1]}"}
        ),
        cli="\n".join(presenters.command("size", requests.Size, {**sized, "gpu": one["gpu"]}) for one in series),
        permalink=presenters.query(form),
    )


@router.api_route("/check", methods=["GET", "POST"])
async def check(request: Request) -> HTMLResponse:
    """Check a config or launch script; before the user has sent one, an example with errors."""
    form = await form_fields(request, (*CHECK, "apply"))
    applying = bool(form.pop("apply"))
    found, error, corrected = Answer(), None, None
    opened = not any(form.values())
    if opened:
        form |= {"text": SCRIPT, "name": SCRIPT_NAME, "gpus": SCRIPT_GPUS}
    if form["example"] and not form["text"]:
        form, error = await _example(request, form)
    if form["text"] or form["name"]:
        found, error = await _checked(request, form)
    if found and applying and "corrected" in found:
        before, corrected = form["text"], found["corrected"]
        form = {**form, "text": corrected["text"]}
        found, error = await _checked(request, form)
        corrected = {**corrected, "diff": presenters.diff_lines(before, form["text"])}
    shown: dict[str, Any] = {"corrected": corrected, "opened": opened}
    if found:
        shown |= presenters.findings_by_line(found["findings"], form["text"])
        can_be_built = found["estimate"] and found["estimate"]["step_s"] is not None
        shown["memory"] = presenters.memory(found["estimate"]) if can_be_built else None
        shown["permalink"] = presenters.query(form) if presenters.linkable(form) else ""
        shown["can_apply"] = bool(found.get("corrected", {}).get("applied")) and not found["ok"]
    choices = ("", api.ENGINES[0], *api.FRAMEWORKS)
    return await page(request, "check.html", form=form, found=found, error=error, framework_choices=choices, **shown)


async def _checked(request: Request, form: FormFields) -> tuple[Answer, Answer | None]:
    fields = {name: value for name, value in form.items() if name not in ("example", "advice")}
    return await ask_form(request, "check", fields, advice=bool(form["advice"]), corrected=True)


async def _example(request: Request, form: FormFields) -> tuple[FormFields, Answer | None]:
    """Return a shipped recipe as one framework's config, to try the check on."""
    arguments = {"target": EXAMPLE_RECIPE, "to": form["example"], "gpus": "8xH100"}
    written, error = await ask(request, "export", arguments)
    if not written:
        return form, error
    name, text = next(iter(written["files"].items()))
    return {**form, "name": name.rpartition("/")[2], "text": text, "gpus": "8xH100", "model": "llama3-8b"}, None


@router.get("/complete/{kind}")
async def complete(request: Request, kind: str) -> HTMLResponse:
    """Return names that complete the input, as options of a list."""
    typed = next((value for name, value in request.query_params.items() if name != "kind"), "")
    last = typed.replace(",", " ").split(" ")[-1] if kind == "gpus" else typed
    found, _ = await ask(request, "complete", {"kind": kind, "query": last[:200], "limit": 12})
    before = typed[: len(typed) - len(last)]
    return await page(request, "options.html", names=[before + name for name in found.get("names", [])])


@router.get("/recipes")
async def recipes(request: Request) -> HTMLResponse:
    """List recipes."""
    form = await form_fields(request, ("query", "goal", "family", "benchmark"))
    arguments: dict[str, Any] = {name: form[name] for name in ("query", "goal", "family")}
    found, error = await ask(request, "recipes", {**arguments, "benchmark": bool(form["benchmark"])})
    every, _ = await ask(request, "recipes", {"benchmark": bool(form["benchmark"])})
    families = ("", *sorted({one["family"] for one in every.get("recipes", [])}))
    rows = found.get("recipes", [])
    return await page(request, "recipes.html", form=form, rows=rows, error=error, families=families)


@router.get("/recipes/{name}")
async def recipe(request: Request, name: str) -> HTMLResponse:
    """Show one recipe: layout, estimate, verification report and text."""
    found, error = await ask(request, "recipe", {"name": name, "format": "toml"})
    if not found:
        return await page(request, "missing.html", 404, error=error, what="recipe", back="/recipes")
    name = found["recipe"]["name"]
    estimate, failed = await ask(request, "estimate", {"target": name})
    reports = await verification_reports(request)
    return await page(
        request,
        "recipe.html",
        name=name,
        recipe=found["recipe"],
        text=found["text"],
        estimate=estimate,
        error=failed,
        report=reports.get(name),
        cli=f"meshwright estimate {name} --json",
        **(layout_view(estimate) if estimate else {}),
    )


async def verification_reports(request: Request) -> dict[str, Answer]:
    """Return all verification reports, read once for the server: no request names a file."""
    state = request.app.state
    if not hasattr(state, "verification_reports"):
        state.verification_reports = await asyncio.to_thread(api.verification_reports)
    found: dict[str, Answer] = state.verification_reports
    return found


@router.get("/recipes/{name}/text")
async def recipe_text(request: Request, name: str) -> HTMLResponse:
    """Show a recipe in another format, or as another framework's config."""
    form = await form_fields(request, ("format", "to"))
    if form["to"]:
        written, error = await ask(request, "export", {"target": name, "to": form["to"]})
        return await page(request, "commands.html", written=written, error=error, to=form["to"], sized="")
    found, error = await ask(request, "recipe", {"name": name, "format": form["format"] or "toml"})
    files = {} if not found else {f"{name}.{ENDINGS[found['format']]}": found["text"]}
    return await page(request, "files.html", files=files, error=error)


ENDINGS = {"toml": "toml", "yaml": "yaml", "json": "json", "python": "py"}


@router.get("/models")
async def models(request: Request) -> HTMLResponse:
    """List models."""
    form = await form_fields(request, ("query",))
    found, error = await ask(request, "models", form)
    return await page(request, "models.html", form=form, rows=found.get("models", []), error=error)


@router.get("/models/{name:path}")
async def model(request: Request, name: str) -> HTMLResponse:
    """Show one model: shape, parameters and recipes."""
    found, error = await ask(request, "model", {"name": name})
    if not found:
        return await page(request, "missing.html", 404, error=error, what="model", back="/models")
    every, _ = await ask(request, "recipes", {})
    rows = [one for one in every.get("recipes", []) if one["model"] == found["model"]["name"]]
    return await page(request, "model.html", model=found["model"], rows=rows)


@router.get("/gpus")
async def gpus(request: Request) -> HTMLResponse:
    """List GPUs."""
    form = await form_fields(request, ("query",))
    found, error = await ask(request, "gpus", {})
    wanted = form["query"].lower()
    rows = [one for one in found.get("gpus", []) if wanted in f"{one['name']} {one['arch']}".lower()]
    return await page(request, "gpus.html", form=form, rows=rows, error=error)


@router.get("/gpus/{name}")
async def gpu(request: Request, name: str) -> HTMLResponse:
    """Show one GPU and its sources."""
    found, error = await ask(request, "gpus", {})
    rows = [one for one in found.get("gpus", []) if one["name"].lower() == name.lower()]
    if not rows:
        near, _ = await ask(request, "complete", {"kind": "gpus", "query": name[:200], "limit": 3})
        error = error or to_error("not in the catalogue", "gpu", name, near.get("names", ()))["error"]
        return await page(request, "missing.html", 404, error=error, what="GPU", back="/gpus")
    return await page(request, "gpu.html", gpu=rows[0])


@router.get("/rules")
async def rules(request: Request) -> HTMLResponse:
    """List rules."""
    form = await form_fields(request, ("query", "pitfalls", "severity"))
    arguments: dict[str, Any] = {"pitfalls": bool(form["pitfalls"])}
    found, error = await ask(request, "rules", arguments)
    rows = _matching(found.get("rules", []), form["query"])
    if form["query"] and not rows:  # rules of other frameworks are found by name
        found, error = await ask(request, "rules", {**arguments, "query": form["query"]})
        rows = found.get("rules", [])
    rows = [one for one in rows if form["severity"] in ("", one["severity"])]
    return await page(request, "rules.html", form=form, rows=rows, error=error)


def _matching(rows: list[Answer], query: str) -> list[Answer]:
    """Return rules whose id or text contains every word of the query."""
    wanted = query.lower().split()
    return [one for one in rows if all(w in f"{one['id']} {one['symptom']} {one['cause']}".lower() for w in wanted)]


@router.get("/rules/{name}")
async def rule(request: Request, name: str) -> HTMLResponse:
    """Show one rule: symptom, cause and fix."""
    found, error = await ask(request, "rules", {"query": name})
    rows = [one for one in found.get("rules", []) if one["id"] == name]
    if not rows:
        near = [one["id"] for one in found.get("rules", [])[:3]]
        error = error or to_error("unknown rule", "rule", name, near)["error"]
        return await page(request, "missing.html", 404, error=error, what="rule", back="/rules")
    return await page(request, "rule.html", rule=rows[0])


@router.get("/accuracy")
async def accuracy(request: Request) -> HTMLResponse:
    """Plot predicted against measured."""
    found, error = await ask(request, "accuracy", {"points": True})
    units = {"step_time": "s per step", "memory": "GiB"} if found else {}
    specs = {name: charts.accuracy(found["points"][name], unit) for name, unit in units.items()}
    return await page(request, "accuracy.html", found=found, error=error, specs=specs)
