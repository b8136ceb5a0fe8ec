"""Generate the page of commands from the table of verbs: arguments, options, limits, and other surfaces."""

from __future__ import annotations

from tables import table

from meshwright.api.inputs import Field, fields_of, range_of
from meshwright.api.verbs import VERBS, Verb
from meshwright.cli.app import app, command_groups
from meshwright.version import SCHEMA

HEAD = f"""# Commands

Every command has `--json` (one object, first key `"schema": "{SCHEMA}"`) and `--help`. The same inputs, with the same
limits, are the parameters of the HTTP API (`/api/NAME`) and of the agent tools. Where a command takes a file, HTTP and
MCP take its contents. Responses and errors are the same objects everywhere: [JSON](schema.md).

"""


def page() -> str:
    """Return all commands in their groups."""
    parts = [HEAD, f"{exit_codes()}\n"]
    for group, rows in command_groups():
        parts += [f"\n## {group}\n", *(_section(name, summary) for name, summary in rows)]
    return "".join(parts)


def exit_codes() -> str:
    """Return the exit codes of all commands."""
    text = " ".join((app.help or "").split())
    return "Exit codes: " + text.partition("Exit codes: ")[2]


def _section(name: str, summary: str) -> str:
    if name not in VERBS:
        return f"\n### {name}\n\n{summary}\n"
    verb = VERBS[name]
    text = "\n\n".join(filter(None, (verb.summary, verb.description, _elsewhere(verb))))
    fields = [field for field in fields_of(verb.request) if field.input.surfaces]
    rows = [(f"`{_label(field)}`", _type(field), _default(field), _meaning(field)) for field in fields]
    found = table(("input", "type", "default", "meaning"), rows) if rows else ""
    return f"\n### {name}\n\n{text}\n\n{found}"


def _elsewhere(verb: Verb) -> str:
    """Return where else a verb is offered."""
    http = f"`GET /api{verb.path or '/' + verb.name}`" if "http" in verb.surfaces else ""
    tool = "agent tool" if "mcp" in verb.surfaces else ""
    return f"Also: {', '.join(filter(None, (http, tool)))}." if http or tool else ""


def _label(field: Field) -> str:
    return field.label if "cli" in field.input.surfaces else field.name


def _type(field: Field) -> str:
    names = {str: "string", int: "integer", float: "number", bool: "flag"}
    kind = " or ".join(names[one] for one in field.types)
    limits = range_of(field.input)
    return f"{kind}{', repeated' if field.repeated else ''}{f', {limits}' if limits else ''}"


def _default(field: Field) -> str:
    if field.required:
        return "required"
    return "" if field.default in (None, (), False) else f"`{field.default}`"


def _meaning(field: Field) -> str:
    only = "" if "cli" in field.input.surfaces else f" ({' and '.join(field.input.surfaces).upper()} only)"
    return f"{field.input.help}{only}"
