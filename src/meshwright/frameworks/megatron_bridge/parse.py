"""From what a file says to a recipe: the values of the named recipe, what is said on top, and what the runner does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from meshwright.clusters import is_known as knows_gpu
from meshwright.frameworks.framework import Content, GpuRequest, ParsedConfig
from meshwright.frameworks.megatron_bridge import bridge_recipes, command, run_config, snippet
from meshwright.frameworks.megatron_bridge.parsed_config import ParsedRun
from meshwright.frameworks.megatron_bridge.runner import decided, measures_only, without_shape
from meshwright.frameworks.megatron_bridge.supported_keys import readable
from meshwright.frameworks.model_match import find_model
from meshwright.recipes.types import Goal, Recipe

SETTLED = ("overlap.gather-needs-reduction", "learning_rate.decay-inside-warmup")
"""Rules of its engine's own command line that are no rules here: the first does not hold, the second only warns."""
SECTIONS = frozenset({"model", "train", "optimizer", "scheduler", "ddp", "dataset", "checkpoint", "logger"})


def recognises(content: Content) -> int:
    """How surely a file is of Megatron-Bridge."""
    if content.format == "shell":
        return 3 if command.runs(content) else int(command.names_runner(content))
    if content.format == "python":
        return 3 if "megatron.bridge" in content.text else 0
    target = content.settings.get("_target_")
    if target is not None and "megatron.bridge" in str(target.value):
        return 4
    marked = any(key.startswith("model.") and key.endswith("_model_parallel_size") for key in content.settings)
    inside = sum(1 for section in SECTIONS if section in content.top_level_keys())
    return 3 if marked and inside > 1 else 2 if inside > 3 else 0


def parse(content: Content) -> ParsedConfig:
    """The recipe that a script, a Python file or a saved config means."""
    reader = {"shell": command.read, "python": snippet.read}.get(content.format, run_config.read)
    return assemble(reader(content), content.path)


def assemble(spoken: ParsedRun, path: str) -> ParsedConfig:
    """A file's settings on top of the recipe that it names."""
    name = str(spoken.recipe.value) if spoken.recipe and not spoken.recipe.unresolved else ""
    row = bridge_recipes.find(name) if name else None
    goal: Goal = (row.goal if row else None) or spoken.goal or "pretrain"
    settings = dict(spoken.settings)
    model = find_model(spoken.model) or (find_model(row.model) if row else None)
    if model is None and spoken.form == "saved":
        model = run_config.model_of(settings)
    base = row.recipe() if row else bridge_recipes.common(goal)
    base = msgspec.structs.replace(base, model=model.name if model else "")
    if spoken.form == "saved" and measures_only(settings):
        base = msgspec.structs.replace(base, benchmark=True)
    if spoken.form == "saved":
        settings = without_shape(settings, model)
    notes = list(spoken.notes)
    own = decided(spoken, settings, base, model)
    if spoken.recipe is not None and spoken.recipe.unresolved:
        notes.append("the recipe's name is only known when the script runs: its values were not judged")
    elif row is not None and row.raises:
        model = None
    elif row is None and spoken.form != "saved" and name not in snippet.COMMON:
        model = None if not spoken.model else model
    return ParsedConfig(
        settings=settings,
        name=name or _stem(path),
        model=model,
        goal=goal,
        base=base,
        gpu_request=_asked(spoken, name, row),
        env=spoken.env,
        notes=tuple(notes),
        files=tuple(dict.fromkeys([path, *(setting.file for setting in settings.values())])),
        field_values=own,
        mappable=readable(settings, base, model),
        suppressed_rules=_settled(row, base, own),
    )


def _settled(row: bridge_recipes.Upstream | None, base: Recipe, own: Mapping[str, Any]) -> tuple[str, ...]:
    """Rules of ours that do not hold here, or that the named recipe answers itself."""
    found = list(SETTLED)
    if row is not None and own.get("data.seq_length", base.data.seq_length) == base.data.seq_length:
        found.append("sequence.beyond-model")  # a recipe for long samples changes the model's positions
    if row is not None and base.layout.offload == "activations":
        found.append("memory.host")  # it offloads some layers, not all
    return tuple(found)


def _stem(path: str) -> str:
    return path.rsplit("/", 1)[-1].split(".")[0] or "config"


def _asked(spoken: ParsedRun, name: str, row: bridge_recipes.Upstream | None) -> GpuRequest:
    """The launcher's GPUs; what it leaves open, the recipe's name may say."""
    asked, encoded = spoken.asked, bridge_recipes.gpus_in(name)
    gpu = asked.gpu or (encoded[1] if encoded and knows_gpu(encoded[1]) else "")
    if asked.count is None and asked.nodes is None and asked.gpus_per_node is None and encoded:
        return GpuRequest(world_size=encoded[0], gpu=gpu, source=spoken.recipe)
    return msgspec.structs.replace(asked, gpu=gpu)
