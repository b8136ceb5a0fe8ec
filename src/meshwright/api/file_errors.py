"""Errors of another framework's file that a plan of its training leaves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.api.targets import first_error
from meshwright.errors import InputError
from meshwright.frameworks.mapping import fields_set_by
from meshwright.notes import no_notes
from meshwright.recipes.format_override import format_override
from meshwright.recipes.types import recipe_fields
from meshwright.rules import RULES

if TYPE_CHECKING:
    from meshwright.api.targets import Job
    from meshwright.frameworks import ImportedFile
    from meshwright.planner import Plan
    from meshwright.rules import Finding

OF_THE_JOB = "launch."  # how rules start on the nodes and signals of a job, which a plan does not start


def errors_left(job: Job | None, plan: Plan | None) -> tuple[Finding, ...]:
    """Return the errors of a file that a plan leaves.

    They are settings that could not be read, so that the plan is of another training, and on the file's own engine
    what its framework refuses whatever the layout is.
    """
    if job is None or job.imported is None:
        return ()
    if plan is None or plan.question.engine != job.engine:
        return unread(job)
    of_layout, rejected = _layout_keys(job.imported), {(one.rule, one.field) for one in job.imported.rejected}
    with no_notes():
        found = job.imported.findings_with(_changes(job, plan))
    return tuple(
        one
        for one in found
        if one.severity == "error" and one.rule not in RULES and not one.rule.startswith(OF_THE_JOB)
        if one.field not in of_layout or (one.rule, one.field) in rejected
        if not job.imported.is_typed(one.field)
    )


def unread(job: Job) -> tuple[Finding, ...]:
    """Return the settings of a file that could not be read, as `check` reports them: another version may have some."""
    rejected = set() if job.imported is None else {(one.rule, one.field) for one in job.imported.rejected}
    if job.imported is None or not rejected:
        return ()
    with no_notes():
        found = job.imported.findings_with(())
    return tuple(one for one in found if one.severity == "error" and (one.rule, one.field) in rejected)


def as_checked(read: ImportedFile | None, error: InputError) -> InputError | None:
    """Return the refusal of a field's value as `check` reports the keys of a file that set it, with place and fix.

    None if the user typed the field, or `check` has no error for these keys.
    """
    if read is None or error.field in read.settings.typed:
        return None
    with no_notes():
        errors = [one for one in read.checked.findings if one.severity == "error"]
    found = [one for one in errors if error.field in fields_set_by(read.framework.key_map, one.field)]
    if not found:
        return None
    path, first = read.content.path, found[0]
    reason = f"is not valid for {read.framework.title}: {first_error(found)}"
    fix = f"in {first.file or path}: {'  '.join(first.fix)}" if first.fix else f"meshwright check {path}"
    return InputError(reason, "file", path, (fix,))


def _layout_keys(read: ImportedFile) -> set[str]:
    """Return the keys of a file that set its layout, which a plan replaces."""
    kinds = recipe_fields()
    sources = read.settings.mapped.source_keys.items()
    return {key for field, key in sources if field in kinds and kinds[field].kind == "layout"}


def _changes(job: Job, plan: Plan) -> tuple[str, ...]:
    """Return what a plan changes in a file besides the typed overrides, which its import has already."""
    typed = () if job.imported is None else job.imported.settings.typed
    return tuple(format_override(one.field, one.new) for one in plan.changes if one.field not in typed)
