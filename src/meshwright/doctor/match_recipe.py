"""Finds the recipe and the GPUs that a log is about, as the estimate needs them."""

from __future__ import annotations

from contextlib import suppress
from math import isclose

import msgspec

from meshwright import clusters, models
from meshwright.clusters import Cluster
from meshwright.display import parameter_count
from meshwright.doctor.logged_settings import (
    LACKS,
    MODEL_ARGUMENTS,
    missing_arguments,
    overridden_keys,
    read_settings,
    stated_arguments,
)
from meshwright.doctor.run import ENGINE, Run
from meshwright.errors import InputError
from meshwright.frameworks.to_recipe import complete
from meshwright.models import ModelSpec
from meshwright.planner import Question, case_of, plan_fixed
from meshwright.recipes import index
from meshwright.recipes import overrides as override
from meshwright.recipes.case import Case, model_of
from meshwright.recipes.format_override import format_override

NO_GPUS = "the log does not name the GPUs"
SAME_BLOCKS = 0.05  # relative difference of block parameters of one model: with and without prediction heads
VOCABULARY = "architecture.vocab"
NAME_IT = "add --recipe NAME, or --model FOLDER with its config.json"


def case_of_run(
    run: Run, gpus: str | Cluster | None = None, overrides: tuple[str, ...] = ()
) -> tuple[Case | None, str]:
    """Return the case of a run from its log and a note; None and what is missing if the log is not enough."""
    if run.header.recipe is not None:
        recipe = override.apply(run.header.recipe, overrides)
        requested = _cluster(run, gpus) if gpus else None
        with suppress(InputError):  # a model from a folder on another machine, or a GPU of another version
            return case_of(
                recipe, model_of(recipe), requested or clusters.cluster(run.header.gpus or recipe.cluster)
            ), ""
        missing = f"{recipe.model} on {gpus or run.header.gpus or recipe.cluster}"
        return None, f"no estimate: {missing} is not known here; add --recipe NAME{_gpus_option(run, gpus)}"
    cluster = _cluster(run, gpus)
    if run.header.states_settings:
        return _from_settings(run, cluster, overrides)
    if run.header.recipe_name and index.is_known(run.header.recipe_name):
        recipe = override.apply(index.load(run.header.recipe_name), overrides)
        note = "the log names its recipe but not its overrides: the estimate is for the recipe as shipped"
        if cluster is None:
            return None, _no_gpus(run)
        return case_of(recipe, model_of(recipe), cluster), note
    if run.header.model and cluster is not None:
        return _from_name(run, cluster, overrides)
    if cluster is None and (run.header.model or run.header.recipe_name):
        return None, _no_gpus(run)
    return None, _no_recipe(run, gpus)


def _no_recipe(run: Run, gpus: str | Cluster | None) -> str:
    return f"no estimate: the log does not name the model; add --recipe NAME{_gpus_option(run, gpus)}"


def _gpus_option(run: Run, gpus: str | Cluster | None) -> str:
    """Return the option that is missing besides the recipe: none if the GPUs are typed or in the log."""
    return "" if gpus else run.header.gpus_option


def logged_model(run: Run) -> ModelSpec | None:
    """Return the model that the log itself names or describes; None if it has none that is known here."""
    header = run.header
    with suppress(InputError):  # a folder of another machine, or arguments that do not describe a model
        if header.recipe is not None:
            return None if header.tiny else model_of(header.recipe)
        if header.states_settings:
            return read_settings(run, ()).model
        if header.recipe_name and index.is_known(header.recipe_name):
            return model_of(index.load(header.recipe_name))
        if header.model:
            return models.find(header.model)
    return None


def contradicting_model(run: Run, other: ModelSpec) -> str:
    """Return how a model contradicts the one that the log names; empty if it does not."""
    logged = logged_model(run)
    whole = not missing_arguments(run)  # otherwise the width of its blocks may be a default
    if logged is None or same_model(logged, other, whole):
        return ""
    named = "" if run.header.states_settings else f"{logged.name}, "
    return f"{run.file} is of {named}{described(logged)}, not of {other.name}, {described(other)}"


def same_model(one: ModelSpec, other: ModelSpec, whole: bool = True) -> bool:
    """Return whether two models have the same blocks; `whole`: the width of both is known too."""
    blocks = (_block_parameters(one), _block_parameters(other))
    return _shape(one) == _shape(other) and (not whole or isclose(*blocks, rel_tol=SAME_BLOCKS))


def _shape(model: ModelSpec) -> tuple[int, int]:
    return model.num_layers, model.hidden


def _block_parameters(model: ModelSpec) -> int:
    """Return the parameters without the vocabulary's, which logs state padded or not at all."""
    return model.params.total - model.params.embedding - model.params.head


def described(model: ModelSpec) -> str:
    return f"a model of {model.num_layers} layers and {parameter_count(model.params.total)} parameters"


def logged_overrides(run: Run, extra: tuple[str, ...]) -> tuple[str, ...]:
    """Return what a log states as overrides, followed by the user's, which take precedence.

    The highest logged learning rate is only a guess of the peak: it does not replace that of the user's file.
    """
    stated = {**stated_arguments(run), **run.header.overrides}
    if not {"optimizer.lr"} & {*stated, *run.header.file_fields} and (rate := run.peak_rate):
        stated["optimizer.lr"] = rate
    if vocab := _logged_vocabulary(run):
        stated[VOCABULARY] = vocab
    keys = overridden_keys(extra)
    return (*(format_override(key, value) for key, value in stated.items() if key not in keys), *extra)


def _logged_vocabulary(run: Run) -> int | None:
    """Return the vocabulary of an argument dump for a script that leaves it to the tokenizer; None if it states one."""
    flags = {one.split()[0] for one in run.header.arguments}
    if not run.header.settings or {"vocab_size", "padded_vocab_size"} & {*run.header.settings}:
        return None
    model = logged_model(run) if {"--padded-vocab-size", "--vocab-size"} & flags else None
    return None if model is None else model.vocab


def closest_recipe(case: Case) -> str:
    """Return the name of the recipe that a case is built of if it is one of another model; else empty."""
    name = case.recipe.name
    return name if index.is_known(name) and model_of(index.load(name)).name != case.model.name else ""


def recipe_of(case: Case) -> str:
    """Return the name of the recipe that a case is built of; empty if the model has none and a similar one is used."""
    return "" if closest_recipe(case) else case.recipe.name


def _with_logged_rate(run: Run, overrides: tuple[str, ...]) -> tuple[str, ...]:
    """Return overrides with the learning rate of the step lines, if neither the arguments nor the user state it."""
    in_log = bool(run.header.config) or any(flag.split()[0] == "--lr" for flag in run.header.arguments)
    stated = in_log or "optimizer.lr" in overridden_keys(overrides)
    rate = None if stated else run.peak_rate
    return (format_override("optimizer.lr", rate), *overrides) if rate else overrides


def _no_gpus(run: Run) -> str:
    """Return what is missing: the GPUs, or only their number."""
    gpu = run.header.gpu
    if gpu and not run.header.world:
        return f"no estimate: the log names the GPU ({gpu}) but not how many; add --gpus 8x{gpu}"
    if gpu:
        return f"no estimate: {gpus_unknown(run)}; add --gpus {run.header.world}x{_nearest_gpu(run)}"
    return f"no estimate: {NO_GPUS}; add --gpus {run.header.world or run.header.data_ranks or 8}xH100"


def gpus_unknown(run: Run) -> str:
    """Return why the GPUs of a log are unknown: it does not name them, or they are not in the catalogue."""
    gpu = run.header.gpu
    known = not gpu or clusters.is_known(gpu)
    return NO_GPUS if known else f"the log names the GPU {gpu}, which is not in the catalogue"


def _nearest_gpu(run: Run) -> str:
    """Return the catalogue's GPU with a similar name, of those with at least the memory of the log's GPU if known."""
    try:
        return clusters.cluster(f"1x{run.header.gpu}").gpu.name
    except InputError as error:
        similar = [clusters.gpu(one.partition("x")[2]) for one in error.fix if clusters.is_known(one.partition("x")[2])]
    enough = [one for one in similar if one.memory_gib >= (run.header.capacity_gib or 0.0)]
    return next((one.name for one in (*enough, *similar)), "H100")


def gpus_of(run: Run) -> str | None:
    """Return the GPUs that the log names, if they are known."""
    named = run.header.gpus or (f"{run.header.world}x{run.header.gpu}" if run.header.gpu and run.header.world else "")
    with suppress(InputError):
        return str(clusters.cluster(named)) if named else None
    return None


def _cluster(run: Run, gpus: str | Cluster | None) -> Cluster | None:
    found = gpus or gpus_of(run)
    return clusters.cluster(found) if isinstance(found, str) else found


def _from_settings(run: Run, where: Cluster | None, overrides: tuple[str, ...]) -> tuple[Case | None, str]:
    """Parse the arguments or the config that Megatron prints as a file of its own."""
    if where is None:
        return None, _no_gpus(run)
    try:
        reading = read_settings(run, _with_logged_rate(run, overrides))
    except InputError as error:
        what = "config" if run.header.config else "arguments"
        return None, f"no estimate: the {what} in the log cannot be parsed ({error.reason}); add --recipe NAME"
    missing = missing_arguments(run)
    if reading.model is None:
        names = ", ".join(one for one in missing if one in MODEL_ARGUMENTS)
        part = f"its arguments lack {names}: use --model NAME, and the others are taken from the log"
        return None, f"no estimate: the log does not describe the model; {part}" if names else _no_recipe(run, where)
    lacks = f"{LACKS} {', '.join(missing)}: Megatron-LM's defaults are assumed; overrides change it"
    recipe = complete(reading, where)
    if run.header.config:  # its name would be that of the log
        recipe = msgspec.structs.replace(recipe, name=reading.model.name)
    return case_of(recipe, reading.model, where, reading.engine), lacks if missing else ""


def _from_name(run: Run, where: Cluster, overrides: tuple[str, ...]) -> tuple[Case | None, str]:
    """Build the case of the model that the log names, with the layout in the log."""
    try:
        model = models.find(run.header.model)
    except InputError:
        return None, f"no estimate: the log's model {run.header.model} is not in the catalog; {NAME_IT}"
    question = Question(model, model.name, where, "pretrain", engine=ENGINE.get(run.kind, "meshwright"))
    note = f"the estimate is for {model.name} with the layout in the log; other settings are those of our recipe"
    return plan_fixed(question, None, logged_overrides(run, overrides)).case, note
