"""Which training a log is of, in our words: what the estimate needs to know."""

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

NO_GPUS = "the log does not say which GPUs ran it: --gpus 8xH100 brings the estimate"
NO_RECIPE = "the log does not say what it trains: --recipe NAME --gpus 8xH100 brings the estimate"


def case_of_run(run: Run, gpus: str | None = None, overrides: tuple[str, ...] = ()) -> tuple[Case | None, str]:
    """The case of a run by what its log says of itself; None and what is missing where that is not enough."""
    if run.told.recipe is not None:
        recipe = override.apply(run.told.recipe, overrides)
        asked = clusters.cluster(gpus) if gpus else None
        with suppress(InputError):  # a model that lay in a folder of another machine, a GPU of another version
            return case_of(recipe, model_of(recipe), asked or clusters.cluster(run.told.gpus or recipe.cluster)), ""
        told = f"{recipe.model} on {gpus or run.told.gpus or recipe.cluster}"
        return None, f"what ran is not known here ({told}): --recipe NAME --gpus 8xH100 brings the estimate"
    where_ = _cluster(run, gpus)
    if run.told.arguments:
        return _from_arguments(run, where_, overrides)
    if run.told.recipe_name and index.is_known(run.told.recipe_name):
        recipe = override.apply(index.load(run.told.recipe_name), overrides)
        note = "the log names its recipe without what was overridden: the estimate is of the recipe as shipped"
        return case_of(recipe, model_of(recipe), where_ or clusters.cluster(recipe.cluster)), note
    if run.told.model and where_ is not None:
        return _from_name(run, where_, overrides)
    if where_ is None and (run.told.model or run.told.recipe_name):
        return None, NO_GPUS
    return None, NO_RECIPE


def told_overrides(run: Run, besides: tuple[str, ...]) -> tuple[str, ...]:
    """What a log says of its layout and batch as overrides; those given come last and win."""
    given = {text.partition("=")[0].strip() for text in besides}
    keys = {override.native_key(key) or key for key in given}
    told = [format_override(key, value) for key, value in run.told.overrides.items() if key not in keys]
    return (*told, *besides)


def gpus_of(run: Run) -> str | None:
    """The GPUs as the log names them, where they are known."""
    named = run.told.gpus or (f"{run.told.world}x{run.told.gpu}" if run.told.gpu and run.told.world else "")
    with suppress(InputError):
        return str(clusters.cluster(named)) if named else None
    return None


def _cluster(run: Run, gpus: str | None) -> Cluster | None:
    found = gpus or gpus_of(run)
    return None if found is None else clusters.cluster(found)


def _from_arguments(run: Run, where: Cluster | None, overrides: tuple[str, ...]) -> tuple[Case | None, str]:
    """Megatron's arguments as it prints them, read as if they had been typed."""
    if where is None:
        return None, NO_GPUS
    theirs = frameworks.framework("megatron-lm")
    content = frameworks.content_of("\n".join(run.told.arguments), f"{run.file} (arguments)", "shell")
    try:
        reading = read_framework(theirs, content, overrides=list(overrides))
    except InputError as error:
        return None, f"the arguments in the log cannot be read ({error.reason}): --recipe NAME brings the estimate"
    if reading.model is None:
        return None, NO_RECIPE
    return case_of(complete(reading, where), reading.model, where, reading.engine), ""


def _from_name(run: Run, where: Cluster, overrides: tuple[str, ...]) -> tuple[Case | None, str]:
    """A model by its name in the log, with the layout that the log tells."""
    try:
        model = models.find(run.told.model)
    except InputError:
        return None, f"the model {run.told.model} of the log is not in the catalogue: --recipe NAME brings the estimate"
    question = Question(model, model.name, where, "pretrain", engine=ENGINE.get(run.kind, "meshwright"))
    note = f"the estimate is of {model.name} with the layout in the log; what it does not tell is as in our recipe"
    return plan_fixed(question, None, told_overrides(run, overrides)).case, note
