"""Import another framework's config or script as one of our recipes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from meshwright import clusters, frameworks
from meshwright.api import requests
from meshwright.api.catalogues import recipe_text, save_files
from meshwright.api.inputs import verb
from meshwright.api.resolve import assumed_in
from meshwright.api.responses import Finding, Response, finding_parts
from meshwright.api.targets import Job, file_of, job_for
from meshwright.errors import InputError
from meshwright.frameworks import DroppedSetting, UnresolvedValue
from meshwright.recipes import files
from meshwright.recipes.types import ENGINES, Recipe


class Imported(NamedTuple):
    """A file as a recipe of ours, as text, and its settings that the recipe does not have."""

    recipe: Recipe
    text: str
    job: Job
    dropped: tuple[DroppedSetting, ...]


@verb(requests.Import)
def import_file(request: requests.Import) -> Imported:
    """Return another framework's file as a recipe of ours, with what was assumed and what did not survive."""
    content, theirs = file_of(request.file, request.framework)
    if content is None or theirs is None:
        reason = "is one of our recipes already" if content is not None else "is not a file"
        fix = (f"meshwright recipe {request.file}",) if content is not None else ("the path of a config or script",)
        raise InputError(reason, field="file", value=request.file, fix=fix)
    format = _format(request)
    job = job_for(
        request.file, request.goal, request.gpus, request.overrides, framework=request.framework, model=request.model
    )
    job.require_model()
    recipe = job.on(ENGINES[0])
    if request.out:
        recipe = msgspec.structs.replace(recipe, name=Path(request.out).stem)
    text = recipe_text(recipe, format)
    if request.out:
        save_files({Path(request.out).name: text}, str(Path(request.out).parent))
    return Imported(recipe, text, job, frameworks.dropped_settings(theirs, content))


def _format(request: requests.Import) -> str:
    if not request.out:
        return request.format or "toml"
    found = files.SUFFIXES.get(Path(request.out).suffix.lower())
    if found is None or request.format not in (None, found):
        fix = (f"--out {Path(request.out).stem}.{request.format or 'toml'}",)
        raise InputError("must end in .toml, .yaml or .json, as the format", field="out", value=request.out, fix=fix)
    return found


class ImportResponse(Response, frozen=True, kw_only=True):
    """The recipe of a file as text; settings without a field, values that were assumed, and errors of the file."""

    file: str
    framework: str
    version: str
    ok: bool
    recipe: str
    model: str
    goal: str
    gpus: str
    text: str
    written: str | None
    not_imported: Sequence[DroppedSetting]
    assumed: Sequence[clusters.Assumption]
    unresolved: Sequence[UnresolvedValue]
    findings: Sequence[Finding]
    notes: Sequence[str]


def import_response(result: Imported, request: requests.Import | None = None) -> ImportResponse:
    """Return the response of import."""
    imported = result.job.imported
    if imported is None:
        raise ValueError("only another framework's file is imported")
    checked = imported.checked
    return ImportResponse(
        file=checked.file,
        framework=checked.framework,
        version=checked.version,
        ok=not imported.rejected,
        recipe=result.recipe.name,
        model=result.recipe.model,
        goal=result.recipe.goal,
        gpus=result.recipe.cluster,
        text=result.text,
        written=None if request is None else request.out,
        not_imported=result.dropped,
        assumed=(*(() if request is None else assumed_in(request.gpus)), *result.job.assumed(ENGINES[0])),
        unresolved=checked.unresolved,
        findings=finding_parts(imported.rejected),
        notes=[note for note in checked.notes if "--gpus" not in note and "--model" not in note],
    )
