"""Settings that a framework's own rules require next to those that a remedy changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import UNSET

from meshwright import frameworks
from meshwright.errors import InputError
from meshwright.frameworks.applied_fixes import FORMATS, settings_of_fix
from meshwright.frameworks.framework import Framework, ParsedConfig, RuleContext
from meshwright.frameworks.types import Settings, SourcedValue
from meshwright.recipes.case import Case
from meshwright.rules import Finding

ROUNDS = 3  # of settings that require others


def with_required(
    theirs: Framework, stated: Settings, case: Case, changed: Case, values: Mapping[str, Any]
) -> tuple[str, ...] | None:
    """Return changed settings as text, with those that the framework requires for them; None if it refuses them.

    `stated` are the settings of the run. What its own settings violate already is no reason: it ran.
    """
    known = {(one.rule, one.field) for one in _errors(theirs, stated, case)}
    texts = {key: theirs.format_setting(key, value) for key, value in values.items()}
    settings = _with(stated, values)
    for _ in range(ROUNDS):
        new = [one for one in _errors(theirs, settings, changed) if (one.rule, one.field) not in known]
        if not new:
            return tuple(dict.fromkeys(texts.values()))
        for text in (text for one in new for text in one.fix if text not in texts.values()):
            if (added := _parsed(theirs, text)) is None or {*added} & {*values}:  # a fix that undoes the change
                return None
            texts, settings = {**texts, **dict.fromkeys(added, text)}, _with(settings, added)
        if not all(one.fix for one in new):
            return None
    return None


def _errors(theirs: Framework, settings: Settings, case: Case) -> list[Finding]:
    ctx = RuleContext(theirs, ParsedConfig(settings, model=case.model), case.recipe, case, case.cluster)
    return [one for rule in theirs.rules for one in rule.findings(ctx) if one.severity == "error"]


def _with(settings: Settings, values: Mapping[str, Any]) -> Settings:
    """Return settings with other values; None or UNSET removes a key."""
    kept = {key: value for key, value in settings.items() if key not in values}
    return kept | {key: SourcedValue(value, 0, "") for key, value in values.items() if value not in (None, UNSET)}


def _parsed(theirs: Framework, text: str) -> Mapping[str, Any] | None:
    """Return the settings that a fix writes; None if it is not written as such."""
    if not text.startswith("--"):
        formats = (settings_of_fix(text, one) for one in dict.fromkeys(FORMATS.values()))
        return next((found for found in formats if found), None)
    try:
        found = theirs.parse(frameworks.content_of(text, "fix", "shell")).settings
    except InputError:
        return None
    return {key: one.value for key, one in found.items()} or None
