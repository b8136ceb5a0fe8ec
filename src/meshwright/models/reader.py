"""Read a Hugging Face config.json, as plain JSON and offline, into a ModelSpec."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from meshwright import file_access, json_text
from meshwright.errors import InputError

from .class_names import types_of_transformers, with_known_type
from .inspection import WAY_OUT, can_inspect, has_transformers, inspected_spec, not_a_decoder
from .quantization import quantization_of
from .readers import diffusion, gpt2, nemotron
from .readers.architectures import SAME_AS, TRAITS, fields_of
from .readers.computed import check_computed
from .readers.decoder import Decoder, grouped, read_decoder
from .readers.fields import Fields, UnsupportedValueError
from .readers.unread import record_unread
from .readers.wrappers import WRAPPERS, read_wrapped
from .spec import ModelSpec
from .trained_folder import not_a_model

MAX_BYTES = 5_000_000
SECTIONS = ("text_config", "vision_config", "llm_config", "audio_config", "quantization_config")
NESTED = ("step3p7",)  # read if the file has the decoder alone; with its encoder it is inspected


class _DiffusionReader(msgspec.Struct, frozen=True):
    family: str
    defaults: Mapping[str, Any]
    read: Callable[[Fields], diffusion.Denoiser]


_DIFFUSERS = {
    "WanTransformer3DModel": _DiffusionReader("wan", diffusion.WAN_DEFAULTS, diffusion.read_wan),
    "FluxTransformer2DModel": _DiffusionReader("flux", diffusion.FLUX_DEFAULTS, diffusion.read_flux),
}


def known_architectures() -> tuple[str, ...]:
    """Return every model_type (or diffusers class) that spec_from_config supports."""
    return tuple(sorted({*TRAITS, *SAME_AS, *WRAPPERS, *_DIFFUSERS, *gpt2.MODEL_TYPES, "nemotron_h"}))


def spec_from_config(config: Mapping[str, Any], name: str, **facts: Any) -> ModelSpec:
    """Return the model of a Hugging Face config; facts are more ModelSpec fields, such as hf_id."""
    if not isinstance(config, Mapping):
        raise InputError("the config must be a JSON object", field="config", value=type(config).__name__)
    try:
        spec = _read(config, name)
    except UnsupportedValueError as error:
        if not can_inspect(config) or file_access.closed():
            raise
        spec = inspected_spec(config, name, why=f"no reader knows {error.field}={error.value}")
    quantization = quantization_of(config)
    if quantization is not None:
        facts = {"quantization": quantization, **facts}
    return msgspec.structs.replace(spec, **facts) if facts else spec


def load_config(path: str | Path) -> dict[str, Any]:
    """Read the config.json at a path, or in the folder at a path."""
    # os.path.isfile returns False for invalid paths (NUL bytes), where Path.is_file raises
    file = Path(path, "config.json") if file_access.is_dir(path) else Path(path)
    sent = file_access.text_of(file, "model")
    if sent is None and not os.path.isfile(file):
        if file_access.is_dir(path):
            fix = ("a folder with config.json",)
            plain = InputError("the folder has no config.json", field="model", value=str(path), fix=fix)
            raise not_a_model(path, "model") or plain
        raise file_access.missing_path(path, "model")
    try:
        size = file.stat().st_size if sent is None else len(sent.encode())
        if size > MAX_BYTES:
            raise InputError(
                f"the file has {size} bytes, more than the limit of {MAX_BYTES} for a model config",
                field="model",
                value=str(file),
            )
        text = file.read_bytes().decode("utf-8-sig") if sent is None else sent.removeprefix("\ufeff")
        data = json_text.loads(text, object_hook=json_text.decode_float)
    except OSError as problem:
        raise InputError(f"the file cannot be read: {problem.strerror}", field="model", value=str(file)) from problem
    except json_text.NestingError as problem:
        raise InputError(str(problem), field="model", value=str(file)) from problem
    except ValueError as problem:  # not UTF-8, not JSON, or truncated
        raise InputError(f"the file is not valid JSON: {problem}", field="model", value=str(file)) from problem
    if not isinstance(data, dict):
        raise InputError("the file must contain a JSON object", field="model", value=str(file))
    return with_known_type(data, _shown_name(file))


def _shown_name(file: Path) -> str:
    """Return the name of a file's model: one note for a relative and an absolute path."""
    whole = Path(os.path.abspath(file))
    return whole.parent.name if whole.name == "config.json" else whole.name


def _read(config: Mapping[str, Any], name: str) -> ModelSpec:
    denoiser = config.get("_class_name")
    if isinstance(denoiser, str):
        return _denoiser_spec(config, denoiser, name)
    model_type = _model_type(config)
    for key in SECTIONS:
        if config.get(key) is not None and not isinstance(config[key], Mapping):
            raise InputError("must be an object", field=key, value=repr(config[key])[:80])
    if model_type not in known_architectures() or (
        model_type in NESTED and isinstance(config.get("text_config"), dict)
    ):
        return inspected_spec(config, name)
    wrapped = WRAPPERS.get(model_type)
    check_computed(config, () if wrapped is None else (wrapped.text_key, "vision_config"))
    if wrapped is not None and (model_type not in SAME_AS or wrapped.text_key in config or "vision_config" in config):
        if any(config.get(key) for key in wrapped.unread):
            return _inspected(config, name, wrapped.unread)
        decoder, encoder, tied = read_wrapped(config, wrapped)
        spec = _decoder_spec(decoder, name, wrapped.family, model_type, wrapped.hf_class)
        if encoder is None:
            return msgspec.structs.replace(spec, tied=tied)
        return msgspec.structs.replace(spec, kind="vision_language", vision=encoder, tied=tied)
    if config.get("text_config"):
        reason = f"{model_type} models have no text_config: the file describes another architecture"
        raise InputError(reason, field="text_config", value=repr(config["text_config"])[:80])
    if model_type in gpt2.MODEL_TYPES:
        fields = Fields(config, gpt2.DEFAULTS, gpt2.ALIASES)
        spec = _decoder_spec(gpt2.read_gpt2(fields), name, "gpt", model_type, "GPT2LMHeadModel")
    elif model_type == "nemotron_h":
        fields = Fields(config, nemotron.DEFAULTS, nemotron.ALIASES)
        spec = _decoder_spec(nemotron.read_nemotron(fields), name, "nemotron", model_type, "NemotronHForCausalLM")
    else:
        traits = TRAITS[SAME_AS.get(model_type, model_type)]
        fields = fields_of(config, SAME_AS.get(model_type, model_type))
        spec = _decoder_spec(read_decoder(fields, traits), name, traits.family, model_type, traits.hf_class)
    fields.reject_unread(model_type)
    record_unread(fields)
    return spec


def _inspected(config: Mapping[str, Any], name: str, sections: tuple[str, ...]) -> ModelSpec:
    """Return the inspected model of a file whose sections no reader knows."""
    if not can_inspect(config):
        reason = "the parameters of this section are only known to transformers"
        raise InputError(reason, field=next(key for key in sections if config.get(key)), fix=(WAY_OUT,))
    return inspected_spec(config, name)


def _model_type(config: Mapping[str, Any]) -> str:
    """Return the model_type of a config, or the one of its class in architectures."""
    model_type = config.get("model_type")
    if model_type is None:
        classes = {traits.hf_class: name for name, traits in TRAITS.items() if not name.endswith("_text")}
        classes |= {wrapper.hf_class: name for name, wrapper in WRAPPERS.items()}
        listed = config.get("architectures")
        if isinstance(listed, list):
            model_type = next((classes[name] for name in listed if name in classes), None)
        if model_type is None:
            raise InputError("the config has no model_type, so its architecture is unknown", field="model_type")
    if not isinstance(model_type, str) or (model_type not in known_architectures() and not can_inspect(config)):
        raise _unknown(config, model_type)
    return model_type


OTHER_NAME = 'if a class of transformers builds it under another name: that class in "architectures", to inspect it'
NEWER = "pip install -U transformers, if a newer version has this type: then it is inspected"
AS_A_ROW = "describe it as one row of a table: CONTRIBUTING.md, Add a model"
OFTEN_MEANT = ("llama", "qwen3", "qwen3_moe", "qwen3_next", "deepseek_v3")  # types that new models often are, renamed


def _unknown(config: Mapping[str, Any], model_type: Any) -> InputError:
    """Return the error for a model_type that nothing here knows, with the ways on."""
    if isinstance(model_type, str) and model_type in types_of_transformers():
        raise not_a_decoder(model_type)
    where = "Meshwright's tables and the installed transformers" if has_transformers() else "Meshwright's tables"
    reason = f"unknown architecture {model_type!r}: not in {where}; docs/models.md lists the known types"
    if config.get("auto_map"):
        reason += "; the code that auto_map names (trust_remote_code) is never run"
    # no did-you-mean by name: a config with another model_type is another model
    alike = next((name for name in OFTEN_MEANT if _reads_as(config, name)), None)
    as_known = (f'"model_type": "{alike}", if it computes what {alike} does: its sizes can be read as such',)
    fix = (*((OTHER_NAME, NEWER) if has_transformers() else (WAY_OUT,)), *(as_known if alike else ()), AS_A_ROW)
    return InputError(reason, field="model_type", value=model_type, fix=fix)


def _reads_as(config: Mapping[str, Any], model_type: str) -> bool:
    try:
        _read({**config, "model_type": model_type}, model_type)
    except InputError:
        return False
    return True


def _decoder_spec(decoder: Decoder, name: str, family: str, model_type: str, hf_class: str) -> ModelSpec:
    return ModelSpec(
        name=name,
        family=family,
        kind="causal_lm",
        hidden=decoder.hidden,
        groups=grouped(decoder.layers),
        vocab=decoder.vocab,
        tied=decoder.tied,
        max_seq_length=decoder.max_seq_length,
        final_norm_params=decoder.final_norm_params,
        learned_positions=decoder.learned_positions,
        extra_params=decoder.extra_params,
        head_bias=decoder.head_bias,
        mtp_layers=decoder.mtp_layers,
        mtp_layer=decoder.mtp_layer,
        model_type=model_type,
        hf_class=hf_class,
        activation=decoder.activation,
    )


def _denoiser_spec(config: Mapping[str, Any], class_name: str, name: str) -> ModelSpec:
    if class_name not in _DIFFUSERS:
        known = ", ".join(_DIFFUSERS)
        raise InputError(f"unknown diffusers class {class_name!r}; known: {known}", "_class_name", class_name)
    entry = _DIFFUSERS[class_name]
    denoiser = entry.read(Fields(config, entry.defaults))
    return ModelSpec(
        name=name,
        family=entry.family,
        kind="diffusion",
        hidden=denoiser.hidden,
        groups=grouped(denoiser.layers),
        extra_params=denoiser.extra_params,
        model_type=class_name,
        hf_class=class_name,
        activation=denoiser.activation,
    )
