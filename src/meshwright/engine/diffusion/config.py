"""The diffusers config of a recipe's model: as published, with the recipe's changes, or shrunk to laptop size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from meshwright.errors import InputError, unknown
from meshwright.models import ModelSpec, config_named, find, spec_from_config
from meshwright.models.readers.diffusion import FLUX_DEFAULTS, WAN_DEFAULTS
from meshwright.recipes.types import Recipe

CLASS = "_class_name"  # the key of the model class in diffusers configs
PACK_SIZE = 2  # FLUX packs 2 × 2 latents into one token
SHARED_KEYS = {"eps": 1e-6, "qk_norm": "rms_norm_across_heads"}
WAN, FLUX = "WanTransformer3DModel", "FluxTransformer2DModel"
DEFAULTS: dict[str, dict[str, Any]] = {
    WAN: {**WAN_DEFAULTS, **SHARED_KEYS},
    FLUX: {**FLUX_DEFAULTS, "axes_dims_rope": [16, 56, 56]},
}
MODEL_TYPES = {WAN: "wan", FLUX: "flux"}
LAYERS = ("num_layers", "num_single_layers")
# Values that --tiny sets. Heads of width 12 keep three rotary axes in both models.
TINY: dict[str, Any] = {
    "num_attention_heads": 4,
    "attention_head_dim": 12,
    "axes_dims_rope": [4, 4, 4],
    "ffn_dim": 96,
    "freq_dim": 32,
    "text_dim": 32,
    "joint_attention_dim": 32,
    "pooled_projection_dim": 16,
}
TINY_CHANNELS = {WAN: {"in_channels": 4, "out_channels": 4}, FLUX: {"in_channels": 16}}


@dataclass(frozen=True)
class DenoiserConfig:
    """A diffusers transformer's config.json with all keys set."""

    values: Mapping[str, Any]

    @property
    def class_name(self) -> str:
        return str(self.values[CLASS])

    @property
    def model_type(self) -> str:
        """wan or flux."""
        return MODEL_TYPES[self.class_name]

    @property
    def num_hidden_layers(self) -> int:
        return sum(int(self.values.get(name) or 0) for name in LAYERS)

    @property
    def hidden_size(self) -> int:
        return int(self.values["num_attention_heads"] * self.values["attention_head_dim"])

    @property
    def patch(self) -> tuple[int, int, int]:
        """Frames, height and width of the latents in one token."""
        if self.class_name == FLUX:
            return (1, PACK_SIZE, PACK_SIZE)
        frames, height, width = self.values["patch_size"]
        return (frames, height, width)

    @property
    def channels(self) -> int:
        """Channels of the latents."""
        channels = int(self.values["in_channels"])
        return channels // PACK_SIZE**2 if self.class_name == FLUX else channels

    @property
    def text_width(self) -> int:
        """Width of the text embeddings."""
        return int(self.values["text_dim" if self.class_name == WAN else "joint_attention_dim"])

    @property
    def pooled_width(self) -> int:
        """Width of the pooled text embedding; 0 if the model has none."""
        return 0 if self.class_name == WAN else int(self.values["pooled_projection_dim"])

    def to_dict(self) -> dict[str, Any]:
        """Return the config.json."""
        return dict(self.values)


def denoiser_config(values: Mapping[str, Any]) -> DenoiserConfig:
    """Validate a diffusers config.json and fill in the defaults."""
    class_name = values.get(CLASS)
    if class_name not in DEFAULTS:
        raise unknown(CLASS, str(class_name), DEFAULTS)
    known = DEFAULTS[class_name]
    for key in values:
        if key not in known and not key.startswith("_"):
            raise unknown(key, key, tuple(known))
    found = DenoiserConfig({CLASS: class_name, **known, **{k: v for k, v in values.items() if k in known}})
    _check_out_channels(found)
    _check_flux_packing(found)
    return found


def _check_out_channels(config: DenoiserConfig) -> None:
    inputs, outputs = config.values["in_channels"], config.values["out_channels"]
    if outputs not in (None, inputs):
        raise InputError(
            f"must equal in_channels ({inputs}): models with extra conditioning channels are not supported",
            field="out_channels",
            value=outputs,
            fix=(f"out_channels={inputs}",),
        )


def _check_flux_packing(config: DenoiserConfig) -> None:
    if config.class_name != FLUX:
        return
    if config.values["patch_size"] != 1:
        raise InputError(
            "FLUX takes packed tokens", field="patch_size", value=config.values["patch_size"], fix=("patch_size=1",)
        )
    if config.values["in_channels"] % PACK_SIZE**2:
        raise InputError("must be a multiple of 4 (2 × 2)", field="in_channels", value=config.values["in_channels"])


def is_diffusion(recipe: Recipe) -> bool:
    """Return whether a recipe trains a diffusion model."""
    return find(recipe.model).kind == "diffusion"


def config_for(recipe: Recipe) -> DenoiserConfig:
    """Return the diffusers config of a recipe's model."""
    config = denoiser_config(config_named(recipe.model))
    changes = {k: v for k, v in msgspec.structs.asdict(recipe.architecture).items() if v is not None}
    for field, value in changes.items():
        if field != "layers" or config.class_name == FLUX:
            raise InputError(
                "the sizes of a diffusion model depend on each other; only the layers of Wan can be changed",
                field=f"architecture.{field}",
                value=value,
            )
        config = DenoiserConfig({**config.values, "num_layers": value})
    return config


def tiny(config: DenoiserConfig, layers: int) -> DenoiserConfig:
    """Return a config with the same layer types, small widths and a few thousand weights."""
    small = {name: value for name, value in TINY.items() if name in config.values}
    layer_keys = [name for name in LAYERS if config.values.get(name)]
    depth = {name: max(1, layers // len(layer_keys)) for name in layer_keys}
    return DenoiserConfig({**config.values, **small, **TINY_CHANNELS[config.class_name], **depth})


def layer_types(config: DenoiserConfig) -> int:
    """Return the number of layer types: FLUX has layers with separate image and text weights, and joint ones."""
    return sum(1 for name in LAYERS if config.values.get(name))


def spec_of(recipe: Recipe, config: DenoiserConfig) -> ModelSpec:
    """Return the model spec of a config, for rules and estimates."""
    return spec_from_config(config.to_dict(), recipe.model)
