"""Models that see: where their vision parts are, what they see of a micro batch, and what of them is trained."""

from __future__ import annotations

from meshwright.engine.vision.encode_images import Seen, encode_images, flat_places, image_groups
from meshwright.engine.vision.vision_modules import (
    EYES,
    VisionModules,
    eyes_of,
    freeze,
    is_seen_by,
    part_of,
    refuse_too_few_layers,
)

__all__ = [
    "EYES",
    "Seen",
    "VisionModules",
    "encode_images",
    "eyes_of",
    "flat_places",
    "freeze",
    "image_groups",
    "is_seen_by",
    "part_of",
    "refuse_too_few_layers",
]
