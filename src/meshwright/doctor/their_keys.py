"""Writes overrides as settings of the framework that ran."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright import frameworks
from meshwright.doctor.run import LogFormat
from meshwright.frameworks.mapping import relevant_fields, to_settings
from meshwright.recipes.case import Case
from meshwright.recipes.types import Recipe, field_value

FRAMEWORK: Mapping[LogFormat, str] = {"megatron": "megatron-lm", "torchtitan": "torchtitan", "automodel": "automodel"}


def to_framework_settings(kind: LogFormat, case: Case, changed: Recipe) -> tuple[str, ...]:
    """Return the changes to the case's recipe as framework settings; empty if one cannot be expressed there."""
    if kind not in FRAMEWORK:
        return ()
    theirs = frameworks.framework(FRAMEWORK[kind])
    fields = relevant_fields(changed, case.model)
    before, _ = to_settings(theirs, case.recipe, fields)
    after, unmapped = to_settings(theirs, changed, fields)
    inexpressible = {one.field for one in unmapped if field_value(case.recipe, one.field) != one.value} - {
        *theirs.derived_fields
    }
    if inexpressible:
        return ()
    settings = [theirs.format_setting(key, value) for key, value in after.items() if before.get(key, ...) != value]
    return (*settings, *(theirs.format_setting(key, None) for key in before if key not in after))
