"""Finds the recipe and the GPUs that a log is about, as the estimate needs them."""

from __future__ import annotations

from contextlib import suppress

from meshwright import clusters, frameworks, models
from meshwright.clusters import Cluster
from meshwright.doctor.run import ENGINE, Run
from meshwright.errors import InputError
from meshwright.frameworks.to_recipe import complete
from meshwright.frameworks.to_recipe import import_recipe as read_framework
from meshwright.planner import Question, case_of, plan_fixed
from meshwright.recipes import index
from meshwright.recipes import overrides as override
from meshwright.recipes.case import Case, model_of
from meshwright.recipes.format_override import format_override

NO_GPUS = "no estimate: the log does not name the GPUs; add --gpus 8xH100"
NO_RECIPE = "no estimate: the log does not name the model; add --recipe NAME --gpus 8xH100"


def case_of_run(run: Run, gpus: str | None = None, overrides: tuple[str, ...] = ()) -> tuple[Case | None, str]:
    """Return the case of a run from its log and a note; None and what is missing if the log is not enough."""
    if run.header.recipe is not None:
        recipe = override.apply(run.header.recipe, overrides)
        requested = clusters.cluster(gpus) if gpus else None
        with suppress(InputError):  # a model from a folder on another machine, or a GPU of another version
            return case_of(
                recipe, model_of(recipe), requested or clusters.cluster(run.header.gpus or recipe.cluster)
            ), ""
        missing = f"{recipe.model} on {gpus or run.header.gpus or recipe.cluster}"
        return None, f"no estimate: {missing} is not known here; add --recipe NAME --gpus 8xH100"
    cluster = _cluster(run, gpus)
    if run.header.arguments:
        return _from_arguments(run, cluster, overrides)
    if run.header.recipe_name and index.is_known(run.header.recipe_name):
        recipe = override.apply(index.load(run.header.recipe_name), overrides)
        note = "the log names its recipe but not its overrides: the estimate is for the recipe as shipped"
        if cluster is None:
            return None, NO_GPUS
        return case_of(recipe, model_of(recipe), cluster), note
    if run.header.model and cluster is not None:
        return _from_name(run, cluster, overrides)
    if cluster is None and (run.header.model or run.header.recipe_name):
        return None, NO_GPUS
    return None, NO_RECIPE


def logged_overrides(run: Run, extra: tuple[str, ...]) -> tuple[str, ...]:
    """Return the layout and batch of a log as overrides, followed by the user's, which take precedence."""
    given = {text.partition("=")[0].strip() for text in extra}
    keys = {override.native_key(key) or key for key in given}
    logged = [format_override(key, value) for key, value in run.header.overrides.items() if key not in keys]
    return (*logged, *extra)


def gpus_of(run: Run) -> str | None:
    """Return the GPUs that the log names, if they are known."""
    named = run.header.gpus or (f"{run.header.world}x{run.header.gpu}" if run.header.gpu and run.header.world else "")
    with suppress(InputError):
        return str(clusters.cluster(named)) if named else None
    return None


def _cluster(run: Run, gpus: str | None) -> Cluster | None:
    found = gpus or gpus_of(run)
    return None if found is None else clusters.cluster(found)


def _from_arguments(run: Run, where: Cluster | None, overrides: tuple[str, ...]) -> tuple[Case | None, str]:
    """Parse the arguments that Megatron prints as if they were command-line flags."""
    if where is None:
        return None, NO_GPUS
    megatron = frameworks.framework("megatron-lm")
    content = frameworks.content_of("\n".join(run.header.arguments), f"{run.file} (arguments)", "shell")
    try:
        reading = read_framework(megatron, content, overrides=list(overrides))
    except InputError as error:
        return None, f"no estimate: the arguments in the log cannot be parsed ({error.reason}); add --recipe NAME"
    if reading.model is None:
        return None, NO_RECIPE
    return case_of(complete(reading, where), reading.model, where, reading.engine), ""


def _from_name(run: Run, where: Cluster, overrides: tuple[str, ...]) -> tuple[Case | None, str]:
    """Build the case of the model that the log names, with the layout in the log."""
    try:
        model = models.find(run.header.model)
    except InputError:
        return None, f"no estimate: the log's model {run.header.model} is not in the catalog; add --recipe NAME"
    question = Question(model, model.name, where, "pretrain", engine=ENGINE.get(run.kind, "meshwright"))
    note = f"the estimate is for {model.name} with the layout in the log; other settings are those of our recipe"
    return plan_fixed(question, None, logged_overrides(run, overrides)).case, note
