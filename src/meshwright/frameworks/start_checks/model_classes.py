"""Classes of transformers that a file names for its model and tokenizer, compared with those of the model.

A config that was copied for another model keeps them: the class then builds other layers from the model's config and
leaves weights out or starts new ones at random, and a tokenizer reads the vocabulary by the rules of another kind.
"""

from __future__ import annotations

import re

from meshwright.frameworks.start_checks.types import Changes, Given, StartCheck
from meshwright.models import is_path
from meshwright.models.class_names import class_head, is_of_another_type

AUTO = {"ForCausalLM", "ForSequenceClassification", "ForTokenClassification"}  # heads that AutoModel… has
AUTO_TOKENIZER = "AutoTokenizer"
SENTENCEPIECE = ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer")
BYTE_LEVEL = ("Qwen2Tokenizer",)
"""Classes that build one kind of tokenizer. The fast ones of transformers 4 read any tokenizer.json as it is."""
BYTE_LEVEL_MODELS = re.compile(r"(qwen(1\.5|[2-9])|qwq|(meta-)?llama-?3)", re.IGNORECASE)
SENTENCEPIECE_MODELS = re.compile(r"(mi[sx]tral-\d+x?\d*b-|llama-?2-|gemma-|tinyllama)", re.IGNORECASE)


def model_class_check(model: str, name: str, place: str) -> StartCheck:
    """Return the check that the class in one key is of the type of the model in another."""

    def other_class(given: Given) -> bool:
        return given.model is not None and is_of_another_type(given.model, _as_written(given, name))

    def own_class(given: Given) -> Changes:
        head, own = class_head(_as_written(given, name)), "" if given.model is None else given.model.hf_class
        auto = f"AutoModel{head}" if head in AUTO else None  # without the key it is found by the model's config
        return {name: own if class_head(own) == head else auto}

    def shown(given: Given) -> str:
        own = "" if given.model is None else given.model.hf_class
        return f"{{{name}}} is a class of another model than {{{model}}}, whose class is {own}"

    return StartCheck(name, other_class, shown, own_class, place,
        effect="builds that model, which fails or leaves weights out and starts others at random")  # fmt: skip


def tokenizer_class_check(model: str, name: str, other_tokenizer: str, place: str) -> StartCheck:
    """Return the check that a tokenizer's class is of the kind that the model has, unless a key names another one."""

    def other_kind(given: Given) -> bool:
        named = _as_written(given, model)
        is_own = not given.is_on(other_tokenizer) and not is_path(named)
        return is_own and _as_written(given, name) in _wrong_tokenizers(named)

    return StartCheck(name, other_kind, f"{{{name}}} is not the kind of tokenizer that {{{model}}} has",
        {name: AUTO_TOKENIZER}, place, effect="fails, or gives the model other tokens than it knows")  # fmt: skip


def _as_written(given: Given, key: str) -> str:
    return str(given.get(key) or "").strip()


def _wrong_tokenizers(model: str) -> tuple[str, ...]:
    """Return the classes that cannot be those of a model's tokenizer, by its name; a name can mean derived models."""
    name = model.rpartition("/")[2]
    if BYTE_LEVEL_MODELS.match(name):
        return SENTENCEPIECE
    return BYTE_LEVEL if SENTENCEPIECE_MODELS.match(name) else ()
