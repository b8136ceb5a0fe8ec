"""The byte tokenizer with any number of tokens, and with a chat template that marks answers, does not, or is none."""

from __future__ import annotations

from pathlib import Path

from meshwright.engine.data.byte_level import BYTES, SPECIAL, TEMPLATE, write_byte_tokenizer

ASCII = [*range(32, 127), *b"\n\t"]
PAIRS = ("th", "he", "in", "er", "an", "re", "on", "at", "en", "nd", "ti", "es", "or", "te", "of", "ed", "is", "it")
PLAIN = TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def write_tiny_tokenizer(folder: Path, vocab: int = 256, chat_template: bool = True, markers: bool = True) -> Path:
    """A tokenizer folder with ids below `vocab`; its ChatML-like template says which part is the answer or does not.

    From 256 on every text can be written; smaller ones (at least 102) know the letters of ASCII only.
    """
    known = ASCII if vocab < 256 else BYTES
    room = vocab - len(SPECIAL) - len(known)
    if room < 0:
        raise ValueError(f"a vocabulary of {vocab} is too small")
    pairs = PAIRS[:room] if vocab >= 256 else ()
    template = (TEMPLATE if markers else PLAIN) if chat_template else None
    return write_byte_tokenizer(folder, known, pairs, template)
