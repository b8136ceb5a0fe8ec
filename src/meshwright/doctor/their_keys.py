"""Overrides in the words of the framework that ran."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright import frameworks
from meshwright.doctor.run import Kind
from meshwright.frameworks.mapping import relevant_fields, to_settings, value_of
from meshwright.recipes.case import Case
from meshwright.recipes.types import Recipe

FRAMEWORK: Mapping[Kind, str] = {"megatron": "megatron-lm", "torchtitan": "torchtitan", "automodel": "automodel"}


def in_their_words(kind: Kind, case: Case, changed: Recipe) -> tuple[str, ...]:
    """What differs from the case's recipe, as settings of theirs; none where part of it cannot be said there."""
    if kind not in FRAMEWORK:
        return ()
    theirs = frameworks.framework(FRAMEWORK[kind])
    fields = relevant_fields(changed, case.model)
    before, _ = to_settings(theirs, case.recipe, fields)
    after, unsaid = to_settings(theirs, changed, fields)
    lost = {one.field for one in unsaid if value_of(case.recipe, one.field) != one.value} - {*theirs.derived_fields}
    if lost:
        return ()
    spelled = [theirs.format_setting(key, value) for key, value in after.items() if before.get(key, ...) != value]
    return (*spelled, *(theirs.format_setting(key, None) for key in before if key not in after))
