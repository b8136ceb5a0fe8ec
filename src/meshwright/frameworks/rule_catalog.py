"""Everything that is found in other frameworks' files beside our own rules, to be looked up by its id."""

from __future__ import annotations

from typing import NamedTuple

from meshwright.frameworks.registry import NAMES, framework
from meshwright.recipes.types import ENGINES
from meshwright.rules import Rule, Severity


class ParseFinding(NamedTuple):
    """A finding that is made while a file is read, not by a rule."""

    id: str
    severity: Severity
    symptom: str
    cause: str


PARSE_FINDINGS = (
    ParseFinding(
        "key.unknown", "error", "the program refuses to start, or drops the setting", "no such key exists there"
    ),
    ParseFinding(
        "key.unread", "warning", "nothing at all: the setting has no effect", "nothing there reads such a key"
    ),
    ParseFinding(
        "key.removed", "error", "an unrecognised argument or key", "the key existed once and was removed or renamed"
    ),
    ParseFinding(
        "key.ignored", "warning", "nothing at all: the setting has no effect", "the key is kept for old scripts only"
    ),
    ParseFinding(
        "key.overwritten", "warning", "another value than the one that is written", "a later step overwrites this key"
    ),
    ParseFinding(
        "value.refused", "error", "an error of the parser, or one much later", "the key does not take such a value"
    ),
    ParseFinding("value.missing", "error", "expected at least one argument", "the flag stands without its value"),
    ParseFinding("value.stray", "error", "unrecognized arguments", "a word belongs to no flag"),
    ParseFinding("value.replaced", "warning", "the last of several values", "a flag is given more than once"),
    ParseFinding("torchtitan.toml-removed", "error", "unrecognized options", "today's torchtitan reads no TOML"),
    ParseFinding("torchtitan.preset", "error", "no such module or config", "presets are functions of the named module"),
    ParseFinding(
        "torchtitan.other-version", "error", "unrecognized options", "the flag is of another line of versions"
    ),
    ParseFinding("torchtitan.stray-argument", "error", "unrecognized arguments", "a word belongs to no flag"),
    ParseFinding(
        "automodel.no-recipe", "error", "the command cannot tell what to run", "the file names no recipe class"
    ),
    ParseFinding("automodel.old-command", "error", "no such command", "the command line was changed"),
    ParseFinding("deepspeed.argument-mismatch", "error", "ValueError of the Trainer", "file and arguments differ"),
    ParseFinding(
        "accelerate.double-checkpointing", "error", "an error, or twice the work", "both the file and the program ask"
    ),
    ParseFinding("accelerate.not-json", "error", "a JSON error when the job starts", "the text is handed on as JSON"),
)


def rules_of(name: str) -> list[Rule]:
    """The rules of a framework, those that are told while reading included."""
    theirs = framework(name)
    found = [ParseFinding(one.id, one.severity, one.symptom, one.cause) for one in theirs.rules]
    known = {one.id for one in found}
    told = [one for one in PARSE_FINDINGS if one.id.startswith(f"{name}.") and one.id not in known]
    return [_rule(one, name, (theirs.engine,)) for one in (*found, *told)]


def find_rules(query: str) -> list[Rule]:
    """Rules of other frameworks' files by part of their id."""
    shared = [
        _rule(one, one.id.split(".")[0], ENGINES) for one in PARSE_FINDINGS if one.id.startswith(("key.", "value."))
    ]
    every = [*shared, *(rule for name in NAMES for rule in rules_of(name))]
    return [rule for rule in every if query.lower() in rule.id.lower()]


def _rule(told: ParseFinding, subject: str, engines: tuple[str, ...]) -> Rule:
    return Rule(
        id=told.id,
        subject=subject,
        severity=told.severity,
        field="",
        broken=lambda case: False,
        message="",
        symptom=told.symptom,
        cause=told.cause,
        fixes=(),
        engines=engines,
    )
