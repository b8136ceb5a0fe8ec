"""Models that see: where their vision parts are, what they see of a micro batch, and what of them is trained."""

from __future__ import annotations

from meshwright.engine.vision.look import Seen, flat_places, image_groups, look
from meshwright.engine.vision.parts import EYES, Eyes, eyes_of, freeze, is_seen_by, part_of, refuse_too_few_layers

__all__ = [
    "EYES",
    "Eyes",
    "Seen",
    "eyes_of",
    "flat_places",
    "freeze",
    "image_groups",
    "is_seen_by",
    "look",
    "part_of",
    "refuse_too_few_layers",
]
