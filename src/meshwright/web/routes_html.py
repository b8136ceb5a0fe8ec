"""The pages: forms that ask the same questions as the command line, and their answers as HTML."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any
from urllib.parse import parse_qsl

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from meshwright import __version__, api
from meshwright.web import charts, presenters, requests
from meshwright.web.errors import not_typed, to_error
from meshwright.web.routes_api import desk_of
from meshwright.web.templates import render

router = APIRouter(include_in_schema=False)

TRAINING = ("goal", "seq", "engine", "overrides", "config")
ASK = ("model", "gpus", *TRAINING, "benchmark")
EXPLORE = ("target", "gpus", *TRAINING)
SCALE = ("model", "gpu", *TRAINING, "tokens", "price")
CHECK = ("text", "name", "gpus", "model", "framework", "advice", "example")
EXAMPLES = (
    ("llama3-8b", "8xH100", "sft"),
    ("llama3-70b", "64xH100", "pretrain"),
    ("qwen3-30b-a3b", "4x8xH200", "pretrain"),
    ("deepseek-v3", "256xGB200", "pretrain"),
    ("llama3-70b", "8xH100", "peft"),
)
VERBATIM = ("text", "config")  # blanks at their start count: lines and columns are told
MOST_FIELDS = 200
TOP = 10
EXAMPLE_RECIPE = "llama3_8b_pretrain_config"
FormFields = dict[str, str]
Answer = dict[str, Any]


async def said_in(request: Request, names: Sequence[str]) -> FormFields:
    """What a form says, in the query or in the body; a field that is not asked for is left out."""
    pairs = list(request.query_params.multi_items())
    if request.method == "POST":
        body = (await request.body()).decode("utf-8", "replace")
        try:
            pairs += parse_qsl(body, keep_blank_values=True, max_num_fields=MOST_FIELDS)
        except ValueError:
            raise HTTPException(413, f"a form has at most {MOST_FIELDS} fields") from None
    found = dict.fromkeys(names, "")
    found.update({name: _said(name, value) for name, value in pairs if name in found})
    return found


def _said(name: str, value: str) -> str:
    return value if name in VERBATIM and value.strip() else value.strip()


async def page(request: Request, template: str, status: int = 200, **shown: Any) -> HTMLResponse:
    """A page; one asked for by htmx is told as fine, so that its error is shown in its place."""
    fragment = request.headers.get("hx-request") == "true"
    text = await asyncio.to_thread(
        render, template, version=__version__, path=request.url.path, frameworks=presenters.FRAMEWORKS, **shown
    )
    return HTMLResponse(text, 200 if fragment else status, {"cache-control": "no-cache", "vary": "hx-request"})


async def answered(
    request: Request, verb: str, question: Mapping[str, Any], texts: Mapping[str, str] | None = None
) -> tuple[Answer | None, Answer | None]:
    """The answer to a question, or the error and its way out."""
    reply = await desk_of(request).ask(verb, question, texts)
    return (reply.data, None) if reply.ok else (None, reply.data)


async def asked_for(
    request: Request,
    verb: str,
    kinds: tuple[type[requests.VerbRequest], type[requests.VerbRequest]],
    said: FormFields,
    **more: Any,
) -> tuple[Answer | None, Answer | None]:
    """A question typed from what a form says; with a config.json of one's own, about that."""
    config = said.get("config", "")
    fields: dict[str, Any] = {name: value for name, value in said.items() if value and name != "config"}
    try:
        if "overrides" in fields:
            fields["overrides"] = presenters.words(fields["overrides"])
        if config:
            fields = {**fields, "config": config, "target" if "target" in said else "model": requests.CONFIG}
        question = kinds[1 if config else 0](**fields, **more)
    except ValidationError as error:
        return None, not_typed(error.errors()[0])
    except ValueError as error:
        return None, to_error(str(error).lower(), "overrides", said["overrides"], ("layout.tp=4 layout.pp=2",))
    return await answered(request, verb, *question.question())


def status_of(error: Answer | None) -> int:
    """The status of a page that could not answer."""
    return 422 if error else 200


@router.api_route("/", methods=["GET", "POST"])
async def ask(request: Request) -> HTMLResponse:
    """Which recipe for this model on these GPUs."""
    said = await said_in(request, ASK)
    plan, error = None, None
    if any(said[name] for name in ("model", "gpus", "config")):
        kinds = (requests.Recommend, requests.RecommendOwn)
        plan, error = await asked_for(request, "recommend", kinds, said, explain=True)
    shown = {} if plan is None else _recommended(plan, said)
    goals, engines = api.GOALS, api.ENGINES
    return await page(
        request,
        "ask.html",
        status_of(error),
        said=said,
        error=error,
        goals=goals,
        engines=engines,
        examples=EXAMPLES,
        **shown,
    )


def _recommended(plan: Answer, said: FormFields) -> dict[str, Any]:
    own = bool(said["config"])
    options = ("gpus", "goal", "seq", "engine", "benchmark")
    return {
        "plan": plan,
        "memory": presenters.memory(plan["estimate"], plan["memory_by_stage_gib"]),
        "step": presenters.step(plan["estimate"]),
        "words": presenters.layout_words(plan["layout"]),
        "counts": presenters.counted(plan["findings"]),
        "cli": presenters.command("recommend", requests.CONFIG if own else said["model"], said, options),
        "permalink": presenters.query(said),
        "try_with": (lambda overrides: presenters.with_override(said, overrides))
        if presenters.linkable(said)
        else None,
        "explore": presenters.query({**said, "target": said["model"], "model": "", "benchmark": ""}),
        "scale": presenters.query(
            {**said, "gpus": "", "benchmark": "", "gpu": plan["question"]["gpus"].split("x")[-1]}
        ),
    }


@router.api_route("/ask/commands", methods=["GET", "POST"])
async def commands(request: Request) -> HTMLResponse:
    """The plan in one framework's words: files, command, and what could not be said."""
    said = await said_in(request, (*ASK, "to"))
    written, error = await asked_for(request, "write", (requests.Write, requests.WriteOwn), said)
    return await page(request, "commands.html", status_of(error), written=written, error=error, to=said["to"])


@router.api_route("/explore", methods=["GET", "POST"])
async def explore(request: Request) -> HTMLResponse:
    """All layouts that fit, memory against speed."""
    said = await said_in(request, (*EXPLORE, "a", "b"))
    asking = {name: said[name] for name in EXPLORE}
    plans, error = None, None
    if any(asking[name] for name in ("target", "gpus", "config")):
        kinds = (requests.Plan, requests.PlanOwn)
        plans, error = await asked_for(request, "plan", kinds, asking, top=TOP, everything=True)
    shown: dict[str, Any] = {"plans": plans}
    if plans is not None:
        first = asking["target"] or requests.CONFIG
        shown["cli"] = presenters.command(
            "plan", first, {**asking, "top": str(TOP)}, ("gpus", "goal", "seq", "engine", "top")
        )
        shown |= {
            "spec": charts.layouts(plans),
            "data": charts.layouts_data(plans),
            "words_of": presenters.layout_words,
        }
        shown["opened"] = lambda one: presenters.opened(one, plans, asking)
    choices = {"goals": ("", *api.GOALS), "engines": api.ENGINES}
    return await page(
        request,
        "explore.html",
        status_of(error),
        said=asking,
        chosen={"a": said["a"], "b": said["b"]},
        error=error,
        permalink=presenters.query(said),
        **choices,
        **shown,
    )


@router.api_route("/explore/compare", methods=["GET", "POST"])
async def compare(request: Request) -> HTMLResponse:
    """One or two layouts in full: memory, time, findings and the pipeline over time."""
    said = await said_in(request, (*EXPLORE, "a", "b"))
    asking = {name: said[name] for name in EXPLORE}
    slots = [name for name in ("a", "b") if said[name]]
    found = await asyncio.gather(*(_one_layout(request, asking, said[slot]) for slot in slots))
    sides = [{"slot": slot.upper(), **one} for slot, one in zip(slots, found, strict=True)]
    whole = [one["answer"] for one in sides if one["answer"]]
    return await page(
        request,
        "compare.html",
        sides=sides,
        fields=presenters.differing(whole[0], whole[1]) if len(whole) == 2 else [],
    )


async def _one_layout(request: Request, asking: FormFields, overrides: str) -> dict[str, Any]:
    """One layout's estimate and its step over time."""
    said = {**asking, "overrides": f"{asking['overrides']} {overrides}".strip()}
    answer, error = await asked_for(request, "estimate", (requests.Estimate, requests.EstimateOwn), said)
    if answer is None:
        return {"answer": None, "error": error}
    shown: dict[str, Any] = {
        "answer": answer,
        "error": None,
        "memory": presenters.memory(answer["estimate"], answer["memory_by_stage_gib"]),
        "step": presenters.step(answer["estimate"]),
        "words": presenters.layout_words(answer["layout"]),
        "ask": presenters.query({**said, "model": said["target"], "target": ""}),
        "cli": presenters.command(
            "estimate", said["target"] or requests.CONFIG, said, ("gpus", "goal", "seq", "engine")
        ),
        "pipeline": None,
    }
    if answer["layout"]["pp"] > 1:
        line, _ = await asked_for(request, "schedule", (requests.Schedule, requests.ScheduleOwn), said)
        shown["pipeline"] = None if line is None else presenters.pipeline(line)
    return shown


@router.api_route("/scale", methods=["GET", "POST"])
async def scale(request: Request) -> HTMLResponse:
    """What more GPUs buy."""
    said = await said_in(request, SCALE)
    found, error = None, None
    if any(said[name] for name in ("model", "gpu", "config")):
        types = {"gpu": [one for one in said["gpu"].replace(",", " ").split() if one]}
        typed: dict[str, Any] = {name: value for name, value in said.items() if name != "gpu"}
        more: dict[str, Any] = types if types["gpu"] else {}
        found, error = await asked_for(request, "scale", (requests.Scale, requests.ScaleOwn), typed, **more)
    specs = {} if found is None else charts.scaling(found["series"])
    options = ("goal", "gpu", "seq", "engine", "tokens", "price")
    titles = {name: row[0] for name, row in charts.SCALED.items()}
    choices = {"goals": api.GOALS, "engines": api.ENGINES, "titles": titles}
    return await page(
        request,
        "scale.html",
        status_of(error),
        said=said,
        found=found,
        error=error,
        specs=specs,
        cli="\n".join(
            presenters.command("size", said["model"] or requests.CONFIG, {**said, "gpu": one["gpu"]}, options)
            for one in (found or {}).get("series", [])
        ),
        permalink=presenters.query(said),
        **choices,
    )


@router.api_route("/check", methods=["GET", "POST"])
async def check(request: Request) -> HTMLResponse:
    """What is wrong with a config or a launch script."""
    said = await said_in(request, CHECK)
    found, error = None, None
    if said["example"] and not said["text"]:
        said, error = await _example(request, said)
    elif said["text"]:
        fields: dict[str, Any] = {name: said[name] for name in CHECK if said[name] and name != "example"}
        try:
            question = requests.CheckText(**{**fields, "advice": bool(said["advice"])})
            found, error = await answered(request, "check", *question.question())
        except ValidationError as wrong:
            error = not_typed(wrong.errors()[0])
    shown: dict[str, Any] = {}
    if found is not None:
        shown = presenters.findings_by_line(found["findings"], said["text"])
        shown["memory"] = presenters.memory(found["estimate"]) if found["estimate"] else None
    frameworks = ("", api.ENGINES[0], *api.FRAMEWORKS)
    return await page(
        request, "check.html", status_of(error), said=said, found=found, error=error, frameworks=frameworks, **shown
    )


async def _example(request: Request, said: FormFields) -> tuple[FormFields, Answer | None]:
    """A config of one framework to try the check on: a shipped recipe in its words."""
    question = {"target": EXAMPLE_RECIPE, "to": said["example"], "gpus": "8xH100"}
    written, error = await answered(request, "export", question)
    if written is None:
        return said, error
    name, text = next(iter(written["files"].items()))
    return {**said, "name": name.rpartition("/")[2], "text": text, "gpus": "8xH100", "model": "llama3-8b"}, None


@router.get("/complete/{kind}")
async def complete(request: Request, kind: str) -> HTMLResponse:
    """Names that what was typed may become, as options of a list."""
    typed = next((value for name, value in request.query_params.items() if name != "kind"), "")
    last = typed.replace(",", " ").split(" ")[-1] if kind == "gpus" else typed
    found, _ = await answered(request, "complete", {"kind": kind, "query": last[:200], "limit": 12})
    before = typed[: len(typed) - len(last)]
    return await page(request, "options.html", names=[before + name for name in (found or {}).get("names", [])])


@router.get("/recipes")
async def recipes(request: Request) -> HTMLResponse:
    """The index of recipes."""
    said = await said_in(request, ("query", "goal", "family", "benchmark"))
    question: dict[str, Any] = {name: said[name] for name in ("query", "goal", "family") if said[name]}
    found, error = await answered(request, "recipes", {**question, "benchmark": bool(said["benchmark"])})
    every, _ = await answered(request, "recipes", {"benchmark": bool(said["benchmark"])})
    families = sorted({one["family"] for one in (every or {}).get("recipes", [])})
    choices = {"goals": ("", *api.GOALS), "families": ("", *families)}
    rows = (found or {}).get("recipes", [])
    return await page(request, "recipes.html", status_of(error), said=said, rows=rows, error=error, **choices)


@router.get("/recipes/{name}")
async def recipe(request: Request, name: str) -> HTMLResponse:
    """One recipe: its layout, what it costs, what was tried of it, and its text."""
    found, error = await answered(request, "recipe", {"name": name, "format": "toml"})
    if found is None:
        return await page(request, "missing.html", 404, error=error, what="recipe", back="/recipes")
    name = found["recipe"]["name"]
    estimate, failed = await answered(request, "estimate", {"target": name})
    reports = await asyncio.to_thread(_verification_reports)
    shown: dict[str, Any] = {}
    if estimate is not None:
        shown["memory"] = presenters.memory(estimate["estimate"], estimate["memory_by_stage_gib"])
        shown |= {"step": presenters.step(estimate["estimate"]), "words": presenters.layout_words(estimate["layout"])}
    return await page(
        request,
        "recipe.html",
        name=name,
        recipe=found["recipe"],
        text=found["text"],
        estimate=estimate,
        error=failed,
        report=reports.get(name),
        formats=("toml", "yaml", "json", "python"),
        cli=f"meshwright estimate {name} --json",
        **shown,
    )


@cache
def _verification_reports() -> dict[str, Answer]:
    """Read the reports once per process."""
    return api.verification_reports()


@router.get("/recipes/{name}/text")
async def recipe_text(request: Request, name: str) -> HTMLResponse:
    """A recipe in another format, or in another framework's words."""
    said = await said_in(request, ("format", "to"))
    if said["to"]:
        written, error = await answered(request, "export", {"target": name, "to": said["to"]})
        return await page(request, "commands.html", status_of(error), written=written, error=error, to=said["to"])
    found, error = await answered(request, "recipe", {"name": name, "format": said["format"] or "toml"})
    files = None if found is None else {f"{name}.{ENDINGS[found['format']]}": found["text"]}
    return await page(request, "files.html", status_of(error), files=files, error=error)


ENDINGS = {"toml": "toml", "yaml": "yaml", "json": "json", "python": "py"}


@router.get("/models")
async def models(request: Request) -> HTMLResponse:
    """The catalogue of models."""
    said = await said_in(request, ("query",))
    found, error = await answered(request, "models", {"query": said["query"]} if said["query"] else {})
    rows = (found or {}).get("models", [])
    return await page(request, "models.html", status_of(error), said=said, rows=rows, error=error)


@router.get("/models/{name:path}")
async def model(request: Request, name: str) -> HTMLResponse:
    """One model: its shape, its parameters, its recipes."""
    found, error = await answered(request, "model", {"name": name})
    if found is None:
        return await page(request, "missing.html", 404, error=error, what="model", back="/models")
    every, _ = await answered(request, "recipes", {})
    rows = [one for one in (every or {}).get("recipes", []) if one["model"] == found["model"]["name"]]
    return await page(request, "model.html", model=found["model"], rows=rows)


@router.get("/gpus")
async def gpus(request: Request) -> HTMLResponse:
    """The catalogue of GPUs."""
    said = await said_in(request, ("query",))
    found, error = await answered(request, "gpus", {})
    wanted = said["query"].lower()
    rows = [one for one in (found or {}).get("gpus", []) if wanted in f"{one['name']} {one['arch']}".lower()]
    return await page(request, "gpus.html", said=said, rows=rows, error=error)


@router.get("/gpus/{name}")
async def gpu(request: Request, name: str) -> HTMLResponse:
    """One GPU's facts with their sources."""
    found, error = await answered(request, "gpus", {})
    rows = [one for one in (found or {}).get("gpus", []) if one["name"].lower() == name.lower()]
    if not rows:
        near, _ = await answered(request, "complete", {"kind": "gpus", "query": name[:200], "limit": 3})
        error = error or to_error("is no GPU of the catalogue", "gpu", name, (near or {}).get("names", ()))
        return await page(request, "missing.html", 404, error=error, what="GPU", back="/gpus")
    return await page(request, "gpu.html", gpu=rows[0])


@router.get("/rules")
async def rules(request: Request) -> HTMLResponse:
    """Everything that is checked."""
    said = await said_in(request, ("query", "pitfalls", "severity"))
    question: dict[str, Any] = {"pitfalls": bool(said["pitfalls"])}
    found, error = await answered(request, "rules", question)
    rows = _matching((found or {}).get("rules", []), said["query"])
    if said["query"] and not rows:  # those of other frameworks' files are found by name
        found, error = await answered(request, "rules", {**question, "query": said["query"]})
        rows = (found or {}).get("rules", [])
    rows = [one for one in rows if said["severity"] in ("", one["severity"])]
    severities = ("", *presenters.SEVERITIES)
    return await page(request, "rules.html", status_of(error), said=said, rows=rows, error=error, severities=severities)


def _matching(rows: list[Answer], query: str) -> list[Answer]:
    """Rules whose id or words hold every word of the query."""
    wanted = query.lower().split()
    return [one for one in rows if all(w in f"{one['id']} {one['symptom']} {one['cause']}".lower() for w in wanted)]


@router.get("/rules/{name}")
async def rule(request: Request, name: str) -> HTMLResponse:
    """One rule: symptom, cause and fix."""
    found, error = await answered(request, "rules", {"query": name})
    rows = [one for one in (found or {}).get("rules", []) if one["id"] == name]
    if not rows:
        error = error or to_error("is no rule", "rule", name, [one["id"] for one in (found or {}).get("rules", [])[:3]])
        return await page(request, "missing.html", 404, error=error, what="rule", back="/rules")
    return await page(request, "rule.html", rule=rows[0])


@router.get("/accuracy")
async def accuracy(request: Request) -> HTMLResponse:
    """Predicted against measured."""
    found, error = await answered(request, "accuracy", {"points": True})
    specs: dict[str, Any] = {}
    if found is not None:
        units = {"step_time": "s per step", "memory": "GiB"}
        specs = {name: charts.accuracy(found["points"][name], unit) for name, unit in units.items()}
    return await page(request, "accuracy.html", status_of(error), found=found, error=error, specs=specs)
