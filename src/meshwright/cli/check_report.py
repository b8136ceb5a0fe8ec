"""Checked, exported and imported files as text."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from meshwright.cli.console import console, escape
from meshwright.cli.layout import (
    NO_LAYOUT,
    NO_LAYOUT_IGNORED,
    Answer,
    assumed_lines,
    finding_lines,
    memory_lines,
    option_lines,
    parameters_text,
    repair_lines,
    titled,
)

MANY = 4  # keys with the same open value from which they are one line


def check(answer: Answer, found: Any) -> None:
    """Print the findings for a recipe or file."""
    out = console()
    accepted = sum(one["severity"] == "error" for one in answer.get("ignored", ()))
    color = "red" if not answer["ok"] else "green" if found.verdict == "ok" else "yellow"
    verdict = f"[{color}]{found.verdict}[/]"
    what = answer["file"] or answer["recipe"]
    where = f" on {answer['gpus']}" if answer["gpus"] else ""
    runner = f"the {answer['engine']} engine" if answer["framework"] == "meshwright" else answer["framework"]
    if answer["framework"] == "dataset":
        verdict = verdict if answer["ok"] else "[red]train refuses rows[/]"
        out.print(f"[bold]{escape(what)}[/], a dataset: {verdict}")
    else:
        out.print(f"[bold]{escape(what)}[/]{where} with {runner}: {verdict}")
    if answer.get("parameters"):
        titled(out, "Model", [escape(_model_line(answer))])
    titled(out, "Assumed", assumed_lines(answer["assumed"]))
    no_layout = NO_LAYOUT_IGNORED if answer["ok"] and accepted else NO_LAYOUT
    if answer["estimate"]:
        titled(out, "Memory", memory_lines(answer["estimate"]) if found.exists else [no_layout])
    titled(out, "Findings", finding_lines(answer["findings"], answer.get("repair")) or ["none"])
    titled(out, "Repair", repair_lines(answer))
    titled(out, "Options", option_lines(answer))
    titled(out, "Unknown", [escape(line) for line in _unresolved_lines(answer["unresolved"])])
    titled(out, "Ignored", ignored_lines(answer))
    if answer["notes"]:
        titled(out, "Notes", [escape(note) for note in answer["notes"]])


def _unresolved_lines(unresolved: Sequence[Answer]) -> list[str]:
    """Return values that are known only at run time; keys of one file with the same value and reason are one line."""
    groups: dict[tuple[str, str, str], list[Answer]] = {}
    for one in unresolved:
        groups.setdefault((one["file"], one["text"], one["reason"]), []).append(one)
    lines = []
    for (file, text, reason), same in groups.items():
        if len(same) < MANY:
            lines += [f"{file}:{one['line']} {one['key']} = {text}: {reason}" for one in same]
        else:
            lines.append(f"{file} {len(same)} keys = {text}: {reason} ({', '.join(one['key'] for one in same)})")
    return lines


def _model_line(answer: Answer) -> str:
    """Return the model that the figures are of, with its parameters."""
    return f"{answer['model']}: {parameters_text(answer['parameters'], answer['active_parameters'])}"


def ignored_lines(answer: Answer) -> list[str]:
    """Return how many findings are accepted, and each with what accepts it."""
    found = answer.get("ignored", [])
    if not found:
        return []
    lines = [f"{len(found)} finding{'s' * (len(found) > 1)} ignored"]
    for one in found:
        place = f"{one['file']}:{one['line']} " if one.get("line") else ""
        why = f": {one['reason']}" if one["reason"] else ""
        lines.append(f"[dim]{escape(place)}{one['rule']} ({one['by']}{escape(why)})[/]")
    return lines


def export(answer: Answer, found: Any) -> None:
    """Print another framework's files and command, and the fields it has no key for."""
    out = console()
    if found.refused:
        titled(out, "Findings", finding_lines(answer["findings"]))
        titled(out, "Assumed", assumed_lines(answer["assumed"]))
        titled(out, "Notes", [escape(note) for note in answer["notes"]])
        return
    for name, text in {} if answer["written"] else answer["files"].items():
        out.print(f"[bold]# {escape(name)}[/]")
        click.echo(text)
    titled(out, "Wrote", [escape(path) for path in answer["written"]])
    titled(out, "Assumed", assumed_lines(answer["assumed"]))
    titled(out, "Start", [escape(_started_there(answer["command"], answer["written"]))])
    if answer["env"]:
        titled(out, "With", [escape(f"{name}={value}") for name, value in answer["env"].items()])
    unmapped = [f"{u['field']}={u['value']}: {u['reason']}" for u in answer["unmapped"]]
    titled(out, "Unmapped", [escape(line) for line in unmapped] or ["nothing: every setting of the recipe is in it"])
    titled(out, "Dropped", [escape(_setting_line(one)) for one in answer["not_imported"]])
    if answer["notes"]:
        titled(out, "Notes", [escape(note) for note in answer["notes"]])
    if answer["findings"]:
        titled(out, "Findings", finding_lines(answer["findings"]))


def _started_there(command: str, written: Sequence[str]) -> str:
    """Return a command that names files of the written folder by their names, started in that folder."""
    folder = Path(written[0]).parent if written else Path()
    names = {Path(path).name for path in written if Path(path).parent == folder}
    is_there = folder != Path() and any(word in names for word in shlex.split(command))
    return f"cd {shlex.quote(str(folder))} && {command}" if is_there else command


def import_file(answer: Answer, found: Any) -> None:
    """Print the recipe of a file, then on stderr what was assumed and what did not survive."""
    if answer["written"]:
        click.echo(f"wrote {answer['written']}")
    else:
        click.echo(answer["text"], nl=False)
    for title, lines in (
        ("assumed", [one["message"] for one in answer["assumed"]]),
        ("not imported", [_setting_line(one) for one in answer["not_imported"]]),
        ("note", answer["notes"]),
    ):
        for line in lines:
            click.echo(f"# {title}: {line}", err=True)
    for one in answer["findings"]:
        place = f"{one['file']}:{one['line']} " if one.get("line") else ""
        fix = f"; fix: {' '.join(one['fix'])}" if one["fix"] else ""
        click.echo(f"# {one['severity']}: {place}{one['message']} ({one['rule']}){fix}", err=True)


def _setting_line(setting: Answer) -> str:
    place = f"{setting['file']}:{setting['line']} " if setting["line"] else ""
    return f"{place}{setting['key']}={setting['value']}: {setting['reason']}"
