"""Module paths of the vision encoder and projector, by model family."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from meshwright.errors import InputError

LANGUAGE, VISION, PROJECTOR = "language", "vision", "projector"


@dataclass(frozen=True)
class VisionModules:
    """Paths of a model's vision modules."""

    encoder: str
    blocks: str  # the encoder's layers, all of one type
    projector: tuple[str, ...]  # maps the encoder's output to the width of the language model
    images: str  # the transformers model family of its image processor
    # Takes whole images of one size (Gemma); a token of an image then attends to all tokens of that image.
    whole_images: bool = False

    @property
    def entry_modules(self) -> tuple[str, ...]:
        """The modules that the model calls directly; a projector inside the encoder is called by the encoder."""
        return (self.encoder, *(path for path in self.projector if not _inside(path, self.encoder)))


_QWEN = VisionModules("model.visual", "model.visual.blocks", ("model.visual.merger",), "qwen2_vl")
_QWEN3 = VisionModules(
    "model.visual", "model.visual.blocks", ("model.visual.merger", "model.visual.deepstack_merger_list"), "qwen2_vl"
)
VISION_MODULES: dict[str, VisionModules] = {  # by the model_type of the outer config
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
        whole_images=True,
    ),
}


def vision_modules_of(config: Any) -> VisionModules | None:
    """Return the vision modules of a transformers config; None for a language model."""
    return VISION_MODULES.get(config.model_type)


def is_vision_module(vision_modules: VisionModules | None, path: str) -> bool:
    """Return whether a module or parameter belongs to the vision encoder or projector."""
    return vision_modules is not None and any(
        _inside(path, part) for part in (vision_modules.encoder, *vision_modules.projector)
    )


def vision_part(vision_modules: VisionModules, path: str) -> str:
    """Return the part of a vision-language model that a parameter belongs to: language, vision or projector."""
    if any(_inside(path, projector) for projector in vision_modules.projector):
        return PROJECTOR
    return VISION if _inside(path, vision_modules.encoder) else LANGUAGE


def freeze(stage: nn.Module, vision_modules: VisionModules, parts: Sequence[str]) -> None:
    """Freeze the parameters of these parts: no gradient is computed or stored for them."""
    for path, parameter in stage.named_parameters():
        if vision_part(vision_modules, path) in parts:
            parameter.requires_grad_(False)


def check_deepstack_layers(config: Any, layers: int) -> None:
    """Raise if the first pipeline stage ends before the layers that receive DeepStack features."""
    deep = len(getattr(config.vision_config, "deepstack_visual_indexes", None) or ())
    if layers < deep:
        raise InputError(
            f"the vision encoder feeds the first {deep} layers, but the first pipeline stage has only {layers}",
            field="layout.pp",
            fix=("layout.pp=1",),
        )


def _inside(path: str, module: str) -> bool:
    return path == module or path.startswith(f"{module}.")
