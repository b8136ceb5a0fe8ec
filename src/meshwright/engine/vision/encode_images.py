"""Runs the vision encoder on the images of a micro batch and scatters their features into the sequence.

Samples have different numbers of images of different sizes. Their arrays are padded to equal length, with counts;
the padding is dropped here, before anything is computed:

    pixels          [samples, max, ...]     patches of all images of a sample, or whole images (Gemma)
    pixel_counts    [samples]
    grids           [samples, max, 3]       time, height and width of each image in patches; not for whole images
    image_counts    [samples]
    feature_counts  [samples]               image tokens of a sample
    image_at        [samples, tokens]       image feature of each token; -1 for text
    axes            [samples, 3, tokens]    time, height and width position of each token (multimodal RoPE)
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
WINDOWS_PER_OP = 8  # in a dry run


@dataclass(frozen=True)
class ImageFeatures:
    """The features of all images of a micro batch, and those of the encoder's inner layers (DeepStack)."""

    features: torch.Tensor  # [image tokens, width]
    deepstack: tuple[torch.Tensor, ...] = ()

    def scatter_into(self, hidden: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """Return hidden states with image tokens replaced by their features."""
        return torch.where((at >= 0)[..., None], self._gather(self.features, at, hidden), hidden)

    def add_deepstack(self, hidden: torch.Tensor, at: torch.Tensor, layer: int) -> torch.Tensor:
        """Return a layer's hidden states with the features of an inner encoder layer added to image tokens."""
        if layer >= len(self.deepstack):
            return hidden
        return hidden + self._gather(self.deepstack[layer], at, hidden).masked_fill((at < 0)[..., None], 0)

    @staticmethod
    def _gather(features: torch.Tensor, at: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return features[at.clamp(min=0)].to(like.dtype)


def encode_images(model: Any, inputs: ImageInputs) -> ImageFeatures:
    """Run the vision encoder on the images of a micro batch.

    Without images it runs on a blank one: the ranks that shard the encoder must all take part in its all-gathers.
    """
    if is_dry(inputs["pixels"]):
        return _encode_dry(model, inputs)
    pixels = _without_padding(inputs["pixels"], inputs["pixel_counts"])
    grids = _without_padding(inputs["grids"], inputs["image_counts"]) if "grids" in inputs else None
    if not len(pixels):
        pixels, grids = _blank(model, inputs)  # no token uses its features, so its gradients are zero
    return _features(model, pixels, grids)


def feature_indices(inputs: ImageInputs) -> torch.Tensor:
    """Return the index of each token's image feature in the micro batch; -1 for text."""
    counts = inputs["feature_counts"]
    first = counts.cumsum(0) - counts
    at = inputs["image_at"]
    return torch.where(at >= 0, at + first[:, None], at)


def image_groups(at: torch.Tensor) -> torch.Tensor:
    """Return the image index of each token within its sample; -1 for text."""
    is_image = at >= 0
    before = torch.nn.functional.pad(is_image, (1, 0))[:, :-1]
    return torch.where(is_image, (is_image & ~before).cumsum(1) - 1, -1)


def _without_padding(padded: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    kept = torch.arange(padded.shape[1], device=padded.device) < counts[:, None]
    return padded[kept]


def _encode_dry(model: Any, inputs: ImageInputs) -> ImageFeatures:
    """Encode in a dry run, without data: no padding, and all images are squares of one size."""
    pixels = inputs["pixels"].flatten(0, 1).clone()
    if "grids" not in inputs:
        return _features(model, pixels, None)
    images = inputs["grids"].shape[0] * inputs["grids"].shape[1]
    side = isqrt(len(pixels) // images)
    grids = torch.tensor([[1, side, side]]).expand(images, 3)  # on the CPU, where the encoder can read it
    encoder = model.visual
    precomputed = {"position_ids": symbol(VISION_UTILS, "get_vision_position_ids")(grids, encoder.spatial_merge_size)}
    if hasattr(encoder, "num_grid_per_side"):
        precomputed |= zip(("interp_indices", "interp_weights"), _interpolation(encoder, grids), strict=True)
    precomputed = {name: value.to(pixels.device) for name, value in precomputed.items()}
    if hasattr(encoder, "window_size"):
        precomputed |= zip(("window_index", "cu_window_seqlens"), _windows(encoder, grids), strict=True)
    with _inputs_on_device(getattr(encoder, "embeddings", None), pixels.device):
        return _features(model, pixels, grids, **precomputed)


def _interpolation(encoder: Any, grids: torch.Tensor) -> Any:
    return symbol(VISION_UTILS, "get_vision_interpolation_indices_and_weights")(
        grids,
        num_grid_per_side=encoder.num_grid_per_side,
        mode=encoder.interpolation_mode,
        align_corners=encoder.interpolation_align_corners,
        spatial_merge_size=encoder.config.spatial_merge_size,
    )


def _windows(encoder: Any, grids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return window indices, with several windows per operation: the same memory in fewer operations."""
    index, ends = symbol(VISION_UTILS, "get_vision_window_index")(
        grids, encoder.spatial_merge_size, encoder.window_size, encoder.patch_size
    )
    return index, torch.cat([ends[:-1:WINDOWS_PER_OP], ends[-1:]])


@contextmanager
def _inputs_on_device(module: torch.nn.Module | None, device: torch.device) -> Iterator[None]:
    """Move a module's inputs to the device within the context."""
    if module is None:
        yield
        return
    hook = module.register_forward_pre_hook(lambda _, args: tuple(one.to(device) for one in args))
    try:
        yield
    finally:
        hook.remove()


def _features(
    model: Any, pixels: torch.Tensor, grids: torch.Tensor | None, **precomputed: torch.Tensor
) -> ImageFeatures:
    out = model.get_image_features(pixels, **({} if grids is None else {"image_grid_thw": grids}), **precomputed)
    found = out.pooler_output
    features = torch.cat(list(found)) if isinstance(found, (tuple, list)) else found.flatten(0, 1)
    return ImageFeatures(features, tuple(getattr(out, "deepstack_features", None) or ()))


def _blank(model: Any, inputs: ImageInputs) -> tuple[torch.Tensor, torch.Tensor | None]:
    pixels = inputs["pixels"]
    if "grids" not in inputs:
        return pixels.new_zeros(1, *pixels.shape[2:]), None
    side = model.config.vision_config.spatial_merge_size
    grid = torch.tensor([[1, side, side]], device=pixels.device)
    return pixels.new_zeros(side * side, *pixels.shape[2:]), grid
