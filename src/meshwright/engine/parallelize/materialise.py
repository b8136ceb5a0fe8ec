"""Weights come into being: only now, and on each rank only the part it holds."""

from __future__ import annotations

import torch
from torch import nn

from meshwright.engine.model.initial import Initial, start
from meshwright.engine.model.stage import Stage


def materialise(stage: Stage, initial: dict[str, Initial], seed: int, device: torch.device, offloaded: bool) -> None:
    """Allocates a rank's part of a stage and fills it as the seed and the names say."""
    tied = tied_name(stage)
    stage.to_empty(device="cpu" if offloaded else device)
    if tied and stage.first and stage.last:
        stage.lm_head.weight = stage.embedding.weight
    for name, parameter in stage.named_parameters():
        known = tied if tied and name == "lm_head.weight" else name
        start(parameter, known, initial[recorded(known, initial)], seed)
    fill_buffers(stage, initial, seed, device)


def tied_name(stage: Stage) -> str:
    """The name of the embedding where the head shares its weights; empty where it has its own."""
    if not getattr(stage.body.config, "tie_word_embeddings", False):
        return ""
    return f"{stage.parts.body}.{stage.parts.embedding}.weight"


def recorded(name: str, initial: dict[str, Initial]) -> str:
    """The name under which the start of a parameter was recorded: a part of a split one starts like the whole."""
    return name if name in initial else name.rpartition("_")[0]


def fill_buffers(stage: nn.Module, initial: dict[str, Initial], seed: int, device: torch.device) -> None:
    """Allocates the buffers of a stage and fills them; those that nothing was recorded of stay as they are."""
    for path, module in stage.named_modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            known = f"{path}.{name}"
            if known in initial:
                module._buffers[name] = torch.empty_like(buffer, device=device)
                start(module._buffers[name], known, initial[known], seed)
