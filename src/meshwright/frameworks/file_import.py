"""Import a framework's file as one of our recipes: what it trains, what was assumed, what has no counterpart here."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from math import ceil
from pathlib import Path

import msgspec

from meshwright import clusters
from meshwright.clusters import Assumption, Cluster
from meshwright.errors import InputError
from meshwright.frameworks.catalogue_shape import catalogue_reference
from meshwright.frameworks.check_file import Count, check, findings_without_fixes
from meshwright.frameworks.common import ASSUMED_VOCABULARY, DEFAULT_VOCABULARY
from meshwright.frameworks.detection import framework_of
from meshwright.frameworks.framework import Content, Framework
from meshwright.frameworks.mapping import fields_set_by, relevant_fields, same_value, text_of
from meshwright.frameworks.model_match import find_local_model, find_model, model_option
from meshwright.frameworks.open_length import LENGTHS, open_length
from meshwright.frameworks.result import CheckResult
from meshwright.frameworks.to_recipe import GLOBAL_BATCH, WARMUP, ImportedRecipe, complete, gpu_variant, import_recipe
from meshwright.models import ModelSpec, names
from meshwright.planner.plan import OPEN_LENGTH
from meshwright.recipes import overrides as override
from meshwright.recipes.case import resized
from meshwright.recipes.key_maps import config_keys
from meshwright.recipes.model_changes import NUMBERS, published_numerics, sizes
from meshwright.recipes.replacements import warmup_steps
from meshwright.recipes.types import Architecture, Goal, Recipe, field_value, recipe_fields
from meshwright.rules.rule import Finding

VOCABULARY = "architecture.vocab"
UNNAMED = "config"  # the recipe name of a file that sets none
MEGATRON_FACTOR = 8.0  # of --use-rope-scaling by default
_NAME = re.compile(r"[\w.-]+")


class ImportedFile(msgspec.Struct, frozen=True, dict=True):
    """A framework's file as a recipe of ours on a cluster."""

    framework: Framework
    content: Content
    recipe: Recipe
    model: ModelSpec
    cluster: Cluster
    check: Callable[[], CheckResult]  # of the file on this cluster
    findings_with: Callable[[Sequence[str]], tuple[Finding, ...]]  # the same with more overrides, without trying fixes
    settings: ImportedRecipe
    assumed: tuple[Assumption, ...]
    resolvable: bool  # whether recipe.model can be opened; otherwise only `model` has the shape
    given_model: str | None = None  # how the recipe refers to a model that the caller gives in place of the file's

    @cached_property
    def checked(self) -> CheckResult:
        """The findings and the repair of the file; trying fixes takes seconds, and few commands show them."""
        return self.check()

    @property
    def rejected(self) -> tuple[Finding, ...]:
        """Settings with an error that were therefore not imported, without those whose field the user typed."""
        found = (*self.settings.parsed.findings, *self.settings.mapped.findings)
        return tuple(one for one in found if one.severity == "error" and not self.is_typed(one.field))

    def is_typed(self, key: str) -> bool:
        """Return whether an override has replaced the field that a key of the file sets."""
        fields = fields_set_by(self.framework.key_map, key)
        return bool(fields) and fields[0] in self.settings.typed

    def without_overrides(self, on: Cluster) -> tuple[Recipe, ModelSpec]:
        """Return the recipe and the model of the file as it is, on a cluster."""
        mapped, parsed = self.settings.mapped.recipe, self.settings.parsed
        model = self.model if parsed.model is None else resized(mapped, parsed.model)
        settings = msgspec.structs.replace(self.settings, recipe=mapped, model=model, typed={})
        recipe = _named_recipe(settings, model, self.content.path, on, self.recipe.cluster, self.given_model)[0]
        counted = [*self.settings.epoch_intervals, *([WARMUP] if self.settings.warmup_share else [])]
        kept = {field: field_value(self.recipe, field) for field in counted if field not in self.settings.typed}
        return override.change(recipe, kept)[0], model  # steps that follow from the file's shares are no changes of it


def import_file(
    framework: Framework,
    content: Content,
    *,
    gpus: str | None = None,
    model: tuple[ModelSpec, str] | None = None,
    goal: Goal | None = None,
    overrides: Sequence[str] = (),
    count: Count = lambda _: None,
    references: bool = False,
) -> ImportedFile:
    """Return a file as a recipe; raise InputError for what it leaves open and the caller does not give.

    `model` is a model and how a recipe refers to it; `goal` is for files that do not name theirs. With `references`,
    paths that the file takes from environment variables stay such texts: a job for the same framework has them too.
    """
    spec = None if model is None else model[0]
    settings = import_recipe(framework, content, spec, list(overrides), goal, references)
    if settings.model is None:
        unknown = settings.named_model
        reason = f"{content.path} does not name its model, or not one of known shape"
        if unknown:
            reason = f"{content.path} trains {unknown}, which is not in the catalogue: name its config.json or folder"
            raise InputError(reason, field="model", value=unknown, fix=(model_option(content),))
        raise InputError(reason, field="model", fix=("--model llama3-8b", model_option(content)))
    on, assumed = _cluster(content.path, settings, gpus)
    given = None if model is None else model[1]
    reference = _cluster_reference(on, gpus)
    named, resolvable = _named_recipe(settings, settings.model, content.path, on, reference, given)
    named, per_epoch = _with_epoch_intervals(content.path, settings, named, count)
    named, warmup = _with_warmup(content.path, settings, named, count)
    return ImportedFile(
        framework=framework,
        content=content,
        recipe=named,
        model=settings.model,
        cluster=on,
        check=lambda: check(
            framework, content, gpus=gpus or str(on), model=spec, overrides=overrides, goal=goal, count=count
        ),
        findings_with=lambda more: findings_without_fixes(
            framework, content, gpus or str(on), spec, (*overrides, *more), goal
        ),
        settings=settings,
        assumed=(
            *assumed,
            *_assumed_vocabulary(settings, given),
            *_assumed_fields(settings, named),
            *_assumed_length(content.path, settings, named, overrides),
            *_assumed_goal(settings, goal),
            *_assumed_batch(content.path, settings, on),
            *warmup,
            *per_epoch,
        ),
        resolvable=resolvable,
        given_model=given,
    )


def starts_from_weights(content: Content) -> bool:
    """Return whether another framework's file names its initial weights, or fine-tunes a model."""
    framework = framework_of(content)
    if framework is None:
        return False
    recipe = import_recipe(framework, content).recipe
    return bool(recipe.checkpoint.pretrained) or recipe.goal != "pretrain"


def _named_recipe(
    settings: ImportedRecipe, model: ModelSpec, path: str, on: Cluster, cluster: str, given: str | None
) -> tuple[Recipe, bool]:
    """Return the recipe of a file with its name and a reference to its model, and whether there is one."""
    named = msgspec.structs.replace(complete(settings, on), cluster=cluster)
    if named.name == UNNAMED or not _NAME.fullmatch(named.name):
        named = msgspec.structs.replace(named, name=Path(path).stem)
    return referring(_without_irrelevant(named, model), settings, given)


def referring(recipe: Recipe, settings: ImportedRecipe, given: str | None = None) -> tuple[Recipe, bool]:
    """Return the recipe of a file with a reference to its model, and whether there is one; `given` replaces it."""
    found = settings.model
    named = settings.parsed.model
    if given is not None or found is None:
        reference: tuple[str | None, Architecture | None] | None = (given, None)
    elif named is not None and named.name in names() and sizes(recipe):  # a catalogue model in other sizes
        reference = (named.name, None)
    elif named is not None and named.name not in names() and find_local_model(named.source)[0] is not None:
        reference = (str(Path(named.source).expanduser().resolve()), None)
    elif named is not None and named.name not in names() and named.name == named.hf_id:  # a hub id of another shape
        reference = (named.hf_id, None)
    else:
        reference = catalogue_reference(found, _scaling(settings), _stated(settings, "architecture.rope_theta"))
    if reference is not None and reference[0] is not None:
        changes = {} if reference[1] is None else {"architecture": reference[1]}
        recipe = msgspec.structs.replace(recipe, model=reference[0], **changes)
        recipe = recipe if given is not None else _with_tokenizer(recipe, settings)
    return _with_numbers(recipe, settings, replaced=given is not None), reference is not None


def _with_tokenizer(recipe: Recipe, settings: ImportedRecipe) -> Recipe:
    """Return the recipe with the tokenizer that the file names, unless it is that of the recipe's model.

    A file that describes its model by sizes may become a resized model of another family, which has another tokenizer.
    """
    named = _named_tokenizer(settings)
    if recipe.data.tokenizer or "data.tokenizer" in settings.typed or not named:
        return recipe
    owner, model = find_model(named), find_model(recipe.model)
    if owner is not None and model is not None and owner.hf_id == model.hf_id:
        return recipe
    return msgspec.structs.replace(recipe, data=msgspec.structs.replace(recipe.data, tokenizer=named))


def _named_tokenizer(settings: ImportedRecipe) -> str:
    """Return the tokenizer that the file names; empty if it names none, or trains without one."""
    found = settings.parsed.settings
    kinds = [setting for key, setting in found.items() if key.rpartition(".")[2] == "tokenizer_type"]
    if any(str(setting.value).startswith("Null") for setting in kinds):
        return ""
    keys = [row.key for row in config_keys(settings.framework.key_map).values() if row.field == "data.tokenizer"]
    named = [found[key] for key in keys if key in found and not found[key].unresolved]
    return str(named[0].value) if named and isinstance(named[0].value, str) else ""


def _scaling(settings: ImportedRecipe) -> float | None:
    """Return the factor of the RoPE scaling of a file that describes its model by sizes; None if it names a model."""
    found = settings.parsed.settings
    if settings.framework.name not in ("megatron-lm", "kempnerforge") or "multi_latent_attention" in found:
        return None
    if "use_rope_scaling" not in found:
        return 0.0
    factor = found.get("rope_scaling_factor")
    with suppress(ValueError):
        return MEGATRON_FACTOR if factor is None else float(str(factor.value))
    return None


def _with_numbers(recipe: Recipe, settings: ImportedRecipe, replaced: bool) -> Recipe:
    """Return the recipe with the numbers that the file trains with, where those of the recipe's model differ.

    A model that the caller gives in place of the file's keeps its own; the file has those that it does not state.
    """
    published = published_numerics(recipe.model)
    numbers = {}
    for name in NUMBERS:
        asked = getattr(settings.recipe.architecture, name)  # by an override
        stated = asked if asked is not None else _stated(settings, f"architecture.{name}")
        known = getattr(published, name)
        kept = asked is None and replaced and known is not None
        if stated is not None and not kept and not same_value(stated, known):
            numbers[name] = stated
    if settings.model is not None and settings.model.learned_positions:
        numbers.pop("rope_theta", None)
    return msgspec.structs.replace(recipe, architecture=msgspec.structs.replace(recipe.architecture, **numbers))


def _stated(settings: ImportedRecipe, field: str) -> float | None:
    """Return a number of the model as the file sets it, or as the framework does by default; None if unknown."""
    rows = [row for row in config_keys(settings.framework.key_map).values() if row.field == field]
    for row in rows:
        setting = settings.parsed.settings.get(row.key)
        value = row.default if setting is None else None if setting.unresolved else setting.value
        with suppress(ValueError, TypeError):
            return None if value is None else float(value)
    return None


def _without_irrelevant(recipe: Recipe, model: ModelSpec) -> Recipe:
    """Return the recipe with the defaults of fields that do not affect it, such as the router's without experts."""
    fields, relevant = recipe_fields(), relevant_fields(recipe, model)
    unused = [key for key in fields if key not in relevant and not key.startswith("architecture.")]
    return override.change(recipe, {key: fields[key].default for key in unused})[0]


def _cluster_reference(on: Cluster, gpus: str | None) -> str:
    return clusters.cluster_reference(gpus or "") or str(on)


def _cluster(path: str, settings: ImportedRecipe, gpus: str | None) -> tuple[Cluster, tuple[Assumption, ...]]:
    """Return the cluster of a file: as given, or as the file requests it, on the default GPU type if it names none."""
    if gpus is not None:
        return clusters.cluster(gpus), ()
    request = settings.parsed.gpu_request
    count = request.count
    if count is None:
        reason = f"{path} does not say how many GPUs it runs on"
        gpu, each = request.gpu or clusters.DEFAULT_GPU, request.gpus_per_node
        if each is not None:
            reason = f"{path} starts {each} GPUs per node, but does not say how many nodes and which GPUs"
        if each is not None and request.gpu:
            reason = f"{path} starts {each} {gpu} per node, but does not say how many nodes"
        few = each or 8
        raise InputError(reason, field="gpus", fix=(f"--gpus {few}x{gpu}", f"--gpus 4x{few}x{gpu}"))
    gpu = request.gpu or clusters.DEFAULT_GPU
    on = clusters.cluster(request.text(gpu))
    if request.gpu:
        return on, gpu_variant(settings, None)
    other = request.text("TYPE")
    text = f"{path} starts {count} GPUs of a type it does not name: {on} is assumed; write --gpus {other} for another"
    return on, (Assumption("gpu", gpu, text),)


def _assumed_vocabulary(settings: ImportedRecipe, given: str | None) -> Iterator[Assumption]:
    """Yield the vocabulary that was taken for a tokenizer whose size is unknown here; a given model has its own."""
    if given is not None or VOCABULARY in settings.typed or settings.model is None:
        return
    for note in settings.parsed.notes:
        if note.startswith((ASSUMED_VOCABULARY, DEFAULT_VOCABULARY)):
            yield Assumption(VOCABULARY, str(settings.model.vocab), note)


def _assumed_fields(settings: ImportedRecipe, recipe: Recipe) -> Iterator[Assumption]:
    """Yield the fields whose value the file leaves to the program or to run time, with the value taken."""
    for field in dict.fromkeys((*settings.unknown_fields, *settings.mapped.unresolved)):
        if field in LENGTHS or field in settings.typed:
            continue
        value = text_of(field_value(recipe, field))
        why = "the training program sets it" if field in settings.unknown_fields else "it is known only when it runs"
        yield Assumption(field, value, f"{field}={value} is assumed: {why}; write {field}=VALUE for another")


def _assumed_length(
    path: str, settings: ImportedRecipe, recipe: Recipe, overrides: Sequence[str]
) -> Iterator[Assumption]:
    """Yield that neither the file nor an override says how long it trains: the recipe's steps are then nobody's."""
    text = open_length(path, settings, recipe, overrides)
    if text:
        yield Assumption(OPEN_LENGTH, "", text)


def _with_epoch_intervals(
    path: str, settings: ImportedRecipe, recipe: Recipe, count: Count
) -> tuple[Recipe, list[Assumption]]:
    """Return the recipe that saves and validates as often as the program does per epoch, if its steps are known."""
    notes: list[Assumption] = []
    for field in settings.epoch_intervals:
        name = settings.parsed.program.per_epoch[field]
        once = msgspec.structs.replace(recipe, train=msgspec.structs.replace(recipe.train, epochs=1.0))
        counted = count(once)
        if counted is None:
            text = f"{path}: {name} at the end of every epoch is not carried, because its steps follow from the data: "
            notes.append(Assumption(field, "0", f"{text}write {field}=N"))
            continue
        steps = max(1, ceil(counted.samples / recipe.train.global_batch_size))
        recipe = override.change(recipe, {field: steps})[0]
        text = f"{field}={steps}, the steps of an epoch: {path} has {name} at the end of every epoch"
        notes.append(Assumption(field, str(steps), text))
    return recipe, notes


def _with_warmup(path: str, settings: ImportedRecipe, recipe: Recipe, count: Count) -> tuple[Recipe, list[Assumption]]:
    """Return the recipe whose warmup is the file's share of its steps, counted in the data if epochs set them."""
    share = settings.warmup_share
    if not share or WARMUP in settings.typed:
        return recipe, []
    counted = count(recipe) if recipe.train.epochs else None
    if counted is not None:
        total = max(1, ceil(counted.samples / recipe.train.global_batch_size))
        steps = share.of(total)
        text = f"{WARMUP}={steps}, {share} of the {total:,} steps counted in the data: as in {path}"
        return override.change(recipe, {WARMUP: steps})[0], [Assumption(WARMUP, str(steps), text)]
    if warmup_steps(share, recipe) is not None:
        return recipe, []
    text = f"{path} warms up for {share} of its steps, whose number follows from the data: "
    text += f"{WARMUP}={recipe.schedule.warmup_steps} is assumed; write {WARMUP}=N, or train.steps=N for the length"
    return recipe, [Assumption(WARMUP, str(recipe.schedule.warmup_steps), text)]


def _assumed_goal(settings: ImportedRecipe, goal: str | None) -> Iterator[Assumption]:
    if settings.parsed.goal_open and goal is None:
        value = settings.parsed.goal
        text = f"goal {value} is assumed: the file does not name one; write --goal sft or peft"
        yield Assumption("goal", value, text)


def _assumed_batch(path: str, settings: ImportedRecipe, on: Cluster) -> Iterator[Assumption]:
    """Yield the global batch of another number of GPUs than the file starts, if it follows from them."""
    request = settings.parsed.gpu_request
    if request.is_example or request.count in (None, on.world):
        return
    if GLOBAL_BATCH in settings.typed or GLOBAL_BATCH in settings.mapped.source_keys:
        return
    there = Cluster(on.gpu, 1, int(request.count or 1))
    now, own = (complete(settings, one).train.global_batch_size for one in (on, there))
    if now != own:
        text = f"{GLOBAL_BATCH}={now:,} on {on.world:,} GPUs: the micro batches of a rank stay as in {path}, which has "
        yield Assumption(
            GLOBAL_BATCH, str(now), f"{text}{own:,} on its {there.world:,} GPUs; {GLOBAL_BATCH}={own} keeps that"
        )
