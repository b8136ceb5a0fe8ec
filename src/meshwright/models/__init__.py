"""Models: their architecture facts, the reader of Hugging Face configs, and the catalogue of shipped models."""

from .catalogue import all_specs, config_of, find, names, nearest_by_size, of_size, search
from .reader import known_architectures, load_config, spec_from_config
from .reshape import reshape
from .spec import (
    MLA,
    Attention,
    Dense,
    Ffn,
    GatedDelta,
    Group,
    Kind,
    Layer,
    Mamba2,
    Mixer,
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
    "Kind",
    "Layer",
    "Mamba2",
    "Mixer",
    "MoE",
    "ModelSpec",
    "ParamCount",
    "Vision",
    "all_specs",
    "config_of",
    "find",
    "known_architectures",
    "load_config",
    "names",
    "nearest_by_size",
    "of_size",
    "reshape",
    "search",
    "spec_from_config",
]
