"""Writes overrides as settings of the framework that ran."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright import frameworks
from meshwright.doctor.run import LogFormat, Run
from meshwright.frameworks.mapping import relevant_fields, to_settings
from meshwright.frameworks.schedule_units import in_file_units
from meshwright.frameworks.types import Settings
from meshwright.recipes.case import Case
from meshwright.recipes.types import Recipe, field_value

FRAMEWORK: Mapping[LogFormat, str] = {
    "megatron": "megatron-lm",
    "torchtitan": "torchtitan",
    "automodel": "automodel",
    "kempnerforge": "kempnerforge",
}


def to_framework_settings(run: Run, case: Case, changed: Recipe) -> tuple[str, ...]:
    """Return the changes to the case's recipe as framework settings; empty if one cannot be expressed there."""
    name = run.header.framework or FRAMEWORK.get(run.kind)
    if name is None:
        return ()
    theirs = frameworks.framework(name)
    fields = relevant_fields(changed, case.model)
    before, _ = to_settings(theirs, case.recipe, fields)
    after, unmapped = to_settings(theirs, changed, fields)
    inexpressible = {one.field for one in unmapped if field_value(case.recipe, one.field) != one.value} - {
        *theirs.derived_fields
    }
    if inexpressible:
        return ()
    differing = {key: value for key, value in after.items() if before.get(key, ...) != value}
    differing |= {key: None for key in before if key not in after}
    stated = in_file_units(theirs.key_map, differing, stated_settings(run), changed)
    return tuple(theirs.format_setting(key, value) for key, value in stated.items())


def stated_settings(run: Run) -> Settings:
    """Return the settings of the framework that the log or the run's own file states; empty if it has neither."""
    if run.header.framework or not run.header.arguments:
        return run.header.settings
    content = frameworks.content_of("\n".join(run.header.arguments), f"{run.file} (arguments)", "shell")
    return frameworks.framework("megatron-lm").parse(content).settings
