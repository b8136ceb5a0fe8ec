"""What a rule, a recipe field or a finding is about: symptom, cause and fix."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Literal, get_args, get_origin

import msgspec

from meshwright import rules
from meshwright.errors import InputError, closest, unknown
from meshwright.frameworks import rule_catalog
from meshwright.recipes.key_maps import override_keys
from meshwright.recipes.types import RecipeField, recipe_fields
from meshwright.rules import Rule

LONGEST = 4000  # characters of a pasted finding in which a rule is looked for
_RULE = re.compile(r"[a-z0-9_]+\.[a-z0-9_.-]*[a-z0-9]", re.IGNORECASE)
_HIDDEN = frozenset(("field", "fix_fields"))  # said by the recipe's own keys instead


class Explained(msgspec.Struct, frozen=True):
    """What was asked about: one rule, one field and the rules that point at it, or a finding of the doctor."""

    about: str
    kind: Literal["rule", "field", "finding"]
    field: RecipeField | None
    rules: tuple[Rule, ...]
    meaning: str = ""  # of a finding


def explain(about: str) -> Explained:
    """What a rule's id, a recipe field in any framework's spelling, or a finding's text is about."""
    text = about.strip()[:LONGEST]
    rule = _rule(text)
    if rule is not None:
        return Explained(rule.id, "rule", _field_of(rule), (rule,))
    key = _key(text)
    if key is not None:
        field = recipe_fields()[key]
        return Explained(key, "field", field, tuple(r for r in rules.all_rules().values() if r.field == field.flat))
    from meshwright.doctor import meanings

    findings = meanings()
    for word in _RULE.findall(text) if text.count(" ") else (text,):
        rule = _rule(word.removesuffix("."))
        if rule is not None:
            return Explained(rule.id, "rule", _field_of(rule), (rule,))
        if word.lower() in findings:
            return Explained(word.lower(), "finding", None, (), findings[word.lower()])
    names = [*rules.all_rules(), *recipe_fields(), *findings]
    near = [one for known in (rules.all_rules(), recipe_fields(), findings) for one in closest(text[:80], known, 2)]
    told = unknown("rule, field or finding", text[:80], near or names)
    raise InputError(told.reason, field="about", value=text, fix=told.fix)


def explained_to_dict(found: Explained) -> dict[str, Any]:
    """The explanation as the JSON object of the outer contract."""
    from meshwright.serialize import SCHEMA

    return {
        "schema": SCHEMA,
        "about": found.about,
        "kind": found.kind,
        "meaning": found.meaning or None,
        "field": None if found.field is None else field_to_dict(found.field),
        "rules": [_rule_to_dict(rule) for rule in found.rules],
    }


def field_to_dict(field: RecipeField) -> dict[str, Any]:
    """A recipe field as a person meets it."""
    spelled = {word.key for word in override_keys().values() if word.field == field.key}
    return {
        "key": field.key,
        "kind": field.kind,
        "meaning": field.text,
        "default": msgspec.to_builtins(field.default),
        "choices": list(_choices(field.type)),
        "also_understood": sorted(spelled),
    }


def _rule_to_dict(rule: Rule) -> dict[str, Any]:
    from meshwright.serialize import rule_to_dict

    keys = {info.flat: key for key, info in recipe_fields().items()}
    told = {name: value for name, value in rule_to_dict(rule).items() if name not in _HIDDEN}
    fixes = [sorted(keys[flat] for flat in fix) for fix in rule.fixes]
    distinct = [fix for place, fix in enumerate(fixes) if fix not in fixes[:place]]
    return {**told, "field": keys.get(rule.field, ""), "fix": distinct}


def _choices(hint: Any) -> Iterable[Any]:
    """The words that a field takes, when they are few."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    parts = (_choices(part) for part in get_args(hint) if isinstance(part, type) or get_origin(part) is not None)
    return [choice for part in parts for choice in part]


def _rule(text: str) -> Rule | None:
    found = rules.all_rules().get(text.lower())
    return found or next((r for r in rule_catalog.find_rules(text) if r.id == text.lower()), None) if text else None


def _key(text: str) -> str | None:
    """The recipe key of a field as we or another framework spells it: layout.tp, tp, --tensor-model-parallel-size."""
    fields, word = recipe_fields(), text.partition("=")[0].strip().lstrip("-+~")
    spelled = (word, word.replace("-", "_"))
    named = [key for key, info in fields.items() if info.flat in spelled or key.partition(".")[2] in spelled]
    foreign = next((found.field for name in spelled if (found := override_keys().get(name))), None)
    if word in fields:
        return word
    return foreign or (named[0] if len(named) == 1 else None)


def _field_of(rule: Rule) -> RecipeField | None:
    return next((info for info in recipe_fields().values() if info.flat == rule.field), None)
