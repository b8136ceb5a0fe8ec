"""The diffusers config of a recipe's model: as published, with the recipe's changes, or shrunk to laptop size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from meshwright.errors import InputError, unknown
from meshwright.models import ModelSpec, config_of, find, load_config, names, spec_from_config
from meshwright.models.readers.diffusion import FLUX_DEFAULTS, WAN_DEFAULTS
from meshwright.recipes.types import Recipe

CLASS = "_class_name"  # the key by which diffusers tells its models apart
PACKED = 2  # FLUX takes squares of 2 × 2 latents as one token
SHARED_KEYS = {"eps": 1e-6, "qk_norm": "rms_norm_across_heads"}
WAN, FLUX = "WanTransformer3DModel", "FluxTransformer2DModel"
DEFAULTS: dict[str, dict[str, Any]] = {
    WAN: {**WAN_DEFAULTS, **SHARED_KEYS},
    FLUX: {**FLUX_DEFAULTS, "axes_dims_rope": [16, 56, 56]},
}
KINDS = {WAN: "wan", FLUX: "flux"}
LAYERS = ("num_layers", "num_single_layers")
# What --tiny makes of each value it finds. Heads of 12 keep three axes of rotation in both models.
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
    """A diffusers transformer's config.json, every key given."""

    values: Mapping[str, Any]

    @property
    def class_name(self) -> str:
        return str(self.values[CLASS])

    @property
    def model_type(self) -> str:
        """wan or flux."""
        return KINDS[self.class_name]

    @property
    def num_hidden_layers(self) -> int:
        return sum(int(self.values.get(name) or 0) for name in LAYERS)

    @property
    def hidden_size(self) -> int:
        return int(self.values["num_attention_heads"] * self.values["attention_head_dim"])

    @property
    def patch(self) -> tuple[int, int, int]:
        """Frames, height and width of the latents that make one token."""
        if self.class_name == FLUX:
            return (1, PACKED, PACKED)
        frames, height, width = self.values["patch_size"]
        return (frames, height, width)

    @property
    def channels(self) -> int:
        """Channels of the latents."""
        channels = int(self.values["in_channels"])
        return channels // PACKED**2 if self.class_name == FLUX else channels

    @property
    def text_width(self) -> int:
        """Width of the text embeddings."""
        return int(self.values["text_dim" if self.class_name == WAN else "joint_attention_dim"])

    @property
    def pooled_width(self) -> int:
        """Width of the embedding of the whole text; 0 where the model takes none."""
        return 0 if self.class_name == WAN else int(self.values["pooled_projection_dim"])

    def to_dict(self) -> dict[str, Any]:
        """The config.json."""
        return dict(self.values)


def denoiser_config(values: Mapping[str, Any]) -> DenoiserConfig:
    """Checks a config.json of diffusers and fills in the defaults."""
    kind = values.get(CLASS)
    if kind not in DEFAULTS:
        raise unknown(CLASS, str(kind), DEFAULTS)
    known = DEFAULTS[kind]
    for key in values:
        if key not in known and not key.startswith("_"):
            raise unknown(key, key, tuple(known))
    found = DenoiserConfig({CLASS: kind, **known, **{k: v for k, v in values.items() if k in known}})
    _refuse_unlike_outputs(found)
    _refuse_unpacked(found)
    return found


def _refuse_unlike_outputs(config: DenoiserConfig) -> None:
    inputs, outputs = config.values["in_channels"], config.values["out_channels"]
    if outputs not in (None, inputs):
        raise InputError(
            f"a velocity has the channels of the latents ({inputs}); models that are given more to see are not known",
            field="out_channels",
            value=outputs,
            fix=(f"out_channels={inputs}",),
        )


def _refuse_unpacked(config: DenoiserConfig) -> None:
    if config.class_name != FLUX:
        return
    if config.values["patch_size"] != 1:
        raise InputError(
            "FLUX takes tokens that are packed already", field="patch_size", value=1, fix=("patch_size=1",)
        )
    if config.values["in_channels"] % PACKED**2:
        raise InputError("a token of FLUX packs 2 × 2 latents", field="in_channels", value=config.values["in_channels"])


def is_diffusion(recipe: Recipe) -> bool:
    """Whether a recipe trains a diffusion model."""
    return find(recipe.model).kind == "diffusion"


def config_for(recipe: Recipe) -> DenoiserConfig:
    """The diffusers config of the model that a recipe trains."""
    name = find(recipe.model).name
    config = denoiser_config(config_of(name) if name in names() else load_config(recipe.model))
    changes = {k: v for k, v in msgspec.structs.asdict(recipe.architecture).items() if v is not None}
    for field, value in changes.items():
        if field != "layers" or config.class_name == FLUX:
            raise InputError(
                "in a diffusion model the sizes follow from each other; only the layers of Wan can be changed",
                field=f"architecture.{field}",
                value=value,
            )
        config = DenoiserConfig({**config.values, "num_layers": value})
    return config


def tiny(config: DenoiserConfig, layers: int) -> DenoiserConfig:
    """A config of the same structure with a few thousand weights: every kind of layer is there, widths are small."""
    small = {name: value for name, value in TINY.items() if name in config.values}
    kinds = [name for name in LAYERS if config.values.get(name)]
    depth = {name: max(1, layers // len(kinds)) for name in kinds}
    return DenoiserConfig({**config.values, **small, **TINY_CHANNELS[config.class_name], **depth})


def kinds_of_layers(config: DenoiserConfig) -> int:
    """How many kinds of layers a model has: FLUX has layers for image and text apart, and for both together."""
    return sum(1 for name in LAYERS if config.values.get(name))


def spec_of(recipe: Recipe, config: DenoiserConfig) -> ModelSpec:
    """The facts of the model that a config builds, for the rules and the estimate."""
    return spec_from_config(config.to_dict(), recipe.model)
