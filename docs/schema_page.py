"""Generate the page of JSON Schemas from the response types."""

from __future__ import annotations

from typing import Any

from tables import table

from meshwright.api import schema
from meshwright.api.verbs import VERBS
from meshwright.version import SCHEMA

HEAD = f"""# JSON

`--json` prints one object; the HTTP API and the agent tools return the same one. Its first key is
`"schema": "{SCHEMA}"`. The JSON Schema files below are generated from the response types, and tests validate real
responses against them. A key in *italics* is present only if it applies. Errors are the same object everywhere;
commands also print them on stderr.

"""


def page() -> str:
    """Return the keys of every response."""
    rows = [(f"[`{name.removesuffix('.json')}`](schema/{name})", _for(name), _keys(one)) for name, one in _published()]
    return HEAD + table(("response", "of", "keys"), rows)


def _published() -> list[tuple[str, dict[str, Any]]]:
    return list(schema.published().items())


def _for(name: str) -> str:
    verb = VERBS.get(name.removesuffix(".json"))
    return (
        "all"
        if verb is None
        else ", ".join({"cli": "command", "http": "HTTP", "mcp": "tool"}[s] for s in verb.surfaces)
    )


def _keys(found: dict[str, Any]) -> str:
    required = found["required"]
    return ", ".join(f"`{key}`" if key in required else f"*`{key}`*" for key in found["properties"] if key != "schema")
