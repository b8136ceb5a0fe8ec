"""A tokenizer of bytes, made on the spot: every text can be written with 248 tokens, and nothing is downloaded."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright.engine.data.cache import cache_folder

NAME = "bytes"  # what data.tokenizer and --tokenizer call it
BOS, EOS, PAD, UNKNOWN, TURN = "<|bos|>", "<|im_end|>", "<|pad|>", "<|unk|>", "<|im_start|>"
SPECIAL = (PAD, BOS, EOS, UNKNOWN, TURN)
NEVER = (0xC0, 0xC1, *range(0xF5, 0x100))  # bytes that UTF-8 does not use
BYTES = tuple(byte for byte in range(256) if byte not in NEVER)
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def write_byte_tokenizer(
    folder: Path, known: Sequence[int] = BYTES, pairs: Sequence[str] = (), template: str | None = TEMPLATE
) -> Path:
    """Writes a tokenizer folder: a token for each known byte and pair of letters, and a template that marks answers."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    entries = {token: number for number, token in enumerate((*SPECIAL, *map(_letter, known), *pairs))}
    tokenizer = Tokenizer(models.BPE(entries, [(pair[0], pair[1]) for pair in pairs], unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    kind: Any = PreTrainedTokenizerFast
    fast = kind(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=PAD, unk_token=UNKNOWN)
    if template is not None:
        fast.chat_template = template
    fast.save_pretrained(folder)
    return folder


def kept() -> Path:
    """The folder of this tokenizer among what is kept between runs; written by whoever asks first."""
    folder = cache_folder() / "tokenizers" / NAME
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = write_byte_tokenizer(Path(tempfile.mkdtemp(dir=folder.parent)))
        try:
            os.rename(made, folder)
        except OSError:  # another process was faster
            shutil.rmtree(made)
    return folder


def _letter(byte: int) -> str:
    """The printable letter by which byte-level tokenizers write a byte."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return chr(byte) if byte in shown else chr(256 + sum(1 for other in range(byte) if other not in shown))
