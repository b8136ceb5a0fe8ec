"""Builds the transformers model of a recipe on the meta device: no weight exists until it is known who holds it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from meshwright.engine import attention, experts
from meshwright.engine.model.mtp import add_mtp
from meshwright.errors import InputError

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
    for name in DROPOUTS:
        if hasattr(config, name):
            setattr(config, name, 0.0)
    for name, value in SETTINGS.items():
        if hasattr(config, name):
            setattr(config, name, value)
    return config


def build_model(config: Any, dtype: torch.dtype, mtp: bool = False) -> nn.Module:
    """The causal language model of a config on the meta device, its attention and experts led to the engine's own.

    With `mtp` it has its multi-token prediction, which transformers leaves out.
    """
    from transformers import AutoModelForCausalLM

    attention.register()
    experts.register()
    try:
        with torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    except ValueError as error:
        raise InputError(
            f"{config.model_type} is no causal language model in transformers: {str(error).splitlines()[0]}",
            field="model",
        ) from None
    if mtp:
        add_mtp(model, dtype)
    for module in model.modules():  # composite models hold several configs
        inner = getattr(module, "config", None)
        if inner is not None:
            inner._attn_implementation = "meshwright"
            inner._experts_implementation = "meshwright"
    return model.train()
