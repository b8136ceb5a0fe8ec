"""Import another framework's config or script as one of our recipes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from meshwright import clusters
from meshwright.api import requests
from meshwright.api.catalogues import recipe_text, save_files
from meshwright.api.checks import check
from meshwright.api.resolve import assumed_in
from meshwright.api.responses import Finding, Response, finding_parts
from meshwright.api.targets import Job, file_of, job_for
from meshwright.api.verb_function import verb
from meshwright.display import Readable, Row, titled
from meshwright.errors import InputError
from meshwright.frameworks import CheckResult, DroppedSetting, UnresolvedValue, as_replaced
from meshwright.recipes import files
from meshwright.recipes.case import model_of
from meshwright.recipes.types import ENGINES, Recipe


class Imported(Readable, msgspec.Struct, frozen=True):
    """A file as a recipe of ours, as text, and its settings that the recipe does not have."""

    recipe: Recipe
    text: str
    job: Job
    dropped: tuple[DroppedSetting, ...]
    checked: CheckResult  # as `check` reports the file

    def summary(self) -> list[Row]:
        """Return the recipe as text, and the settings that it does not have."""
        lost = [f"{one.key}={one.value}: {one.reason}" for one in self.dropped]
        found = [f"{one.severity}: {one.message}" for one in self.checked.findings]
        return [*titled("Recipe", self.text.splitlines()), *titled("Dropped", lost), *titled("Findings", found)]


@verb(requests.Import)
def import_file(request: requests.Import) -> Imported:
    """Return another framework's file as a recipe of ours, with what was assumed and what did not survive."""
    content, theirs = file_of(request.file, request.framework, request.gpus)
    if content is None or theirs is None:
        reason = "is one of our recipes already" if content is not None else "is not a file"
        fix = (f"meshwright recipe {request.file}",) if content is not None else ("the path of a config or script",)
        raise InputError(reason, field="file", value=request.file, fix=fix)
    format = _format(request)
    job = job_for(
        request.file, request.goal, request.gpus, request.overrides, framework=request.framework, model=request.model
    )
    job.require_model()
    dropped = (*job.dropped(), *_positions(job))
    recipe = job.on(ENGINES[0])
    if request.out:
        recipe = msgspec.structs.replace(recipe, name=Path(request.out).stem)
    text = recipe_text(recipe, format)
    if request.out:
        save_files({Path(request.out).name: text}, str(Path(request.out).parent))
    return Imported(recipe, text, job, dropped, check_file(request))


def check_file(request: requests.Import) -> CheckResult:
    """Return what `check` finds in the file: on GPUs that it does not name, only what holds on all.

    A given model that contradicts the file's is no error: the recipe has the given one.
    """
    names = ("framework", "model", "gpus", "goal", "overrides")
    found = check.handle(requests.Check(target=request.file, **{name: getattr(request, name) for name in names}))
    return msgspec.structs.replace(found, findings=tuple(as_replaced(one) for one in found.findings))


def _positions(job: Job) -> tuple[DroppedSetting, ...]:
    """Return the file's number of positions if the catalogue model that the recipe names has another."""
    if job.imported is None:
        return ()
    longest = model_of(job.recipe).max_seq_length
    found = []
    for key, setting in job.imported.settings.parsed.settings.items():
        if key.rsplit(".", 1)[-1] == "max_position_embeddings" and str(setting.value) != str(longest):
            reason = f"the recipe's model {job.recipe.model} has {longest} positions"
            found.append(DroppedSetting(key, setting.value, reason, setting.file, setting.line))
    return tuple(found)


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
    checked = result.checked
    out = None if request is None else request.out
    assumed = (*(() if request is None else assumed_in(request.gpus)), *result.job.assumed(ENGINES[0]))
    said = [one.message for one in assumed]
    written = f"{out} was written although {checked.file} has errors: correct them first"
    return ImportResponse(
        file=checked.file,
        framework=checked.framework,
        version=checked.version,
        ok=checked.ok,
        recipe=result.recipe.name,
        model=result.recipe.model,
        goal=result.recipe.goal,
        gpus=result.recipe.cluster,
        text=result.text,
        written=out,
        not_imported=result.dropped,
        assumed=assumed,
        unresolved=checked.unresolved,
        findings=finding_parts(checked.findings),
        notes=[
            *((written,) if out and not checked.ok else ()),
            *(one for one in checked.notes if "--gpus" not in one and "--model" not in one and one not in said),
        ],
    )
