"""Models without an LM head: embedding models, rerankers and classifiers, which next-token training does not fit."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright import file_access
from meshwright.errors import InputError
from meshwright.notes import note

from .catalogue import find, find_by_shape, hub_config, is_path, with_organization, without_hub_url
from .inspection import is_encoder
from .reader import load_config
from .spec import ModelSpec

SENTENCE_FILES = ("modules.json", "1_Pooling", "config_sentence_transformers.json")  # of sentence-transformers
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
# Compiled when a config.json is read: models of the catalogue need none.
_LANGUAGE = r"ForCausalLM|LMHead|ForConditionalGeneration|ForImageTextToText|ForPreTraining|DoubleHeads"
_OTHER_TASK = (
    r"For(?:\w*Classification|QuestionAnswering|MultipleChoice|NextSentencePrediction|TextEncoding|MaskedLM|Retrieval|"
    r"\w*Embedding|\w*Reward\w*|Scor\w+|\w*Rank\w*)|RewardModel|EmbeddingModel|BiModel|CrossEncoder"
)
_BASE_CLASS = r"\w+Model"
_EMBEDDING = (
    "it is a sentence-transformers model ({found}): it embeds texts by pooling and has no LM head; here language "
    "models are trained to predict the next token"
)
_OTHER_HEAD = (
    "its class {found} has a head for another task in place of the LM head (classifier, reranker, reward or masked "
    "language model); here language models are trained to predict the next token"
)
_NOT_A_DECODER = "its class {found} has no LM head, and {reason}; embedding models and encoders are not trained here"
_NO_HEAD = (
    "its class {found} has no LM head and tie_word_embeddings is false: a language model would start with a random head"
)
_TRAINED = (
    "{model}: {found} is a decoder without an LM head of its own; trained is the language model on the next token, "
    "with {head} as its head. Embedding models are trained with sentence-transformers instead"
)


def require_language_model(text: str) -> None:
    """Raise InputError for a folder or hub id of an embedding model, a classifier or an encoder.

    For a decoder without an LM head of its own, note what would be trained.
    """
    text = without_hub_url(text.strip())
    path: str | Path | None = os.path.expanduser(text) if is_path(text) else hub_config(with_organization(text))
    if path is None:
        return
    try:
        config = load_config(path)
    except InputError:  # reported by find, which knows what else the file may be
        return
    listed = config.get("architectures")
    classes = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
    folder = Path(path) if file_access.is_dir(path) else Path(path).parent
    in_folder = Path(path).name == "config.json" or folder == Path(path)
    marks = [name for name in SENTENCE_FILES if in_folder and file_access.exists(str(folder / name))]
    if marks:
        trainer = "train embedding models with SentenceTransformerTrainer of sentence-transformers"
        raise _refusal(text, _EMBEDDING.format(found=", ".join(marks)), config, trainer)
    if any(re.search(_LANGUAGE, name) for name in classes) or "_class_name" in config:
        return
    if other := [name for name in classes if re.search(_OTHER_TASK, name)]:
        trainer = "train classifiers and rerankers with Trainer of transformers or CrossEncoderTrainer"
        raise _refusal(text, _OTHER_HEAD.format(found=other[0]), config, trainer)
    if bare := [name for name in classes if re.fullmatch(_BASE_CLASS, name)]:
        has_weights = in_folder and any(file_access.exists(str(folder / name)) for name in WEIGHTS)
        _require_head(text, bare[0], config, has_weights)


def _require_head(text: str, found: str, config: Mapping[str, Any], has_weights: bool) -> None:
    """Raise if a base class is no decoder, or if its weights lack the head; else note what would be trained."""
    trainer = "train embedding models with SentenceTransformerTrainer of sentence-transformers"
    if is_encoder(config.get("model_type")):
        reason = f"model_type {config['model_type']} is an encoder"
        raise _refusal(text, _NOT_A_DECODER.format(found=found, reason=reason), config, trainer)
    spec = find(text)
    if spec.kind != "causal_lm":
        return
    if not spec.tied and has_weights:
        raise _refusal(text, _NO_HEAD.format(found=found), config, trainer)
    head = "the input embedding (tied)" if spec.tied else "a new lm_head, which no weights contain,"
    note(_TRAINED.format(model=text, found=found, head=head))


def _refusal(text: str, reason: str, config: Mapping[str, Any], trainer: str) -> InputError:
    shapes = _language_models(config)
    named = f"name a language model: {', '.join(shapes)}" if shapes else "name a language model (…ForCausalLM)"
    return InputError(reason, "model", text, [named, trainer])


def _language_models(config: Mapping[str, Any]) -> list[str]:
    """Return the shipped models of a config's type, width and depth."""
    hidden, layers = config.get("hidden_size"), config.get("num_hidden_layers")
    if not isinstance(hidden, int) or not isinstance(layers, int):
        return []
    found: tuple[ModelSpec, ...] = find_by_shape(hidden, layers)
    return [one.hf_id or one.name for one in found if one.model_type == config.get("model_type")][:2]
