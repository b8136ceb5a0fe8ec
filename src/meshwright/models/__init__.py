"""Model architectures: specs, the reader of Hugging Face configs, and the catalogue."""

from .catalogue import all_specs, config_of, find, find_by_shape, names, nearest_by_size, search
from .reader import known_architectures, load_config, spec_from_config
from .reshape import reshape
from .spec import (
    MLA,
    Attention,
    Dense,
    Ffn,
    GatedDelta,
    Group,
    Layer,
    Mamba2,
    Mixer,
    ModelKind,
    ModelSpec,
    MoE,
    ParamCount,
    Vision,
)

__all__ = [
    "MLA",
    "Attention",
    "Dense",
    "Ffn",
    "GatedDelta",
    "Group",
    "Layer",
    "Mamba2",
    "Mixer",
    "MoE",
    "ModelKind",
    "ModelSpec",
    "ParamCount",
    "Vision",
    "all_specs",
    "config_of",
    "find",
    "find_by_shape",
    "known_architectures",
    "load_config",
    "names",
    "nearest_by_size",
    "reshape",
    "search",
    "spec_from_config",
]
