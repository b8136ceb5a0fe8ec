"""Weight initialization: each rank allocates and fills only its own shards, from a checkpoint or from the seed."""

from __future__ import annotations

import torch
from torch import nn

from meshwright.engine.hf_io.layout_map import TensorLocation
from meshwright.engine.hf_io.read import FolderWeights
from meshwright.engine.model.init import InitSpec, fill_initial
from meshwright.engine.model.nf4_linear import shapes_to_fill, weights_to_fill
from meshwright.engine.model.stage import Stage
from meshwright.engine.model.transformers_stage import TransformersStage


def init_weights(
    stage: Stage,
    initial: dict[str, InitSpec],
    seed: int,
    device: torch.device,
    offloaded: bool,
    weights: FolderWeights | None = None,
) -> None:
    """Allocate this rank's shards of a stage and fill them from a checkpoint; missing ones from seed and name."""
    stage.to_empty(device="cpu" if offloaded else device)
    if isinstance(stage, TransformersStage):
        stage.tie_again()
    elif stage.head_is_tied and stage.first and stage.last:
        stage.lm_head.weight = stage.embedding.weight
    places = places_in(stage, weights)
    for name, parameter in weights_to_fill(stage):
        source = stage.shared_name(name)
        if weights is None or not weights.fill(parameter, name, places.get(name)):
            fill_initial(parameter, source, initial[recorded_name(source, initial)], seed)
    fill_buffers(stage, initial, seed, device, weights)


def places_in(stage: nn.Module, weights: FolderWeights | None) -> dict[str, TensorLocation]:
    """Return which part of which checkpoint tensor each tensor of a stage is; empty without a checkpoint."""
    if weights is None:
        return {}
    full = ((name, torch.empty(shape, device="meta")) for name, shape in shapes_to_fill(stage).items())
    return weights.locate([*full, *stage.named_buffers()])


def recorded_name(name: str, initial: dict[str, InitSpec]) -> str:
    """Return the name under which a parameter's init was recorded: segments of a fused one share its name."""
    return name if name in initial else name.rpartition("_")[0]


def fill_buffers(
    stage: nn.Module,
    initial: dict[str, InitSpec],
    seed: int,
    device: torch.device,
    weights: FolderWeights | None = None,
) -> None:
    """Allocate and fill the buffers of a stage; buffers without a recorded init stay as they are."""
    places = places_in(stage, weights)
    for path, module in stage.named_modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            full_name = f"{path}.{name}"
            if full_name in initial:
                empty = module._buffers[name] = torch.empty_like(buffer, device=device)
                # Tables computed from the config are not in checkpoints.
                if weights is None or full_name not in places or not weights.fill(empty, full_name, places[full_name]):
                    fill_initial(empty, full_name, initial[full_name], seed)
