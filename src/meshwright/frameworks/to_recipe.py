"""Import a framework's file as a recipe, and list its candidate clusters."""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import lcm
from typing import Any, Literal, get_args, get_origin

import msgspec

from meshwright.clusters import Assumption, Cluster, assumptions, cluster, is_known
from meshwright.errors import InputError
from meshwright.frameworks.common import ASSUMED_VOCABULARY
from meshwright.frameworks.environment import with_references
from meshwright.frameworks.framework import Content, Framework, ParsedConfig
from meshwright.frameworks.mapping import MappedSettings, map_to_recipe
from meshwright.frameworks.model_match import local_model_path
from meshwright.models import ModelSpec, has_other_weights, reshape
from meshwright.recipes import overrides as override
from meshwright.recipes.case import resized
from meshwright.recipes.model_changes import NUMBERS
from meshwright.recipes.overrides import PRETRAINED
from meshwright.recipes.replacements import WarmupShare, warmup_steps
from meshwright.recipes.types import Architecture, Engine, Goal, Recipe, recipe_fields
from meshwright.recipes.values import bare_type

GPUS = ("H100", "A100-80", "H200", "B200", "GB200")
"""GPU types to try if a file names none; a finding must hold on all of them."""
ANY_NUMBER = "*x"  # before a GPU type: as many as the layout can have; nobody types it
WORLD_MULTIPLES = (1, 2, 4, 8, 16, 32, 64)
GPUS_PER_NODE = 8
INT_CANDIDATES = (1, 2, 4, 8, 16, 64, 512)
EXTRA_CANDIDATES = {"data.seq_length": (131_072,)}
WARMUP, GLOBAL_BATCH = "schedule.warmup_steps", "train.global_batch_size"
MODEL_KEYS = ("pretrained_model_name_or_path", "hf_model_id", "name_or_path")
MODEL_ARGUMENTS = ("model_name_or_path", "model_name", "model", "pretrained_model_name_or_path")
"""Arguments of programs that name their model."""
_SIZE_FIELDS = tuple(f"architecture.{name}" for name in Architecture.__struct_fields__ if name not in NUMBERS)


class ImportedRecipe(msgspec.Struct, frozen=True):
    """A framework's file as a recipe."""

    framework: Framework
    parsed: ParsedConfig
    mapped: MappedSettings
    recipe: Recipe
    model: ModelSpec | None
    unknown_fields: tuple[str, ...] = ()  # recipe fields set by neither the file nor an override
    file_model: ModelSpec | None = None  # the model of the file itself, if the caller gives one too
    typed: dict[str, Any] = {}  # values that overrides set, by key
    keeps_batch: bool = False  # accumulated steps keep the batch of the file in the layout that overrides set

    @property
    def warmup_share(self) -> WarmupShare:
        """The warmup as a share of the steps, unless the file or an override sets a number of steps."""
        stated = WARMUP in self.typed or WARMUP in self.mapped.source_keys
        return WarmupShare() if stated else self.parsed.program.warmup_share

    @property
    def epoch_intervals(self) -> tuple[str, ...]:
        """The fields in steps that the program does at the end of every epoch, unless an override sets them."""
        return tuple(field for field in self.parsed.program.per_epoch if field not in self.typed)

    @property
    def named_model(self) -> str:
        """The model that the file names, by a Hugging Face id or as torchtitan does; empty if it names none."""
        found = self.parsed.settings
        for key, setting in found.items():
            if key.startswith("model") and key.rsplit(".", 1)[-1] in MODEL_KEYS and not setting.unresolved:
                return str(setting.value)
        given = [one for name, one in self.parsed.program.given.items() if name in MODEL_ARGUMENTS]
        if given and not given[0].unresolved and isinstance(given[0].value, str):
            return given[0].value
        parts = [str(found[key].value) for key in ("model.name", "model.flavor") if key in found]
        return " ".join(parts) if len(parts) == 2 else ""

    @property
    def engine(self) -> Engine:
        """The engine that runs it."""
        return self.parsed.engine or self.framework.engine


SHARES = ("layout.micro_batch_size", "layout.tp", "layout.pp", "layout.cp", "layout.ep")
"""Fields of the layout that change how many micro batches a step has, and not the samples of a step."""
TO_WRITE = re.compile(r"; write (\w+\.\w+)=")
"""The override that a note on a missing value asks for: the note goes once it is typed."""


def import_recipe(
    framework: Framework,
    content: Content,
    model: ModelSpec | None = None,
    overrides: list[str] | None = None,
    goal: Goal | None = None,
    references: bool = False,
) -> ImportedRecipe:
    """Import a file as a recipe. `model` and `goal` are for files that do not name theirs; overrides apply last.

    With `references`, paths that the file takes from environment variables stay such texts.
    """
    if framework.formatter_for is not None:
        framework = msgspec.structs.replace(framework, format_setting=framework.formatter_for(content))
    content, texts = framework.own_overrides(content, overrides or [])
    parsed = _with_goal(framework.parse(content), content.path, goal)
    parsed = with_references(framework, parsed) if references else parsed
    file_model = _file_model(parsed)
    if model is not None:
        if file_model is not None and any(note.startswith(ASSUMED_VOCABULARY) for note in parsed.notes):
            file_model = msgspec.structs.replace(file_model, vocab=model.vocab)  # the file leaves it open
        parsed = _with_model(parsed, model)
    mapped = _with_weights_here(map_to_recipe(framework, parsed), content)
    requested = override.requested(mapped.recipe, texts)
    notes = tuple(note for note in parsed.notes if not (one := TO_WRITE.search(note)) or one[1] not in requested)
    parsed = msgspec.structs.replace(parsed, notes=notes)
    recipe, _ = override.change(mapped.recipe, requested)
    found = None if parsed.model is None else resized(recipe, parsed.model)
    unknown = tuple(
        field for field in parsed.unknown_fields if field not in requested and field not in mapped.source_keys
    )
    names = {text.partition("=")[0].strip() for text in texts}  # a key of the framework's own has its own meaning
    keeps_batch = any(name in SHARES or f"layout.{name}" in SHARES for name in names)
    keeps_batch = keeps_batch and framework.complete is not None and GLOBAL_BATCH not in requested
    return ImportedRecipe(framework, parsed, mapped, recipe, found, unknown, file_model, requested, keeps_batch)


def _with_weights_here(mapped: MappedSettings, content: Content) -> MappedSettings:
    """Return the recipe with the path from here of a model folder that the file names by another one."""
    checkpoint = mapped.recipe.checkpoint
    here = local_model_path(checkpoint.pretrained or "", content)
    if not here or here == checkpoint.pretrained:
        return mapped
    checkpoint = msgspec.structs.replace(checkpoint, pretrained=here)
    return msgspec.structs.replace(mapped, recipe=msgspec.structs.replace(mapped.recipe, checkpoint=checkpoint))


def _file_model(parsed: ParsedConfig) -> ModelSpec | None:
    """Return the model that the file itself trains, in the sizes that it sets."""
    sizes = {key.partition(".")[2]: value for key, value in parsed.field_values.items() if key in _SIZE_FIELDS}
    return parsed.model if parsed.model is None or not sizes else reshape(parsed.model, **sizes)


def _with_model(parsed: ParsedConfig, model: ModelSpec) -> ParsedConfig:
    """Return the file with the caller's model; sizes and weights of the file's own model go with it."""
    same = parsed.model is not None and parsed.model.name == model.name and not has_other_weights(model)
    dropped = (*(() if parsed.model is None else _SIZE_FIELDS), *(() if same else (PRETRAINED,)))
    kept = {key: value for key, value in parsed.field_values.items() if key not in dropped}
    notes = tuple(note for note in parsed.notes if not note.startswith(ASSUMED_VOCABULARY))
    return msgspec.structs.replace(parsed, model=model, field_values=kept, notes=notes)


def _with_goal(parsed: ParsedConfig, path: str, goal: Goal | None) -> ParsedConfig:
    """Return the parsed file with the requested goal; raise InputError if the file is for another one."""
    if goal is None or goal == parsed.goal:
        return parsed
    if not parsed.goal_open:
        if goal == "pretrain" and parsed.goal == "sft" and parsed.field_values.get("data.train_on") == "all":
            note = f"{path} trains all tokens of its texts from existing weights: that is sft with data.train_on=all"
            return msgspec.structs.replace(parsed, notes=(*parsed.notes, note))
        raise InputError(f"{path} is for {parsed.goal}", field="goal", value=goal, fix=(f"--goal {parsed.goal}",))
    return msgspec.structs.replace(parsed, goal=goal)


def complete(imported: ImportedRecipe, on: Cluster) -> Recipe:
    """Return the recipe on a cluster, with fields derived from the number of GPUs; overrides stay as typed."""
    recipe = msgspec.structs.replace(imported.recipe, cluster=str(on))
    if imported.framework.complete is None:
        return recipe
    completed = imported.framework.complete(recipe, imported.parsed, on)
    if imported.keeps_batch:  # a field of the layout changes memory and speed only
        of_file = imported.framework.complete(imported.mapped.recipe, imported.parsed, on).train.global_batch_size
        completed = override.change(completed, {GLOBAL_BATCH: of_file})[0]
    completed = override.change(completed, imported.typed)[0] if imported.typed else completed
    steps = warmup_steps(imported.warmup_share, completed)
    return completed if steps is None else override.change(completed, {WARMUP: steps})[0]


def asked_gpus(imported: ImportedRecipe, gpu: str) -> str:
    """Return as many GPUs of a type as the file's layout has; any number if it needs several and leaves it open."""
    request, worlds = imported.parsed.gpu_request, list(_worlds(imported))
    if request.count is not None or worlds[0] == 1:
        return gpu
    return str(_cluster(worlds[0], request.gpus_per_node, gpu)) if len(worlds) == 1 else f"{ANY_NUMBER}{gpu}"


def clusters_for(imported: ImportedRecipe, gpus: str | None) -> tuple[bool, list[Cluster]]:
    """Return whether the GPUs are known, and the cluster, or all candidate clusters."""
    any_of = gpus.removeprefix(ANY_NUMBER) if gpus is not None and gpus.startswith(ANY_NUMBER) else ""
    if gpus is not None and not any_of:
        return True, [cluster(gpus)]
    request = imported.parsed.gpu_request
    gpu = any_of or (request.gpu if is_known(request.gpu) else "")  # a site has names of its own: gpu:ampere:4
    if request.count is not None and gpu:
        return True, [_cluster(request.count, request.gpus_per_node, gpu)]
    types = (gpu,) if gpu else GPUS
    worlds = [request.count] if request.count is not None else list(_worlds(imported))
    return False, [_cluster(world, request.gpus_per_node, gpu) for gpu in types for world in worlds]


def gpu_variant(imported: ImportedRecipe, gpus: str | None) -> tuple[Assumption, ...]:
    """Return which card was taken for the GPU type that a file names, if several have that name: gpu:a100:4."""
    request = imported.parsed.gpu_request
    if gpus is not None or request.count is None or not is_known(request.gpu):
        return ()
    found = (one for one in assumptions(request.text(request.gpu)) if one.field == "variant")
    typed = request.text("TYPE")
    return tuple(msgspec.structs.replace(one, message=f"{one.message}, as --gpus {typed}") for one in found)


def _worlds(imported: ImportedRecipe) -> Iterator[int]:
    layout, request = imported.recipe.layout, imported.parsed.gpu_request
    dense = layout.tp * layout.cp * (layout.ep if imported.engine == "kempnerforge" else 1)
    least = layout.pp * lcm(dense, layout.ep * layout.etp) * layout.dp_replicate
    if layout.dp_shard > 0:
        yield max(layout.pp * dense * layout.dp_replicate * layout.dp_shard, least)
        return
    if request.gpus_per_node and least % request.gpus_per_node:
        least = lcm(least, request.gpus_per_node)
    yield from (least * factor for factor in WORLD_MULTIPLES)


def _cluster(world: int, per_node: int | None, gpu: str) -> Cluster:
    size = per_node or GPUS_PER_NODE
    return cluster(f"{world // size}x{size}x{gpu}" if world % size == 0 and world >= size else f"{world}x{gpu}")


def alternatives(field: str) -> list[Any]:
    """Return candidate values for an unresolved field."""
    field_type, _ = bare_type(recipe_fields()[field].type)
    if get_origin(field_type) is Literal:
        return list(get_args(field_type))
    if field_type is bool:
        return [True, False]
    return [*INT_CANDIDATES, *EXTRA_CANDIDATES.get(field, ())] if field_type is int else []
