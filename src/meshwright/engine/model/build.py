"""Builds the transformers model of a recipe on the meta device: no weight exists until it is known who holds it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from meshwright.engine import attention, experts
from meshwright.engine.model.mtp import add_mtp
from meshwright.engine.vision.vision_modules import VISION_MODULES, vision_modules_of
from meshwright.errors import InputError, first_line

SAME_CLASS = {"kimi_k2": "deepseek_v3"}  # model types that run in another one's class
DROPOUTS = ("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop")
# No padding row: its gradient would be dropped, and a vocabulary cut over ranks would drop another row on each.
SETTINGS = {"use_cache": False, "pad_token_id": None, "rescale_prenorm_residual": False, "output_router_logits": False}


def transformers_config(values: Mapping[str, Any]) -> Any:
    """The transformers config of a config.json, with what training changes: no cache, no dropout, no padding row."""
    from transformers import AutoConfig

    values = dict(values)
    kind = values.get("model_type")
    values["model_type"] = SAME_CLASS.get(str(kind), kind)
    try:
        config = AutoConfig.for_model(**values)
    except (ValueError, KeyError) as error:
        raise InputError(
            f"transformers has no model of type {kind!r}: {error}", field="model", fix=("meshwright models",)
        ) from None
    for part in (config, *_inner(config)):
        _set_present(part, dict.fromkeys(DROPOUTS, 0.0) | SETTINGS)
    return config


def _inner(config: Any) -> list[Any]:
    """The configs inside the config of a composite model."""
    return [part for name in ("text_config", "vision_config") if (part := getattr(config, name, None)) is not None]


def _set_present(config: Any, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if hasattr(config, name):
            setattr(config, name, value)


def build_model(config: Any, dtype: torch.dtype, mtp: bool = False) -> nn.Module:
    """The model of a config on the meta device, its attention and experts led to the engine's own.

    A causal language model, or a vision-language model where the config has a vision part. With `mtp` it has its
    multi-token prediction, which transformers leaves out.
    """
    attention.register()
    experts.register()
    kind, said = _class_for(config)
    try:
        with torch.device("meta"):
            model: nn.Module = kind.from_config(config, dtype=dtype)
    except ValueError as error:
        raise InputError(
            f"{config.model_type} is no {said} in transformers: {first_line(error)}",
            field="model",
        ) from None
    _settle_tying(model)
    if mtp:
        add_mtp(model, dtype)
    for module in model.modules():  # composite models hold several configs
        inner = getattr(module, "config", None)
        if inner is not None:
            inner._attn_implementation = "meshwright"
            inner._experts_implementation = "meshwright"
    return model.train()


def _class_for(config: Any) -> tuple[Any, str]:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    if getattr(config, "vision_config", None) is None:
        return AutoModelForCausalLM, "causal language model"
    if vision_modules_of(config) is None:
        raise InputError(
            f"the engine does not know the vision parts of {config.model_type}; it knows those of {', '.join(VISION_MODULES)}",
            field="model",
            fix=("data.images=false",),
        )
    return AutoModelForImageTextToText, "vision-language model"


def _settle_tying(model: Any) -> None:
    """Says in the language model's own config whether head and embedding are one: composite configs say it outside."""
    text = model.config.get_text_config()
    if text is not model.config:
        text.tie_word_embeddings = model.lm_head.weight is model.get_input_embeddings().weight
