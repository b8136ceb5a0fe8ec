"""Recipes and files of any framework: checked, and written in other words."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from meshwright import clusters, frameworks, models, planner
from meshwright.api.resolve import recipe_from
from meshwright.errors import InputError
from meshwright.frameworks import CheckResult, ExportedConfig, RecipeCheckResult
from meshwright.parsing import one_of
from meshwright.recipes import index
from meshwright.recipes import overrides as override
from meshwright.recipes.types import ENGINES, Recipe


def check(
    target: str | Recipe,
    *,
    gpus: str | int | None = None,
    engine: str | None = None,
    framework: str | None = None,
    model: str | None = None,
    advice: bool = False,
    overrides: Sequence[str] = (),
) -> CheckResult:
    """Findings for a recipe by name or value, or for a file of ours or of another framework.

    `model` is for files that do not name theirs; `advice` adds what could be better to what is wrong in such files.
    """
    content = None
    if isinstance(target, str) and (frameworks.is_file(target) or not index.is_known(target)):
        content = _content(target)
        theirs = frameworks.framework_of(content, framework)
        if theirs is not None:
            if engine is not None:
                raise InputError(f"the file is for {theirs.engine}", field="engine", value=engine)
            named = None if model is None else models.find(model)
            where = None if gpus is None else str(gpus)
            return frameworks.check(theirs, content, gpus=where, model=named, overrides=overrides, advice=advice)
    if framework not in (None, frameworks.NATIVE):
        frameworks.framework(str(framework))  # a name that nobody knows is told as such
        raise InputError("a recipe of ours has no other words", field="framework", value=framework)
    if model is not None:
        raise InputError("a recipe names its own model", field="model", value=model, fix=("without --model",))
    found = target if isinstance(target, Recipe) else recipe_from(target)
    return check_recipe(found, gpus, engine or ENGINES[0], overrides, content)


def check_recipe(
    recipe: Recipe,
    gpus: str | int | None,
    engine: str,
    overrides: Sequence[str],
    content: frameworks.Content | None = None,
    advice: bool = True,
) -> RecipeCheckResult:
    """Findings for a recipe of ours, on its own cluster or another."""
    engine = one_of("engine", engine, ENGINES)
    asked = override.apply(planner.with_engine_strategy(recipe, engine), list(overrides))
    cluster = clusters.cluster(str(gpus) if gpus is not None else asked.cluster)
    return frameworks.check_native(asked, cluster, engine, content, advice)


def _content(target: str) -> frameworks.Content:
    """The file that a name means; a name that is neither file nor recipe is told with what it may have been."""
    if not frameworks.is_file(target):
        index.load(target)  # raises with did-you-mean
    return frameworks.open_file(target)


def export(
    target: str | Recipe, to: str, *, gpus: str | int | None = None, overrides: Sequence[str] = ()
) -> tuple[ExportedConfig, RecipeCheckResult]:
    """A recipe in another framework's words, and what the rules say of it there."""
    theirs = frameworks.framework(to)
    found = target if isinstance(target, Recipe) else recipe_from(target)
    judged = check_recipe(found, gpus, theirs.engine, overrides, advice=False)
    written = frameworks.export(theirs, judged.recipe, judged.model, judged.cluster)
    if not judged.ok:
        asked = f"{judged.recipe.model} --gpus {judged.cluster} --goal {judged.recipe.goal} --engine {judged.engine}"
        note = f"a layout that runs there: meshwright recommend {asked} --save sized.toml, then export sized.toml"
        written = msgspec.structs.replace(written, notes=(*written.notes, note))
    return written, judged
