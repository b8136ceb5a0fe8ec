"""Build a recipe from the named Megatron-Bridge recipe, its overrides, and what the runner changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from meshwright.clusters import is_known as knows_gpu
from meshwright.frameworks.framework import Content, GpuRequest, ParsedConfig
from meshwright.frameworks.megatron_bridge import bridge_recipes, command, run_config, snippet
from meshwright.frameworks.megatron_bridge.keys import is_unlisted, unlisted_note
from meshwright.frameworks.megatron_bridge.model_sizes import changed_sizes, null_vocabulary, without_model_sizes
from meshwright.frameworks.megatron_bridge.parsed_config import ParsedRun, get_value, positive_int
from meshwright.frameworks.megatron_bridge.runner import derived_fields, is_benchmark_run
from meshwright.frameworks.megatron_bridge.supported_keys import mappable_settings
from meshwright.frameworks.model_match import find_local_model, find_model
from meshwright.frameworks.types import Settings
from meshwright.models import reshape
from meshwright.recipes.types import Goal, Recipe

SUPPRESSED_RULES = ("overlap.gather-needs-reduction", "learning_rate.decay-inside-warmup")
"""Megatron-LM constraints that do not apply here: the first does not hold, the second is only a warning."""
PADDED = ("dataset.pad_to_max_length", "dataset.dataset_kwargs.pad_to_max_length")
SECTIONS = frozenset({"model", "train", "optimizer", "scheduler", "ddp", "dataset", "checkpoint", "logger"})


def detect(content: Content) -> int:
    """Return the score of a file for Megatron-Bridge."""
    if content.format == "shell":
        starts = command.runs(content) or command.started(content)
        return 3 if starts else int(command.names_runner(content))
    if content.format == "python":
        return 3 if command.PACKAGE in content.text else 0
    if content.settings.get("_target_") is not None or run_config.recipe_of(content.settings) is not None:
        targets = (one for key, one in content.settings.items() if key.rpartition(".")[2] == "_target_")
        if any(command.PACKAGE in str(one.value) for one in targets):
            return 4
    has_parallel_size = any(
        key.startswith("model.") and key.endswith("_model_parallel_size") for key in content.settings
    )
    section_count = sum(1 for section in SECTIONS if section in content.top_level_keys())
    return 3 if has_parallel_size and section_count > 1 else 2 if section_count > 3 else 0


def parse(content: Content) -> ParsedConfig:
    """Parse a script, a Python file or a saved config."""
    reader = {"shell": command.read, "python": snippet.read}.get(content.format, run_config.read)
    return assemble(reader(content), content)


def assemble(run: ParsedRun, content: Content) -> ParsedConfig:
    """Combine a file's settings with the recipe it names."""
    name = str(run.recipe.value) if run.recipe and not run.recipe.unresolved else ""
    row = bridge_recipes.find(name) if name else None
    goal: Goal = (row.goal if row else None) or run.goal or "pretrain"
    settings = dict(run.settings)
    own, problem = find_local_model(run.model, content)
    model = own or find_model(run.model) or (find_model(row.model) if row else None)
    if model is None and run.form == "saved":
        model = run_config.model_of(settings)
    base = row.recipe() if row else bridge_recipes.common(goal)
    base = msgspec.structs.replace(base, model=model.name if model else "")
    if run.form == "saved" and is_benchmark_run(settings):
        base = msgspec.structs.replace(base, benchmark=True)
    if run.form == "saved":
        settings = without_model_sizes(settings, model)
    notes = [*run.notes, *([f"{run.model}: {problem}"] if problem else [])]
    if run.form != "saved":
        notes += [f"{one.file}:{one.line} {unlisted_note(key)}" for key, one in settings.items() if is_unlisted(key)]
    sizes, unsized = changed_sizes(settings, model)
    if unsized:
        notes.append(unsized)
        model = None
    resized = reshape(model, **sizes) if model else None
    fields = derived_fields(run, settings, base, resized)
    fields |= {f"architecture.{name}": size for name, size in sizes.items()}
    if run.recipe is not None and run.recipe.unresolved:
        notes.append("the recipe name is known only at run time: its values were not checked")
    elif row is not None and row.raises:
        model = None
    elif row is None and run.form != "saved" and name not in snippet.COMMON:
        model = None if not run.model else model
    return ParsedConfig(
        settings=settings,
        name=name or _stem(content.path),
        model=model,
        goal=goal,
        base=base,
        gpu_request=_gpu_request(run, name, row),
        env=run.env,
        findings=run.findings,
        notes=tuple(notes),
        files=tuple(dict.fromkeys([content.path, *(setting.file for setting in settings.values())])),
        field_values=fields,
        mappable=mappable_settings(settings, base, model),
        assumed=_assumed_fields(settings, base),
        vocabulary=null_vocabulary(row, settings),
        suppressed_rules=_suppressed_rules(row, base, fields),
    )


def _assumed_fields(settings: Settings, base: Recipe) -> tuple[str, ...]:
    """Return the length where it is only a limit: batches of fine-tuning are padded to their longest sample.

    Datasets with images are padded to the limit under pipeline and expert parallelism (ConfigContainer.validate).
    """
    padded = any(get_value(settings, key, base.data.pad_to_max_length) is True for key in PADDED)
    packed = get_value(settings, "dataset.enable_offline_packing", base.data.packing) is True
    if base.goal == "pretrain" or packed or padded:
        return ()
    degrees = {"model.pipeline_model_parallel_size": base.layout.pp, "model.expert_model_parallel_size": base.layout.ep}
    fixed = base.data.images and any(positive_int(settings, key, degree) > 1 for key, degree in degrees.items())
    return () if fixed else ("data.seq_length",)


def _suppressed_rules(
    row: bridge_recipes.BridgeRecipe | None, base: Recipe, fields: Mapping[str, Any]
) -> tuple[str, ...]:
    """Return our rules that do not apply, or that the named recipe already satisfies."""
    found = list(SUPPRESSED_RULES)
    if row is not None and fields.get("data.seq_length", base.data.seq_length) == base.data.seq_length:
        found.append("sequence.beyond-model")  # long-context recipes extend the model's positions
    if row is not None and base.layout.offload == "activations":
        found.append("memory.host")  # it offloads only some layers
    return tuple(found)


def _stem(path: str) -> str:
    return path.rsplit("/", 1)[-1].split(".")[0] or "config"


def _gpu_request(run: ParsedRun, name: str, row: bridge_recipes.BridgeRecipe | None) -> GpuRequest:
    """Return the launcher's GPUs, completed from the recipe name."""
    request, encoded = run.gpu_request, bridge_recipes.gpus_in_name(name)
    gpu = request.gpu or (encoded[1] if encoded and knows_gpu(encoded[1]) else "")
    if request.count is None and request.nodes is None and request.gpus_per_node is None and encoded:
        return GpuRequest(world_size=encoded[0], gpu=gpu, source=run.recipe)
    return msgspec.structs.replace(request, gpu=gpu)
