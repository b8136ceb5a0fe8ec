"""Vision-language models: vision modules, image encoding and freezing."""

from __future__ import annotations

from meshwright.engine.vision.encode_images import ImageFeatures, encode_images, feature_indices, image_groups
from meshwright.engine.vision.vision_modules import (
    VISION_MODULES,
    VisionModules,
    check_deepstack_layers,
    freeze,
    is_vision_module,
    vision_modules_of,
    vision_part,
)

__all__ = [
    "VISION_MODULES",
    "ImageFeatures",
    "VisionModules",
    "check_deepstack_layers",
    "encode_images",
    "feature_indices",
    "freeze",
    "image_groups",
    "is_vision_module",
    "vision_modules_of",
    "vision_part",
]
