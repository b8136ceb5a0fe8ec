"""The tools: verbs with a text for agents next to their JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.api import SCHEMA
from meshwright.api.inputs import json_schema
from meshwright.api.verbs import Verb, verbs_on
from meshwright.mcp.compact import output_schema

SECONDS = 30.0  # time limit of a call

INSTRUCTIONS = (
    "Facts about training large models: recipes, layouts, memory, speed, cost, and what is wrong with a config or a "
    "run. Start with recommend (one plan) or size (how many GPUs); plan ranks layouts; try one change with estimate; "
    "check reads configs and launch scripts, doctor reads logs of runs; find names with models, gpus and recipes; look "
    "up a finding with explain. gpus is one cluster such as 8xH100 or 4x8xH100; overrides are KEY=VALUE. "
    "Estimates come with their bands, and every answer with the calls to make next."
)
PATHS = " A model, recipe, config, script or log is named, given as a path on this machine, or sent as text."
TEXTS = " Files are sent as text; paths are not opened."

TOOLS: Mapping[str, Verb] = {verb.name: verb for verb in verbs_on("mcp")}


def title(tool: Verb) -> str:
    """Return the title of a tool."""
    return tool.summary.removesuffix(".")


def description(tool: Verb) -> str:
    """Return what a tool does, on one line."""
    return " ".join(f"{tool.summary} {tool.description}".split())


def instructions(files: bool) -> str:
    """Return what an agent should know before its first call."""
    return INSTRUCTIONS + (PATHS if files else TEXTS)


def input_schema(tool: Verb, files: bool) -> dict[str, Any]:
    """Return the JSON Schema of a tool's arguments; with paths where files are allowed."""
    return json_schema(tool.request, "mcp", files=files) | {"examples": [dict(call) for call in tool.calls]}


def describe() -> dict[str, Any]:
    """Return all tools with their schemas, as served on standard input and output."""
    return {
        "schema": SCHEMA,
        "tools": [
            {
                "name": tool.name,
                "title": title(tool),
                "description": description(tool),
                "input": input_schema(tool, files=True),
                "output": output_schema(tool.name),
            }
            for tool in TOOLS.values()
        ],
    }
