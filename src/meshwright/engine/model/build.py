"""Builds the transformers model of a recipe on the meta device: weights are allocated after sharding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from meshwright.engine import attention, experts
from meshwright.engine.model.mtp import add_mtp
from meshwright.engine.vision.vision_modules import VISION_MODULES, vision_modules_of
from meshwright.errors import InputError, first_line
from meshwright.models.quantization import KEYS as QUANTIZATION_KEYS
from meshwright.recipes.engine_models import has_own_layers

SAME_CLASS = {"kimi_k2": "deepseek_v3"}  # model types that use the class of another one
NEVER_TIED = ("nemotron_h",)  # classes without tied weights, whatever tie_word_embeddings says
DROPOUTS = (
    *("attention_dropout", "hidden_dropout", "residual_dropout", "embedding_dropout"),
    *("resid_pdrop", "embd_pdrop", "attn_pdrop"),
)
RANDOM = ("dropout", "pdrop", "layerdrop", "jitter")  # in the names of config values
# No padding row: torch drops its gradient, and with a sharded vocabulary each rank would drop another row.
SETTINGS = {"use_cache": False, "pad_token_id": None, "rescale_prenorm_residual": False, "output_router_logits": False}


def transformers_config(values: Mapping[str, Any]) -> Any:
    """Return the transformers config of a config.json with training settings: no cache, dropout or padding row.

    The quantization of a folder's files is left out: weights are dequantized as they are read, and saved plain.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    values = _without_file_settings(values)
    model_type = values.get("model_type")
    values["model_type"] = SAME_CLASS.get(str(model_type), model_type)
    if values["model_type"] not in CONFIG_MAPPING:
        raise InputError(f"transformers has no model type {model_type!r}", field="model", fix=("meshwright models",))
    try:
        config = AutoConfig.for_model(**values)
    except Exception as error:  # config classes compute with the values, which may fail in any way
        reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise InputError(
            f"transformers rejects the config of this {model_type}: {reason}",
            field="model",
            fix=("correct the value in config.json, or download the folder again",),
        ) from None
    if config.model_type in NEVER_TIED:
        config.tie_word_embeddings = False
    settings = dict.fromkeys(DROPOUTS, 0.0) | SETTINGS
    if not runs_own_layers(config):
        settings = {**_random_parts(config), **{k: v for k, v in SETTINGS.items() if k != "pad_token_id"}}
    for part in (config, *_inner(config)):
        _set_present(part, settings)
    return config


def _random_parts(config: Any) -> dict[str, float]:
    """Return zero for every dropout and noise of a config: a step must not depend on the layout."""
    found = {k: v for k, v in config.to_dict().items() if isinstance(v, float) and any(word in k for word in RANDOM)}
    return dict.fromkeys(found, 0.0)


def _without_file_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    inner = values.get("text_config")
    kept = {name: value for name, value in values.items() if name not in QUANTIZATION_KEYS}
    return {**kept, "text_config": _without_file_settings(inner)} if isinstance(inner, Mapping) else kept


def _inner(config: Any) -> list[Any]:
    """Return the configs inside the config of a composite model."""
    return [part for name in ("text_config", "vision_config") if (part := getattr(config, name, None)) is not None]


def _set_present(config: Any, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if hasattr(config, name):
            setattr(config, name, value)


def runs_own_layers(config: Any) -> bool:
    """Return whether the engine runs the model layer by layer, with its own attention; else transformers runs it."""
    if builds_own_class() or getattr(config, "vision_config", None) is not None:
        return True
    return has_own_layers(config.model_type)


_own_class: ContextVar[type | None] = ContextVar("own_class", default=None)


@contextmanager
def building(model_class: type | None) -> Iterator[None]:
    """Build a user's class instead of transformers' for every model of this process, until the end of the block."""
    if model_class is not None and not callable(getattr(model_class, "_from_config", None)):
        reason = "must be a subclass of transformers.PreTrainedModel"
        raise InputError(reason, field="model_class", value=getattr(model_class, "__name__", model_class))
    before = _own_class.set(model_class)
    try:
        yield
    finally:
        _own_class.reset(before)


def builds_own_class() -> bool:
    """Return whether models are built with a user's class here."""
    return _own_class.get() is not None


def build_model(config: Any, dtype: torch.dtype, mtp: bool = False, attention_kind: str | None = None) -> nn.Module:
    """Build the model of a config on the meta device, with the engine's attention and experts.

    A causal language model, or a vision-language model if the config has a vision config. With `mtp` it gets
    multi-token prediction, which transformers does not build. A model that transformers runs keeps its own attention:
    `attention_kind`, or transformers' choice.
    """
    attention.register()
    experts.register()
    auto_class, description = _class_for(config)
    try:
        with torch.device("meta"):
            own: Any = _own_class.get()
            build = auto_class.from_config if own is None else own._from_config
            options = {} if attention_kind is None else {"attn_implementation": attention_kind}
            model: nn.Module = build(config, dtype=dtype, **options)
    except ValueError as error:
        raise InputError(
            f"{config.model_type} is not a {description} in transformers: {first_line(error)}",
            field="model",
            fix=("data.images=true with a dataset of images",) if config.model_type.endswith("_text") else (),
        ) from None
    if not runs_own_layers(config):
        return model.train()
    _copy_tying_flag(model)
    if mtp:
        add_mtp(model, dtype)
    for module in model.modules():  # composite models have several configs
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
            f"the vision encoder of {config.model_type} is not supported; supported: {', '.join(VISION_MODULES)}",
            field="model",
            fix=("data.images=false",),
        )
    return AutoModelForImageTextToText, "vision-language model"


def _copy_tying_flag(model: Any) -> None:
    """Copy the weight-tying flag to the language model's config: composite configs have it only outside."""
    text = model.config.get_text_config()
    if text is not model.config:
        text.tie_word_embeddings = model.lm_head.weight is model.get_input_embeddings().weight
