"""JSON Schemas of responses and of the error object, generated from their types."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

from meshwright.api.responses import ErrorResponse
from meshwright.api.verbs import VERBS, Verb
from meshwright.version import SCHEMA

DRAFT = "https://json-schema.org/draft/2020-12/schema"
COMPONENTS = "#/components/schemas/{name}"


def response_schema(verb: Verb) -> dict[str, Any]:
    """Return the JSON Schema of a verb's response."""
    return schema_of(verb.response)


def error_schema() -> dict[str, Any]:
    """Return the JSON Schema of the error object."""
    return schema_of(ErrorResponse)


def schema_of(response: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the JSON Schema of a response's type."""
    found = msgspec.json.schema(response)
    definitions = {name: _with_schema_required(one) for name, one in found["$defs"].items()}
    root = definitions.pop(response.__name__)
    return {**root, "$defs": definitions} if definitions else root


def _with_schema_required(definition: dict[str, Any]) -> dict[str, Any]:
    """Return a definition that requires the `schema` key: it has a default, but is always sent."""
    properties = definition.get("properties", {})
    if properties.get("schema", {}).get("default") != SCHEMA:
        return definition
    return definition | {"required": ["schema", *definition.get("required", [])]}


def component_schemas(verbs: list[Verb]) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Return a reference to each verb's response and the components of an OpenAPI document, the error included."""
    types = [verb.response for verb in verbs]
    found, components = msgspec.json.schema_components([*types, ErrorResponse], ref_template=COMPONENTS)
    references = {verb.name: reference for verb, reference in zip(verbs, found, strict=False)}
    references["error"] = list(found)[-1]
    return references, {name: _with_schema_required(one) for name, one in components.items()}


@cache
def published() -> dict[str, dict[str, Any]]:
    """Return the schemas to publish, by file name: every command's response and the error object."""
    found = {verb.name: response_schema(verb) for verb in VERBS.values() if verb.surfaces}
    found["error"] = error_schema()
    return {f"{name}.json": {"$schema": DRAFT, **one} for name, one in found.items()}
