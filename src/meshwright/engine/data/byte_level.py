"""A tokenizer of bytes, made on the spot: every text can be written with 248 tokens, and nothing is downloaded."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

NAME = "bytes"  # what data.tokenizer and --tokenizer call it
BOS, EOS, PAD, UNKNOWN, START = "<|bos|>", "<|im_end|>", "<|pad|>", "<|unk|>", "<|im_start|>"
SPECIAL = (PAD, BOS, EOS, UNKNOWN, START)
NEVER = (0xC0, 0xC1, *range(0xF5, 0x100))  # bytes that UTF-8 does not use
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def write_byte_tokenizer(folder: Path) -> Path:
    """Writes a tokenizer folder with the chat template that marks answers."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = [_letter(byte) for byte in range(256) if byte not in NEVER]
    entries = {token: number for number, token in enumerate((*SPECIAL, *letters))}
    tokenizer = Tokenizer(models.BPE(entries, [], unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    kind: Any = PreTrainedTokenizerFast
    fast = kind(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=PAD, unk_token=UNKNOWN)
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return folder


def kept() -> Path:
    """The folder of this tokenizer among what is kept between runs; written by whoever asks first."""
    from meshwright.engine.data.talks import cache_folder

    folder = cache_folder() / "tokenizers" / NAME
    if not (folder / "tokenizer_config.json").is_file():
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
