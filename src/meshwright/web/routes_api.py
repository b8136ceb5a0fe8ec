"""The JSON API: the same functions as the command line, under /api."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Body, Path, Query, Request, Response

from meshwright import __version__
from meshwright.api import SCHEMA
from meshwright.web import requests
from meshwright.web.dispatcher import RETRY_S, Dispatcher, Reply
from meshwright.web.requests import VerbRequest

router = APIRouter()
Name = Annotated[requests.Word, Path(description="as it is called in the catalogue")]

ERROR = {
    "type": "object",
    "required": ["schema", "error", "field", "value", "reason", "fix"],
    "properties": {
        "schema": {"const": SCHEMA},
        "error": {"type": "string"},
        "field": {"type": "string"},
        "value": {"type": ["string", "null"]},
        "reason": {"type": "string"},
        "fix": {"type": "array", "items": {"type": "string"}},
    },
}
KEYS: dict[str, tuple[str, ...]] = {
    "recommend": (
        "question",
        "recipe",
        "contract",
        "layout",
        "estimate",
        "changes",
        "findings",
        "suggestions",
        "commands",
    ),
    "plan": ("plans", "pareto", "dropped", "searched"),
    "estimate": ("question", "recipe", "layout", "estimate", "findings", "memory_by_stage_gib"),
    "size": ("smallest", "most_efficient", "sizes"),
    "scale": ("series",),
    "schedule": ("schedule", "ranks", "chunks", "micro_batches", "span_s", "idle_share", "passes"),
    "check": ("framework", "ok", "findings", "unresolved", "notes", "estimate"),
    "export": ("framework", "ok", "files", "command", "findings"),
    "recipes": ("recipes",),
    "recipe": ("recipe",),
    "models": ("models",),
    "model": ("model",),
    "gpus": ("gpus",),
    "rules": ("rules",),
    "accuracy": ("rows", "predicted", "step_time", "memory", "fit"),
    "complete": ("kind", "names"),
}
"""What every answer has beside its schema."""


def desk_of(request: Request) -> Dispatcher:
    """Where this server's questions are answered."""
    desk: Dispatcher = request.app.state.desk
    return desk


async def ask(request: Request, verb: str, question: VerbRequest) -> Reply:
    """The reply to a typed question."""
    return await desk_of(request).ask(verb, *question.question())


def sent(request: Request, reply: Reply) -> Response:
    """A reply as it goes over the wire; what the asker has already is not sent again."""
    headers = {"etag": reply.tag, "cache-control": "no-cache"} if reply.ok else {"cache-control": "no-store"}
    if reply.status == 429:
        headers["retry-after"] = str(RETRY_S)
    if reply.ok and request.method == "GET" and reply.tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(reply.body, reply.status, headers, media_type="application/json")


def _documented(verb: str) -> dict[int | str, dict[str, Any]]:
    answer = {
        "type": "object",
        "required": ["schema", *KEYS[verb]],
        "properties": {"schema": {"const": SCHEMA}},
    }
    refusals = {
        404: "nothing is at this address",
        408: "the question did not arrive in time",
        413: "too large",
        414: "too long",
        421: "this server has another name",
        422: "the question cannot be understood or answered; the way out is told",
        429: "too many questions wait already",
    }
    found: dict[int | str, dict[str, Any]] = {200: _described("the answer", answer)}
    return found | {code: _described(why, ERROR) for code, why in refusals.items()}


def _described(text: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": text, "content": {"application/json": {"schema": schema}}}


def _route(method: str, path: str, verb: str, kind: type[VerbRequest], named: bool = False) -> None:
    """One question as a route: its fields in the query of a GET, or in the body of a POST."""
    place: Any = Annotated[kind, Query() if method == "GET" else Body()]

    async def answered(request: Request, question: VerbRequest) -> Response:
        return sent(request, await ask(request, verb, question))

    async def answered_by_name(request: Request, name: str, question: VerbRequest) -> Response:
        said, texts = question.question()
        return sent(request, await desk_of(request).ask(verb, {**said, "name": name}, texts))

    handler: Callable[..., Any] = answered_by_name if named else answered
    handler.__annotations__ = {"request": Request, "question": place, "return": Response}
    if named:
        handler.__annotations__["name"] = Name
    router.add_api_route(
        path,
        handler,
        methods=[method],
        name=f"{verb} {method.lower()} {kind.__name__}",
        summary=(kind.__doc__ or "").strip(),
        operation_id=f"{verb}_{kind.__name__}".lower(),
        responses=_documented(verb),
        response_class=Response,
    )


for _path, _verb, _kind, _own in (
    ("/recommend", "recommend", requests.Recommend, requests.RecommendOwn),
    ("/plan", "plan", requests.Plan, requests.PlanOwn),
    ("/estimate", "estimate", requests.Estimate, requests.EstimateOwn),
    ("/size", "size", requests.Size, requests.SizeOwn),
    ("/scale", "scale", requests.Scale, requests.ScaleOwn),
    ("/schedule", "schedule", requests.Schedule, requests.ScheduleOwn),
    ("/check", "check", requests.Check, requests.CheckText),
    ("/export", "export", requests.Export, requests.ExportText),
):
    _route("GET", _path, _verb, _kind)
    _route("POST", _path, _verb, _own)

_route("GET", "/recipes", "recipes", requests.Recipes)
_route("GET", "/recipes/{name}", "recipe", requests.Recipe, named=True)
_route("GET", "/models", "models", requests.Models)
_route("POST", "/models", "model", requests.ModelOwn)
_route("GET", "/models/{name:path}", "model", requests.VerbRequest, named=True)
_route("GET", "/gpus", "gpus", requests.VerbRequest)
_route("GET", "/rules", "rules", requests.Rules)
_route("GET", "/accuracy", "accuracy", requests.Accuracy)
_route("GET", "/complete", "complete", requests.Complete)


@router.get("/health")
async def health(request: Request) -> dict[str, Any]:
    """Whether the server answers, and how many questions wait."""
    return {"schema": SCHEMA, "ok": True, "version": __version__, "waiting": len(desk_of(request).asked)}
