"""Generate the agent instructions: which tool or command for what, with today's output of each."""

from __future__ import annotations

import json
import shlex
from typing import Any

from commands_page import exit_codes
from tables import table

from meshwright import api
from meshwright.api.inputs import command_words
from meshwright.api.requests import MAX_PLANS
from meshwright.api.verbs import Verb
from meshwright.cli.app import command_groups
from meshwright.mcp.executor import reply
from meshwright.mcp.tools import INSTRUCTIONS, SECONDS, TOOLS, description

MAX_LINES = 14  # of an example's output

SERVER = {"mcpServers": {"meshwright": {"command": "meshwright", "args": ["mcp"]}}}
HEAD = """---
name: meshwright
description: {description}
---
"""
DESCRIPTION = (
    "Plans and checks the training of large models. Use it to find which parallel layout, recipe or GPU count fits a "
    "model, how much memory or time a training takes, what is wrong with a training config, a launch script or a run, "
    "or to write a recipe as another framework's config."
)


def page() -> str:
    """Return the file."""
    return "\n".join(
        (
            HEAD.format(description=DESCRIPTION),
            f"# Meshwright for coding agents\n\n{INSTRUCTIONS}\n",
            _tools(),
            _responses(),
            _inputs(),
            _examples(),
            _commands(),
        )
    )


def _tools() -> str:
    rows = [(f"`{tool.name}`", description(tool), f"`{_command(tool)}`") for tool in TOOLS.values()]
    return (
        f"## Tools\n\nServe them with `meshwright mcp`; agents start it with `{json.dumps(SERVER)}`, or use "
        "`meshwright mcp --http`. Without a server, the command in the last column prints the same object.\n\n"
        + table(("tool", "what it does", "command"), rows)
    )


def _command(tool: Verb) -> str:
    example = tool.calls[-1]  # the last one names something instead of sending a text, if there is one
    return shlex.join(["meshwright", tool.name, *command_words(tool.request, example), "--json"])


def _responses() -> str:
    wrong = {"model": "lama3-8b", "gpus": "8xH100", "goal": "sft"}
    return f"""## Responses and errors

Every response is an object with `"schema": "{api.SCHEMA}"` and a few lines of text. Memory is in GiB per GPU; every
estimate has its uncertainty in percent and names its MFU convention. An error has field, value, message and fix: apply
the fix and call again. `recommend` with `{json.dumps(wrong)}` returns:

```
{reply("recommend", wrong).text}
```

No tool reads or writes a file: send configs as text, and write the files that `export` returns yourself. A call may
take {SECONDS:g} s; `plan` returns at most {MAX_PLANS} plans.
"""


def _inputs() -> str:
    """Return every input once, with the tools that take it."""
    users: dict[tuple[str, ...], list[str]] = {}
    for tool in TOOLS.values():
        schema = tool.input_schema("mcp")
        for name, one in schema["properties"].items():
            users.setdefault((name, *_row(one, name in schema["required"])), []).append(f"`{tool.name}`")
    rows = [(f"`{name}`", ", ".join(tools), *rest) for (name, *rest), tools in users.items()]
    return "## Inputs\n\n" + table(("input", "of", "type", "default", "meaning"), rows)


def _row(one: dict[str, Any], required: bool) -> tuple[str, str, str]:
    kind = one["type"] if isinstance(one["type"], str) else " or ".join(one["type"])
    limits = f", {one['minimum']:g} to {one['maximum']:g}" if "minimum" in one and "maximum" in one else ""
    default = "required" if required else f"`{json.dumps(one['default'])}`" if "default" in one else ""
    choices = f" One of {', '.join(one['enum'])}." if "enum" in one else ""
    examples = f" E.g. {', '.join(f'`{json.dumps(e)}`' for e in one['examples'])}." if "examples" in one else ""
    return f"{kind}{limits}", default, f"{one['description']}{choices}{examples}"


def _examples() -> str:
    shown = [_example(tool, dict(call)) for tool in TOOLS.values() for call in tool.calls]
    return "\n".join(("## Examples\n", *shown))


def _example(tool: Verb, arguments: dict[str, object]) -> str:
    lines = reply(tool.name, arguments).text.splitlines()
    more = [f"… {len(lines) - MAX_LINES} more lines"] if len(lines) > MAX_LINES else []
    shown = "\n".join([*lines[:MAX_LINES], *more])
    return f"`{tool.name}` with `{json.dumps(arguments)}`:\n\n```\n{shown}\n```\n"


def _commands() -> str:
    rows = [(f"`meshwright {name}`", summary) for _, commands in command_groups() for name, summary in commands]
    return f"## Commands\n\n{exit_codes()}\n\n" + table(("command", "does"), rows)
