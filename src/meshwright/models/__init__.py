"""Model architectures: specs, the reader of Hugging Face configs, and the catalogue."""

from .catalogue import (
    all_specs,
    catalogue_name,
    config_named,
    config_of,
    find,
    find_by_shape,
    is_config,
    is_path,
    names,
    search,
)
from .quantization import Quantization, quantization_of
from .reader import decode_float, known_architectures, load_config, spec_from_config
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
from .trained_folder import not_a_model

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
    "Quantization",
    "Vision",
    "all_specs",
    "catalogue_name",
    "config_named",
    "config_of",
    "decode_float",
    "find",
    "find_by_shape",
    "is_config",
    "is_path",
    "known_architectures",
    "load_config",
    "names",
    "not_a_model",
    "quantization_of",
    "reshape",
    "search",
    "spec_from_config",
]
