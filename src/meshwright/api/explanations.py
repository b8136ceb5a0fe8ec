"""Explain a rule, a recipe field, a finding of the doctor or a term of reports."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_args, get_origin

import msgspec

from meshwright import rules
from meshwright.api import requests
from meshwright.api.inputs import verb
from meshwright.api.responses import Part, Response, Severity, copied
from meshwright.api.terms import TERMS
from meshwright.errors import InputError, closest, unknown
from meshwright.frameworks import rule_catalog
from meshwright.recipes.key_maps import REMOVED_KEYS, override_keys
from meshwright.recipes.overrides import translate_value
from meshwright.recipes.types import RecipeField, recipe_fields
from meshwright.rules import Rule

SHOWN = 80  # characters of an unknown name that the error repeats
_RULE = re.compile(r"[a-z0-9_]+\.[a-z0-9_.-]*[a-z0-9]", re.IGNORECASE)


Kind = Literal["rule", "field", "finding", "term"]


class Explained(msgspec.Struct, frozen=True):
    """One rule, one field and the rules about it, a finding of the doctor, or a term of reports."""

    about: str
    kind: Kind
    field: RecipeField | None
    rules: tuple[Rule, ...]
    meaning: str = ""  # of a finding or a term


@verb(requests.Explain)
def explain(request: requests.Explain) -> Explained:
    """Return what a rule id, a recipe field in any framework's keys, a finding's text or a term of reports means."""
    text = request.about.strip()
    rule = _rule(text)
    if rule is not None:
        return Explained(rule.id, "rule", _field_of(rule), (rule,))
    term = _term(text)
    key = recipe_key(text)
    if term is not None and (key is None or key.partition(".")[2] != term):
        return Explained(term, "term", None, (), TERMS[term])
    if key is not None:
        field = recipe_fields()[key]
        about = tuple(r for r in rules.all_rules().values() if r.field == field.flat)
        return Explained(key, "field", field, about, TERMS[term] if term else "")
    from meshwright.doctor import meanings

    findings = meanings()
    for word in _RULE.findall(text) if text.count(" ") else (text,):
        rule = _rule(word.removesuffix("."))
        if rule is not None:
            return Explained(rule.id, "rule", _field_of(rule), (rule,))
        if word.lower() in findings:
            return Explained(word.lower(), "finding", None, (), findings[word.lower()])
    known = (rules.all_rules(), recipe_fields(), findings, TERMS)
    near = [one for names in known for one in closest(text[:SHOWN], names, 2)]
    error = unknown("rule, field, finding or term", text[:SHOWN], near or [one for names in known for one in names])
    raise InputError(error.reason, field="about", value=text, fix=error.fix)


class FieldPart(Part, frozen=True, kw_only=True):
    """A recipe field; `also_understood` lists other frameworks' keys for it."""

    key: str
    kind: str
    meaning: str
    default: Any
    choices: Sequence[Any]
    also_understood: Sequence[str]


class ExplainedRule(Part, frozen=True, kw_only=True):
    """A rule; each entry of `fix` lists recipe keys to change together."""

    id: str
    subject: str
    severity: Severity
    engines: Sequence[str]
    symptom: str
    cause: str
    pitfall: str
    field: str
    fix: Sequence[Sequence[str]]


class ExplainResponse(Response, frozen=True, kw_only=True):
    """What a rule, a field, a finding or a term means."""

    about: str
    kind: Kind
    meaning: str | None
    field: FieldPart | None
    rules: Sequence[ExplainedRule]


def explain_response(found: Explained, request: requests.Explain | None = None) -> ExplainResponse:
    """Return the response of explain."""
    return ExplainResponse(
        about=found.about,
        kind=found.kind,
        meaning=found.meaning or None,
        field=None if found.field is None else _field_part(found.field),
        rules=[_rule_part(rule) for rule in found.rules],
    )


def _field_part(field: RecipeField) -> FieldPart:
    return FieldPart(
        key=field.key,
        kind=field.kind,
        meaning=field.text,
        default=msgspec.to_builtins(field.default),
        choices=list(_choices(field.type)),
        also_understood=sorted({key.key for key in override_keys().values() if key.field == field.key}),
    )


def _rule_part(rule: Rule) -> ExplainedRule:
    keys = {info.flat: key for key, info in recipe_fields().items()}
    fixes = [sorted(keys[flat] for flat in fix) for fix in rule.fixes]
    distinct = [fix for place, fix in enumerate(fixes) if fix not in fixes[:place]]
    return copied(ExplainedRule, rule, field=keys.get(rule.field, ""), fix=distinct)


def _choices(hint: Any) -> Iterable[Any]:
    """Return the values of the literals in a type hint."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    parts = (_choices(part) for part in get_args(hint) if isinstance(part, type) or get_origin(part) is not None)
    return [choice for part in parts for choice in part]


def _term(text: str) -> str | None:
    word = text.strip().lower().replace(" ", "_").replace("-", "_")
    return word if word in TERMS else None


def _rule(text: str) -> Rule | None:
    found = rules.all_rules().get(text.lower())
    return found or next((r for r in rule_catalog.find_rules(text) if r.id == text.lower()), None) if text else None


def recipe_key(text: str) -> str | None:
    """Return the recipe key of a field in any framework's keys: layout.tp, tp, --tensor-model-parallel-size."""
    fields, word = recipe_fields(), text.partition("=")[0].strip().lstrip("-+~")
    variants = (word, word.replace("-", "_"))
    named = [key for key, info in fields.items() if info.flat in variants or key.partition(".")[2] in variants]
    foreign = next((found.field for name in variants if (found := override_keys().get(name))), None)
    if word in fields:
        return word
    return foreign or (named[0] if len(named) == 1 else None)


def as_override(option: str, value: str) -> tuple[str, str] | None:
    """Return why an option of another tool is none of ours, and what to write instead."""
    key = recipe_key(option)
    if key is not None:
        alias = override_keys().get(option)
        meant = f"{key}={(translate_value(alias, value) if alias else value) if value else 'VALUE'}"
        return f"recipe fields are written as KEY=VALUE: {meant}", meant
    if option in REMOVED_KEYS:
        reason, instead = REMOVED_KEYS[option]
        instead = instead.replace("{value}", value or "VALUE")
        return f"{option} {reason}: {instead}", instead
    return None


def _field_of(rule: Rule) -> RecipeField | None:
    return next((info for info in recipe_fields().values() if info.flat == rule.field), None)
