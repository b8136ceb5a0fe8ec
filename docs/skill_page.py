"""The skill file for coding agents: which tool or command for what, with the answers they give today."""

from __future__ import annotations

import json
import shlex

import click
from tables import table

from meshwright import api
from meshwright.cli.app import app
from meshwright.mcp.executor import reply
from meshwright.mcp.fields import Field
from meshwright.mcp.tools import INSTRUCTIONS, MOST_PLANS, SECONDS, TOOLS, Tool, words

LONGEST = 14  # lines of an answer that are shown

SERVER = {"mcpServers": {"meshwright": {"command": "meshwright", "args": ["mcp"]}}}
HEAD = """---
name: meshwright
description: {description}
---
"""
DESCRIPTION = (
    "Plans and checks the training of large models. Use it when somebody asks which parallel layout, recipe or GPU "
    "count fits a model, how much memory or time a training takes, why a training config or launch script is wrong, "
    "or wants a recipe in another framework's config."
)


def page() -> str:
    """The whole file."""
    return "\n".join(
        (
            HEAD.format(description=DESCRIPTION),
            f"# Meshwright for coding agents\n\n{INSTRUCTIONS}\n",
            _which(),
            _mistakes(),
            _inputs(),
            _examples(),
            _commands(),
        )
    )


def _which() -> str:
    rows = [(f"`{tool.name}`", tool.title, tool.text, f"`{_command(tool)}`") for tool in TOOLS.values()]
    return (
        f"## Which tool\n\nServe them with `meshwright mcp`, as agents start it: `{json.dumps(SERVER)}`; or with "
        "`meshwright mcp --http`. Without a server, the command in the last column gives the same object.\n\n"
        + table(("tool", "for", "what it does", "same on the command line"), rows)
    )


def _command(tool: Tool) -> str:
    example = tool.examples[-1]  # one with a name rather than a text, where there is one
    return shlex.join(["meshwright", *words(tool, example), "--json"])


def _mistakes() -> str:
    wrong = {"model": "lama3-8b", "gpus": "8xH100", "goal": "sft"}
    told = reply("recommend", wrong)
    return f"""## Answers and mistakes

Every answer is an object with `"schema": "{api.SCHEMA}"` and a few lines of text. Memory is in GiB per GPU; every
estimate has its band in per cent and says what its MFU counts. A mistake is a tool error with field, value, message and
fix: apply the fix and ask again. `recommend` with `{json.dumps(wrong)}` says:

```
{told.text}
```

No tool opens or writes a file: send configs as text, and write what `export` returns yourself. A call may take
{SECONDS:g} s; `plan` gives at most {MOST_PLANS} plans.
"""


def _inputs() -> str:
    """Every input once, with the tools that take it."""
    takers: dict[tuple[str, ...], list[str]] = {}
    for tool in TOOLS.values():
        for field in tool.fields:
            takers.setdefault((field.name, *_row(field)), []).append(f"`{tool.name}`")
    rows = [(f"`{name}`", ", ".join(tools), *rest) for (name, *rest), tools in takers.items()]
    return "## Inputs\n\n" + table(("input", "of", "type", "default", "meaning"), rows)


def _row(field: Field) -> tuple[str, str, str]:
    default = "needed" if field.needed else "" if field.default is None else f"`{json.dumps(field.default)}`"
    limits = f", {field.least:g} to {field.most:g}" if field.least is not None and field.most is not None else ""
    choices = f" One of {', '.join(field.choices)}." if field.choices else ""
    tried = f" E.g. {', '.join(f'`{json.dumps(one)}`' for one in field.examples)}." if field.examples else ""
    return f"{field.kind}{limits}", default, f"{field.text}{choices}{tried}"


def _examples() -> str:
    shown = [_example(tool, dict(example)) for tool in TOOLS.values() for example in tool.examples]
    return "\n".join(("## Examples, as answered today\n", *shown))


def _example(tool: Tool, arguments: dict[str, object]) -> str:
    lines = reply(tool.name, arguments).text.splitlines()
    more = [f"… {len(lines) - LONGEST} more lines"] if len(lines) > LONGEST else []
    shown = "\n".join([*lines[:LONGEST], *more])
    return f"`{tool.name}` with `{json.dumps(arguments)}`:\n\n```\n{shown}\n```\n"


def _commands() -> str:
    rows = [(f"`meshwright {name}`", command.get_short_help_str(160)) for name, command in app.commands.items()]
    return f"## All commands\n\n{_exit_codes(app)}\n\n" + table(("command", "does"), rows)


def _exit_codes(command: click.Command) -> str:
    text = " ".join((command.help or "").split())
    return "Exit codes: " + text.partition("Exit codes: ")[2]
