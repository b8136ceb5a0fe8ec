"""Rows of the user's own data that train leaves out because of their length, and the length that keeps them."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from meshwright import planner
from meshwright.api.data_findings import DATA_ROWS
from meshwright.api.sample_lengths import SHOWN_ROWS, OwnSamples, own_samples
from meshwright.display import plural
from meshwright.errors import some
from meshwright.recipes import overrides as override
from meshwright.recipes.case import Case
from meshwright.recipes.types import ENGINES
from meshwright.rules import Finding, Severity

SEQ_LENGTH = "data.seq_length"
STEP = 256  # of lengths that are suggested where a power of two is not possible


def dropped_rows(case: Case) -> tuple[Finding, ...]:
    """Return the warning of rows that our engine leaves out for their length; other engines train on what is left."""
    recipe = case.recipe
    found = own_samples(recipe) if case.engine == ENGINES[0] else None
    if found is None or not found.dropped:
        return ()
    untrainable = found.untrainable or 0
    about, source = ("", f"counted with {found.tokenizer}") if found.tokenizer else ("about ", "estimated by bytes")
    why = f"longer than {SEQ_LENGTH}={recipe.data.seq_length}"
    if recipe.data.truncation != "drop":
        why = f"{why}, and truncation leaves none of their answers"
    count = f"{about}{found.dropped:,}{' more' if untrainable else ''} of {plural(found.rows, 'row')} will be dropped"
    total = f"; {found.dropped + untrainable:,} in all" if untrainable else ""
    more = found.dropped - SHOWN_ROWS
    places = some(found.dropped_rows, SHOWN_ROWS, "; ") + (f" and {more:,} more" if more > 0 else "")
    return (_finding(case, found, f"{count} ({source}{total}): they are {why}: {places}"),)


def _finding(case: Case, found: OwnSamples, message: str) -> Finding:
    """Return the warning; its fix is a length that the layout, or another one, has memory for, if there is one."""
    severity: Severity = "advice" if case.recipe.data.truncation == "drop" else "warning"
    lengths = list(_lengths(found.longest))
    fixes = (*((one,) for one in lengths if not _errors(case, one)), _with_layout(case, lengths[-1]))
    fix = next(filter(None, fixes), ())
    shorter = "split or shorten these rows"
    other = "" if fix else f"{shorter}: {lengths[-1]} would keep them, but {_errors(case, lengths[-1])[0]}"
    return Finding(DATA_ROWS, severity, SEQ_LENGTH, message, fix, no_fix=other)


def _lengths(longest: int) -> Iterator[str]:
    """Yield the lengths of samples that fit the longest row whole: its last token is only a target."""
    least = max(longest - 1, 1)
    for length in dict.fromkeys((1 << (least - 1).bit_length(), ceil(least / STEP) * STEP)):
        yield f"{SEQ_LENGTH}={length}"


def _errors(case: Case, change: str) -> list[str]:
    """Return what is wrong with the case after a change, and was not before it."""
    before = planner.error_messages(case)
    return [one for one in planner.error_messages(_changed(case, change)) if one not in before]


def _with_layout(case: Case, change: str) -> tuple[str, ...]:
    """Return the change with those of the layout that it needs; empty if no layout makes it possible."""
    if planner.error_messages(case):  # its own repair comes first
        return ()
    repair = planner.as_overrides(planner.find_repair(_changed(case, change), {"seq_length"}))
    return (change, *repair) if repair and all(one.startswith(("layout.", "kernels.")) for one in repair) else ()


def _changed(case: Case, change: str) -> Case:
    return case.rebuild(override.apply(case.recipe, [change]))
