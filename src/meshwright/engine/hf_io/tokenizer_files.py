"""What lies beside the weights in a folder: the config, how to generate, and the tokenizer."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import torch

from meshwright.engine.hf_io.find import CONFIG, read_json
from meshwright.engine.hf_io.name_map import Described
from meshwright.engine.hf_io.shards import failed_to_write

TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "chat_template.jinja", "chat_template.json"),
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json", "tekken.json"),
)
GENERATION = "generation_config.json"
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds a tokenizer."""
    return (folder / "tokenizer_config.json").is_file()


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copies the files of a tokenizer, and of what prepares images, from one folder to another."""
    for path in (source / name for name in TOKENIZER):
        if path.is_file() and path.resolve() != (folder / path.name).resolve():
            try:
                shutil.copyfile(path, folder / path.name)
            except OSError as error:
                raise failed_to_write(folder / path.name, path.stat().st_size, error) from None


def published_config(described: Described, dtype: torch.dtype, tokenizer: Path | None) -> Any:
    """The model's config as others are to read it: with its cache, and with the tokenizer's special tokens."""
    config = copy.deepcopy(described.config)
    config.architectures = [type(described.model).__name__]
    config.dtype = str(dtype).removeprefix("torch.")
    there = tokenizer is not None and (tokenizer / CONFIG).is_file()
    said = read_json(tokenizer / CONFIG) if tokenizer is not None and there else {}
    for part in {id(one): one for one in (config, config.get_text_config())}.values():
        if hasattr(part, "use_cache"):
            part.use_cache = True
        for name in SPECIAL:
            if said.get(name) is not None and hasattr(part, name):
                setattr(part, name, said[name])
    return config


def generation(config: Any) -> str:
    """The generation_config.json of a model that had none."""
    from transformers import GenerationConfig

    return str(GenerationConfig.from_model_config(config).to_json_string(use_diff=True))
