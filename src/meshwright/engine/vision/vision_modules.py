"""Where the parts of a vision-language model are, whatever its family calls them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from meshwright.errors import InputError

LANGUAGE, VISION, PROJECTOR = "language", "vision", "projector"


@dataclass(frozen=True)
class VisionModules:
    """The vision parts of a model by their paths in it."""

    tower: str
    blocks: str  # the tower's layers, all alike
    projector: tuple[str, ...]  # what takes the tower's output to the width of the language model
    images: str  # the family in transformers whose image processor makes patches for it
    sees_whole_images: bool = False  # a token of an image attends to all tokens of that image

    @property
    def called(self) -> tuple[str, ...]:
        """The modules that are called by themselves; a projector inside the tower is called by the tower."""
        return (self.tower, *(path for path in self.projector if not _inside(path, self.tower)))


_QWEN = VisionModules("model.visual", "model.visual.blocks", ("model.visual.merger",), "qwen2_vl")
_QWEN3 = VisionModules(
    "model.visual", "model.visual.blocks", ("model.visual.merger", "model.visual.deepstack_merger_list"), "qwen2_vl"
)
EYES: dict[str, VisionModules] = {  # by the model_type of the whole model
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": _QWEN3,
    "qwen3_5": _QWEN,
    "qwen3_5_moe": _QWEN,
    "glm4v_moe": VisionModules(
        "model.visual", "model.visual.blocks", ("model.visual.downsample", "model.visual.merger"), "glm4v"
    ),
    "gemma3": VisionModules(
        "model.vision_tower",
        "model.vision_tower.encoder.layers",
        ("model.multi_modal_projector",),
        "gemma3",
        sees_whole_images=True,
    ),
}


def eyes_of(config: Any) -> VisionModules | None:
    """The vision parts of the model that a transformers config builds; None for a language model."""
    return EYES.get(config.model_type)


def is_seen_by(eyes: VisionModules | None, path: str) -> bool:
    """Whether a module or parameter belongs to the vision parts."""
    return eyes is not None and any(_inside(path, part) for part in (eyes.tower, *eyes.projector))


def part_of(eyes: VisionModules, path: str) -> str:
    """The part of a vision-language model that a parameter belongs to: language, vision or projector."""
    if any(_inside(path, projector) for projector in eyes.projector):
        return PROJECTOR
    return VISION if _inside(path, eyes.tower) else LANGUAGE


def freeze(stage: nn.Module, eyes: VisionModules, parts: Sequence[str]) -> None:
    """Takes the parameters of these parts out of training: no gradient is computed or kept for them."""
    for path, parameter in stage.named_parameters():
        if part_of(eyes, path) in parts:
            parameter.requires_grad_(False)


def refuse_too_few_layers(config: Any, layers: int) -> None:
    """Refuses a first stage that ends before the layers to which the tower's inner layers add what they saw."""
    deep = len(getattr(config.vision_config, "deepstack_visual_indexes", None) or ())
    if layers < deep:
        raise InputError(
            f"the vision tower feeds the first {deep} layers, and the first stage chunk of the pipeline has {layers}",
            field="layout.pp",
            fix=("layout.pp=1",),
        )


def _inside(path: str, module: str) -> bool:
    return path == module or path.startswith(f"{module}.")
