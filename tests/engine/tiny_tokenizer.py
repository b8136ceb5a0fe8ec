"""A byte tokenizer of any vocabulary size, with or without a chat template and generation marks."""

from __future__ import annotations

from pathlib import Path

from meshwright.engine.data.byte_level import BYTES, SPECIAL, TEMPLATE, write_byte_tokenizer

ASCII = [*range(32, 127), *b"\n\t"]
PAIRS = ("th", "he", "in", "er", "an", "re", "on", "at", "en", "nd", "ti", "es", "or", "te", "of", "ed", "is", "it")
PLAIN = TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def write_tiny_tokenizer(folder: Path, vocab: int = 256, chat_template: bool = True, markers: bool = True) -> Path:
    """Write a tokenizer folder with ids below `vocab`; `markers` adds generation marks to its ChatML-like template.

    A vocabulary of 256 or more encodes any text; smaller ones (at least 102) only ASCII.
    """
    byte_values = ASCII if vocab < 256 else BYTES
    free = vocab - len(SPECIAL) - len(byte_values)
    if free < 0:
        raise ValueError(f"a vocabulary of {vocab} is too small")
    pairs = PAIRS[:free] if vocab >= 256 else ()
    template = (TEMPLATE if markers else PLAIN) if chat_template else None
    return write_byte_tokenizer(folder, byte_values, pairs, template)
