"""Hugging Face folders in and out: weights read into any layout, models and adapters written as the hub has them."""

from __future__ import annotations

from meshwright.engine.hf_io.find import find
from meshwright.engine.hf_io.name_map import Described, describe, describe_model
from meshwright.engine.hf_io.peft import load_adapters, save_adapters
from meshwright.engine.hf_io.read import Loaded, Weights, load_weights
from meshwright.engine.hf_io.tokenizer_files import copy_tokenizer, has_tokenizer
from meshwright.engine.hf_io.write import Saved, save_model, write_folder

__all__ = [
    "Described",
    "Loaded",
    "Saved",
    "Weights",
    "copy_tokenizer",
    "describe",
    "describe_model",
    "find",
    "has_tokenizer",
    "load_adapters",
    "load_weights",
    "save_adapters",
    "save_model",
    "write_folder",
]
