"""The HTTP API under /api: a route for each verb, derived from its request and response."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse

from meshwright import __version__
from meshwright.api.inputs import SHOWN_BYTES, fields_of, json_schema, texts_of
from meshwright.api.schema import component_schemas
from meshwright.api.verbs import VERBS, Verb, verbs_on
from meshwright.errors import InputError
from meshwright.version import SCHEMA
from meshwright.web.cache import Reply, address
from meshwright.web.dispatcher import Dispatcher
from meshwright.web.errors import error_of
from meshwright.web.worker import BAD_REQUEST as UNPROCESSABLE

router = APIRouter()
REFERENCES, COMPONENTS = component_schemas(verbs_on("http"))
ERRORS = {
    400: "the body is not valid JSON, or not an object",
    404: "unknown path, or no recipe or model of that name",
    405: "the path does not support this method",
    408: "the request did not arrive in time",
    413: "the body is too large",
    414: "the URL is too long",
    421: "unknown Host header",
    422: "invalid or unanswerable request; the error has the fix",
    429: "too many pending requests",
}


def dispatcher_of(request: Request) -> Dispatcher:
    """Return the dispatcher of this server."""
    found: Dispatcher = request.app.state.dispatcher
    return found


def _route(verb: Verb, method: str, path: str) -> None:
    """Add a route: arguments in the query of a GET, or in the JSON body of a POST."""
    is_get = method == "GET"

    async def answer(request: Request) -> Response:
        dispatcher = dispatcher_of(request)
        arguments: Any = _query(verb, request) if is_get else await _body(verb, request)
        if not isinstance(arguments, dict):
            failed = arguments if isinstance(arguments, InputError) else _not_an_object(verb, arguments)
            return JSONResponse(error_of(failed), 400, {"cache-control": "no-store"})
        arguments |= request.path_params
        reply = await dispatcher.ask(verb.name, arguments, texts=not is_get, strings=is_get)
        if verb.path and reply.status == UNPROCESSABLE and _is_unknown_name(reply):
            reply = _not_found(reply, verb)
        if is_get and reply.ok and reply.cacheable:
            dispatcher.cache.put(address(request.scope), reply)
        return reply.to_response(request.headers.get("if-none-match", "") if is_get else "")

    router.add_api_route(
        path,
        answer,
        methods=[method],
        name=f"{verb.name} {method.lower()}",
        summary=verb.summary,
        description=verb.description,
        operation_id=f"{verb.name}_{method.lower()}",
        responses={200: _content("the response", REFERENCES[verb.name]), **_ERROR_RESPONSES},
        response_class=Response,
        openapi_extra={"parameters": _parameters(verb)} if is_get else {"requestBody": _request_body(verb)},
    )


def _query(verb: Verb, request: Request) -> dict[str, Any]:
    repeated = {field.name for field in fields_of(verb.request) if field.repeated}
    query = request.query_params
    return {name: query.getlist(name) if name in repeated else query[name] for name in query}


async def _body(verb: Verb, request: Request) -> Any:
    body = await request.body()
    if ignored := next(iter(request.query_params), ""):
        reason = f"a POST takes its arguments in a JSON body, not in the query; {verb.name} takes {_taken(verb)}"
        return InputError(reason, ignored[:SHOWN_BYTES], request.query_params[ignored][:SHOWN_BYTES], _example(verb))
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        reason = str(error) if body.strip() else "the body is empty"
        shown = body[:80].decode("utf-8", "replace")
        reason = f"not valid JSON: {reason}; the body is an object of {_taken(verb)}"
        return InputError(reason, "body", shown, _example(verb))


def _taken(verb: Verb) -> str:
    """Return the arguments of a POST: the texts first, as they are what a GET does not have."""
    names = (*texts_of(verb.request), *(one.name for one in fields_of(verb.request) if "http" in one.input.surfaces))
    return ", ".join(dict.fromkeys(names))


def _example(verb: Verb) -> tuple[str, ...]:
    """Return the body with the first required argument; empty if none is."""
    first = next((one for one in fields_of(verb.request) if one.required), None)
    fix = first.fix("http")[:1] if first is not None else ()
    return tuple(f"{{{one}}}".replace(f"{{{first.name}:", f'{{"{first.name}":') for one in fix if first is not None)


def _not_an_object(verb: Verb, sent: Any) -> InputError:
    kind = "null" if sent is None else type(sent).__name__
    return InputError(f"must be a JSON object of arguments, not {kind}", "body", fix=_example(verb))


def _not_found(reply: Reply, verb: Verb) -> Reply:
    """Return an error about the name in the path as 404, with the list of names if none is close."""
    error = reply.data["error"]
    fix = error["fix"] or [f"GET /api{verb.path.partition('/{')[0]} lists all"]
    return Reply(404, msgspec.json.encode({**reply.data, "error": {**error, "fix": fix}}))


def _is_unknown_name(reply: Reply) -> bool:
    """Return whether an error is about the name in the path."""
    error = reply.data.get("error", {})
    return error.get("field") in ("recipe", "model") and str(error.get("message", "")).startswith("unknown")


def _content(text: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": text, "content": {"application/json": {"schema": schema}}}


_ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    code: _content(text, REFERENCES["error"]) for code, text in ERRORS.items()
}


def _parameters(verb: Verb) -> list[dict[str, Any]]:
    schema = json_schema(verb.request, "http", texts=False)
    return [
        {
            "name": name,
            "in": "path" if f"{{{name}" in verb.path else "query",
            "required": name in schema["required"],
            "description": one.pop("description"),
            "schema": one,
        }
        for name, one in schema["properties"].items()
    ]


def _request_body(verb: Verb) -> dict[str, Any]:
    return {"required": True, "content": {"application/json": {"schema": json_schema(verb.request, "http")}}}


def _needs_text(verb: Verb) -> bool:
    """Return whether a required input can only be sent as text, in the body of a POST."""
    return any(field.required and "http" not in field.input.surfaces for field in fields_of(verb.request))


for _verb in verbs_on("http"):
    if not _needs_text(_verb):
        _route(_verb, "GET", _verb.path or f"/{_verb.name}")
    if texts_of(_verb.request) and not _verb.path:
        _route(_verb, "POST", f"/{_verb.name}")
_route(VERBS["model"], "POST", "/models")


@router.get("/health", response_class=JSONResponse)
async def health(request: Request) -> JSONResponse:
    """Return whether the server responds, and the number of pending requests."""
    waiting = len(dispatcher_of(request).pending)
    return JSONResponse({"schema": SCHEMA, "ok": True, "version": __version__, "waiting": waiting})


def openapi(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI document, with the schemas of all responses."""
    if app.openapi_schema is None:
        found = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
        found.setdefault("components", {}).setdefault("schemas", {}).update(COMPONENTS)
        app.openapi_schema = found
    return app.openapi_schema
