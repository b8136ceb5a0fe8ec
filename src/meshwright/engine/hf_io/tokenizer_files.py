"""Writes the small files of a model folder: config, generation config and tokenizer."""

from __future__ import annotations

import copy
import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from meshwright.engine.hf_io.find import read_json
from meshwright.engine.hf_io.name_map import NameMap
from meshwright.engine.hf_io.shards import write_error, write_text
from meshwright.errors import InputError
from meshwright.hub import CONFIG

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "chat_template.jinja", "chat_template.json"),
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json", "tekken.json"),
)
GENERATION = "generation_config.json"
SPECIAL_TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
OWN_TOKENIZER_KEYS = ("bos_token_id", "eos_token_id")  # a padding token may be the one that ends, which is trained


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder has a tokenizer."""
    from meshwright.engine.data.tokenizers import byte_pair_files

    named = any((folder / name).is_file() for name in ("tokenizer_config.json", "tokenizer.json"))
    return named or byte_pair_files(folder) is not None


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy tokenizer and image processor files from one folder to another; a vocabulary with merges as a tokenizer."""
    from meshwright.engine.data.tokenizers import byte_pair_files, load_tokenizer

    if byte_pair_files(source) is not None:
        load_tokenizer(source).save_pretrained(folder)
        return
    for path in (source / name for name in TOKENIZER_FILES):
        if path.is_file() and path.resolve() != (folder / path.name).resolve():
            try:
                shutil.copyfile(path, folder / path.name)
            except OSError as error:
                raise write_error(folder / path.name, path.stat().st_size, error) from None


def set_chat_template(folder: Path, text: str) -> None:
    """Give a folder's tokenizer a chat template as transformers writes it, in place of those it has."""
    config, legacy = folder / "tokenizer_config.json", folder / "chat_template.json"
    settings = read_json(config) if config.is_file() else {}
    if settings.pop("chat_template", None) is not None:
        write_text(config, json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
    legacy.unlink(missing_ok=True)
    write_text(folder / "chat_template.jinja", text)


def export_config(names: NameMap, dtype: torch.dtype, tokenizer: Path | None) -> Any:
    """Return the model's config for export: with use_cache on and the tokenizer's special tokens."""
    config = copy.deepcopy(names.config)
    config.architectures = [type(names.model).__name__]
    config.dtype = str(dtype).removeprefix("torch.")
    special = _special_tokens(tokenizer) if tokenizer is not None else {}
    for section in {id(one): one for one in (config, config.get_text_config())}.values():
        if hasattr(section, "use_cache"):
            section.use_cache = True
        for name, value in special.items():
            if hasattr(section, name) and not _includes(getattr(section, name), value):
                setattr(section, name, value)
    return config


def _special_tokens(tokenizer: Path) -> dict[str, Any]:
    """Return special tokens by key: those of the config next to the tokenizer, and the tokenizer's own for the others.

    Without the latter, a config that names no tokens would have transformers' defaults for its model type, and the
    model would not stop at the token that ended its documents in the training.
    """
    from meshwright.engine.data.tokenizers import load_tokenizer

    config = read_json(tokenizer / CONFIG) if (tokenizer / CONFIG).is_file() else {}
    found = {key: config[key] for key in SPECIAL_TOKEN_KEYS if config.get(key) is not None}
    known = {**(config.get("text_config") or {}), **found}
    open_keys = [key for key in OWN_TOKENIZER_KEYS if known.get(key) is None]
    if open_keys:
        with suppress(InputError):  # a tokenizer that only its model's own class reads
            loaded = load_tokenizer(tokenizer)
            found |= {key: value for key in open_keys if (value := getattr(loaded, key, None)) is not None}
    return found


def _includes(tokens: Any, token: Any) -> bool:
    """Return whether several tokens include one: a chat model ends a text with any of them."""
    return isinstance(tokens, list) and token in tokens


def generation_config(config: Any, tokenizer: Path | None) -> str:
    """Return generation_config.json: that of the tokenizer's folder if it names the token that ends a text.

    Random initial weights are written before their tokenizer is: their file names none, and a model would not stop.
    """
    from transformers import GenerationConfig

    default = str(GenerationConfig.from_model_config(config).to_json_string(use_diff=True))
    if tokenizer is None or not (tokenizer / GENERATION).is_file():
        return default
    text = (tokenizer / GENERATION).read_text(encoding="utf-8")
    values = json.loads(text)
    if values.get("eos_token_id") is not None:
        return text
    return json.dumps({**values, **json.loads(default)}, indent=2) + "\n"
