"""Check recipes and files of any framework, and export recipes to other frameworks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from meshwright import clusters, frameworks, launch, planner
from meshwright.api import requests
from meshwright.api.catalogues import recipe_text, save_files
from meshwright.api.inputs import verb
from meshwright.api.planning import plan_response, recommend
from meshwright.api.resolve import assumed_in, model_named
from meshwright.api.responses import Estimate, Finding, Response, copied, estimate_part, finding_parts
from meshwright.api.targets import is_model, recipe_for
from meshwright.choices import FRAMEWORKS
from meshwright.errors import InputError
from meshwright.frameworks import CheckResult, ExportedConfig, RecipeCheckResult, UnmappedField, UnresolvedValue
from meshwright.parsing import one_of
from meshwright.recipes import index
from meshwright.recipes import overrides as override
from meshwright.recipes.case import model_of
from meshwright.recipes.types import ENGINES, Recipe


@verb(requests.Check)
def check(request: requests.Check) -> CheckResult:
    """Return the findings for a recipe by name or value, or for a file of any framework."""
    target, framework, model = request.target, request.framework, request.model
    content = None
    if isinstance(target, str) and is_model(target, request.goal, content_decides=True):
        if model is not None:
            raise InputError("the target is a model itself", field="model", value=model, fix=("remove --model",))
        found = recipe_for(target, request.goal, request.gpus, request.overrides, request.engine or ENGINES[0])
        return check_recipe(found, request.gpus, request.engine or ENGINES[0], request.overrides)
    if isinstance(target, str) and (frameworks.is_file(target) or not index.is_known(target)):
        content = _content(target)
        theirs = frameworks.framework_of(content, framework)
        if theirs is not None:
            if request.engine is not None:
                raise InputError(f"the file is for {theirs.engine}", field="engine", value=request.engine)
            spec = None if model is None else model_named(model)[0]
            gpus = None if request.gpus is None else str(request.gpus)
            return frameworks.check(
                theirs, content, gpus=gpus, model=spec, overrides=request.overrides, advice=request.advice
            )
    if framework not in (None, frameworks.NATIVE):
        raise InputError("applies to files of other frameworks, not to recipes", field="framework", value=framework)
    if model is not None:
        raise InputError("a recipe names its model", field="model", value=model, fix=("remove --model",))
    found = recipe_for(target, request.goal)
    return check_recipe(found, request.gpus, request.engine or ENGINES[0], request.overrides, content)


def check_recipe(
    recipe: Recipe,
    gpus: str | int | None,
    engine: str,
    overrides: Sequence[str],
    content: frameworks.Content | None = None,
    advice: bool = True,
) -> RecipeCheckResult:
    """Return the findings for one of our recipes, on its own cluster or another."""
    engine = one_of("engine", engine, ENGINES)
    changed = override.apply(planner.with_engine_strategy(recipe, engine), list(overrides))
    cluster = clusters.cluster(str(gpus) if gpus is not None else changed.cluster)
    return frameworks.check_native(changed, cluster, engine, content, advice)


def _content(target: str) -> frameworks.Content:
    """Return the file's content; raise with did-you-mean if the name is neither a file nor a recipe."""
    if not frameworks.is_file(target):
        index.load(target)
    return frameworks.open_file(target)


class Exported(NamedTuple):
    """A recipe as another framework's files, and the findings for it there."""

    written: ExportedConfig
    checked: RecipeCheckResult


@verb(requests.Export)
def export(request: requests.Export) -> Exported:
    """Return a recipe as another framework's files, and the findings for it there."""
    theirs = frameworks.framework(request.to)
    if request.model is not None and isinstance(request.target, str) and is_model(request.target, request.goal):
        raise InputError("the target is a model itself", field="model", value=request.model, fix=("remove --model",))
    found = recipe_for(request.target, request.goal, request.gpus, request.overrides, theirs.engine)
    if request.model is not None:
        found = msgspec.structs.replace(found, model=model_named(request.model)[1])
    checked = check_recipe(found, request.gpus, theirs.engine, request.overrides, advice=False)
    try:
        written = frameworks.export(theirs, checked.recipe, checked.model, checked.cluster)
    except InputError as error:
        fixes = _export_fixes(request.to, checked, error.fix)
        raise InputError(error.reason, error.field, error.value, fixes) from error
    if not checked.ok:
        recipe = checked.recipe
        arguments = f"{recipe.model} --gpus {checked.cluster} --goal {recipe.goal} --engine {checked.engine}"
        note = f"for a layout that runs: meshwright recommend {arguments} --save sized.toml, then export sized.toml"
        written = msgspec.structs.replace(written, notes=(*written.notes, note))
    if request.out:
        save_files(written.files, request.out)
    return Exported(written, checked)


def _export_fixes(to: str, checked: RecipeCheckResult, tried: Sequence[str]) -> list[str]:
    """Return what makes an export possible: the error's own fixes, those of the findings, or other frameworks."""
    found = [fix for one in checked.findings if one.severity == "error" for fix in one.fix]
    changes = [fix for fix in (*tried, " ".join(dict.fromkeys(found))) if fix and not fix.startswith("--")]
    works = [fix for fix in changes if _can_export(to, checked, fix.split())]
    others = [name for name in FRAMEWORKS if name != to and not works and _can_export(name, checked, ())]
    return works or [f"--to {name}" for name in others[:3]]


def _can_export(to: str, checked: RecipeCheckResult, changes: Sequence[str]) -> bool:
    try:
        recipe = override.apply(checked.recipe, changes)
        frameworks.export(frameworks.framework(to), recipe, model_of(recipe), checked.cluster)
    except InputError:
        return False
    return True


class CheckResponse(Response, frozen=True, kw_only=True):
    """The findings for a recipe or file."""

    framework: str
    version: str
    ok: bool
    file: str | None
    recipe: str
    model: str | None
    gpus: str | None
    engine: str
    findings: Sequence[Finding]
    unresolved: Sequence[UnresolvedValue]
    notes: Sequence[str]
    estimate: Estimate | None
    options: Sequence[planner.Option] = ()
    assumed: Sequence[clusters.Assumption] = ()


class ExportResponse(Response, frozen=True, kw_only=True):
    """Another framework's files and command, the fields it has no key for, and the findings there."""

    framework: str
    ok: bool
    gpus: str
    files: Mapping[str, str]
    command: str
    env: Mapping[str, str]
    unmapped: Sequence[UnmappedField]
    notes: Sequence[str]
    findings: Sequence[Finding]
    assumed: Sequence[clusters.Assumption] = ()


def check_response(result: CheckResult, request: requests.Check | None = None) -> CheckResponse:
    """Return the response of check."""
    return copied(
        CheckResponse,
        result,
        file=result.file or None,
        recipe=result.recipe.name,
        model=result.model.name if result.model else None,
        gpus=str(result.cluster) if result.cluster else None,
        findings=finding_parts(result.findings),
        estimate=estimate_part(result.estimate) if result.estimate else None,
        assumed=assumed_in(request.gpus) if request is not None else (),
    )


def export_response(result: Exported, request: requests.Export | None = None) -> ExportResponse:
    """Return the response of export."""
    written, checked = result.written, result.checked
    return copied(
        ExportResponse,
        written,
        ok=checked.ok,
        gpus=str(checked.cluster),
        command=launch.command_of(written.program, checked.cluster),
        env=written.program.env,
        findings=finding_parts(checked.findings),
        assumed=assumed_in(request.gpus) if request is not None else (),
    )


@verb(requests.Write)
def write(request: requests.Write) -> ExportResponse:
    """Return the recommended recipe as a framework's files and the command that starts them."""
    plan = recommend.handle(request)
    if request.to != ENGINES[0]:
        return export_response(export(plan.recipe, request.to, gpus=request.gpus))
    response = plan_response(plan)
    return ExportResponse(
        framework=request.to,
        ok=plan.ok,
        gpus=response.question.gpus,
        files={f"{plan.recipe.name}.toml": recipe_text(plan.recipe)},
        command=response.commands.get(request.to, ""),
        env={},
        unmapped=[],
        notes=[],
        findings=response.findings,
        assumed=response.question.assumed,
    )
