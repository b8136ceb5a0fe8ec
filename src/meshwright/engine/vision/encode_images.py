"""What a model sees of a micro batch, and where in the sequence it goes.

Samples have different numbers of images of different sizes. Their arrays are padded to stand side by side, with counts;
the padding is dropped here, before anything is computed:

    pixels          [samples, most, ...]    patches of all images of a sample, or whole images (Gemma)
    pixel_counts    [samples]
    grids           [samples, most, 3]      time, height and width of each image in patches; not for whole images
    image_counts    [samples]
    feature_counts  [samples]               tokens that the images of a sample become
    image_at        [samples, tokens]       which of these a token is; -1 for text
    axes            [samples, 3, tokens]    time, height and width of each token, where positions have three
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import isqrt
from typing import Any

import torch

from meshwright.engine.kernels.device_caps import is_dry
from meshwright.engine.patching import symbol

ImageInputs = dict[str, torch.Tensor]
VISION_UTILS = "transformers.vision_utils"  # derives positions and windows from image shapes
WINDOWS_AT_ONCE = 8  # in a dry run


@dataclass(frozen=True)
class Seen:
    """The features of all images of a micro batch, and those of the tower's inner layers (deep stack)."""

    features: torch.Tensor  # [tokens of images, width]
    deep: tuple[torch.Tensor, ...] = ()

    def placed(self, hidden: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """Hidden states with the features in the places of image tokens."""
        return torch.where((at >= 0)[..., None], self._picked(self.features, at, hidden), hidden)

    def deepened(self, hidden: torch.Tensor, at: torch.Tensor, layer: int) -> torch.Tensor:
        """Hidden states behind a layer, with what an inner layer of the tower saw added in the places of images."""
        if layer >= len(self.deep):
            return hidden
        return hidden + self._picked(self.deep[layer], at, hidden).masked_fill((at < 0)[..., None], 0)

    @staticmethod
    def _picked(features: torch.Tensor, at: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return features[at.clamp(min=0)].to(like.dtype)


def encode_images(model: Any, told: ImageInputs) -> Seen:
    """Runs the vision parts on the images of a micro batch.

    They run on a blank image where there is none: ranks that share the tower's weights gather them together.
    """
    if is_dry(told["pixels"]):
        return _look_dry(model, told)
    pixels = _without_padding(told["pixels"], told["pixel_counts"])
    grids = _without_padding(told["grids"], told["image_counts"]) if "grids" in told else None
    if not len(pixels):
        pixels, grids = _blank(model, told)  # nothing picks it, so its gradients are nought
    return _features(model, pixels, grids)


def flat_places(told: ImageInputs) -> torch.Tensor:
    """Which feature of the micro batch each token is; -1 for text."""
    counts = told["feature_counts"]
    first = counts.cumsum(0) - counts
    at = told["image_at"]
    return torch.where(at >= 0, at + first[:, None], at)


def image_groups(at: torch.Tensor) -> torch.Tensor:
    """The image that each token belongs to, counted within its sample; -1 for text."""
    seen = at >= 0
    before = torch.nn.functional.pad(seen, (1, 0))[:, :-1]
    return torch.where(seen, (seen & ~before).cumsum(1) - 1, -1)


def _without_padding(padded: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    kept = torch.arange(padded.shape[1], device=padded.device) < counts[:, None]
    return padded[kept]


def _look_dry(model: Any, told: ImageInputs) -> Seen:
    """The same without data: no sample has padding, and all pictures are squares of one size."""
    pixels = told["pixels"].flatten(0, 1).clone()
    if "grids" not in told:
        return _features(model, pixels, None)
    images = told["grids"].shape[0] * told["grids"].shape[1]
    side = isqrt(len(pixels) // images)
    grids = torch.tensor([[1, side, side]]).expand(images, 3)  # on the host, where the tower can read it
    tower = model.visual
    known = {"position_ids": symbol(VISION_UTILS, "get_vision_position_ids")(grids, tower.spatial_merge_size)}
    if hasattr(tower, "num_grid_per_side"):
        known |= zip(("interp_indices", "interp_weights"), _interpolation(tower, grids), strict=True)
    known = {name: value.to(pixels.device) for name, value in known.items()}
    if hasattr(tower, "window_size"):
        known |= zip(("window_index", "cu_window_seqlens"), _windows(tower, grids), strict=True)
    with _inputs_moved(getattr(tower, "embeddings", None), pixels.device):
        return _features(model, pixels, grids, **known)


def _interpolation(tower: Any, grids: torch.Tensor) -> Any:
    return symbol(VISION_UTILS, "get_vision_interpolation_indices_and_weights")(
        grids,
        num_grid_per_side=tower.num_grid_per_side,
        mode=tower.interpolation_mode,
        align_corners=tower.interpolation_align_corners,
        spatial_merge_size=tower.config.spatial_merge_size,
    )


def _windows(tower: Any, grids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Windows of an image, several together: that is the same memory in fewer operations."""
    index, ends = symbol(VISION_UTILS, "get_vision_window_index")(
        grids, tower.spatial_merge_size, tower.window_size, tower.patch_size
    )
    return index, torch.cat([ends[:-1:WINDOWS_AT_ONCE], ends[-1:]])


@contextmanager
def _inputs_moved(module: torch.nn.Module | None, device: torch.device) -> Iterator[None]:
    """While it lasts, what a module is given comes to the device first."""
    if module is None:
        yield
        return
    hook = module.register_forward_pre_hook(lambda _, given: tuple(one.to(device) for one in given))
    try:
        yield
    finally:
        hook.remove()


def _features(model: Any, pixels: torch.Tensor, grids: torch.Tensor | None, **known: torch.Tensor) -> Seen:
    out = model.get_image_features(pixels, **({} if grids is None else {"image_grid_thw": grids}), **known)
    found = out.pooler_output
    features = torch.cat(list(found)) if isinstance(found, (tuple, list)) else found.flatten(0, 1)
    return Seen(features, tuple(getattr(out, "deepstack_features", None) or ()))


def _blank(model: Any, told: ImageInputs) -> tuple[torch.Tensor, torch.Tensor | None]:
    pixels = told["pixels"]
    if "grids" not in told:
        return pixels.new_zeros(1, *pixels.shape[2:]), None
    side = model.config.vision_config.spatial_merge_size
    grid = torch.tensor([[1, side, side]], device=pixels.device)
    return pixels.new_zeros(side * side, *pixels.shape[2:]), grid
