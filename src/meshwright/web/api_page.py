"""The page that documents the HTTP API: written from the OpenAPI document, with nothing loaded from another host."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from meshwright import __version__
from meshwright.version import SCHEMA
from meshwright.web.routes_api import ERRORS
from meshwright.web.templates import render

router = APIRouter(include_in_schema=False)
MANY = 12  # values that are listed in full


@router.get("/api/docs", response_class=HTMLResponse)
async def api_docs(request: Request) -> HTMLResponse:
    """Show every address with its arguments, an example and the keys of its response."""
    document = request.app.openapi()
    base = str(request.base_url).rstrip("/")
    shown = {
        "operations": [_operation(path, methods, document, base) for path, methods in document["paths"].items()],
        "errors": ERRORS,
        "schema": SCHEMA,
        "schema_url": str(request.app.openapi_url),
    }
    return HTMLResponse(render("api.html", version=__version__, path=request.url.path, **shown))


def _operation(path: str, methods: Mapping[str, Any], document: Mapping[str, Any], base: str) -> dict[str, Any]:
    """Return one address as it is shown; the arguments of a GET and a POST are the same but for files."""
    first = methods.get("get") or methods["post"]
    schemas = {one["name"]: {**one["schema"], **_texts(one)} for one in methods.get("get", {}).get("parameters", ())}
    needed = {one["name"] for one in methods.get("get", {}).get("parameters", ()) if one["required"]}
    body = methods.get("post", {}).get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    if body is not None:
        schemas |= {name: one for name, one in body["properties"].items() if name not in schemas}
        needed = needed or set(body["required"])
    return {
        "id": path.strip("/").replace("/", "-").replace("{", "").replace("}", ""),
        "methods": ", ".join(method.upper() for method in methods),
        "path": path,
        "summary": first["summary"],
        "description": first.get("description", ""),
        "arguments": [_argument(name, one, name in needed) for name, one in schemas.items()],
        "response_keys": _keys(first, document),
        "example": _example(path, methods, schemas, needed, base),
    }


def _texts(parameter: Mapping[str, Any]) -> dict[str, str]:
    return {"description": parameter.get("description", "")}


def _argument(name: str, schema: Mapping[str, Any], required: bool) -> dict[str, Any]:
    kinds = schema.get("type", "")
    values = schema.get("enum") or []
    parts = [", ".join(map(str, values[:MANY])) + (" …" if len(values) > MANY else "")] if values else []
    low, high = schema.get("minimum"), schema.get("maximum")
    parts += [f"at least {low:g}"] if low is not None and high is None else []
    parts += [f"{low or 0:g} to {high:g}"] if high is not None else []
    examples = [one if isinstance(one, str) else json.dumps(one) for one in schema.get("examples", ())]
    parts += [f"e.g. {', '.join(examples[:3])}"] if examples and not values and len(str(examples)) < 200 else []
    parts += [f"default {json.dumps(schema['default'])}"] if "default" in schema else []
    return {
        "name": name,
        "type": " or ".join(kinds) if isinstance(kinds, list) else kinds,
        "values": "; ".join(parts),
        "meaning": schema.get("description", ""),
        "required": required,
    }


def _keys(operation: Mapping[str, Any], document: Mapping[str, Any]) -> list[str]:
    """Return the keys of a response."""
    content = operation["responses"]["200"].get("content", {}).get("application/json", {})
    name = content.get("schema", {}).get("$ref", "").rpartition("/")[2]
    return [*document["components"]["schemas"].get(name, {}).get("properties", ())]


def _example(path: str, methods: Mapping[str, Any], schemas: Mapping[str, Any], needed: set[str], base: str) -> str:
    """Return a curl command that works: required arguments with their first example."""
    values = {name: _sample(name, schemas[name]) for name in schemas if name in needed}
    for name in [name for name in values if f"{{{name}" in path]:
        path = path.replace(f"{{{name}}}", str(values.pop(name)))
    if "get" in methods:
        query = f"?{urlencode(values)}" if values else ""
        return f"curl '{base}{path}{query}'"
    return f"curl -H 'content-type: application/json' -d '{json.dumps(values)}' {base}{path}"


def _sample(name: str, schema: Mapping[str, Any]) -> Any:
    """Return a value of an argument that an example can send."""
    if name == "target" or (name == "name" and "recipe" in schema.get("description", "").lower()):
        return "llama3_8b_pretrain_config"
    found = (schema.get("examples") or schema.get("enum") or ["llama3-8b"])[0]
    return found[0] if isinstance(found, list) else found
