"""Helpers for tests of framework configs and their exact findings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hypothesis import strategies as st

from meshwright import frameworks, models
from meshwright.clusters import cluster
from meshwright.frameworks.export_recipe import differences, write
from meshwright.recipes import overrides
from meshwright.recipes.types import Recipe


class Case(NamedTuple):
    """A file's text and its expected findings: rule and line, 0 if the file does not set the key."""

    name: str
    text: str
    expected: Sequence[tuple[str, int]] = ()
    gpus: str | None = None
    model: str | None = None
    path: str = ""  # if the file name matters

    def __str__(self) -> str:
        return self.name


def found(case: Case, path: str, framework: str, folder: Path | None = None) -> list[tuple[str, int]]:
    """Return the findings of check, errors first."""
    content = frameworks.content_of(case.text, case.path or path, folder=folder)
    assert frameworks.detect_framework(content).name == framework
    model = None if case.model is None else models.find(case.model)
    result = frameworks.check(frameworks.framework(framework), content, gpus=case.gpus, model=model)
    assert all(finding.message for finding in result.findings)
    return [(finding.rule, finding.line) for finding in result.findings]


def replaced(text: str, *pairs: tuple[str, str]) -> str:
    """Return the text with replacements; each old text must occur once."""
    for old, new in pairs:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def unmapped(framework: str, recipe: Recipe, model: str, gpus: str) -> dict[str, Any]:
    """Return the fields lost in an export and re-import, with reasons."""
    theirs, spec, on = frameworks.framework(framework), models.find(model), cluster(gpus)
    written = write(theirs, recipe, spec, on)
    listed = {one.field for one in written.unmapped}
    return {one.field: one.reason for one in differences(theirs, written, recipe, spec, on) if one.field not in listed}


def changed(recipe: Recipe, values: dict[str, Any]) -> Recipe:
    """Return the recipe with some fields changed."""
    return overrides.change(recipe, values)[0]


def draws(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Draw values for optional fields, named like layout__tp."""
    return st.fixed_dictionaries({}, optional={key.replace("__", "."): value for key, value in fields.items()})
