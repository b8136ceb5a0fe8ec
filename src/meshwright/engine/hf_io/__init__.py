"""Hugging Face folders: load weights into any layout, save models and adapters in hub format."""

from __future__ import annotations

from meshwright.engine.hf_io.find import find_folder
from meshwright.engine.hf_io.name_map import NameMap, build_name_map, name_map_of_model
from meshwright.engine.hf_io.peft import load_adapters, save_adapters
from meshwright.engine.hf_io.read import FolderWeights, LoadReport, load_weights
from meshwright.engine.hf_io.tokenizer_files import copy_tokenizer, has_tokenizer
from meshwright.engine.hf_io.write import SaveReport, save_model, write_folder

__all__ = [
    "FolderWeights",
    "LoadReport",
    "NameMap",
    "SaveReport",
    "build_name_map",
    "copy_tokenizer",
    "find_folder",
    "has_tokenizer",
    "load_adapters",
    "load_weights",
    "name_map_of_model",
    "save_adapters",
    "save_model",
    "write_folder",
]
