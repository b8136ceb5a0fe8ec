"""Weights come into being: only now, and on each rank only the part it holds."""

from __future__ import annotations

import torch
from torch import nn

from meshwright.engine.hf_io.layout_map import Place
from meshwright.engine.hf_io.read import Weights
from meshwright.engine.model.init import InitSpec, fill_initial
from meshwright.engine.model.nf4_linear import shapes_to_fill, weights_to_fill
from meshwright.engine.model.stage import Stage


def init_weights(
    stage: Stage,
    initial: dict[str, InitSpec],
    seed: int,
    device: torch.device,
    offloaded: bool,
    weights: Weights | None = None,
) -> None:
    """Allocates a rank's part of a stage and fills it from a folder; what that does not hold as seed and names say."""
    tied = tied_embedding_name(stage)
    stage.to_empty(device="cpu" if offloaded else device)
    if tied and stage.first and stage.last:
        stage.lm_head.weight = stage.embedding.weight
    where = places_in(stage, weights)
    for name, parameter in weights_to_fill(stage):
        known = tied if tied and name == "lm_head.weight" else name
        if weights is None or not weights.fill(parameter, name, where.get(name)):
            fill_initial(parameter, known, initial[recorded_name(known, initial)], seed)
    fill_buffers(stage, initial, seed, device, weights)


def places_in(stage: nn.Module, weights: Weights | None) -> dict[str, Place]:
    """Where the tensors of a stage lie in the model that a folder was opened for; empty without a folder."""
    if weights is None:
        return {}
    whole = ((name, torch.empty(shape, device="meta")) for name, shape in shapes_to_fill(stage).items())
    return weights.places_of([*whole, *stage.named_buffers()])


def tied_embedding_name(stage: Stage) -> str:
    """The name of the embedding where the head shares its weights; empty where it has its own."""
    if not getattr(stage.body.config, "tie_word_embeddings", False):
        return ""
    return f"{stage.parts.body}.{stage.parts.embedding}.weight"


def recorded_name(name: str, initial: dict[str, InitSpec]) -> str:
    """The name under which the start of a parameter was recorded: a part of a split one starts like the whole."""
    return name if name in initial else name.rpartition("_")[0]


def fill_buffers(
    stage: nn.Module, initial: dict[str, InitSpec], seed: int, device: torch.device, weights: Weights | None = None
) -> None:
    """Allocates the buffers of a stage and fills them; those that nothing was recorded of stay as they are."""
    where = places_in(stage, weights)
    for path, module in stage.named_modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            known = f"{path}.{name}"
            if known in initial:
                made = module._buffers[name] = torch.empty_like(buffer, device=device)
                # Tables that are computed from the config are in no file.
                if weights is None or known not in where or not weights.fill(made, known, where[known]):
                    fill_initial(made, known, initial[known], seed)
