"""Initial weights of an exported run for frameworks that load only checkpoints of their own format."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping
from pathlib import Path

from meshwright import file_access
from meshwright.frameworks.model_match import find_model, model_path
from meshwright.models import ModelSpec
from meshwright.recipes.types import Recipe

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
REFERENCE = re.compile(r"\$\{(\w+)\}")


def needs_converted(recipe: Recipe) -> bool:
    """Return whether a run needs weights that a framework with its own format cannot load as the recipe names them."""
    if not recipe.checkpoint.pretrained:
        return recipe.goal != "pretrain"
    return is_hugging_face(recipe.checkpoint.pretrained)


def is_hugging_face(weights: str) -> bool:
    """Return whether weights are named by a Hugging Face id, or are a folder in that format; ./a/b is always a path."""
    if is_hub_id(weights):
        return True
    path = Path(weights).expanduser()
    return not file_access.closed() and (path / "config.json").is_file() and any(path.glob("*.safetensors*"))


def is_hub_id(weights: str) -> bool:
    """Return whether weights are named by a Hugging Face id; over HTTP no file of this machine is looked at."""
    path = Path(weights).expanduser()
    is_local = not file_access.closed() and (path.exists() or path.parent.exists())
    return bool(HUB_ID.fullmatch(weights)) and not is_local


def tokenizer_of(recipe: Recipe, model: ModelSpec) -> str:
    """Return the tokenizer of a run: as named, that of its weights, or that published with the model; empty if unknown.

    A model in the user's own sizes is written as a catalogue model with another vocabulary, whose tokenizer is not his.
    """
    weights, vocabulary = recipe.checkpoint.pretrained, recipe.architecture.vocab
    if recipe.data.tokenizer or (weights and is_hugging_face(weights)):
        return recipe.data.tokenizer or weights
    published = find_model(recipe.model)
    is_other = vocabulary is not None and (published is None or published.vocab != vocabulary)
    return "" if is_other else model_path(recipe, model) or model.hf_id or ""


def shell_word(word: str, variables: Mapping[str, str], expanded: Collection[str] = ()) -> str:
    """Quote a word for a shell; it expands references such as ${NAME} to these variables, and stops if one is unset.

    Words in `expanded` are written as the user's script has them, as one word.
    """
    if word in expanded:
        return _in_double_quotes(word)
    if not any(f"${{{name}}}" in word for name in variables):
        return shlex.quote(word)
    parts = REFERENCE.split(word)  # text, name, text, name, ..., text
    quoted = [shlex.quote(text) if text else "" for text in parts[0::2]]
    names = [f'"${{{name}:?{variables.get(name, "not set")}}}"' for name in parts[1::2]]
    return "".join(text + name for text, name in zip(quoted, [*names, ""], strict=True))


def _in_double_quotes(word: str) -> str:
    """Return a word in double quotes; a quote inside a command substitution has its own context."""
    found, depth, ticks = "", 0, False
    for number, letter in enumerate(word):
        ticks = ticks != (letter == "`")
        depth += word.startswith("$(", number)
        found += f"\\{letter}" if letter in '"\\' and not depth and not ticks else letter
        depth -= depth > 0 and letter == ")"
    return f'"{found}"'
