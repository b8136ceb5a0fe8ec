"""Parameter counts of models built by transformers and diffusers on the meta device."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest

# Names with another model_type in transformers.
BUILT_AS = {"kimi_k2": "deepseek_v3"}


def built_params(config: Mapping[str, Any]) -> int:
    """Return the parameters of the model that the real class builds; tied ones count once."""
    torch = pytest.importorskip("torch", reason="torch is not installed: nothing to compare with")
    from transformers.initialization import no_init_weights

    with torch.device("meta"), no_init_weights():  # which leaves out tying, too
        model = _denoiser(config) if "_class_name" in config else _language_model(config)
    if hasattr(model, "tie_weights"):
        model.tie_weights()
    return sum(parameter.numel() for parameter in model.parameters())


def hub_config(config: Mapping[str, Any]) -> Any:
    """Return the transformers config object of a config.json."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: nothing to compare with")
    transformers.logging.set_verbosity_error()
    keys = copy.deepcopy({key: value for key, value in config.items() if key != "model_type"})
    model_type = config["model_type"]
    return transformers.AutoConfig.for_model(BUILT_AS.get(model_type, model_type), **keys)


def _language_model(config: Mapping[str, Any]) -> Any:
    import transformers

    made = hub_config(config)
    wraps = "vision_config" in config
    auto = transformers.AutoModelForImageTextToText if wraps else transformers.AutoModelForCausalLM
    return auto.from_config(made)


def _denoiser(config: Mapping[str, Any]) -> Any:
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed: nothing to compare with")
    keys = {key: value for key, value in config.items() if not key.startswith("_")}
    return getattr(diffusers, config["_class_name"])(**keys)
