"""Writes the Hugging Face folder that --tiny fine-tunes from: random weights and a byte-level tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshwright.engine.data.byte_level import write_byte_tokenizer
from meshwright.engine.warning_filters import no_progress

SHARD = "100KB"  # so that even a tiny model has several files, as large ones do


def write_tiny_folder(config: Any, folder: Path, seed: int) -> Path:
    """Write the folder; the same seed gives the same weights."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    model_class: Any = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]), no_progress():
        torch.manual_seed(seed)
        model_class.from_config(config, dtype=torch.float32).save_pretrained(folder, max_shard_size=SHARD)
    write_byte_tokenizer(folder)
    return folder
