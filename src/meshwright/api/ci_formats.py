"""Findings as CI systems read them: SARIF 2.1.0 for code scanning, and the annotations of GitHub workflows."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from meshwright.frameworks import rule_catalog
from meshwright.version import VERSION

Answer = Mapping[str, Any]
SARIF_VERSION = "2.1.0"
SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
LEVELS = {"error": "error", "warning": "warning", "advice": "note"}
COMMANDS = {"error": "error", "warning": "warning", "advice": "notice"}
SUPPRESSED = {"comment": "inSource", "option": "external", "baseline": "external"}
UNREADABLE = "file.unreadable"


def sarif(answers: Sequence[Answer], failed: Sequence[Answer], exit_code: int) -> dict[str, Any]:
    """Return the findings of files as one SARIF log; accepted ones are suppressed results."""
    found = [*distinct_findings(answers), *distinct_findings(answers, "ignored")]
    ids = sorted({str(finding["rule"]) for _, finding in found})
    known = rule_catalog.all_rules()
    notifications = [
        {
            "level": "error",
            "descriptor": {"id": UNREADABLE},
            "message": {"text": one["error"]["message"]},
            "locations": [_location(one["file"], 0)],
        }
        for one in failed
    ]
    return {
        "$schema": SARIF_SCHEMA,
        "version": SARIF_VERSION,
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "meshwright",
                        "semanticVersion": VERSION,
                        "rules": [_rule(name, known.get(name)) for name in ids],
                        "notifications": [{"id": UNREADABLE}] if failed else [],
                    }
                },
                "invocations": [
                    {
                        "executionSuccessful": not failed,
                        "exitCode": exit_code,
                        "toolExecutionNotifications": notifications,
                    }
                ],
                "results": [_result(answer, finding, ids) for answer, finding in found],
            }
        ],
    }


def distinct_findings(answers: Sequence[Answer], which: str = "findings") -> list[tuple[Answer, Answer]]:
    """Return findings with their answers, each once: a config and the script that starts it report the same line."""
    found: dict[tuple[str, ...], tuple[Answer, Answer]] = {}
    for answer in answers:
        for finding in answer.get(which, ()):
            file = finding.get("file") or answer.get("file")
            place = (relative(file), str(finding.get("line") or "")) if file else (str(answer.get("recipe")), "")
            found.setdefault((*place, finding["rule"], finding["severity"], finding["message"]), (answer, finding))
    return list(found.values())


def _rule(name: str, rule: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"id": name}
    if rule is not None:
        found["shortDescription"] = {"text": rule.symptom or name}
        found["fullDescription"] = {"text": rule.cause or name}
        found["help"] = {"text": f"{rule.symptom}. Cause: {rule.cause}. More: meshwright explain {name}"}
        found["defaultConfiguration"] = {"level": LEVELS[rule.severity]}
    return found


def _result(answer: Answer, finding: Answer, ids: Sequence[str]) -> dict[str, Any]:
    file = finding.get("file") or answer.get("file")
    found: dict[str, Any] = {
        "ruleId": finding["rule"],
        "ruleIndex": ids.index(finding["rule"]),
        "level": LEVELS[finding["severity"]],
        "message": {"text": text_of(finding)},
        "locations": [_location(file, finding.get("line") or 0)] if file else [],
        "partialFingerprints": {"ruleAndField/v1": f"{finding['rule']}:{finding['field']}"},
    }
    if "by" in finding:
        why = finding["reason"] or finding["by"]
        found["suppressions"] = [{"kind": SUPPRESSED[finding["by"]], "justification": why}]
    return found


def _location(file: str, line: int) -> dict[str, Any]:
    path = relative(file)
    outside = os.path.isabs(path)
    place: dict[str, Any] = {"uri": Path(path).as_uri() if outside else quote(path)}
    physical = {"artifactLocation": place if outside else {**place, "uriBaseId": "%SRCROOT%"}}
    return {"physicalLocation": {**physical, **({"region": {"startLine": line}} if line else {})}}


def relative(file: str) -> str:
    """Return a path from the working folder, with slashes; one outside of it stays absolute."""
    path = Path(os.path.abspath(os.path.expanduser(file)))
    here = Path.cwd()
    return path.relative_to(here).as_posix() if path.is_relative_to(here) else path.as_posix()


def text_of(finding: Answer) -> str:
    """Return a finding's message with its fix."""
    fix = f" Fix: {' '.join(finding['fix'])}" if finding["fix"] else ""
    other = f" ({finding['no_fix']})" if finding.get("no_fix") else ""
    return f"{finding['message']}.{fix}{other}"


def github(answers: Sequence[Answer], failed: Sequence[Answer]) -> Iterator[str]:
    """Yield a workflow command per finding, which GitHub shows on the line of the file."""
    for answer, finding in distinct_findings(answers):
        file = finding.get("file") or answer.get("file")
        named = f"{file or answer.get('recipe')}: " * (not file)
        yield _command(
            COMMANDS[finding["severity"]], file, finding.get("line"), finding["rule"], named + text_of(finding)
        )
    for one in failed:
        fix = f" Fix: {' | '.join(one['error']['fix'][:3])}" if one["error"]["fix"] else ""
        file = one["file"] if os.path.exists(one["file"]) else None
        message = one["error"]["message"] if file else f"{one['file']}: {one['error']['message']}"
        yield _command("error", file, None, UNREADABLE, f"{message}.{fix}")


def _command(level: str, file: str | None, line: int | None, title: str, message: str) -> str:
    values = {"file": relative(file) if file else "", "line": str(line or ""), "title": f"meshwright {title}"}
    properties = ",".join(f"{name}={_property(value)}" for name, value in values.items() if value)
    return f"::{level} {properties}::{_data(message)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
