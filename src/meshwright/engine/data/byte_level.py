"""A byte-level tokenizer that needs no download: 248 tokens encode any text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright.engine.data.cache import cache_folder, cache_lock
from meshwright.engine.fsync import atomic_folder

NAME = "bytes"  # value of data.tokenizer and --tokenizer
BOS, EOS, PAD, UNKNOWN, TURN_START = "<|bos|>", "<|im_end|>", "<|pad|>", "<|unk|>", "<|im_start|>"
VERSION = 2  # increment when the files of the tokenizer change
SPECIAL = (PAD, BOS, EOS, UNKNOWN, TURN_START)
UNUSED_BYTES = (0xC0, 0xC1, *range(0xF5, 0x100))  # bytes that UTF-8 does not use
BYTES = tuple(byte for byte in range(256) if byte not in UNUSED_BYTES)
TEMPLATE = (
    "{{ bos_token }}{% if tools %}{{ '<|im_start|>tools\\n' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}"
    "{% for call in message['tool_calls'] %}{{ '<tool_call>' + (call['function'] | tojson) + '</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def write_byte_tokenizer(
    folder: Path, byte_values: Sequence[int] = BYTES, pairs: Sequence[str] = (), template: str | None = TEMPLATE
) -> Path:
    """Write a tokenizer folder with a token per byte value and per pair, and a chat template with generation marks."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    entries = {token: number for number, token in enumerate((*SPECIAL, *map(_byte_char, byte_values), *pairs))}
    tokenizer = Tokenizer(models.BPE(entries, [(pair[0], pair[1]) for pair in pairs], unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    fast_class: Any = PreTrainedTokenizerFast
    fast = fast_class(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=PAD, unk_token=UNKNOWN)
    if template is not None:
        fast.chat_template = template
    fast.save_pretrained(folder)
    return folder


def cached_byte_tokenizer() -> Path:
    """Return this tokenizer's folder in the cache, writing it on first use."""
    folder = cache_folder() / "tokenizers" / f"{NAME}-{VERSION}"
    if not folder.is_dir():
        with cache_lock(folder):
            if not folder.is_dir():
                with atomic_folder(folder) as partial:
                    write_byte_tokenizer(partial)
    return folder


def _byte_char(byte: int) -> str:
    """Return the printable character that byte-level tokenizers use for a byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return chr(byte) if byte in printable else chr(256 + sum(1 for other in range(byte) if other not in printable))
