"""The tools: verbs with a text for agents next to their JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.api import SCHEMA
from meshwright.api.schema import response_schema
from meshwright.api.verbs import Verb, verbs_on

SECONDS = 30.0  # time limit of a call

INSTRUCTIONS = (
    "Facts about training large models: recipes, layouts, memory, speed, cost, and what is wrong with a config or a "
    "run. Start with recommend; try one change with estimate; send configs and launch scripts to check, and logs of "
    "runs to doctor, as text; look up a finding with explain. Estimates come with their uncertainty; nothing is run "
    "and no file is read or written."
)

TOOLS: Mapping[str, Verb] = {verb.name: verb for verb in verbs_on("mcp")}


def title(tool: Verb) -> str:
    """Return the title of a tool."""
    return tool.summary.removesuffix(".")


def description(tool: Verb) -> str:
    """Return what a tool does, on one line."""
    return " ".join(f"{tool.summary} {tool.description}".split())


def describe() -> dict[str, Any]:
    """Return all tools with their schemas."""
    return {
        "schema": SCHEMA,
        "tools": [
            {
                "name": tool.name,
                "title": title(tool),
                "description": description(tool),
                "input": tool.input_schema("mcp"),
                "output": response_schema(tool),
            }
            for tool in TOOLS.values()
        ],
    }
